"""The PyTorch engine, on the processor and on a GPU."""
