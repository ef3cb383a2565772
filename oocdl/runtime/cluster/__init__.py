"""Runs passes on the workers of a Dask client.

Each worker is a member of a crew: it holds its share of the weights, and runs its calls by our own scheduler.
What crosses between members goes from worker to worker; Dask's tasks show what each works at. A crew that
loses a member is gathered anew, and the run goes on from its last commit.
"""
