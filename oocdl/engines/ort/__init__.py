"""The onnxruntime engine: programs as small ONNX models of standard operators.

``lowerings`` has one record an operator; chains of elementwise instructions run on NumPy beside the
sessions.
"""
