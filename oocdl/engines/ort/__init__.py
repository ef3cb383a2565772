"""The onnxruntime engine: operators of onnxruntime and of NumPy on arrays."""
