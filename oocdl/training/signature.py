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

WORDS: Mapping[str, str] = {word: ours for ours, words in {
    "lr": "learning_rate lr_scheduler scheduler_fn lr_schedule schedule", "optimizer": "opt optim",
    "loss": "criterion loss_fn loss_function",
    "epochs": "num_epochs n_epochs nb_epoch max_epochs num_train_epochs",
    "steps": "max_steps num_steps n_steps steps_per_epoch iterations",
    "batch_size": "bs batchsize per_device_train_batch_size",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches", "seed": "random_state random_seed",
    "validation": "validation_data val_data valid_data eval_dataset val_dataloader validation_dataset "
    "validation_split val_split",
    "validation_freq": "check_val_every_n_epoch", "memory": "max_memory memory_limit mem budget ram",
    "threads": "n_jobs num_threads nthreads num_workers", "client": "n_workers cluster",
    "engine": "device accelerator", "precision": "dtype amp mixed_precision fp16 bf16",
    "progress": "verbose progress_bar disable_tqdm",
    "workdir": "output_dir log_dir logdir save_dir checkpoint checkpoint_dir default_root_dir ckpt_path",
    "resume": "resume_from_checkpoint initial_epoch", "spill": "local_directory scratch tmpdir",
    "trials": "trials_total n_trials num_samples", "space": "param_grid param_distributions", "inputs": "x",
    "targets": "y labels", "dataset": "data train_data train_dataset train_dataloaders",
    "model": "net network", "out": "output", "hosts": "nodes", "trace": "profile profiler",
    "callbacks": "callback", "class_weight": "class_weights",
    "clip_norm": "clipnorm max_grad_norm gradient_clip_val global_clipnorm", "betas": "beta_1 beta1",
    "metrics": "metric", "augment": "augmentation augmentations transform transforms data_augmentation",
    "normalize": "normalization normalise preprocessing",
    "early_stopping": "patience earlystopping min_delta",
    "save_top_k": "save_best_only load_best_model_at_end save_total_limit",
    "ema": "ema_decay swa model_ema moving_average ema_momentum use_ema", "clip_value": "clipvalue",
    "param_groups": "parameter_groups no_decay", "sample_weight": "sample_weights",
}.items() for word in words.split()}  # fmt: skip
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


def listing(kind: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Put some of a function's ``**options`` into its signature: the records of a ``TypedDict``."""

    def give(function: Callable[P, T]) -> Callable[P, T]:
        own, only = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        options = options_of(kind).items()
        listed = [inspect.Parameter(n, only, default=one.default, annotation=one.kind) for n, one in options]
        *first, rest = own.parameters.values()
        function.__dict__["__signature__"] = own.replace(parameters=[*first, *listed, rest])
        return function

    return give


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse unknown options with the word that was meant; completes its docstring."""
    options = _options(function)
    known = tuple(name for name in {**_explicit(function), **options} if name != "self")

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        for name in named:
            if name not in known:
                raise InputError(f"{function.__name__} takes no '{shown(name)}'{hint(name, known)}")
        return function(*given, **named)

    call.__doc__ = _described(function, options)
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


def records_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return what is known of each parameter of a function: its docstring goes before the records."""
    told = entries(function)
    hints = get_type_hints(function)
    own = {name: one.default for name, one in _explicit(function).items() if name in hints}
    found = {name: Option(default, "neither", type=hints[name]) for name, default in own.items()}
    options = found | _options(function)
    return {name: replace(one, doc=told.get(name, one.doc)) for name, one in options.items()}


def entries(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring says of each parameter, in one line."""
    found = PARAMETERS.search(inspect.getdoc(function) or "")
    texts = re.split(r"\n(?=\w)", found["entries"].strip("\n")) if found else []
    return {name: " ".join(text.split()) for name, _, text in (entry.partition("\n") for entry in texts)}


def _described(function: Callable[..., Any], options: Mapping[str, Option]) -> str:
    doc, told = inspect.getdoc(function) or "", entries(function)
    if not told and not options:
        return doc
    known = {**ALL_OPTIONS, **options}
    texts = {name: told.get(name) or known[name].doc for name in _explicit(function) if name != "self"}
    texts |= {name: text for name, text in told.items() if name in options}
    rest = ", ".join(name for name in options if name not in texts)
    if rest:
        texts["**options"] = f"{rest}: see `docs/reference/options.md`, or help(oocdl.Options)."
    section = "\n".join(entry(name, text) for name, text in texts.items())
    found = PARAMETERS.search(doc)
    assert found is not None, f"the docstring of {function.__name__} has no section of parameters"
    return doc[: found.start("entries")] + f"{section}\n" + doc[found.end("entries") :]


def _explicit(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {name: one for name, one in found.items() if one.kind is not one.VAR_KEYWORD}


def _options(function: Callable[..., Any]) -> dict[str, Option]:
    kinds = get_args(get_type_hints(function).get("options"))
    return dict(options_of(*kinds)) if kinds else {}
