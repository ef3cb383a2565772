"""Metrics, as ``fit(metrics=...)`` and ``Run.evaluate(metrics=...)`` take them."""

from oocdl.ops.metric_functions import (
    F1,
    MAE,
    PSNR,
    R2,
    RMSE,
    Accuracy,
    DiceMetric,
    IoU,
    Metric,
    Precision,
    Sensitivity,
    Specificity,
)

__all__ = ["F1", "MAE", "PSNR", "R2", "RMSE", "Accuracy", "DiceMetric", "IoU", "Metric", "Precision"]
__all__ += ["Sensitivity", "Specificity"]
