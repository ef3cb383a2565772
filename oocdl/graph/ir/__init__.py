"""The graph: values, nodes, operator rules, index expressions, and programs.

Programs are what engines run: the nodes of one layer for shards of one shape. What a program costs
and how its operands are prepared is said here, below engines and planner alike.
"""
