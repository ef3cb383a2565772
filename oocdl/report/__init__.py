"""Reports: the plan as a table, a text and a picture, progress, and measured beside predicted."""
