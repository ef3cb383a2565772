"""The graph (values, nodes, operator rules, index expressions) and programs, which engines run."""
