"""Convolutions and pooling windows on PyTorch.

``dispatch`` chooses the kernel by shape: matrix products for kernels of one tap, im2col where there are
few taps, convolutions plane by plane for thin slabs, oneDNN otherwise.
"""
