"""Tests of the operators, losses and optimizers."""
