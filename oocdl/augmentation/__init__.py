"""Augmentation and normalisation of samples, region by region: a sample is never whole in memory."""
