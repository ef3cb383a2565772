"""ONNX files to graphs, and back with trained weights."""
