"""A pass while it runs: sessions, tasks, and our own scheduler.

A session holds the chunks of weights and state between passes and hands the tasks of each to Dask,
in this process or on the workers of a client. ``execute`` is the function of every task: reserve
memory, gather inputs, run the program, put the results into the memory tier.
"""
