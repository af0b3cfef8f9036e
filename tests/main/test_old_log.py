"""Logs of the release before one package (`tests/golden/old`): read, verified, and continued."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest

import trinity_es
from tests.helpers.handmade import cli
from tests.helpers.paths import GOLDEN
from tests.helpers.runs import finish
from trinity_es import BatchLifecycleState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.values import BatchId

pytestmark = pytest.mark.timeout(180)

STATES: dict[str, dict[BatchId, str]] = {
    "run": {"0/check": "finalized", 1: "finalized", 2: "finalized", "2/check": "finalized", 3: "running"},
    "batches": {1: "finalized", 2: "finalized", 3: "aborted", 4: "running"},
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old logs, and of their configs with the one key that was renamed since."""
    with tarfile.open(GOLDEN / "old" / "old.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    for name in STATES:
        path = tmp_path / f"{name}.yaml"
        with pytest.raises(ConfigError, match=r"explorer\.places; it is explorer\.max_concurrency now"):
            trinity_es.load_config(path)
        path.write_text(path.read_text().replace(" places:", " max_concurrency:"))
    return tmp_path


def finished(url: str) -> Counter[tuple[str, int]]:
    """How often each task finished, by stream and task."""
    with trinity_es.open_log(url) as log:
        return Counter((r.stream, r.event.task) for r in log.events() if isinstance(r.event, ev.TaskFinished))


def dispatched(url: str, after: int) -> set[tuple[str, int]]:
    with trinity_es.open_log(url) as log:
        return {(r.stream, unit.task) for r in log.events() if isinstance(r.event, ev.TasksDispatched)
                for unit in r.event.units if r.position > after}


def ended(url: str) -> int:
    """The position at which the old system died."""
    with trinity_es.open_log(url) as log:
        return log.head().position


@pytest.mark.parametrize("name", STATES)
def test_an_old_log_is_listed_replayed_shown_and_sound(old: Path, name: str) -> None:
    url = f"sqlite:///{old}/{name}/log.sqlite"
    with trinity_es.open_log(url) as log:
        [problem] = log.verify()  # the tables are as that release made them, the events are sound
        assert problem.startswith("checkpoint read_models: it has version 5, expected 6: an older release wrote")
        before = log.batches(), [life.runner for life in log.runner_lives()]
    assert cli("rebuild", "--log", url).exit_code == 0
    with trinity_es.open_log(url) as log:
        assert log.verify() == []
        assert before == (log.batches(), [life.runner for life in log.runner_lives()])
        recorded = log.config()[1]["explorer"]
        assert recorded["max_concurrency"] == {"run": 2, "batches": 4}[name]
        assert "places" not in recorded
        assert {b.batch_id: str(b.state) for b in log.batches()} == STATES[name]
        for batch_id, state in STATES[name].items():
            replayed = log.replay(batch_id)
            assert replayed.state.value.lower() == state
            assert (replayed.final_result is not None) == (state != "running")
    assert cli("verify", "--log", url).exit_code == 0
    for batch_id, state in STATES[name].items():
        told = cli("replay", batch_id, "--log", url, "--json")
        assert json.loads(told.stdout).get("result_equal") is (None if state == "running" else True), told.output
    assert "runner-0" in cli("show", 1, "--task", 0, "--log", url).stdout


def test_an_old_batch_that_was_in_flight_is_finished_and_its_finished_tasks_do_not_run_again(old: Path) -> None:
    config = trinity_es.load_config(old / "batches.yaml", ["explorer.rollout_model.script={}"])
    url, before = config.store.url, ended(config.store.url)
    had = {key for key in finished(url) if key[0] == "batch/4"}
    assert len(had) == 3
    with trinity_es.open_log(url) as log:
        first = log.replay(1).final_result
    with trinity_es.running(config) as client:
        assert client.finalize_train_batch(1, timeout=60) == first
        assert client.finalize_train_batch(4, timeout=60)["finished_task_count"] == 6
        assert client.batch(4).state is BatchLifecycleState.FINALIZED
        assert all(status.ok for status in client.batch(4).statuses.values())
        assert Counter(e.eid.task for e in client.experiences(4)) == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert dispatched(url, before) == {("batch/4", task) for task in range(6)} - had
    assert set(finished(url).values()) == {1}
    with trinity_es.open_log(url) as log:
        assert log.verify() == []


def test_an_old_run_that_was_cut_off_is_resumed_to_its_end(old: Path) -> None:
    url = f"sqlite:///{old}/run/log.sqlite"
    before, had = ended(url), set(finished(url))
    code, out, err = finish("resume", "run.yaml", cwd=old)
    assert code == 0, err
    assert "going on with the run" in err
    assert "weights          6 versions, the last is 5" in out
    assert not dispatched(url, before) & had
    assert set(finished(url).values()) == {1}
    with trinity_es.open_log(url) as log:
        assert log.verify() == []
        assert [(b.batch_id, str(b.state), b.trained_step) for b in log.batches()] == [
            ("0/check", "finalized", None), (1, "finalized", 1), (2, "finalized", 2), ("2/check", "finalized", None),
            (3, "finalized", 3), (4, "finalized", 4), ("4/check", "finalized", None), (5, "finalized", 5),
        ]
