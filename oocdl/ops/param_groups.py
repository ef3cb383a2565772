"""Groups of weights with settings of their own, as PyTorch's ``param_groups``: the first whose name matches.

A group is a mapping: ``params``, patterns of names, and any fields of the optimizer that differ
from its own. The word ``no_decay_1d`` among groups takes weight decay off all weights of at most one axis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from oocdl.errors import InputError
from oocdl.ops.optimizers import Optimizer, scalars
from oocdl.ops.schedules import base_of, lasting, rebased

NO_DECAY = "no_decay_1d"
"""Word for groups in which weights of at most one axis (biases, norms) do not decay."""
ParamGroups = tuple[Mapping[str, Any] | str, ...]
OF_ALL = ("clip_norm", "clip_value", "name")
"""Fields that an optimizer has once, for all groups."""
SOURCES = {"lr": "lr", "adam/bias1": "betas", "adam/bias2": "betas", "sgd/undamped": "dampening"}
"""SCALAR value -> the field of the optimizer that it is made of."""
AVERAGE_KEPT = "ema/kept"
"""The SCALAR by which an average counts in the next one; the new weight has the rest."""


@dataclass(frozen=True)
class Group:
    """What weights of one group are updated by."""

    optimizer: Optimizer
    number: int = 0
    """Its place in ``param_groups``, from 1; 0 for all weights that are in none."""
    given: frozenset[str] = frozenset()
    """The fields that the group has given."""

    def scalar(self, name: str) -> str:
        """Return the group's name for a SCALAR value, which has a number if the group's contents differ.

        >>> Group(None, 2, frozenset({"lr"})).scalar("lr")
        'lr/2'
        """
        return f"{name}/{self.number}" if SOURCES.get(name) in self.given else name


def groups_of(optimizer: Optimizer, param_groups: ParamGroups | None) -> list[Group]:
    """Return the group of all weights that are in none, and those of ``param_groups`` in order.

    A learning rate that is a number, where the optimizer's is a schedule, is what the schedule begins from in
    the group: PyTorch's schedulers scale each group from its own. Raises InputError for what an optimizer
    cannot have.
    """
    found = [Group(optimizer)]
    known = [one.name for one in fields(optimizer) if one.init and one.name not in OF_ALL]
    for given in param_groups or ():
        if isinstance(given, str):
            if "weight_decay" not in known:
                raise InputError(f"param_groups has '{NO_DECAY}', but this optimizer has no weight_decay")
            continue
        number = len(found)
        changes = {name: held for name, held in given.items() if name != "params"}
        for name in changes:
            if name not in known:
                takes = f"it takes params, {', '.join(known)}"
                raise InputError(f"param_groups has '{name}' for '{_shown(given)}'; {takes}")
        try:
            if "lr" in changes and callable(optimizer.lr) and not callable(changes["lr"]):
                base = base_of(optimizer.lr)
                if not base:
                    how = "give the group a schedule"
                    raise InputError(f"its lr is a number, but the optimizer's is a function of yours; {how}")
                changes["lr"] = rebased(optimizer.lr, base, float(changes["lr"]))
            found.append(Group(replace(optimizer, **changes), number, frozenset(changes)))
        except (InputError, TypeError, ValueError) as error:
            raise InputError(f"param_groups for '{_shown(given)}': {error}") from error
    return found


def _shown(given: Mapping[str, Any]) -> str:
    return ", ".join(given["params"])


def assigned(
    optimizer: Optimizer,
    param_groups: ParamGroups | None,
    names: Mapping[str, Collection[str]],
    flat: Collection[str],
) -> dict[str, Group]:
    """Return the group of each weight: the first that has a pattern of one of its ``names``.

    ``flat`` are the weights of at most one axis. Raises InputError for a pattern that matches no weight, and
    for a group whose weights are all in groups before it.
    """
    default, *groups = groups_of(optimizer, param_groups)
    found = dict.fromkeys(names, default)
    taken: set[str] = set()
    mappings = [given for given in param_groups or () if not isinstance(given, str)]
    for group, given in zip(groups, mappings, strict=True):
        matched: set[str] = set()
        for pattern in given["params"]:
            hits = {weight for weight, known in names.items() if any(fnmatchcase(n, pattern) for n in known)}
            if not hits:
                why = f"'{pattern}', which matches no trained weight"
                some = ", ".join(f"'{name}'" for name in list(names)[:5])
                raise InputError(f"param_groups has {why}, as {some} are")
            matched |= hits
        if matched <= taken:
            why = f"'{_shown(given)}', whose weights are all in groups before it"
            raise InputError(f"param_groups has {why}; put it first")
        found |= dict.fromkeys(matched - taken, group)
        taken |= matched
    if NO_DECAY in (param_groups or ()):
        for weight in flat:
            group, without = found[weight], dict[str, Any](weight_decay=0.0)
            found[weight] = replace(group, optimizer=replace(group.optimizer, **without))
    return found


def lasting_groups(param_groups: ParamGroups | None, steps: int) -> ParamGroups | None:
    """Return the groups with schedules that last for a run of so many steps, where they say nothing else."""
    if param_groups is None:
        return None
    return tuple(
        {**given, "lr": lasting(given["lr"], steps)}
        if isinstance(given, Mapping) and "lr" in given
        else given
        for given in param_groups
    )


def step_scalars(
    optimizer: Optimizer, param_groups: ParamGroups | None, ema: float | None, step: int
) -> dict[str, float]:
    """Return the contents of all SCALAR values of an update at a step, counted from 0.

    The average of weights begins as the weights after the first step, as ``torch.optim.swa_utils`` has it.
    """
    found: dict[str, float] = {} if ema is None else {AVERAGE_KEPT: ema if step else 0.0}
    for group in reversed(groups_of(optimizer, param_groups)):
        found |= {group.scalar(name): number for name, number in scalars(group.optimizer, step).items()}
    return found


def rates_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rates among SCALAR values: "lr", and "lr/1" if the first group has its own."""
    return {name: numbers[name] for name in sorted(numbers) if name.partition("/")[0] == "lr"}
