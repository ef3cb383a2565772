"""The onnxruntime engine: operators of onnxruntime and of NumPy on arrays.

``ort_kernels`` has one record an operator; chains of elementwise instructions run on NumPy.
"""
