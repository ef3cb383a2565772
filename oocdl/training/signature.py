"""Shared by public functions: hints for wrong words, and descriptions from the records of options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from oocdl.config.option_checks import nearest, shown
from oocdl.config.options import Option, entry, options_of
from oocdl.errors import InputError
from oocdl.training.call import ALL_OPTIONS

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
    "validation_split": "validation", "val_split": "validation", "check_val_every_n_epoch": "validation_freq",
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
    "class_weights": "class_weight", "clipnorm": "clip_norm", "max_grad_norm": "clip_norm",
    "gradient_clip_val": "clip_norm", "global_clipnorm": "clip_norm", "beta_1": "betas", "beta1": "betas",
    "metric": "metrics", "augmentation": "augment", "augmentations": "augment", "transform": "augment",
    "transforms": "augment", "data_augmentation": "augment",
    "normalization": "normalize", "normalise": "normalize", "preprocessing": "normalize",
    "patience": "early_stopping", "earlystopping": "early_stopping", "min_delta": "early_stopping",
    "save_best_only": "save_top_k", "load_best_model_at_end": "save_top_k", "save_total_limit": "save_top_k",
    "ema_decay": "ema", "swa": "ema", "model_ema": "ema", "moving_average": "ema", "ema_momentum": "ema",
    "use_ema": "ema", "clipvalue": "clip_value", "parameter_groups": "param_groups",
    "no_decay": "param_groups", "sample_weights": "sample_weight",
}  # fmt: skip
"""Words of other libraries, and ours, or those that ``OTHERWISE`` explains."""

OTHERWISE: Mapping[str, str] = {
    "momentum": "it is a field of the optimizer: optimizer=oocdl.optim.SGD(lr=0.01, momentum=0.9)",
    "nesterov": "it is a field of the optimizer: optimizer=oocdl.optim.SGD(0.1, momentum=0.9, nesterov=True)",
    "weight_decay": "it is a field of the optimizer: optimizer=oocdl.optim.AdamW(lr=1e-3, weight_decay=0.01)",
    "betas": "it is a field of the optimizer: optimizer=oocdl.optim.Adam(lr=1e-3, betas=(0.9, 0.99))",
    "clip_value": "it is a field of the optimizer: optimizer=oocdl.optim.Adam(lr=1e-3, clip_value=1.0)",
    "label_smoothing": "it is a field of the loss: loss=oocdl.losses.CrossEntropy(label_smoothing=0.1)",
    "pos_weight": "it is a field of the loss: loss=oocdl.losses.BCE(pos_weight=8.0)",
    "sample_weight": "the loss names the array: loss=oocdl.losses.CrossEntropy(sample_weights='weight')",
    "clip_norm": "it is a field of the optimizer: optimizer=oocdl.optim.Adam(lr=1e-3, clip_norm=1.0)",
    "class_weight": "it is a field of the loss: loss=oocdl.losses.CrossEntropy(class_weights=(1.0, 2.0))",
    "ignore_index": "it is a field of the loss: loss=oocdl.losses.CrossEntropy(ignore_index=255)",
    "early_stopping": "it is a callback: callbacks=[oocdl.callbacks.EarlyStopping('val_loss', patience=10)]",
    "save_top_k": "it is a field of a callback: callbacks=[oocdl.callbacks.ModelCheckpoint(save_top_k=3)]",
    "threads": "this function takes cores=, the compute threads of each host",
    "accumulate": "one pass is what this function knows: leave it out",
}
"""Words of other libraries, and of ours, that some function lacks: what is done in their place."""
FEW = 9
"""Maximum number of options that are listed where one is not known; nobody reads more of them."""
P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse unknown options by InputError, with the word that was meant.

    Its docstring is completed with what the records say of its parameters.
    """
    further = _further_options(function)
    known = tuple(name for name in [*_explicit(function), *further] if name != "self")

    @wraps(function)
    def call(*given: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise InputError(f"{function.__name__} takes no '{shown(name)}'{hint(name, known)}")
        return function(*given, **options)

    call.__doc__ = _described(function, further)
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
    way = OTHERWISE.get(meant)
    if way:
        return f": {way}"
    few = f"; it takes {', '.join(known)}" if len(known) <= FEW else ", and nothing like it: see its help"
    return nearest(name, known) or few


PARAMETERS = re.compile(r"Parameters\n-{10}\n(?P<entries>.*?)(?=\n\S[^\n]*\n-{3,}\n|\Z)", re.DOTALL)
"""The section of a docstring in numpydoc's form."""


def records_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return what is known of each parameter of a public function, those of its ``**options`` among them.

    Its own docstring takes precedence over the records of options.
    """
    told = entries(function)
    hints = get_type_hints(function)
    found = {
        name: Option(parameter.default, "neither", type=hints.get(name), doc=told.get(name, ""))
        for name, parameter in _explicit(function).items()
    }
    further = _further_options(function)
    return found | {n: replace(one, doc=told.get(n, one.doc)) for n, one in further.items()}


def entries(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring says of each parameter, in one line."""
    found = PARAMETERS.search(inspect.getdoc(function) or "")
    texts = re.split(r"\n(?=\w)", found["entries"].strip("\n")) if found else []
    return {name: " ".join(text.split()) for name, _, text in (entry.partition("\n") for entry in texts)}


def _described(function: Callable[..., Any], further: Mapping[str, Option]) -> str:
    """The docstring, with an entry for each parameter, and the names of its further options."""
    doc, told = inspect.getdoc(function) or "", entries(function)
    if not told and not further:
        return doc
    texts = {name: told.get(name) or ALL_OPTIONS[name].doc for name in _explicit(function) if name != "self"}
    texts |= {name: text for name, text in told.items() if name in further}
    rest = ", ".join(name for name in further if name not in told)
    if rest:
        texts["**options"] = f"{rest}: see `docs/reference/options.md`, or help(oocdl.Options)."
    section = "\n".join(entry(name, text) for name, text in texts.items())
    found = PARAMETERS.search(doc)
    assert found is not None, f"the docstring of {function.__name__} has no section of parameters"
    return doc[: found.start("entries")] + f"{section}\n" + doc[found.end("entries") :]


def _explicit(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function but its ``**options``."""
    found = inspect.signature(function).parameters
    return {name: one for name, one in found.items() if one.kind is not one.VAR_KEYWORD}


def _further_options(function: Callable[..., Any]) -> Mapping[str, Option]:
    """The records of the ``**options`` of a function, in the order of all options."""
    if "options" not in getattr(function, "__annotations__", {}):
        return {}
    (kind,) = get_args(get_type_hints(function)["options"])
    return options_of(kind)
