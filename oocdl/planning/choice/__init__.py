"""The choice among plans of a pass: the cuts that fit and take the fewest predicted seconds."""
