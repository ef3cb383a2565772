"""Datasets: opens Zarr groups and HDF5 files, checks them, and reads regions of their arrays."""
