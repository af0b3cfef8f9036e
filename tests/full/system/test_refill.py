"""Steps whose filtered and failed tasks are replaced by the next ones of the tasksets (`explorer.refill`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.handmade import cli
from tests.helpers.prompts import prompts_used
from tests.helpers.runs import events_of, killed_when, make_config, outcome, went_well
from tests.helpers.systems import StartSystem
from trinity_es.config.config import Config, load_config
from trinity_es.events.errors import BatchNotFound, BatchTypeMismatch, DataError, TooFewGroups
from trinity_es.events.values import BatchLifecycleState, Task

pytestmark = pytest.mark.timeout(240)

ROWS, SIZE, AT_MOST = 40, 4, 12
REWARD = "tests.helpers.runs:odd_question"
MOMENTS = ("BatchSubmitted", "GroupsMissing", "TasksAdded", "BatchFinalizing")
"""Events after which a run is killed."""
PIPELINE = {"operators": [{"name": "reward_filter", "args": {"threshold": 1.0}}]}


def refilled_run(folder: Path, *, latency: float = 0.0, at_most: int = AT_MOST, **sections: Any) -> Path:
    script = {"latency_seconds": latency}
    return make_config(
        folder, rows=ROWS,
        explorer={"max_concurrency": 4, "refill": {"at_most": at_most},
                  "rollout_model": {"engine_type": "scripted", "script": script}},
        buffer={"batch_size": SIZE, "pipeline": PIPELINE, "explorer_input": {"tasksets": [{
            "name": "questions", "path": "train.jsonl", "repeat_times": 2, "shuffle": True, "reward_fn": REWARD,
            "rollout_args": {"max_tokens": 8},
        }]}},
        trainer={"class": "tests.helpers.runs:SteadyTrainer", "args": {"seconds": 0.0}, "keep_checkpoints": 2},
        **sections,
    )


def require_full_steps(config: Config) -> None:
    """Every odd row was delivered once, in full steps but the last, and each row was used once."""
    delivered = [event.selected for _, event in events_of(config, "BatchFinalized")]
    assert set(delivered[:-1]) == {2 * SIZE}
    assert sum(delivered) == ROWS
    with trinity_es.open_log(config.store.url) as log:
        assert prompts_used(log, "questions") == dict.fromkeys(range(ROWS), 1)
        assert log.verify() == []


def reached(kind: str, nth: int, config: Config) -> bool:
    return len(events_of(config, kind)) >= nth


@pytest.mark.slow
@pytest.mark.parametrize(("store", "kills"), [
    ("sqlite", 3),
    pytest.param("sqlite", 20, marks=pytest.mark.all),
    pytest.param("postgresql", 20, marks=[pytest.mark.all, pytest.mark.postgres, pytest.mark.timeout(600)]),
])
def test_a_refilled_run_that_is_killed_ends_as_if_nothing_had_been(
    store: str, kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    went_well("run", calm := refilled_run(tmp_path / "calm"), cwd=tmp_path)
    require_full_steps(calm_config := load_config(calm))
    kinds = [type(event).__name__ for _, event in events_of(calm_config, *MOMENTS)][:20]
    assert len(kinds) == 20
    url = f"sqlite:///{tmp_path / 'killed.db'}" if store == "sqlite" else request.getfixturevalue("postgres")()
    path = refilled_run(tmp_path / "run", latency=0.05, store={"url": url})
    config = load_config(path)
    for i in range(20 // kills - 1, 20, 20 // kills):
        nth = kinds[:i + 1].count(kinds[i])
        killed_when(partial(reached, kinds[i], nth), path, f"{kinds[i]} number {nth}")
    went_well("resume", path, "--set", "explorer.rollout_model.script.latency_seconds=0", cwd=tmp_path)
    require_full_steps(config)
    assert outcome(config) == outcome(calm_config)


def test_a_step_ends_with_what_it_has_when_its_further_tasks_are_spent(tmp_path: Path) -> None:
    path = refilled_run(tmp_path / "run", at_most=1)
    out, _ = went_well("run", path, "--set", "total_steps=2", cwd=tmp_path)
    config = load_config(path)
    for stream, event in [(s, e) for s, e in events_of(config, "GroupsMissing")][1::2]:  # the second of each step
        line = next(line for line in out.splitlines() if line.startswith(f"step {stream.removeprefix('batch/')}/2"))
        assert f"short: {event.usable} of {SIZE} groups; explorer.refill.at_most is spent" in line
    added = [(stream, len(event.repeat_times)) for stream, event in events_of(config, "TasksAdded")]
    assert added == [("batch/1", 1), ("batch/2", 1)]
    for stream, event in events_of(config, "GroupsMissing"):
        assert event.usable + event.missing == SIZE
        assert event.lost["reward_filter"] >= event.missing, stream
    with trinity_es.open_log(config.store.url) as log:
        assert sum(prompts_used(log, "questions").values()) == 2 * (SIZE + 1)


def test_groups_that_failed_or_were_filtered_are_named_and_tasks_can_be_added(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_retry_times": 0}, buffer={"pipeline": PIPELINE})

    def task(number: int, **changed: Any) -> Task:
        return Task(workflow="single_turn", repeat_times=2, raw_task={"prompt": f"question {number}"},
                    reward_fn=REWARD, **changed)

    client.submit_batch(batch_id=1, batch_type="train", min_wait_num=3, tasks=[
        task(1), task(2), Task(workflow="single_turn", raw_task={"prompt": "no number"}, reward_fn=REWARD),
    ])
    with pytest.raises(TooFewGroups, match=r"needs 2 more \(lost: 1 by failed, 1 by reward_filter\)"):
        client.finalize_train_batch(1, groups=3, timeout=60)
    assert client.batch(1).state is BatchLifecycleState.RUNNING
    assert "it has 1 usable group and needs 2 more" in client.why(1)
    with pytest.raises(TooFewGroups) as again:
        client.finalize_train_batch(1, groups=3, timeout=60)
    assert again.value.details == {"usable": 1, "missing": 2, "lost": {"failed": 1, "reward_filter": 1}}
    client.redo(1, [2], reason="the same failure")
    with pytest.raises(TooFewGroups, match="needs 2 more"):  # not before the task has failed again
        client.finalize_train_batch(1, groups=3, timeout=60)
    assert client.batch(1).failed_attempts == 2
    assert client.add_tasks(1, [task(3), task(5)]) == 3
    result = client.finalize_train_batch(1, groups=3, timeout=60)
    assert result["finished_task_count"] == 5
    assert [e.eid.task for e in client.experiences(1)] == [0, 0, 3, 3, 4, 4]
    assert client.finalize_train_batch(1, groups=9) == result
    with pytest.raises(DataError, match="tasks can be added only to a RUNNING batch"):
        client.add_tasks(1, [task(7)])
    with pytest.raises(BatchNotFound):
        client.add_tasks(2, [task(7)])
    client.submit_batch(batch_id="e", batch_type="eval", tasks=[task(1)])
    with pytest.raises(BatchTypeMismatch, match="batch 'e' is of type eval, expected train: submit the tasks"):
        client.add_tasks("e", [task(7)])
    client.abort_batch("e", reason="enough")
    client.submit_batch(batch_id=2, batch_type="train", tasks=[task(1), task(2)])
    with pytest.raises(TooFewGroups):
        client.finalize_train_batch(2, groups=2, timeout=60)
    assert client.finalize_train_batch(2, groups=1, timeout=60)["finished_task_count"] == 2
    assert "the last, 2, was finalized" in (told := cli("status", "--log", client.config.store.url).stdout)
    assert "with 1 of 2 groups" in told
