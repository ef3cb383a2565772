"""Kernels of what runs along a sequence: recurrent layers, attention."""
