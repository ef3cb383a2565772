"""Chains of elementwise instructions and reductions, each run as one compiled loop.

The PyTorch and onnxruntime engines use it on the processor: instructions are grouped, cheap values
are computed again where they are read, and a chain becomes a loop that LLVM compiles.
"""
