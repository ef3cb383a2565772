"""One test for many small things: a test of its own takes more time than looking at one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def for_each(
    items: Iterable[T] | Callable[[], Iterable[T]],
) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Make a test of a check: it looks at all items, and fails with those that are wrong.

    ``items`` may be a function: what takes seconds to list is listed where the test runs, not by each worker.
    """

    def make(check: Callable[[T], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for item in items() if callable(items) else items:
                try:
                    check(item)
                except Exception as failure:  # whatever a check raises, the others are looked at, too
                    wrong.append(f"{item}: {failure!r}")
            assert not wrong, "\n".join([f"{len(wrong)} are wrong", *wrong])

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return make
