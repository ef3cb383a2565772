"""Lowerings of ONNX operators to operators of our vocabulary: one table a module, by ONNX's names."""
