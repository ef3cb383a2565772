"""Convolutions and pooling windows on PyTorch.

``dispatch`` chooses the kernel by shape: products for kernels of one tap, im2col where there are
few taps, one tap after the other for thin slabs, oneDNN otherwise.
"""
