"""This machine: how much memory the process may use, how many cores, and how freed memory is given back.

Limits of memory are read from the machine, memory cgroups, ``ulimit`` and Slurm; the least of them counts.
"""
