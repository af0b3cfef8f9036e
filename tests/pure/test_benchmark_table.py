"""The table of all benchmarks: each aim has a row, and says how far it is reached, or why that can not be told.

The account of `make chaos-hosts`, and the long log that benchmarks copy together.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trinity_es
from benchmarks import table
from benchmarks.chaos_hosts_account import Fault, HostsAccount, Work
from benchmarks.compared import Row, Spread, Watch, alternate, family_of, pairs, report
from benchmarks.dispatch import check_experiences, percentile
from benchmarks.long_log import lengthen
from benchmarks.recovery import config_in, make_history
from benchmarks.sample_log import make
from benchmarks.table import AIMS, SOURCES, lines, markdown
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import EID, Experience
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.verify.log import verify_log
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


@pytest.fixture
def config(tmp_path: Path) -> trinity_es.Config:
    found = config_in(tmp_path, runners=1, places=8)
    Path(found.store.url.removeprefix("sqlite:///")).parent.mkdir(parents=True)
    make_history(found, 1000)
    return found


def test_a_log_that_was_copied_is_sound_to_the_last_row(config: trinity_es.Config) -> None:
    with open_log(config.store.url) as log:
        events, batches = log.head().position, log.count_batches()
    assert lengthen(config.store.url, 3 * events - 1) == 3 * events
    found = verify_log(config.store.url)
    assert (found.problems, found.notes, found.events) == ([], [], 3 * events)
    with open_log(config.store.url) as log:
        assert log.count_batches() == 3 * batches
        last = log.replay(3 * batches)
        assert (last.batch_id, last.trained_step, last.final_result["batch_id"]) == (3 * batches,) * 3


def test_what_it_can_not_copy_is_refused(tmp_path: Path) -> None:
    make(f"sqlite:///{tmp_path}/log.sqlite", batches=3, tasks=4)
    with pytest.raises(ValueError, match="rm_"):
        lengthen(f"sqlite:///{tmp_path}/log.sqlite", 10_000)


JOINED: dict[str, Any] = {"address": "10.0.0.2", "pid": 7, "places": {}}


def log_of(*events: ev.Event, epochs: tuple[int, ...] = ()) -> Any:
    """Return a log with an event each second, written by a coordinator of these epochs, or of the first."""
    items = [
        SimpleNamespace(position=n, event=event, recorded_at=float(n), stream="batch/1",
                        metadata={"lease": "coordinator", "epoch": epochs[n] if epochs else 1})
        for n, event in enumerate(events)
    ]
    return SimpleNamespace(events=lambda: items)


def joined(epoch: int) -> ev.Event:
    return ev.HostJoined(host="b", epoch=epoch, life=str(epoch), **JOINED)


def started(incarnation: int) -> ev.Event:
    return ev.RunnerStarted(runner="runner-0@b", incarnation=incarnation, pid=1, host="vm", engine="scripted")


def finished(incarnation: int) -> ev.Event:
    return ev.RunsFinished(task=0, run_id_base=0, attempt=1, runner="runner-0@b", incarnation=incarnation, runs=[],
                           payload=None, model_version=0, model_version_end=0, seconds=1.0)


def lost(epoch: int) -> ev.Event:
    return ev.HostLost(host="b", epoch=epoch, reason="not heard of")


def account_of(log: Any, *faults: Fault, killed: set[str] | None = None) -> HostsAccount:
    account = HostsAccount("hosts")
    account.add_hosts(log, faults, killed or set(), 15.0)
    return account


def test_a_result_of_an_epoch_that_is_over_is_seen() -> None:
    good = account_of(log_of(joined(1), started(3), finished(3), lost(1), joined(2), started(4), finished(4)))
    assert good.clean
    assert good.epochs == 2
    assert account_of(log_of(joined(1), started(3), lost(1), finished(3))).over
    assert account_of(log_of(joined(1), started(3), lost(1), joined(2), finished(3))).over
    assert account_of(log_of(joined(1), started(3), lost(1), epochs=(1, 2, 1))).over


def test_an_attempt_that_is_blamed_for_a_lost_host_is_seen() -> None:
    failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0@b", incarnation=3,
                              kind="runner_lost", message="host b is lost", retry=True, blamed=True)
    log = log_of(joined(1), started(3), failed)
    assert account_of(log).blamed
    assert account_of(log, killed={"runner-0@b"}).clean


def test_a_loss_that_is_known_late_or_never_or_for_nothing_is_seen() -> None:
    log = log_of(*[joined(1)] * 30, lost(1))  # at 30 s
    assert account_of(log, Fault("host killed", "b", at=15.0, until=35.0, loses=True)).known == [
        (15.0, "host killed of b")]
    assert account_of(log, Fault("host killed", "b", at=5.0, until=25.0, loses=True)).late
    assert account_of(log, Fault("host killed", "b", at=31.0, until=51.0, loses=True)).late
    assert account_of(log, Fault("link away", "b", at=24.0, until=29.0, others=["c"])).needless


def test_a_host_that_does_less_while_another_is_away_or_than_the_others_is_seen() -> None:
    work = Work([])
    work.units["b"] = [(n / 2, (n + 1) / 2) for n in range(200)]
    work.units["c"] = [(n / 2, (n + 1) / 2) for n in range(100)] + [(float(n), n + 1.0) for n in range(50, 100)]
    fault = Fault("link away", "d", at=50.0, until=70.0, calm=20.0, others=["b", "c"])
    account = HostsAccount("hosts")
    account.add_work(work, [fault], (20.0, 40.0), {}, 1)
    assert [(round(ratio, 2), name) for ratio, name in account.away] == [
        (1.0, "b during link away of d"), (0.5, "c during link away of d")]
    assert len(account.slower) == 1
    assert account.shares == account.idle == []
    account.add_work(work, [], (60.0, 80.0), {}, 1)
    assert len(account.shares) == 2
