"""Reports: the plan as a table, a text and a picture, progress, and measured beside predicted.

Everything here reads plans and events and makes text or pixels; nothing here decides how a step
runs. ``disk_check`` refuses a run for which there is not enough disk.
"""
