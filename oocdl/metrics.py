"""Metrics, as ``fit(metrics=...)`` and ``Run.evaluate(metrics=...)`` take them, and those of your own."""

from oocdl.ops.metric_functions import (
    ASD,
    F1,
    HD95,
    MAE,
    PSNR,
    R2,
    RMSE,
    Accuracy,
    Confusion,
    DiceMetric,
    IoU,
    Metric,
    Precision,
    Sensitivity,
    Specificity,
    TopK,
)
from oocdl.ops.own_loss import register_metric as register

__all__ = ["ASD", "F1", "HD95", "MAE", "PSNR", "R2", "RMSE", "Accuracy", "Confusion", "DiceMetric", "IoU"]
__all__ += ["Metric", "Precision", "Sensitivity", "Specificity", "TopK", "register"]
