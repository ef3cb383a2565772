"""ONNX files to graphs, and back with trained weights.

The reader binds sizes, folds what is known before the run, and lowers each ONNX node to operators
of our vocabulary; the writer copies the file with trained weights in place of the
old ones.
"""
