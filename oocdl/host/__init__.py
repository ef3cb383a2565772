"""The machine: what memory and cores the process may use, and how freed memory is given back.

Limits are read from the machine, memory cgroups, ``ulimit`` and Slurm; the least of them counts.
"""
