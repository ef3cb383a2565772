"""Runs a trained network over a dataset: losses, metrics, outputs, classes and volumes of labels."""
