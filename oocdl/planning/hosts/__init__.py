"""Spreads a pass over the hosts of a cluster: which worker runs which call, and what travels between them."""
