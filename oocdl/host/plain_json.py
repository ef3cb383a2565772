"""JSON that every reader takes."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any


def json_text(data: Any) -> str:
    """Write data as JSON; a number that is not finite is null, as JSON has none of these.

    >>> json_text([float("nan"), 1.5]).split()
    ['[', 'null,', '1.5', ']']
    """
    return json.dumps(_finite(data), indent=1, default=str, allow_nan=False)


def _finite(data: Any) -> Any:
    match data:
        case dict():
            return {name: _finite(value) for name, value in data.items()}
        case list() | tuple():
            return [_finite(value) for value in data]
        case float() if not isfinite(data):
            return None
    return data
