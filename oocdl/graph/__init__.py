"""The graph of a pass, and everything that is computed from it as pure data."""
