"""What a module needs and allows, found by calling copies of it before anything is exported."""
