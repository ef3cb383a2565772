"""Samples of a dataset, as a page shows them."""
