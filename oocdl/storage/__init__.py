"""Storage: datasets, the memory tier with its spill, and runs on disk."""
