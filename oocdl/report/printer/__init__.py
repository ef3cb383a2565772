"""Plans as text that depends on the plan alone: not on the machine, hash seeds or the version of Python."""
