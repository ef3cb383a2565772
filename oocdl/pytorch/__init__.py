"""The front door for PyTorch: a module goes in, and its trained weights come back; its user never sees ONNX.

Only ``door`` is imported with oocdl, and needs no PyTorch. It opens the rest where a module is given, which
is exported as a file whose metadata says what ONNX cannot: what is a parameter, what is trained, which norms
stay in evaluation mode, and what each tensor is called in the module. What a file cannot carry is refused.
"""
