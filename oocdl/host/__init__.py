"""This machine: how much memory the process may use, how many cores, and how memory is given back."""
