"""What people look at: the plan as a table and a picture, progress, and predicted beside measured.

Everything here reads plans and events and makes text or pixels; nothing here decides how a step
runs.
"""
