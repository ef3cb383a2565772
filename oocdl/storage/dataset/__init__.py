"""Datasets: Zarr groups and HDF5 files, opened, checked, and read by region.

Sampling gives the order of samples of each epoch.
"""
