"""Hyperparameter search: many runs of one model, of which the better ones train on."""
