"""The front door for PyTorch: a module goes in, and its trained weights come back; its user never sees ONNX.

Only ``door`` is imported with oocdl, and needs no PyTorch. What a file cannot carry is refused.
"""
