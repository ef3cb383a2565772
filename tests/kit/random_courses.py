"""Options of ``fit`` that are drawn together, and the loop in PyTorch that does the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn
from torch.optim import lr_scheduler

from oocdl import losses, optim, transforms
from oocdl.storage.dataset.sampling import permutation
from tests.kit import by_hand

IGNORED = 255
SHAPES = [(6, 8), (7, 5), (6, 8), (4, 4), (8, 5)]
DECAY = {"weight_decay": 0.1}
OPTIMIZERS: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = [
    (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5}),
    (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, **DECAY}, {"dampening": 0.5}),
    (optim.Adam, torch.optim.Adam, {"eps": 1e-4, **DECAY}, {"weight_decay": 0.3}),
    (optim.AdamW, torch.optim.AdamW, {"eps": 1e-4, "betas": (0.5, 0.8), **DECAY}, {"betas": (0.7, 0.8)}),
    (optim.RMSprop, torch.optim.RMSprop, {"eps": 1e-3, "momentum": 0.7}, {"centered": True, "alpha": 0.9}),
    (optim.Lion, by_hand.Lion, DECAY, {"betas": (0.7, 0.8)}),
    (optim.LAMB, by_hand.LAMB, {"eps": 1e-3, **DECAY}, {"always_adapt": True, "betas": (0.7, 0.8)}),
]
"""Ours and PyTorch's, what both are given, and what a group changes of it."""
SCHEDULES: list[tuple[Any, Any]] = [
    (lambda lr: lr, lambda made, steps: lr_scheduler.ConstantLR(made, 1.0)),
    (partial(optim.Step, every=2, factor=0.5), lambda made, steps: lr_scheduler.StepLR(made, 2, 0.5)),
    (optim.Cosine, lr_scheduler.CosineAnnealingLR),
    (optim.Polynomial, lambda made, steps: lr_scheduler.PolynomialLR(made, steps, 0.9)),
]
RATE = 0.01
CUTS: tuple[Any, ...] = ("auto", {"batch": 2}, {"space": 2}, {"channels": 2})


class Net(nn.Module):
    """A mask is looked up and added to features of an image; classes of voxels, and a number of each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.first = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.seg = nn.Conv2d(3, 3, 3, padding=1)
        self.edge = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.norm(self.first(x) + self.table(mask).movedim(-1, 1)))
        return self.seg(h), self.edge(h)


def matches(name: str, patterns: str | list[str]) -> bool:
    """Whether a weight is of a group."""
    return any(fnmatchcase(name, one) for one in ([patterns] if isinstance(patterns, str) else patterns))


@dataclass
class Course:
    """What a seed draws: options of ``fit``, and all that the loop in PyTorch has to know of them."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    breaks: int = 0
    """Step after which a first call is broken off, in the middle of an epoch where it has three steps."""

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        one, flip = r.choice, lambda: r.random() < 0.5
        self.count, self.with_sizes = r.randint(4, 7), flip()
        self.kind, self.torch_kind, self.fields, changed = OPTIMIZERS[self.seed % len(OPTIMIZERS)]
        self.schedule, self.torch_schedule = one(SCHEDULES)
        self.clip = one([{}, {"clip_norm": 0.3}, {"clip_value": 0.02}])
        self.cross_entropy = losses.CrossEntropy(
            IGNORED, one([None, (0.5, 1.0, 2.0)]), one([0.0, 0.1]), one([None, "w"])
        )
        self.weights = {"seg": one([1.0, 0.5])}
        if not self.with_sizes:
            self.weights |= one([{}, {"edge": 0.3}, {"edge": 0.0}])
        self.groups: list[Any] = one(
            [
                [],
                [{"params": "seg.*", "lr": RATE / 3, **changed}, {"params": "*bias", "weight_decay": 0.0}],
                [{"params": ["norm.weight", "norm.b*"], "lr": 0}],
            ]
        )
        self.held, self.flips, steps = one([(), (1,), (0, 3)]), flip(), r.randint(3, 7)
        self.breaks = min(2, one([0, r.randint(1, steps - 1)]))
        self.options = {
            "steps": steps,
            "optimizer": self.kind(self.schedule(RATE), **self.fields, **self.clip),
            "loss": {name: (self.of(name), weight) for name, weight in self.weights.items()},
            "targets": {name: name for name in self.weights},
            "batch_size": r.randint(1, min(3, self.count - len(self.held))),
            "accumulate": one([1, 2, 3]),
            "shuffle": flip(),
            "ema": one([None, 0.7]),
            "freeze": one([(), "table.*", "first.*"]),
            "scale": one([None, {"x": 0.25}]),
            "parallel": CUTS[(self.seed + self.seed // 7 * 2) % len(CUTS)],
            "param_groups": self.groups or None,
        }
        if self.held:
            self.options |= {"validation": self.held, "validation_steps": one([1, 2])}
        if self.flips:
            self.options["augment"] = transforms.RandFlip(1.0, 0)

    def of(self, output: str) -> Any:
        """Return the loss of an output."""
        weights = self.cross_entropy.sample_weights
        return self.cross_entropy if output == "seg" else losses.Huber(0.3, sample_weights=weights)

    def write(self, path: Path) -> list[dict[str, Any]]:
        """Write the samples, in groups if they differ in size; returns them."""
        r, found = np.random.default_rng(self.seed), []
        for number in range(self.count):
            shape = SHAPES[number % len(SHAPES)] if self.with_sizes else SHAPES[0]
            labels = np.where(r.uniform(size=shape) < 0.2, IGNORED, r.integers(0, 3, shape))
            x, mask = r.normal(size=(2, *shape)).astype("f4"), r.integers(0, 4, shape)
            edge, w = r.normal(size=(1, *shape)), r.uniform(size=1)
            found.append({"x": x, "mask": mask, "seg": labels.astype("u1"), "edge": edge, "w": w})
        group = zarr.open_group(str(path), mode="w")
        if self.with_sizes:
            for number, sample in enumerate(found):
                for name in ("x", "mask", "seg", "w"):
                    group.create_array(f"s{number}/{name}", data=sample[name])
            group.attrs["oocdl"] = {"samples": [f"s{number}" for number in range(self.count)]}
        else:
            for name in found[0]:
                group.create_array(
                    name, data=np.stack([one[name] for one in found]), chunks=(2, *found[0][name].shape)
                )
        return found

    def loss(self, net: nn.Module, samples: list[dict[str, Any]], trains: bool) -> Tensor:
        """Return the weighted loss of a batch."""
        names = ["x", "mask", "seg", "w", *list(self.weights)[1:]]
        x, mask, seg, w, *edge = (torch.as_tensor(np.stack([one[name] for one in samples])) for name in names)
        x = x.double() * (self.options["scale"] or {"x": 1.0})["x"]
        if trains and self.flips:
            x, mask, seg, *edge = (one.flip(-2) for one in (x, mask, seg, *edge))
        logits, numbers = net(x, mask.long())
        ce, labels = self.cross_entropy, seg.long()
        factors = None if ce.class_weights is None else torch.tensor(ce.class_weights).double()
        how: dict[str, Any] = {"ignore_index": IGNORED, "weight": factors, "reduction": "none"}
        each = F.cross_entropy(logits, labels, label_smoothing=ce.label_smoothing, **how)
        counted = labels[labels != IGNORED]
        below = len(counted) if factors is None else factors[counted].sum()
        each = each * w.double()[:, :, None] if ce.sample_weights else each
        total = self.weights["seg"] * each.sum() / below
        if edge:
            far = F.huber_loss(numbers, edge[0], delta=0.3, reduction="none")
            far = far * w.double()[:, :, None, None] if ce.sample_weights else far
            total = total + self.weights["edge"] * far.mean()
        return total

    def batches(self, samples: list[dict[str, Any]], rows: list[int]) -> list[list[dict[str, Any]]]:
        """Divide rows into batches of one size, as they fill; the rest comes at the end."""
        waiting: dict[Any, list[Any]] = {}
        found = []
        for row in rows:
            mine = waiting.setdefault(samples[row]["seg"].shape, [])
            mine.append(samples[row])
            if len(mine) == self.options["batch_size"]:
                found.append(list(mine))
                mine.clear()
        return found + [mine for mine in waiting.values() if mine]

    def train(self, net: nn.Module, samples: list[dict[str, Any]]) -> tuple[list[Any], dict[str, Tensor]]:
        """Train in place; returns the loss and the validation of each step, and averages of weights."""
        how, rows = self.options, [row for row in range(self.count) if row not in self.held]
        parts: list[list[Any]] = [[] for _ in (*self.groups, None)]
        stay = (how["freeze"] or "-", "-" if "edge" in self.weights else "edge.*")
        names = {
            name: p for name, p in net.named_parameters() if not any(fnmatchcase(name, one) for one in stay)
        }
        for name, p in names.items():
            hits = [n for n, group in enumerate(self.groups) if matches(name, group["params"])]
            parts[hits[0] if hits else -1].append(p)
        settings = [{"lr": RATE, **one} for one in (*self.groups, {})]
        made = self.torch_kind(
            [{**one, "params": p} for one, p in zip(settings, parts, strict=True)], **self.fields
        )
        scheduler = self.torch_schedule(made, how["steps"])
        history, averages = list[Any](), dict[str, Tensor]()
        for epoch in range(how["steps"]):
            order = permutation(0, epoch, len(rows)) if how["shuffle"] else range(len(rows))
            passes = self.batches(samples, [rows[int(at)] for at in order])
            for at in range(0, len(passes), how["accumulate"]):
                if len(history) == how["steps"]:
                    return history, averages
                net.train().zero_grad()
                batches = passes[at : at + how["accumulate"]]
                losses_ = [self.loss(net, batch, True) / len(batches) for batch in batches]
                sum(losses_).backward()  # type: ignore[union-attr]
                if "clip_norm" in self.clip:
                    nn.utils.clip_grad_norm_(names.values(), self.clip["clip_norm"])
                if "clip_value" in self.clip:
                    nn.utils.clip_grad_value_(names.values(), self.clip["clip_value"])
                made.step()
                scheduler.step()
                for name, p in names.items():
                    new, kept = p.detach().clone(), how["ema"] or 0.0
                    averages[name] = kept * averages.get(name, new) + (1 - kept) * new
                history.append(
                    (sum(one.item() for one in losses_), self.validated(net, samples, len(history) + 1))
                )
        return history, averages

    def validated(self, net: nn.Module, samples: list[dict[str, Any]], done: int) -> float:
        """Return the mean loss of the samples that are held out; NaN if it is not time for that."""
        every = self.options.get("validation_steps")
        if every is None or (done % every and done != self.options["steps"]):
            return float("nan")
        with torch.no_grad():
            found = [
                (self.loss(net.eval(), one, False).item(), len(one))
                for one in self.batches(samples, list(self.held))
            ]
        return sum(loss * count for loss, count in found) / len(self.held)
