"""A module beside its file, on the same numbers: outputs, gradients, statistics, at two sizes."""
