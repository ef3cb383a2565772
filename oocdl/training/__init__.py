"""``fit``, ``open`` and ``plan``: from what the user asked for to a run on disk.

The trainer walks through epochs and steps, has the session run each pass, emits events and commits.
A run is the directory that comes out; resuming decides whether what is there may go on.
"""
