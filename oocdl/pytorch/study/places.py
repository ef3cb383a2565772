"""Tells where in a module, and in which line of its code, a call comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
"""Beginnings of the files whose lines say nothing of the module's code."""


class Places:
    """The parts of a module, and their names."""

    def __init__(self, module: nn.Module) -> None:
        self.title = type(module).__name__
        self._names = {id(part): name or self.title for name, part in module.named_modules()}

    def here(self) -> str:
        """Say which part of the module runs now, and which line of its code."""
        part, line = "", ""
        frame = sys._getframe(1)
        while frame is not None and not (part and line):
            file = frame.f_code.co_filename
            if not line and is_of_user(file):
                line = f"{Path(file).name}:{frame.f_lineno}"
            part = part or self._names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back  # type: ignore[assignment]
        return f"in '{part or self.title}'" + (f" ({line})" if line else "")


def is_of_user(file: str) -> bool:
    """Whether a file of code is neither PyTorch's nor ours."""
    return not file.startswith(_NOT_THE_USERS)
