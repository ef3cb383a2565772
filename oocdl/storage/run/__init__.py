"""The directory of a run: versions of weights and state, committed so that a crash loses nothing.

A commit writes new chunks, fsyncs them, and replaces ``CURRENT`` last; a manifest binds every chunk
to its checksum.
"""
