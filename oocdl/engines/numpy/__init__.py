"""The NumPy engine: every operator as its definition says, slow and exact, to check other engines by."""
