"""Optimizers that PyTorch does not have, written by hand after their papers, with timm's defaults."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), **options: Any) -> None:
        options.pop("foreach", None)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (w for w in group["params"] if w.grad is not None):
                mean = self.state[weight].get("exp_avg", torch.zeros_like(weight))
                move = torch.sign(first * mean + (1 - first) * weight.grad)
                weight -= group["lr"] * (move + group["weight_decay"] * weight)
                self.state[weight]["exp_avg"] = second * mean + (1 - second) * weight.grad


class LAMB(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:1904.00962; without decay the ratio of norms is 1, as in Apex and timm."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        options.pop("foreach", None)
        known = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "always_adapt": False}
        super().__init__(params, {"lr": lr, **known, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (w for w in group["params"] if w.grad is not None):
                held, zeros = self.state[weight], torch.zeros_like(weight)
                count = held["step"] = held.get("step", 0) + 1
                mean = held["exp_avg"] = first * held.get("exp_avg", zeros) + (1 - first) * weight.grad
                square = held["exp_avg_sq"] = second * held.get("exp_avg_sq", zeros) + (
                    (1 - second) * weight.grad**2
                )
                root = (square / (1 - second**count)).sqrt() + group["eps"]
                step = mean / (1 - first**count) / root + group["weight_decay"] * weight
                ratio = weight.norm() / step.norm() if weight.norm() > 0 and step.norm() > 0 else 1.0
                if not group["weight_decay"] and not group["always_adapt"]:
                    ratio = 1.0
                weight -= group["lr"] * ratio * step
