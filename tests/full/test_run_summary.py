"""What a run says while it goes on and at its end, counted on runs that are known."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.timed_logs import write_at
from trinity_es.cli.render.progress import RunView
from trinity_es.cli.render.watch import read_overview
from trinity_es.cli.run_in_view import print_summary, run_summary
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.safe_text import sparkline
from trinity_es.testing import wait_until

START = 1_772_352_000.0
LIFE: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
OTHER: dict[str, Any] = {"runner": "runner-1", "incarnation": 2}


READY = ev.RunnerReady(**LIFE, places=1, model_version=0, load_seconds=1.0)


def submitted(batch_id: BatchId, kind: Any = "train") -> ev.Event:
    return ev.BatchSubmitted(batch_id=batch_id, batch_type=kind, repeat_times=[1], tasks=[{}])


def done(tokens: int, version: int = 0) -> ev.Event:
    run = ev.RunResult(run=0, metrics={}, response_tokens=tokens)
    return ev.RunsFinished(task=0, run_id_base=0, attempt=1, **LIFE, runs=[run], payload=None, model_version=version,
                           model_version_end=version, seconds=1.0)


def finalized(batch_id: BatchId, kind: str, metric: str, reward: float) -> ev.Event:
    return ev.BatchFinalized(result={"batch_id": batch_id, "batch_type": kind, "metrics": {metric: reward}})


def evaluated(at: float, name: str, reward: float) -> list[tuple[float, str, ev.Event]]:
    stream = batch_stream(name)
    metric = f"eval/{name.partition('/')[2]}/reward/mean@1"
    return [(at, stream, submitted(name, "eval")), (at, stream, finalized(name, "eval", metric, reward))]


def write(path: Path, entries: list[tuple[float, str, ev.Event]]) -> None:
    write_at(path, ((START + at, stream, event) for at, stream, event in entries))


def test_what_a_run_says_at_its_end(tmp_path: Path, path: Path) -> None:
    config = Config.from_dict({"store": {"url": f"sqlite:///{path}"}}, folder=tmp_path)
    write(path, [
        (0, "runner/runner-0", READY), *evaluated(0, "0/letters", 0.1), *evaluated(0, "0/digits", 0.7),
        (10, "batch/1", submitted(1)), (12, "batch/2", submitted(2)),  # two at once
        (18, "batch/1", done(300, 3)), (19, "batch/2", done(300, 2)),
        (20, "batch/1", finalized(1, "train", "rollout/reward/mean", 0.5)),
        (20, "batch/2", finalized(2, "train", "rollout/reward/mean", 0.5)),
        (50, "batch/2", submitted(2)), (60, "batch/2", done(400, 3)), (70, "batch/2", done(0, 2)),  # the id once more
        *((80.0 + n, "weights", ev.WeightsPublished(version=v, path="p", method=m))
          for n, (v, m) in enumerate([(1, "memory"), (2, "memory"), (1, "checkpoint"), (2, "checkpoint")])),
        *evaluated(90, "2/letters", 0.4), *evaluated(90, "2/digits", 0.6),
    ])
    with open_log(str(path)) as log:
        told = run_summary(config, log)
        row = log.batch_row(2)
    assert told["response_tokens"] == 1000
    assert told["tokens_per_second"] == pytest.approx(1000 / (10 + 40))  # of 10 to 20 and 50 to 90 s
    assert (told["weight_versions"], told["model_version"]) == (3, 2)
    assert (told["eval_reward_before"], told["eval_reward_after"]) == (0.1, 0.4)
    assert row.model_version == 3


def summary_and_line(path: Path) -> tuple[dict[str, Any], str]:
    config = Config.from_dict({"store": {"url": f"sqlite:///{path}"}}, folder=path.parent)
    out = io.StringIO()
    with open_log(str(path)) as log, RunView(str(path), Console(file=out, width=160)):
        told = run_summary(config, log)
    return told, next(line for line in out.getvalue().splitlines() if line.startswith("step 1"))


def test_the_time_that_a_system_was_down_or_loaded_engines_makes_no_step_slower(path: Path) -> None:
    kept = ev.AttemptKept(**LIFE, task=0, run_id_base=0, runs=1, attempt=1, payload="p", calls=0, open_calls=1,
                          tokens=100, steps=0, seconds=9.0)  # it went on after the last event
    began = [ev.CoordinatorStarted(epoch=epoch, pid=1, host="h", version="1") for epoch in (1, 2)]
    write(path, [
        (0, "system", began[0]), (5, "runner/runner-0", READY), (10, "batch/1", submitted(1)),
        (14, "batch/1", done(300)),  # and all is killed
        (100, "clock", ev.ClockStepped(seconds=1.0, before=14.0)), (100, "system", began[1]),
        (100, "batch/1", kept),
        (112, "runner/runner-0", ev.RunnerStarted(runner="runner-0", incarnation=2, pid=1, host="h", engine="vllm")),
        (112, "runner/runner-1", ev.RunnerReady(**OTHER, places=1, model_version=0, load_seconds=12.0)),
        (116, "batch/1", done(500)), (116, "batch/1", finalized(1, "train", "rollout/reward/mean", 0.5)),
    ])
    told, line = summary_and_line(path)
    assert told["tokens_per_second"] == pytest.approx(700 / (4 + 4))
    assert "  800 tokens (100 of them before the whole system ended)  35 tokens/s" in line
    assert line.endswith("  20.00 s")


def test_a_clock_that_is_set_makes_no_step_longer_or_shorter(path: Path) -> None:
    write(path, [
        (0, "runner/runner-0", READY), (10, "batch/1", submitted(1)), (11, "batch/1", done(300)),
        (3615, "clock", ev.ClockStepped(seconds=3600.0, before=START + 11)), (3615, "batch/1", done(100)),
        (3616, "batch/1", finalized(1, "train", "rollout/reward/mean", 0.5)),
    ])
    told, line = summary_and_line(path)
    assert told["tokens_per_second"] == pytest.approx(400 / 6)
    assert line.endswith("  6.00 s")


def test_the_rate_of_a_batch_is_its_own_tokens_by_its_own_seconds(path: Path) -> None:
    entries: list[tuple[float, str, ev.Event]] = [(0, "runner/runner-0", READY)]
    for n in range(1, 4):
        entries += [(400 * n - 1, f"batch/{n}", submitted(n)), (400 * n, f"batch/{n}", done(256)),
                    (400 * n, f"batch/{n}", finalized(n, "train", "rollout/reward/mean", -0.0001))]
    entries += [(5000, "batch/e", submitted("e", "eval")), (5050, "batch/e", done(280)),
                (5050, "batch/e", finalized("e", "eval", "eval/letters/reward/mean@1", 0.5)),
                *evaluated(5050, "f", 0.5)]
    write(path, entries)
    out = io.StringIO()
    with RunView(str(path), Console(file=out, width=160)):
        pass
    steps = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert [line.partition("tasks  ")[2] for line in steps] == [
        "reward 0.000  256 tokens  256 tokens/s  version 0  1.00 s"] * 3
    assert "  280 tokens  5.6 tokens/s  version 0  50.00 s" in out.getvalue()
    assert "eval f  0/1 tasks  reward 0.500  0 tokens  0.00 s" in out.getvalue()


def test_tokens_that_come_at_once_after_a_silence_were_not_made_at_once(tmp_path: Path, path: Path) -> None:
    write(path, [(0, "runner/runner-0", READY), (0, "batch/1", submitted(1)), (100, "batch/1", done(6000))])
    with open_log(str(path)) as log:
        assert read_overview(log, now=START + 100.5).tokens_per_second == pytest.approx(6000 / 30)
    young = tmp_path / "young.sqlite"
    write(young, [(0, "runner/runner-0", READY), (0, "batch/1", submitted(1)), (5, "batch/1", done(6000))])
    with open_log(str(young)) as log:
        assert read_overview(log, now=START + 5).tokens_per_second == pytest.approx(6000 / 5)


def test_an_eval_without_a_result_is_named(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.from_dict({"store": {"url": f"sqlite:///{path}"}}, folder=tmp_path)
    failed: list[tuple[float, str, ev.Event]] = [
        (0, "batch/0/letters", submitted("0/letters", "eval")),
        (1, "batch/0/letters", finalized("0/letters", "eval", "eval/letters/failed_task_count", 1.0)),
    ]
    steps: list[tuple[float, str, ev.Event]] = [(2, "runner/runner-0", READY)]
    for n, reward in enumerate((-0.0001, 0.05, 0.1), 1):
        steps += [(10 * n, f"batch/{n}", submitted(n)), (10 * n + 5, f"batch/{n}", done(300)),
                  (10 * n + 5, f"batch/{n}", finalized(n, "train", "rollout/reward/mean", reward))]
    write(path, [*failed, *steps, *evaluated(40, "2/letters", 0.4), *evaluated(41, "3/letters", 0.5)])
    with open_log(str(path)) as log:
        told = run_summary(config, log)
    assert (told["eval_reward_before"], told["eval_reward_after"]) == (None, 0.5)
    assert [e["reward"] for e in told["evals"]] == [None, 0.4, 0.5]
    print_summary(told)
    said = capsys.readouterr().out
    assert "batches          6 (3 to train on, 3 evals, 1 without a reward)\n" in said
    assert "eval reward      none in the first eval, 0.500 in the last\n" in said
    assert "tokens           900 generated, 60 a second while a batch was open and engines served\n" in said
    for log, named in (
        ("my run/log.sqlite", "--log 'my run/log.sqlite'"), ("postgresql://me:***@db/x", "--config CONFIG"),
    ):
        print_summary(told | {"log": log})
        assert f"  trinity-es verify {named}\n" in capsys.readouterr().out
    assert "reward           0.000 in the first step, 0.100 in the last  ▁▅█\n" in said  # from the least to the most


def test_a_curve_goes_from_its_least_to_its_most() -> None:
    assert sparkline([0.010, 0.012, 0.024]) == "▁▂█"
    assert sparkline([-3.0, 5.0, 1.0]) == "▁█▅"
    assert sparkline([0.3] * 3) == "▄▄▄"
    assert sparkline([n / 2 for n in range(120)], 2) == "▁█"


# --- the live view: a line a step in a pipe, a panel on a terminal ----------------------------------------------------
STARTED = ev.RunnerStarted(runner="runner-0", incarnation=1, pid=2, host="here", engine="vllm")
LOST = ev.RunnerLost(runner="runner-0", incarnation=1, reason="\x1b[2J[red]killed[/red]")


def step(number: int) -> list[ev.Event]:
    unit = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=number, batch_type="train", repeat_times=[1], tasks=[{}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit], model_version=number - 1),
        ev.TaskFinished(
            task=0, run_id_base=0, attempt=1, runner="runner-0", incarnation=1, payload=None, seconds=0.1,
            runs=[ev.RunResult(run=0, metrics={"reward": 0.25}, response_tokens=700)], model_version=number - 1,
            model_version_end=number - 1,
        ),
    ]
    state = fold(events)
    return [*events, ev.BatchFinalized(result=batch_result(state))]


def append(path: Path, stream: str, events: list[ev.Event]) -> int:
    with EventLog.open(str(path), create=True, durability="process", projectors=projectors()) as log:
        version = log.stream_version(stream)
        write = Write(stream=stream, expected_version=version, events=events)
        return log.append([write], commit_id=f"{stream}/{version}").last_position


def view_of(path: Path, terminal: bool) -> tuple[RunView, io.StringIO]:
    out = io.StringIO()
    return RunView(str(path), Console(file=out, force_terminal=terminal, width=160), total_steps=2), out


def test_a_pipe_gets_a_line_a_step_and_a_runner_that_changes(path: Path) -> None:
    view, out = view_of(path, terminal=False)
    with view:  # the log is not there yet
        append(path, "runner/runner-0", [STARTED, READY])
        append(path, batch_stream(1), step(1))
        append(path, "runner/runner-0", [LOST])
        last = append(path, batch_stream(2), step(2))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["runner-0: loading engine vllm (pid 2)", "runner-0: ready after 1.0 s"]
    assert lines[2].startswith("step 1/2  1/1 tasks  reward 0.250  700 tokens  ")
    assert "  version 0  " in lines[2]
    assert lines[3] == "runner-0: lost: \\x1b[2J[red]killed[/red]"
    assert lines[4].startswith("step 2/2")
    assert len(lines) == 5
    assert view.position == last


def test_a_run_that_goes_on_says_what_is_trained_without_being_generated(path: Path) -> None:
    append(path, "runner/runner-0", [STARTED, READY])
    before = append(path, batch_stream(1), step(1))
    out = io.StringIO()
    with RunView(str(path), Console(file=out, width=160), total_steps=2, after=before):
        append(path, batch_stream(1), [ev.BatchTrained(step=1)])
        append(path, batch_stream(2), [*step(2), ev.BatchTrained(step=2)])
    first, second = out.getvalue().splitlines()
    assert first == "step 1/2  trained on the experiences that the log had"
    assert second.startswith("step 2/2  1/1 tasks")


def test_a_terminal_shows_the_engine_that_loads_and_then_the_step(path: Path) -> None:
    view, out = view_of(path, terminal=True)
    with view:
        append(path, "runner/runner-0", [STARTED])
        wait_until(lambda: "runner-0 #1" in out.getvalue() and "loading" in out.getvalue(), "the runner in the view")
        append(path, "runner/runner-0", [READY])
        append(path, batch_stream(1), step(1))
        wait_until(lambda: "reward 0.250" in out.getvalue(), "the reward in the view")
        wait_until(lambda: "step 1/2" in out.getvalue(), "the step in the view")
        wait_until(lambda: "700 tokens" in out.getvalue(), "the tokens in the view")
        failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1,
                                  kind="workflow", message="boom", retry=True)
        append(path, batch_stream(2), [*step(2)[:2], failed])
        wait_until(lambda: " s   1 failed attempts" in out.getvalue(), "the failure in the view")


def test_a_run_that_never_began_ends_its_view_at_once(tmp_path: Path) -> None:
    view, out = view_of(tmp_path / "none.sqlite", terminal=False)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the run failed"), view:
        raise RuntimeError("the run failed")
    assert time.monotonic() - started < 5
    assert out.getvalue() == ""
