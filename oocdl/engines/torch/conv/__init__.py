"""Convolutions and pooling windows on PyTorch; ``dispatch`` chooses the kernel by shape."""
