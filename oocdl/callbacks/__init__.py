"""Listeners that write a run's history elsewhere, or act upon it: ``fit(callbacks=[CSV("losses.csv")])``."""

from oocdl.callbacks.committed_rows import CSV
from oocdl.callbacks.mlflow import MLflow
from oocdl.callbacks.tensorboard import TensorBoard
from oocdl.callbacks.validation_callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

__all__ = ["CSV", "EarlyStopping", "MLflow", "ModelCheckpoint", "ReduceLROnPlateau", "TensorBoard"]
