"""The table of all benchmarks: each aim has a row, and says how far it is reached, or why that can not be told."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.compared import Row, Spread, Watch, alternate, family_of, pairs, report
from benchmarks.dispatch import check_experiences, percentile
from benchmarks.table import AIMS, SOURCES, lines, markdown
from trinity_es.events.experience import EID, Experience
from trinity_es.testing import sampled


def result(*rows: Row) -> dict[str, Any]:
    return {"rows": [{**asdict(row), "met": row.met} for row in rows]}


def verdicts(*rows: Row) -> list[str]:
    return [line.verdict for line in lines({"log_append": result(*rows)}) if line.id == "E5"]


def test_an_aim_without_figures_is_a_row_too() -> None:
    assert [line.id for line in lines({})] == list(AIMS)
    assert {line.verdict for line in lines({})} == {"not measured"}
    assert set(SOURCES.values()) < set(AIMS)


def test_rows_are_under_the_aim_of_their_benchmark_or_their_own() -> None:
    own = pairs("tasks", "tasks/s", [60.0], "that", [2.0], aim=30.0, id="E2")
    found = lines({"dispatch": result(own, Row("p50", "ms", Spread.of([1.0])))})
    assert [(line.id, line.what) for line in found][:2] == [("E1", "p50"), ("E2", "tasks")]


def test_what_is_reached_and_by_how_much_not() -> None:
    assert verdicts(pairs("a", "events/s", [60.0, 50.0, 70.0], "driver", [100.0] * 3, aim=0.5)) == ["reached"]
    assert verdicts(pairs("a", "events/s", [10.0], "driver", [100.0], aim=0.5)) == ["missed: 5.00 times"]
    assert verdicts(pairs("a", "ms", [2.06], "its p50", [1.0], aim=2.0, most=True)) == ["missed by 3.0%"]
    assert verdicts(Row("share", "of the ideal", Spread.of([0.5]), aim=0.98)) == ["missed: 1.96 times"]
    assert verdicts(Row("share", "of the ideal", Spread.of([0.99]), aim=0.98)) == ["reached"]


def test_what_could_not_be_compared_is_not_reached() -> None:
    """A thousand tasks a second are no thirty times the other's, where there is no other."""
    row = pairs("tasks", "tasks/s", [1000.0], "the known system", None, aim=30.0)
    assert row.met is None
    assert verdicts(row) == ["not measured: without the known system"]
    assert verdicts(Row("beside", "ms", Spread.of([1.0]))) == [""]


def test_a_ratio_is_the_median_of_the_pairs() -> None:
    """Not the ratio of the medians: the machine was slow for one pair, which is slow for both."""
    row = pairs("a", "events/s", [1.0, 100.0, 90.0], "that", [1.0, 200.0, 100.0])
    assert (row.ratio.median, row.ratio.min, row.ratio.max, row.ratio.times) == (0.9, 0.5, 1.0, 3)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pairs("a", "events/s", [1.0, 2.0], "that", [1.0])


def test_who_goes_first_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return 1.0

    alternate({"a": lambda: way("a"), "b": lambda: way("b")}, 3)
    assert "".join(order) == "baabba"


def test_the_table_is_read_from_what_benchmarks_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = pairs("append, groups of 64", "events/s", [70_000.0, 60_000.0], "sqlite3", [100_000.0] * 2, aim=0.5)
    report("Appending", [row], Watch(), ["PostgreSQL: none"], str(tmp_path / "log_append.json"))
    (tmp_path / "replay.json").write_text(json.dumps({"rows": []}))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["table", "--folder", str(tmp_path), "--json", str(tmp_path / "all.json")])
    assert table.main() == 0
    told = capsys.readouterr().out
    assert ("| E5 | append, groups of 64 | 65,000 (60,000 - 70,000) events/s | sqlite3 | "
            "100,000 (100,000 - 100,000) | 0.65 (0.60 - 0.70) | >= 0.5 | reached |") in told
    assert "left out: PostgreSQL: none" in told
    assert "Load average" in told
    written = json.loads((tmp_path / "all.json").read_text())
    assert [(r["id"], r["benchmark"], r["met"]) for r in written["rows"]] == [("E5", "log_append", True)]
    assert "E6" in written["not_measured"]
    assert {"date", "commit", "machine", "beside", "left_out"} <= set(written["measured"]["log_append"])


def test_every_line_has_as_many_cells_as_the_head() -> None:
    row = pairs("a", "ms", [1.0, 2.0], "that", [20.0, 30.0], aim=1 / 12, most=True)
    told = list(markdown(lines({"dispatch": result(row)})))
    assert {line.count("|") for line in told} == {9}
    assert "<= 1/12" in told[2]


def experiences(tokens: int, numbers: Sequence[int]) -> list[Experience]:
    return [
        Experience(eid=EID(batch=1, task=n), tokens=sampled(n, tokens)[0], prompt_length=tokens // 2, reward=1.0,
                   logprobs=sampled(n, tokens)[1], advantages=[0.0] * (tokens - tokens // 2))
        for n in numbers
    ]


def test_experiences_that_lack_or_differ_end_the_benchmark() -> None:
    check_experiences(experiences(8, range(3)), 3, 8)
    for wrong in (experiences(8, range(2)), experiences(8, [0, 1, 1]), experiences(6, range(3))):
        with pytest.raises(SystemExit):
            check_experiences(wrong, 3, 8)
    other = experiences(8, range(3))
    other[1].reward = 0.5
    with pytest.raises(SystemExit, match="other values"):
        check_experiences(other, 3, 8)


def test_percentiles_are_of_what_was_measured() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile(list(map(float, range(100))), 0.95) == 95.0


def test_a_system_has_no_part_in_who_adopted_it() -> None:
    starts = "import subprocess as s; print(s.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        [system] = family_of(int(other.stdout.readline()))  # who would rest it would stop `other`, too
        system.kill()
        other.stdin.write(b"\n")
