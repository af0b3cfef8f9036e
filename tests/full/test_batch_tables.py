"""Tables as a terminal, a pipe and a file get them: what is shown is whole, what does not fit is named."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.sample_log import make
from tests.helpers.handmade import cli, write
from trinity_es.cli.render import batch_tables, runners_weights_usage
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import batch_stream
from trinity_es.projections.history import attempts
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.runner_history import natural_key

LONG = "experiment-" + "a-long-name/" * 15 + "end"


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose processes are gone, with a runner that died."""
    path = str(tmp_path_factory.mktemp("dead") / "log.sqlite")
    make(path, batches=14, tasks=24, runs=4, seed=3, dead=True, payloads=False)
    return path


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_table_cuts_a_number_or_a_heading_however_narrow_the_terminal(dead: str, width: int) -> None:
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with open_log(dead) as log:
        rows, lives = log.batches(), log.runner_lives()
        batch_tables.print_batches(out, rows)
        runners_weights_usage.print_runners(out, lives)
        runners_weights_usage.print_lives(out, lives)
        runners_weights_usage.print_weights(out, log.weights(), log.deliveries_by_version(), 0)
        batch_tables.print_timeline(out, attempts.fold_timeline(log.events(4)), [], None)
    text = out.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert ("too narrow here for " in text) == (width < 200)
    four = next(line.split() for line in text.splitlines() if line.startswith("4 "))
    assert f"{rows[3].reward:.3f}" in four


def test_in_a_pipe_a_long_id_takes_no_column_away(path: Path) -> None:
    write(path, [(batch_stream(LONG), [
        ev.BatchSubmitted(batch_id=LONG, batch_type="eval", repeat_times=[2], tasks=[{}])])])
    text = cli("batches", "--log", path).stdout
    assert LONG in text
    assert text.split("\n")[1].split()[1:5] == ["eval", "running", "1", "0"]
    assert "too narrow" not in text


def test_runners_of_a_system_that_is_gone_are_not_running(dead: str) -> None:
    *lines, note = cli("runners", "--log", dead).stdout.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["gone"] * 4
    assert note.startswith("gone: the whole system ended unseen")
    assert "gone" in cli("runners", "runner-1", "--log", dead).stdout
    hows = {life["how"] for life in json.loads(cli("runners", "--json", "--log", dead).stdout)}
    assert ("gone" in hows, "running" in hows) == (True, False)


def test_names_are_in_the_order_of_their_numbers() -> None:
    names = ["runner-10", "runner-2", "2", "judge", "runner-1", "runner", "runner-2b"]
    assert sorted(names, key=natural_key) == ["2", "judge", "runner", "runner-1", "runner-2", "runner-2b", "runner-10"]


def test_a_long_list_of_weights_says_how_many_it_leaves_out(path: Path) -> None:
    versions = range(1, runners_weights_usage.MAX_ROWS + 8)
    write(path, [("weights", [ev.WeightsPublished(version=n, path="w") for n in versions])])
    text = cli("weights", "--log", path).stdout
    lines = [line for line in text.splitlines() if line[:7].strip().isdecimal()]
    assert [lines[0].split()[0], lines[-1].split()[0]] == ["8", str(runners_weights_usage.MAX_ROWS + 7)]
    assert "7 before them: --json has all" in text
    assert len(json.loads(cli("weights", "--log", path, "--json").stdout)) == runners_weights_usage.MAX_ROWS + 7
