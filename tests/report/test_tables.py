"""Tables follow the width they are printed at."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from oocdl.report.tables import Column, Sheet, blocks, key_values, shortened, sparkline, text_of

COLUMNS = (
    Column("layer", "layer", kind="name"),
    Column("useful", "useful", rank=1),
    Column("useless", "useless", rank=2),
    Column("seconds", "seconds", "{:.2f}".format),
)
NAME = "update/decoder.stage3.block2.conv1.weight/exp_avg_sq/next"
SHEET = Sheet("layers", COLUMNS, [(NAME, 12345, 12345, 1.0), ("stem", 1, 2, 0.5)], ("2 layers", 3, 4, 1.5))


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    lines = text_of(SHEET, columns=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    (row,) = (line for line in lines if line.startswith(("│ update", "│ upda")))
    assert row.split()[1].endswith("next") and (width < 200) == ("…" in row)
    assert row.split()[-2] == "1.00", "what stays is not shortened"


def test_the_least_useful_columns_go_first_and_it_is_said() -> None:
    wide, middle, narrow = (text_of(SHEET, columns=width) for width in (80, 45, 30))
    assert "useless" in wide and "no room" not in wide
    assert "useful" in middle and middle.splitlines()[-1] == "no room for: useless"
    assert narrow.splitlines()[-1] == "no room for: useful, useless"
    assert "1.50" in narrow and "2 layers" in narrow


def test_rows_are_data_too() -> None:
    assert SHEET.records()[1] == {"layer": "stem", "useful": 1, "useless": 2, "seconds": 0.5}


def test_words_are_wrapped_not_cut() -> None:
    text = text_of(
        key_values("run", [("why", "it is what it is, and nothing else than what it has been")]), columns=40
    )
    assert max(map(len, text.splitlines())) <= 40 and "…" not in text
    assert " ".join(text.replace("│", " ").split()).count("nothing") == 1


def test_names_of_files_are_text() -> None:
    text = text_of(Sheet("[red]t", COLUMNS[:1], [("[bold]x\x1b[31m",)]), columns=60)
    assert "[red]t" in text and "[bold]x" in text and "\x1b" not in text


def test_wide_characters_count_twice() -> None:
    for width in range(3, 12):
        assert cell_len(shortened("層" * 20, width)) <= width


def test_layers_are_grouped_by_blocks() -> None:
    names = [f"stage{s}.block{b}.conv{c}" for s in range(4) for b in range(5) for c in range(3)]
    names += [f"grad/{name}" for name in reversed(names)]
    assert blocks(names, 200) == [(name, [at]) for at, name in enumerate(names)]
    found = blocks(names, 40)
    assert [label for label, _ in found[:2]] == ["stage0.block0 × 3", "stage0.block1 × 3"]
    assert found[-1][0] == "grad/stage0.block0 × 3" and len(found) == 40
    assert [label for label, _ in blocks(names, 10)][3:5] == ["stage3 × 15", "grad/stage3 × 15"]
    assert sorted(at for _, places in found for at in places) == list(range(len(names)))


def test_names_that_tell_nothing_are_grouped_in_their_order() -> None:
    found = blocks([f"reducesum_{n}" for n in range(500)], 40)
    assert len(found) <= 40 and found[0] == ("reducesum_0 to reducesum_12 × 13", list(range(13)))
    assert sorted(at for _, places in found for at in places) == list(range(500))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("numbers", "bars"),
    [
        ([0.5, NAN, 0.6], "▁ █"),
        ([0.5, INF, -INF, 0.6], "▁  █"),
        ([INF, -INF, 3.0, 3.0, 1.0, 1.0], " █▁"),
        ([NAN], " "),
        ([], ""),
    ],
)
def test_what_is_no_number_is_a_blank_among_the_bars(numbers: list[float], bars: str) -> None:
    assert sparkline(numbers, 3 if len(numbers) > 4 else 9) == bars
