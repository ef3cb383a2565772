"""Convolutions on arrays in channel blocks, onnxruntime's fastest layout.

How volumes are cut into tiles of blocked channels, and the steps that convolve them.
"""
