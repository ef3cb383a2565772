"""Networks of libraries, trained in three steps beside PyTorch. See README.md; not in the default run."""
