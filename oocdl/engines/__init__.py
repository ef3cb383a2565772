"""Engines: programs to functions of arrays.

``engine`` is the protocol and the choice by name, ``registry`` names all engines; each engine is one
package, and none knows another. A runtime is imported when it is chosen, not before.
"""
