"""Engines: programs to functions of arrays.

``engine`` is the protocol, ``registry`` names all engines; each engine is one package. A runtime is
imported when it is chosen, not before.
"""
