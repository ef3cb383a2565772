"""The PyTorch engine, on the processor and on a GPU.

Each operator has one record in a table of kernels; ``scratch`` bounds the memory that a program
takes while it runs, and decides which results are made where they belong, or over an input.
"""
