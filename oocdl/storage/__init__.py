"""Where bytes live: chunks in a RAM tier over a Zarr spill, the run on disk, the dataset."""
