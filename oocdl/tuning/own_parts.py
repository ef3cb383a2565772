"""Parts that a user has registered in this process (operators, losses, optimizers), sent to workers by value.

Workers make the plans of their trials. They need not have the modules in which it stands.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from oocdl.errors import InputError
from oocdl.graph.onnx.own_operators import OWN
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import KNOWN, OPTIMIZERS, Own
from oocdl.ops.own_loss import FORMULAS

_packing = Lock()
"""Guards the set of modules that are pickled by value, which is the whole process's."""


def packed() -> bytes:
    """Return what is registered here, pickled. Raises InputError if a function holds what cannot be sent."""
    own = OWN, FORMULAS, KNOWN
    functions: list[Callable[..., Any]] = [operator.function for operator in OWN.values()]
    functions += [formula for _, formula in FORMULAS.values()]
    functions += [known.update for known in KNOWN.values()]
    names = {function.__module__ for function in functions} - {"__main__"}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    with _packing:
        new = [one for one in modules if one.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            pickled: bytes = cloudpickle.dumps(own)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise InputError(
                f"what is registered ({', '.join([*OWN, *FORMULAS, *KNOWN])}) cannot be "
                f"sent to workers ({error}); have its functions read numbers, texts and arrays only"
            ) from error
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)
    return pickled


def take(parts: bytes) -> None:
    """Know in this process what was ``packed`` in another, in the place of what has the same names."""
    operators, formulas, optimizers = pickle.loads(parts)
    OWN.update(operators)
    FORMULAS.update(formulas)
    LOSSES.update({name: spec for name, (spec, _) in formulas.items()})
    KNOWN.update(optimizers)
    OPTIMIZERS.update({name: partial(Own, name) for name in optimizers})
