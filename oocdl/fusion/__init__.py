"""Chains of elementwise instructions and reductions, each run as one compiled loop. See README.md."""
