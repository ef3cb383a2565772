"""A simulated step: of one process, or of hosts with a network between them."""
