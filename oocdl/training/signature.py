"""What public functions share: a wrong word gets a hint, and an option is described once, by ``fit``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from oocdl.config import nearest, shown
from oocdl.errors import InputError
from oocdl.ops.loss_functions import Loss

LossLike = str | Path | Loss | Mapping[str, "str | Loss | tuple[str | Loss, float]"]
"""What ``loss=`` takes."""
Size = int | float | str
"""Bytes, as a number or as a text with a unit."""
Names = str | Sequence[str]
"""One name or pattern, or several."""

WORDS: Mapping[str, str] = {
    "learning_rate": "lr", "lr_scheduler": "lr", "scheduler_fn": "lr", "lr_schedule": "lr", "schedule": "lr",
    "opt": "optimizer", "optim": "optimizer", "criterion": "loss", "loss_fn": "loss", "loss_function": "loss",
    "num_epochs": "epochs", "n_epochs": "epochs", "nb_epoch": "epochs", "max_epochs": "epochs",
    "num_train_epochs": "epochs", "max_steps": "steps", "num_steps": "steps", "n_steps": "steps",
    "steps_per_epoch": "steps", "iterations": "steps", "bs": "batch_size", "batchsize": "batch_size",
    "per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate", "random_state": "seed", "random_seed": "seed",
    "validation_data": "validation", "val_data": "validation", "valid_data": "validation",
    "eval_dataset": "validation", "val_dataloader": "validation", "validation_dataset": "validation",
    "max_memory": "memory", "memory_limit": "memory", "mem": "memory", "budget": "memory", "ram": "memory",
    "n_jobs": "threads", "num_threads": "threads", "nthreads": "threads", "num_workers": "threads",
    "n_workers": "client", "cluster": "client", "device": "engine", "accelerator": "engine",
    "dtype": "precision", "amp": "precision", "mixed_precision": "precision", "fp16": "precision",
    "bf16": "precision", "verbose": "progress", "progress_bar": "progress", "disable_tqdm": "progress",
    "output_dir": "workdir", "log_dir": "workdir", "logdir": "workdir", "save_dir": "workdir",
    "checkpoint": "workdir", "checkpoint_dir": "workdir", "default_root_dir": "workdir",
    "ckpt_path": "workdir", "resume_from_checkpoint": "resume", "initial_epoch": "resume",
    "local_directory": "spill", "scratch": "spill", "tmpdir": "spill", "trials_total": "trials",
    "n_trials": "trials", "num_samples": "trials", "param_grid": "space", "param_distributions": "space",
    "x": "inputs", "y": "targets", "labels": "targets", "data": "dataset", "train_data": "dataset",
    "train_dataset": "dataset", "train_dataloaders": "dataset", "net": "model", "network": "model",
    "output": "out", "nodes": "hosts", "profile": "trace", "profiler": "trace", "callback": "callbacks",
}  # fmt: skip
"""Words of other libraries, and ours."""

OTHERWISE: Mapping[str, str] = {
    "momentum": "it is a field of the optimizer: optimizer=oocdl.optim.SGD(lr=0.01, momentum=0.9)",
    "nesterov": "it is a field of the optimizer: optimizer=oocdl.optim.SGD(0.1, momentum=0.9, nesterov=True)",
    "weight_decay": "it is a field of the optimizer: optimizer=oocdl.optim.AdamW(lr=1e-3, weight_decay=0.01)",
    "betas": "it is a field of the optimizer: optimizer=oocdl.optim.Adam(lr=1e-3, betas=(0.9, 0.99))",
    "clip_norm": "it is a field of the optimizer: optimizer=oocdl.optim.Adam(lr=1e-3, clip_norm=1.0)",
    "class_weight": "it is a field of the loss: loss=oocdl.losses.CrossEntropy(class_weights=(1.0, 2.0))",
    "ignore_index": "it is a field of the loss: loss=oocdl.losses.CrossEntropy(ignore_index=255)",
    "validation": "Run.evaluate(dataset) has its loss afterwards; oocdl.search(validation=) compares by it",
    "validation_split": "write two datasets, and ask Run.evaluate for the loss of the second",
    "metrics": "what is minimized is loss=; other metrics are made of what Run.predict writes",
    "augment": "samples are trained on as they are: write augmented copies of them to the dataset",
    "early_stopping": "a callback that raises KeyboardInterrupt at a StepDone ends the run, committed",
    "ema": "weights are not averaged: Run.weights has those of the last commit",
    "threads": "this function takes cores=, the compute threads of each host",
    "accumulate": "one pass is what this function knows: leave it out",
}
"""Words of other libraries, and of ours, that some function lacks: what is done in their place."""
SAME = {
    "class_weights": "class_weight", "clipnorm": "clip_norm", "max_grad_norm": "clip_norm",
    "gradient_clip_val": "clip_norm", "global_clipnorm": "clip_norm", "beta_1": "betas", "beta1": "betas",
    "metric": "metrics", "augmentation": "augment", "augmentations": "augment", "transform": "augment",
    "transforms": "augment", "data_augmentation": "augment", "patience": "early_stopping",
    "earlystopping": "early_stopping", "min_delta": "early_stopping", "ema_decay": "ema", "swa": "ema",
    "model_ema": "ema", "moving_average": "ema",
}  # fmt: skip
"""Further words for what ``OTHERWISE`` explains."""

FEW = 8
"""So many options are listed where one is not known; nobody reads more of them."""
P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse unknown options by InputError, with the word that was meant."""
    known = tuple(name for name in inspect.signature(function).parameters if name != "self")

    @wraps(function)
    def call(*given: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise InputError(f"{function.__name__} takes no '{shown(name)}'{hint(name, known)}")
        return function(*given, **options)

    return call


def hint(name: str, known: Sequence[str]) -> str:
    """Say what was meant by a word that is none of ``known``.

    >>> hint("learning_rate", ["lr"]), hint("epochz", ["lr", "epochs"]), hint("wxyz", ["lr"])
    (": it is called 'lr' here", " (did you mean 'epochs'?)", '; it takes lr')
    """
    word = name.lower()
    meant = WORDS.get(word, word)
    if meant in known:
        return f": it is called '{meant}' here"
    way = OTHERWISE.get(SAME.get(meant, meant))
    if way:
        return f": {way}"
    few = f"; it takes {', '.join(known)}" if len(known) <= FEW else ", and nothing like it: see its help"
    return nearest(name, known) or few


def like(other: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of ``other``, with their types, defaults and descriptions.

    It is called with all of them by name.
    """

    def give(function: Callable[..., T]) -> Callable[P, T]:
        result = inspect.signature(function).return_annotation
        signature = inspect.signature(other).replace(return_annotation=result)

        @wraps(function)
        def call(*given: P.args, **options: P.kwargs) -> T:
            bound = signature.bind(*given, **options)
            bound.apply_defaults()
            return function(**bound.arguments)

        call.__dict__["__signature__"] = signature
        call.__annotations__ = {**getattr(other, "__annotations__", {}), "return": result}
        return public(described_by(other)(call))

    return give


def described_by(other: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Complete a docstring with what ``other`` says of parameters that both have, where it says nothing."""

    def describe(function: Callable[P, T]) -> Callable[P, T]:
        doc, told = inspect.getdoc(function) or "", {**entries(other), **entries(function)}
        lines = [told[name] for name in inspect.signature(function).parameters if name in told]
        section = "\n".join(["Parameters", "----------", *lines, ""])
        found = PARAMETERS.search(doc)
        start, end = (len(doc), len(doc)) if found is None else found.span()
        function.__doc__ = doc[:start] + ("\n\n" if found is None else "") + section + doc[end:]
        return function

    return describe


PARAMETERS = re.compile(r"Parameters\n-{10}\n(?P<entries>.*?)(?=\n\S[^\n]*\n-{3,}\n|\Z)", re.DOTALL)
"""The section of a docstring in numpydoc's form."""


def entries(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring says of each parameter: its lines, of which the first is the name."""
    found = PARAMETERS.search(inspect.getdoc(function) or "")
    texts = re.split(r"\n(?=\w)", found["entries"].strip("\n")) if found else []
    return {text.split("\n", 1)[0]: text for text in texts}


def first_sentence(function: Callable[..., Any], name: str) -> str:
    """Return the first sentence of what is said of a parameter, as plain text."""
    _, _, text = entries(function)[name].partition("\n")
    return " ".join(re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0].replace("`", "").split())
