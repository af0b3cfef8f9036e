"""what-if on real recorded runs (D5): with the recorded settings it gives their times, with others what a run gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import trinity_es
from tests.helpers.handmade import cli
from tests.helpers.systems import scripted
from trinity_es import Task
from trinity_es.audit.regenerate import find_rollout, regenerate
from trinity_es.audit.whatif.forecast import Figures, Forecast, Settings, predict
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import DataError

HALF = "tests.full.system.test_explorer:always_half"
SCRIPT = {
    "latency_seconds": [0.2, 0.6], "tokens": 6,
    "rules": [
        {"prompt": "slow", "latency_seconds": [0.8, 1.1]},
        {"prompt": "hang", "hang": True, "times": 2},
        {"prompt": "fails", "error": "no", "latency_seconds": 0.1, "times": 4},
    ],
}
PLAIN, HARD = ["plain"] * 12, ["plain"] * 3 + ["slow", "hang", "fails", "plain", "fails", "slow"] + ["plain"] * 3


def tasks(batch: int, kinds: list[str]) -> list[Task]:
    return [
        Task(workflow="single_turn", repeat_times=2, reward_fn=HALF, rollout_args={"seed": batch},
             raw_task={"prompt": f"{kind} {batch} {i}", "answer": "x"})
        for i, kind in enumerate(kinds)
    ]


def train(client: RolloutClient, batch: int) -> None:
    client.finalize_train_batch(batch, timeout=60)
    time.sleep(0.1)
    client.acknowledge(batch, batch, {})


def run(folder: Path, runners: int, *, hard: bool) -> str:
    """Batches 1 and 2 one after the other; then, with `hard`, some that overlap, with failures and dropped tasks."""
    over = {"ratio": 0.25, "wait_after_min": 0.05}
    explorer = {"max_concurrency": 3, "max_timeout": 1.2, "over_rollout": over,
                "rollout_model": {"engine_num": runners, "script": SCRIPT}}
    config = scripted(folder, explorer=explorer)
    with trinity_es.running(config) as client:
        client.submit_batch(batch_id="warm up", tasks=tasks(0, PLAIN[:8]), batch_type="eval")
        client.finalize_eval_batch("warm up", timeout=60)
        for batch in (1, 2):
            client.submit_batch(batch_id=batch, tasks=tasks(batch, PLAIN), batch_type="train")
            train(client, batch)
        if hard:
            client.submit_batch(batch_id=3, tasks=tasks(3, HARD), batch_type="train", min_wait_num=9)
            train(client, 3)
            client.submit_batch(batch_id=4, tasks=tasks(4, HARD), batch_type="train", min_wait_num=9)
            for batch in (4, 5, 6):  # two in flight, as under fully_async
                if batch < 6:
                    more = tasks(batch + 1, HARD)
                    client.submit_batch(batch_id=batch + 1, tasks=more, batch_type="train", min_wait_num=9)
                if batch == 5:
                    client.submit_batch(batch_id="5/check", tasks=tasks(9, PLAIN[:5]), batch_type="eval")
                train(client, batch)
            client.finalize_eval_batch("5/check", timeout=60)
    return config.store.url


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trinity_es.Log]:
    with trinity_es.open_log(run(tmp_path_factory.mktemp("two"), 2, hard=True)) as log:
        yield log


def rows(log: trinity_es.Log, *chosen: Any, **settings: Any) -> list[Forecast]:
    return [r for r in predict(log, list(chosen) or None, Settings(**settings)).batches if r.chosen]


def largest_error(found: list[Forecast]) -> float:
    return max(abs(r.predicted.seconds - r.recorded.seconds) / r.recorded.seconds for r in found)  # type: ignore[operator]


def together(found: list[Forecast]) -> Figures:
    names = ("seconds", "finished", "failed", "dropped", "attempts")
    return Figures(**{name: sum(getattr(r.predicted, name) for r in found) for name in names})


def test_d5_with_the_recorded_settings_it_gives_the_recorded_step_times(recorded: trinity_es.Log) -> None:
    found = rows(recorded)
    assert [r.batch_id for r in found] == ["warm up", 1, 2, 3, 4, 5, 6, "5/check"]
    assert all(r.recorded.dropped for r in found if r.batch_id in (3, 4, 5, 6)), "the run dropped too little to tell"
    assert sum(r.recorded.attempts for r in found) > sum(r.tasks for r in found), "nothing was attempted again"
    assert largest_error(found) < 0.05
    for row in found:  # who comes last in a step is a close race
        assert abs(row.predicted.dropped - row.recorded.dropped) <= 1
        assert abs(row.predicted.failed - row.recorded.failed) <= 1
        assert abs(row.predicted.finished - row.recorded.finished) <= 1
    for seed in range(3):
        assert largest_error(rows(recorded, seed=seed)) < 0.05
    assert largest_error(rows(recorded, 2)) < 0.05
    assert [r.batch_id for r in rows(recorded, 5)] == [5]
    beside = {r.batch_id for r in predict(recorded, [5]).batches if not r.chosen}
    assert {4, 6, "5/check"} <= beside <= {3, 4, 6, "5/check"}, "what ran beside it had its places too"


def test_a_wrong_setting_gives_other_times(recorded: trinity_es.Log) -> None:
    assert largest_error(rows(recorded, max_concurrency=2)) > 0.1
    assert largest_error(rows(recorded, runners=1)) > 0.5


def test_what_it_says_of_a_number_of_runners_is_what_a_run_takes(recorded: trinity_es.Log, tmp_path: Path) -> None:
    with trinity_es.open_log(run(tmp_path, 1, hard=False)) as one:
        for log, runners, real in ((recorded, 1, one), (one, 2, recorded)):
            predicted = together(rows(log, 1, 2, runners=runners)).seconds
            before, truth = (sum(r.recorded.seconds or 0.0 for r in rows(which, 1, 2)) for which in (log, real))
            assert predicted is not None
            told = f"recorded {before:.2f} s, predicted {predicted:.2f} s, a real run {truth:.2f} s"
            assert abs(predicted - truth) < abs(before - truth) / 2, told  # a busy machine adds what is in no record


def test_units_of_one_run_each_are_as_many_as_runs(recorded: trinity_es.Log) -> None:
    halves = together(rows(recorded, 1, 2, runs_per_unit=1))
    assert halves.attempts == 48
    assert halves.finished == 24


def test_what_a_system_recorded_is_generated_again(recorded: trinity_es.Log) -> None:
    for run in (0, 1):
        rollout = find_rollout(recorded, 1, 3, run)
        assert rollout.engine_version.startswith("script ")
        assert rollout.experiences[0].info["sampling"]["choice"] == run
        again = regenerate(rollout)
        assert again.equal, again
        assert again.why == []


def test_the_command(recorded: trinity_es.Log, tmp_path: Path) -> None:
    url = recorded.url
    told = cli("what-if", "all", "--log", url)
    assert told.exit_code == 0, told.output
    assert "recorded settings" in told.stdout
    assert "5/check" in told.stdout
    asked = ("--runners", "1", "--timeout", "0.5", "--over-rollout-ratio", "0.5", "--max-retry", "0",
             "--max-concurrency", "2")
    told = cli("what-if", "3", "4", "--log", url, *asked, "--json")
    assert told.exit_code == 0, told.output
    data = orjson.loads(told.stdout)
    assert data["recorded_settings"] == {
        "timeout": 1.2, "over_rollout_ratio": 0.25, "runners": 2, "max_concurrency": 3, "max_retry": 2,
        "runs_per_unit": None,
    }
    assert data["settings"] == {
        "timeout": 0.5, "over_rollout_ratio": 0.5, "runners": 1, "max_concurrency": 2, "max_retry": 0,
        "runs_per_unit": None,
    }
    chosen = [b for b in data["batches"] if b["chosen"]]
    assert [b["batch_id"] for b in chosen] == [3, 4]
    assert data["totals"]["predicted"]["dropped"] == sum(b["predicted"]["dropped"] for b in chosen)
    assert data["not_modelled"]
    assert cli("what-if", "77", "--log", url).exit_code == 2
    assert cli("what-if", "--runners", "0", "--log", url).exit_code == 2
    with pytest.raises(DataError, match="none of the chosen batches"):
        predict(recorded, [77])
