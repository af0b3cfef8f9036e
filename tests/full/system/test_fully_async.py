"""Training and generation overlap and the run dies as a whole: no prompt is skipped or used twice (P34, C7)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_es
from tests.helpers import runs
from tests.helpers.of_the_day import of_the_day
from tests.helpers.prompts import prompts_used
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.system import leftovers

pytestmark = pytest.mark.timeout(240)


class Choosing(runs.SteadyTrainer):
    def wants_sync(self, step: int) -> bool:
        return step in (1, 4)


def config_of(folder: Path, *, trainer: str = "SteadyTrainer", seconds: float = 0.3, **synchronizer: Any) -> Path:
    path = runs.make_config(folder)
    data = yaml.safe_load(path.read_text())
    data["synchronizer"] = synchronizer
    module = "tests.full.system.test_fully_async" if trainer == "Choosing" else "tests.helpers.runs"
    data["trainer"] |= {"class": f"{module}:{trainer}", "args": {"seconds": seconds}}
    path.write_text(yaml.safe_dump(data))
    return path


def add_second_taskset(path: Path, rows: int) -> None:
    """Read it twice, a third as often as the first."""
    data = yaml.safe_load(path.read_text())
    (path.parent / "more.jsonl").write_text("\n".join(json.dumps({"prompt": f"more {i}"}) for i in range(rows)))
    first = data["buffer"]["explorer_input"]["tasksets"][0]
    more = {**first, "name": "more", "path": "more.jsonl", "ratio": 0.5, "epochs": 2}
    data["buffer"]["explorer_input"]["tasksets"].append(more)
    path.write_text(yaml.safe_dump(data))


def order(config: Config) -> list[tuple[str, Any]]:
    """Submissions and ends of steps, trainings and weights, as they happened."""
    out: list[tuple[str, Any]] = []
    for stream, event in runs.events_of(config, "BatchSubmitted", "BatchFinalized", "BatchTrained", "WeightsPublished"):
        match event:
            case ev.BatchSubmitted(batch_type="train"):
                out.append(("submitted", event.batch_id))
            case ev.BatchFinalized() if event.result["batch_type"] == "train":
                out.append(("generated", event.result["batch_id"]))
            case ev.BatchTrained():
                out.append(("trained", event.step))
            case ev.WeightsPublished():
                out.append(("weights", event.version))
            case _:
                assert stream.startswith("batch/")
    return out


def before(happened: list[tuple[str, Any]], first: tuple[str, Any], second: tuple[str, Any]) -> bool:
    return happened.index(first) < happened.index(second)


def check_complete(config: Config, steps: int, used: dict[str, dict[int, int]]) -> None:
    """Every prompt as often as it should be, every step trained and finished once, the last weights out."""
    with trinity_es.open_log(config.store.url) as log:
        assert log.verify() == []
        batches = {b.batch_id: b for b in log.batches()}
        assert {name: prompts_used(log, name) for name in used} == used
    train = {b: row for b, row in batches.items() if isinstance(b, int)}
    assert {b: (row.state, row.trained_step) for b, row in train.items()} == {
        step: ("finalized", step) for step in range(1, steps + 1)
    }
    assert {row.state for row in batches.values()} == {"finalized"}
    versions = [e.version for _, e in runs.events_of(config, "WeightsPublished")]
    assert versions == sorted(set(versions))
    assert versions[-1] == steps
    learnt = json.loads((config.checkpoint_dir / f"global_step_{steps}" / "state.json").read_text())
    assert learnt["steps"] == steps
    finished = Counter((s, e.task) for s, e in runs.events_of(config, "TaskFinished"))
    assert set(finished.values()) == {1}, "a finished task was run again"
    assert leftovers.leftovers(config) == []


ONCE = {"questions": dict.fromkeys(range(runs.ROWS), 1)}


def completed(path: Path) -> tuple[Config, list[tuple[str, Any]]]:
    config = load_config(path)
    runs.went_well("run", path, cwd=path.parent.parent)
    check_complete(config, runs.STEPS, ONCE)
    return config, order(config)


@pytest.mark.slow
def test_p34_fully_async_generates_while_it_trains_and_never_has_more_in_flight(tmp_path: Path) -> None:
    path = config_of(tmp_path / "run", seconds=0.8, sync_style="fully_async", max_inflight_batches=2)
    _, happened = completed(path)
    for step in range(1, runs.STEPS):
        assert before(happened, ("submitted", step + 1), ("trained", step))  # not waiting for the weights
    for step in range(3, runs.STEPS + 1):
        assert before(happened, ("trained", step - 2), ("submitted", step))  # two in flight at most
    # The trainer is the slow one here: weights come in while the next step is open or waits for it.
    assert before(happened, ("submitted", 3), ("weights", 2))


@pytest.mark.slow
def test_p34_sync_offset_generates_ahead_with_the_weights_of_the_step_before(tmp_path: Path) -> None:
    path = config_of(tmp_path / "run", sync_style="fixed", sync_interval=1, sync_offset=1)
    config, happened = completed(path)
    for step in range(2, runs.STEPS + 1):
        assert before(happened, ("submitted", step), ("weights", step - 1))
        assert before(happened, ("generated", step), ("weights", step - 1))  # so which weights it is from is known
    for step in range(3, runs.STEPS + 1):
        assert before(happened, ("weights", step - 2), ("submitted", step))
    dispatched = [(s, e.model_version) for s, e in runs.events_of(config, "TasksDispatched") if "/" not in s[6:]]
    assert set(dispatched) == {(f"batch/{step}", max(0, step - 2)) for step in range(1, runs.STEPS + 1)}


@pytest.mark.slow
def test_p34_trainer_driven_publishes_when_the_trainer_says_so(tmp_path: Path) -> None:
    path = config_of(tmp_path / "run", trainer="Choosing", sync_style="trainer_driven", max_inflight_batches=2)
    config, _ = completed(path)
    assert [e.version for _, e in runs.events_of(config, "WeightsPublished")] == [1, 4, 5]  # the last ones always
    # Evals belong to weights: 2 and 4 were passed when version 4 came, and that is measured once.
    submitted = [e for _, e in runs.events_of(config, "BatchSubmitted")]
    assert [e.batch_id for e in submitted if e.batch_type == "eval"] == ["0/check", "4/check"]


MOMENTS: dict[str, Callable[[Config], bool]] = {
    "two steps in flight, none generated": lambda c: any(runs.count(c, "TaskFinished", n) for n in (1, 2)),
    "a step trained, its weights not out, the next generating": lambda c: (
        runs.count(c, "BatchTrained", 2) == 1 and runs.count(c, "BatchSubmitted", 3) == 1
    ),
    "weights out, two steps open": lambda c: (
        2 in {e.version for _, e in runs.events_of(c, "WeightsPublished")} and runs.count(c, "BatchSubmitted", 4) == 1
    ),
}


def die_and_resume(path: Path, reached: Callable[[Config], bool], moment: str) -> Config:
    config = runs.killed_when(reached, path, moment)
    runs.went_well("resume", path, *runs.AT_ONCE, cwd=path.parent)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("moment", of_the_day([*MOMENTS]))
def test_c7_fully_async_killed_as_a_whole_skips_no_prompt_and_uses_none_twice(tmp_path: Path, moment: str) -> None:
    path = config_of(tmp_path / "run", sync_style="fully_async", max_inflight_batches=2)
    config = die_and_resume(path, MOMENTS[moment], moment)
    check_complete(config, runs.STEPS, ONCE)


@pytest.mark.slow
def test_c7_two_tasksets_with_ratios_killed_as_a_whole_use_every_prompt_as_often_as_they_should(tmp_path: Path) -> None:
    path = config_of(tmp_path / "run", sync_style="fully_async", max_inflight_batches=2)
    add_second_taskset(path, rows=3)
    config = die_and_resume(path, lambda c: runs.count(c, "TaskFinished", 3) >= 1, "step 3")
    steps = 7  # 14 + 2 * 3 tasks, 3 a step
    check_complete(config, steps, {**ONCE, "more": dict.fromkeys(range(3), 2)})
    submitted = [e for _, e in runs.events_of(config, "BatchSubmitted") if e.batch_type == "train"]
    sources = [Counter(t["index"]["taskset"] for t in e.tasks) for e in submitted]
    assert sources[:6] == [Counter(questions=2, more=1)] * 6
    cursors = {(e.taskset, e.batch_id): (e.epoch, e.offset) for _, e in runs.events_of(config, "TasksetAdvanced")}
    assert cursors["more", 3] == (1, 0)
    assert cursors["questions", 3] == (0, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "synchronizer"), of_the_day([
    pytest.param("SteadyTrainer", {"sync_style": "fixed", "sync_interval": 1, "sync_offset": 1}, id="sync_offset"),
    pytest.param("Choosing", {"sync_style": "trainer_driven", "max_inflight_batches": 2}, id="trainer_driven"),
]))
def test_c7_the_other_styles_killed_as_a_whole_skip_no_prompt_and_use_none_twice(
    tmp_path: Path, trainer: str, synchronizer: dict[str, Any]
) -> None:
    path = config_of(tmp_path / "run", trainer=trainer, **synchronizer)
    config = die_and_resume(path, lambda c: runs.count(c, "BatchTrained", 2) == 1, "step 2 trained")
    check_complete(config, runs.STEPS, ONCE)
    if trainer == "SteadyTrainer":  # which weights a step is from does not depend on time: the same end
        undisturbed = config_of(tmp_path / "undisturbed", trainer=trainer, **synchronizer)
        runs.went_well("run", undisturbed, *runs.AT_ONCE, cwd=tmp_path)
        assert runs.outcome(config) == runs.outcome(load_config(undisturbed))
