"""Changed ONNX files and odd command lines end well or in one line, within 5 s; files within 1 GiB.

With ``test_random_damage`` these are 500 attempts; the first lines of the kits say how to try more.
"""

from __future__ import annotations

import json

import pytest

from tests.kit.commands import python


@pytest.mark.parametrize(("kit", "first", "last"), [("changed_files", 0, 300), ("command_lines", 0, 125)])
def test_what_is_odd_is_refused_in_one_line(kit: str, first: int, last: int) -> None:
    done = python("-m", f"tests.kit.{kit}", first, last, seconds=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], done.stderr[-4000:]
    assert sum(found["ended"].values()) == last - first
