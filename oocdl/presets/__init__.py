"""Whole ways of training in one word: ``oocdl.presets.nnunet("Dataset001_Heart", memory="8GiB")``."""

from oocdl.presets.nnunet_folds import CrossValidation, nnunet

__all__ = ["CrossValidation", "nnunet"]
