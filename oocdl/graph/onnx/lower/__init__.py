"""How each ONNX operator becomes operators of our vocabulary: one table a module, by ONNX's names."""
