"""The live page of a run: what is written for it, what is read of it, and how it is drawn."""
