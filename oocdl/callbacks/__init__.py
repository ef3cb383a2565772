"""Listeners that write a run's history elsewhere, or act upon it: ``fit(callbacks=[CSV("losses.csv")])``."""

from oocdl.callbacks.csv_file import CSV
from oocdl.callbacks.early_stopping import EarlyStopping
from oocdl.callbacks.mlflow import MLflow
from oocdl.callbacks.model_checkpoint import ModelCheckpoint
from oocdl.callbacks.reduce_lr import ReduceLROnPlateau
from oocdl.callbacks.tensorboard import TensorBoard

__all__ = ["CSV", "EarlyStopping", "MLflow", "ModelCheckpoint", "ReduceLROnPlateau", "TensorBoard"]
