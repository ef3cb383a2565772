"""Kernels of what runs along time: recurrent layers, CTC."""
