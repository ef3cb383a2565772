"""Under which sizes of its inputs a file is the network that it was written from."""
