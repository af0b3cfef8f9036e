"""A step of which every run failed ends the run with a sentence, and is repeated after a fix. One case a day of two."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_es
from tests.helpers import runs
from tests.helpers.handmade import cli
from tests.helpers.of_the_day import of_the_day
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.values import batch_stream
from trinity_es.system import leftovers
from trinity_es.telemetry.metrics_file import read_metrics

pytestmark = pytest.mark.timeout(240)

REWARDS = """
def share(response, prompt, truth):
    return sum(c < "m" for c in response) / max(1, len(response))

def broken(response, prompt, truth):
    row = int(prompt.split()[-1])
    if row in range(3, 6):
        raise KeyError("stok") if row < 5 else ValueError("too long")
    return share(response, prompt, truth)
"""
BROKEN = "buffer.explorer_input.tasksets.0.reward_fn=rewards:broken"
"""The rows of step 2 have no reward."""


def made(folder: Path, *, interval: int = 1, reward: str = "broken", **sections: Any) -> Path:
    """Write a run of 5 steps, rows in order, whose reward is a module beside its config."""
    path = runs.make_config(folder, interval=interval, **sections)
    config = yaml.safe_load(path.read_text())
    config["buffer"]["explorer_input"]["tasksets"][0] |= {"shuffle": False, "reward_fn": f"rewards:{reward}"}
    path.write_text(yaml.safe_dump(config))
    (folder / "rewards.py").write_text(REWARDS)
    return path


def mend(path: Path) -> None:
    rewards = path.parent / "rewards.py"
    rewards.write_text(REWARDS.replace("range(3, 6)", "()"))


def submissions(config: Config, step: int) -> list[list[int]]:
    with trinity_es.open_log(config.store.url) as log:
        events = [r.event for r in log.read(stream=batch_stream(step), types=["BatchSubmitted"])]
        return [[task["index"]["index"] for task in log.tasks_of(e)] for e in events
                if isinstance(e, ev.BatchSubmitted)]


def require_sentence(code: int, err: str) -> None:
    assert code == 2, err
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: step 2 gave nothing to train on: each of its 6 runs failed, 4 of them with ")
    assert "KeyError: 'stok' (rewards.py:8 in broken). See `trinity-es why 2`" in line
    ways = r"`trinity-es resume \S+log\.sqlite` \(`trinity-es resume CONFIG` if .+\)"
    assert re.search(rf"fix it, and {ways} generates the step again$", line)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    return runs.outcomes(lambda folder, interval: made(folder, interval=interval, reward="share"), tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("interval", of_the_day([1, 2]))
def test_a_step_that_failed_whole_ends_the_run_and_is_generated_anew_when_it_goes_on(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, Any]], interval: int
) -> None:
    path = made(tmp_path / "run", interval=interval)
    config = load_config(path)
    code, _, err = runs.finish_here("run", path, *runs.AT_ONCE, cwd=tmp_path)
    require_sentence(code, err)
    assert leftovers.leftovers(config) == []
    told = cli("why", 2, "--log", config.store.url).output
    assert "2/2 runs completed" not in told
    assert "KeyError: 'stok'" in told
    assert "`trinity-es resume " in told
    assert runs.count(config, "BatchTrained", 2) == 0

    code, _, err = runs.finish_here("resume", path, *runs.AT_ONCE, cwd=tmp_path)  # nothing was mended
    require_sentence(code, err)

    mend(path)
    out, err = runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    assert runs.outcome(config) == undisturbed(interval)
    assert submissions(config, 2) == [[3, 4, 5]] * 3
    trained = [event.step for _, event in runs.events_of(config, "BatchTrained")]
    assert trained.count(2) == 1
    assert [line for line in out.splitlines() if line.startswith("batches")] == [
        "batches          8 (5 to train on, 3 evals)"]
    out, err = runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    assert "is complete" in err
    assert submissions(config, 2) == [[3, 4, 5]] * 3

    log = "--log", config.store.url
    assert "failed" not in cli("why", 2, *log).output
    assert cli("verify", *log).exit_code == 0
    assert "KeyError" in cli("events", 2, *log).output, "the log lost the try that failed"
    told = cli("show", 2, *log).output
    assert "submitted again: try 3" in told
    assert "KeyError" not in told
    rows = tmp_path / "rows.jsonl"
    assert cli("export", 2, "--experiences", rows, *log).exit_code == 0
    assert len(rows.read_text().splitlines()) == 6
    assert "28 used once, 0 not used" in cli("usage", *log).output
    metrics = read_metrics(Path(config.run_dir) / "metrics.jsonl")[2]
    assert (metrics["rollout/failed_task_count"], metrics["trainer/loss"]) == (0, 0.5)


@pytest.mark.slow
def test_a_step_that_failed_whole_is_made_anew(tmp_path: Path, undisturbed: Callable[[int], dict[str, Any]]) -> None:
    path = made(tmp_path / "run", reward="share")
    code, _, err = runs.finish_here("run", path, "--set", BROKEN, cwd=tmp_path)
    require_sentence(code, err)
    runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    assert runs.outcome(load_config(path)) == undisturbed(1)


@pytest.mark.slow
def test_explorer_and_trainer_in_two_processes_go_on_after_a_step_that_failed_whole(
    tmp_path: Path, undisturbed: Callable[[int], dict[str, Any]]
) -> None:
    path = made(tmp_path / "run")
    config = load_config(path)

    def both(word: str) -> list[tuple[int, str]]:
        with (runs.command(word, path, "--set", "mode=train", cwd=tmp_path) as trains,
              runs.command(word, path, "--set", "mode=explore", cwd=tmp_path) as explores):
            ends = [process.communicate(timeout=120)[1] for process in (explores, trains)]
            return [(explores.returncode, ends[0]), (trains.returncode, ends[1])]

    (code, err), (of_trainer, told) = both("run")
    require_sentence(code, err)
    assert (of_trainer, "Traceback" in told) == (2, False)
    assert told.strip().splitlines()[-1].startswith("error: the actor system is gone: start the explorer again")
    mend(path)
    for code, err in both("resume"):
        assert code == 0, err
    assert runs.outcome(config) == undisturbed(1)
    assert len(submissions(config, 2)) == 2


@pytest.mark.slow
def test_a_fully_async_run_goes_on_after_a_step_that_failed_whole(tmp_path: Path) -> None:
    course = {"sync_style": "fully_async", "max_inflight_batches": 3, "sync_interval": 2}
    path = made(tmp_path / "run", synchronizer=course)
    rewards = path.parent / "rewards.py"
    rewards.write_text(REWARDS.replace("range(3, 6)", "range(3, 9)"))  # so that step 3, in flight, fails too
    config = load_config(path)
    code, _, err = runs.finish_here("run", path, *runs.AT_ONCE, cwd=tmp_path)
    require_sentence(code, err)
    mend(path)
    runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    told = runs.outcome(config)
    assert told["used"] == dict.fromkeys(range(runs.ROWS), 1)
    assert [told["batches"][step][2] for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert all(told["batches"][step][1] is not None for step in range(1, 6)), "a step gave nothing, and was passed over"


class Nothing:
    """An operator that leaves nothing of step 2."""

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        return [e for e in experiences if e.eid.batch != 2], {}


@pytest.mark.slow
def test_a_step_of_which_the_pipeline_left_nothing_is_passed_over(tmp_path: Path) -> None:
    path = made(tmp_path / "run", reward="share")
    code, _, err = runs.finish_here(
        "run", path, "--set", "buffer.pipeline.operators=[{name: tests.full.system.test_failed_step:Nothing}]",
        "--set", "trainer.class=tests.full.system.test_failed_step:Strict", cwd=tmp_path)
    assert code == 0, err
    trained = {event.step: event.metrics for _, event in runs.events_of(load_config(path), "BatchTrained")}
    assert trained == {1: {"learnt": 6.0}, 2: {}, 3: {"learnt": 6.0}, 4: {"learnt": 6.0}, 5: {"learnt": 4.0}}


class Strict:
    def __init__(self, model_path: str, **args: Any) -> None:
        pass

    def step(self, experiences: list[Experience]) -> dict[str, float]:
        if not experiences:
            raise ValueError("there is nothing to learn from")
        return {"learnt": float(len(experiences))}

    def save(self, path: str) -> None:
        Path(path).mkdir(parents=True)
