"""Constants that are computed when a file is read."""
