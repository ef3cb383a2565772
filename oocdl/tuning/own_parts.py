"""What a user has registered in this process (operators, losses, optimizers), sent to workers by value.

Workers make the plans of their trials. They need not have the modules in which it stands.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from oocdl.errors import InputError
from oocdl.graph.onnx.own_operators import OWN, OwnOperator
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import OPTIMIZERS, Own
from oocdl.ops.own_loss import FORMULAS, Formula, OwnLoss
from oocdl.ops.own_optimizer import KNOWN, Known

_packing = Lock()
"""Which modules are pickled by value is a fact of the process."""


@dataclass(frozen=True)
class OwnParts:
    """All that is registered, by name, with the digests that it has where it was."""

    operators: Mapping[str, OwnOperator]
    losses: Mapping[str, tuple[OwnLoss, Formula]]
    optimizers: Mapping[str, Known]


def packed() -> bytes:
    """Return what is registered here, pickled. Raises InputError if a function holds what cannot be sent."""
    own = OwnParts(dict(OWN), dict(FORMULAS), dict(KNOWN))
    functions: list[Callable[..., Any]] = [one.function for one in own.operators.values()]
    functions += [formula for _, formula in own.losses.values()]
    functions += [one.update for one in own.optimizers.values()]
    names = {function.__module__ for function in functions} - {"__main__"}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    with _packing:
        new = [one for one in modules if one.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            made: bytes = cloudpickle.dumps(own)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise InputError(
                f"what is registered ({', '.join([*own.operators, *own.losses, *own.optimizers])}) cannot be "
                f"sent to workers ({error}); have its functions read numbers, texts and arrays only"
            ) from error
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)
    return made


def take(parts: bytes) -> None:
    """Know in this process what was ``packed`` in another, in the place of what has the same names."""
    own: OwnParts = pickle.loads(parts)
    OWN.update(own.operators)
    for name, (spec, formula) in own.losses.items():
        FORMULAS[name] = spec, formula
        LOSSES[name] = spec
    for name, known in own.optimizers.items():
        KNOWN[name] = known
        OPTIMIZERS[name] = partial(Own, name)
