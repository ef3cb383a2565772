"""Finds what a module needs and allows, by calling copies of it before anything is exported."""
