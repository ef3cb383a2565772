"""The graph of a pass, and everything that is computed from it as pure data.

``ir`` is the graph itself, ``onnx`` reads and writes files, ``transforms`` rewrite graphs into
graphs, and ``partition`` forms layers and cuts them. No operator is known here by name where a fact
of its rule will do.
"""
