"""Listeners that write a run's history elsewhere: ``fit(callbacks=[oocdl.callbacks.CSV("losses.csv")])``."""

from oocdl.callbacks.csv_file import CSV
from oocdl.callbacks.mlflow import MLflow
from oocdl.callbacks.tensorboard import TensorBoard

__all__ = ["CSV", "MLflow", "TensorBoard"]
