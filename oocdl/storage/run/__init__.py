"""The directory of a run: versions of weights and state, committed so that a crash loses nothing."""
