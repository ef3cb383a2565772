"""Plans as text: the graph of a pass, its layers, their programs, its tasks.

The text depends on the plan alone (not on the machine, on hash seeds or on the version of Python),
so that two plans can be compared with ``diff``, as the golden texts of the tests are.
"""
