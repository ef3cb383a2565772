"""The graph (values, nodes, operator rules, index expressions) and programs, which engines run.

A program is the nodes of one layer for shards of one shape. Its costs, and how its operands are
prepared, are defined here because engines and planner both need them.
"""
