"""What a trainer was given is settled: delivered again to one that starts again, freed when nobody needs it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trinity_es
from tests.helpers.prompts import prompts_used
from tests.helpers.runs import ROWS, command, kill_run, make_config, went_well
from tests.helpers.systems import StartSystem, events, kill_system, pid_of, play_batch, sleepers
from trinity_es import Task
from trinity_es.client import connection
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.payload_format import Payload
from trinity_es.events.store.payloads.payload_store import inlined, is_inline
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.testing import SleepWorkflow, wait_until

pytestmark = pytest.mark.timeout(240)


def generate(client: RolloutClient, *batch_ids: BatchId) -> None:
    for batch_id in batch_ids:
        play_batch(client, batch_id, sleepers(3))


def test_promise_3_a_trainer_back_at_step_k_gets_every_later_batch_again_and_nothing_is_generated_again(
    start_system: StartSystem
) -> None:
    client = start_system()
    generate(client, 1, 2, 3, "four", 5, 6)
    client.submit_batch(batch_id="check", tasks=sleepers(3), batch_type="eval")
    client.finalize_eval_batch("check", timeout=60)
    client.submit_batch(batch_id=9, tasks=sleepers(3), batch_type="train")  # generated, but not finalized
    client.abort_batch(9, reason="not wanted")
    for step, batch_id in ((1, 1), (2, 3), (3, 2), (4, "four")):  # in another order than they were generated
        client.acknowledge(batch_id, step)
    before = {batch_id: [e.tokens.tolist() for e in client.experiences(batch_id)] for batch_id in (2, "four", 5, 6)}
    dispatched = len(events(client, ev.TasksDispatched))
    assert client.redelivered == []

    with trinity_es.connect(client.config, resumed_at=2) as again:
        assert again.redelivered == [2, "four", 5, 6]
        assert {b: [e.tokens.tolist() for e in again.experiences(b)] for b in again.redelivered} == before
        after, got = 0, []
        for _ in again.redelivered:
            batch_id, after = again.next_batch(after, timeout=10)
            got.append(batch_id)
        assert got == again.redelivered
        generate(again, 7)
        assert again.next_batch(after, timeout=10)[0] == 7
        with pytest.raises(TimeoutError):
            again.next_batch(again.next_batch(after, timeout=10)[1], timeout=0.2)
    assert len(events(client, ev.TasksDispatched)) == dispatched + 1  # of batch 7
    assert events(client, ev.ExperiencesRedelivered) == [ev.ExperiencesRedelivered(step=2, batches=[2, "four", 5, 6])]
    assert client.log.verify() == []


def trainings(client: RolloutClient, batch_id: BatchId) -> list[tuple[int, dict[str, float]]]:
    found = client.log.read(stream=batch_stream(batch_id), types=["BatchTrained"])
    return [(r.event.step, r.event.metrics) for r in found if isinstance(r.event, ev.BatchTrained)]


def test_a_batch_that_was_used_again_is_acknowledged_again_and_once(start_system: StartSystem) -> None:
    client = start_system()
    generate(client, 1)
    client.acknowledge(1, 1, {"loss": 1.0})
    client.acknowledge(1, 1, {"loss": 1.0})
    assert trainings(client, 1) == [(1, {"loss": 1.0})]
    for _ in range(2):  # it came back twice before it used anything: that is one redelivery
        with trinity_es.connect(client.config, resumed_at=0) as again:
            assert again.redelivered == [1]
    assert len(events(client, ev.ExperiencesRedelivered)) == 1
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)  # what it knew of this is in the log
    client.acknowledge(1, 1, {"loss": 0.5})
    client.acknowledge(1, 1, {"loss": 0.5})
    assert trainings(client, 1) == [(1, {"loss": 1.0}), (1, {"loss": 0.5})]
    with trinity_es.connect(client.config, resumed_at=0) as again:
        assert again.redelivered == [1]
    assert len(events(client, ev.ExperiencesRedelivered)) == 2
    with trinity_es.connect(client.config, resumed_at=1) as again:
        assert again.redelivered == []
    assert len(events(client, ev.ExperiencesRedelivered)) == 2
    for wrong in (-1, "3"):
        with pytest.raises(DataError, match="resumed_at"):
            trinity_es.connect(client.config, resumed_at=wrong)  # type: ignore[arg-type]


def test_experiences_that_were_processed_are_not_processed_again_for_a_request_that_comes_again(
    start_system: StartSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_system()
    generate(client, 1)
    payload = Experience.serialize_many(list(client.experiences(1)))
    monkeypatch.setattr(connection.uuid, "uuid4", lambda: SimpleNamespace(hex="the-same-request"))
    first = client.process_experiences([payload])
    monkeypatch.undo()
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    client.process_experiences([payload])
    monkeypatch.setattr(connection.uuid, "uuid4", lambda: SimpleNamespace(hex="the-same-request"))
    assert client.process_experiences([payload]) == first
    assert len(events(client, ev.ExperiencesProcessed)) == 2


# --- retention ------------------------------------------------------------------------------------------------------
def digests(client: RolloutClient, batch_id: BatchId) -> set[str]:
    """Return the digests of a batch's payloads in the store: the differences of its delivery lie in the event."""
    state = client.batch(batch_id)
    refs = [*state.experiences, *(r for t in state.tasks for r in t.payloads)]
    return {ref.digest for ref in refs if not is_inline(ref.digest)}


def freed(client: RolloutClient) -> list[BatchId]:
    return [b for event in events(client, ev.PayloadsFreed) for b in event.batches]


def test_payloads_are_freed_only_when_enough_later_steps_were_acknowledged(start_system: StartSystem) -> None:
    client = start_system(store={"retention": 2})
    payloads = client._payloads
    client.submit_batch(batch_id="given up", tasks=sleepers(2), batch_type="train")
    wait_until(lambda: client.batch("given up").completed_task_count == 2, "two tasks")
    client.abort_batch("given up", reason="not wanted")
    generate(client, 1, 2, 3, 4, 5)
    its = {b: digests(client, b) for b in ("given up", 1, 2, 3, 4, 5)}
    assert all(its.values())

    client.acknowledge(1, 1)
    client.acknowledge(2, 2)
    client.acknowledge(2, 2)
    wait_until(lambda: freed(client) == ["given up"], "the aborted batch to be freed")  # two steps were since
    generate(client, 6)
    assert freed(client) == ["given up"]
    client.acknowledge(3, 3)
    wait_until(lambda: freed(client) == ["given up", 1], "batch 1 to be freed")
    wait_until(lambda: all(payloads.size(d) is None for d in its[1] | its["given up"]), "its payloads to be gone")
    with pytest.raises(PayloadNotFound, match=r"batch 1 were freed: store\.retention"):
        list(client.experiences(1))
    client.acknowledge(4, 4)
    wait_until(lambda: freed(client) == ["given up", 1, 2], "batch 2 to be freed")
    wait_until(lambda: all(payloads.size(d) is None for d in its[2]), "its payloads to be gone")
    for batch_id in (3, 4, 5, 6):  # the newest two steps, and two that nobody acknowledged
        assert None not in map(payloads.size, digests(client, batch_id))
        assert list(client.experiences(batch_id))

    event = events(client, ev.PayloadsFreed)[-1]
    assert (event.payloads, event.bytes > 0) == (len(its[2]), True)
    assert client.log.verify() == []
    assert client.log.check_result(1)[0] == client.log.check_result(1)[1]
    with pytest.raises(PayloadNotFound, match=r"\[2\] were trained after step 1.*store\.retention \(2\) deleted"):
        trinity_es.connect(client.config, resumed_at=1)
    with trinity_es.connect(client.config, resumed_at=2) as again:
        assert again.redelivered == [3, 4, 5, 6]
    generate(client, 1)  # the id again: what was freed was the earlier batch's
    assert list(client.experiences(1))
    assert client.log.verify() == []


def test_delivered_payloads_keep_the_raw_ones_and_processed_ones_keep_none(start_system: StartSystem) -> None:
    client = start_system(store={"retention": 1})
    payloads = client._payloads
    client.submit_batch(
        batch_id=1, batch_type="train",
        tasks=[Task(workflow=SleepWorkflow, workflow_args={"tokens": 2000}, repeat_times=4) for _ in range(3)],
    )
    client.finalize_train_batch(1, timeout=60)
    found = list(client.experiences(1))
    raw = {ref.digest for task in client.batch(1).tasks for ref in task.payloads}
    [delivered] = client.batch(1).experiences
    assert set(Payload(inlined(delivered.digest)).sources) == raw
    client.process_experiences([payloads.get(digest) for digest in sorted(raw)])  # the very bytes: theirs is the digest

    client.acknowledge(1, 1)
    generate(client, 2)
    assert list(client.experiences(1)) == found
    client.acknowledge(2, 2)
    wait_until(lambda: freed(client) == [1], "batch 1 to be freed")
    wait_until(lambda: all(payloads.size(d) is None for d in raw), "its payloads to be gone")
    [(_, processed)] = client.processed_experiences()
    assert sorted((e.eid.task, e.eid.run) for e in processed) == sorted((e.eid.task, e.eid.run) for e in found)
    assert client.log.verify() == []

    lost = min(ref.digest for task in client.batch(2).tasks for ref in task.payloads)
    payloads.delete(lost)
    with pytest.raises(PayloadNotFound, match=rf"{lost}.*to which payload .* refers"):
        list(client.experiences(2))
    assert any(lost in problem and "batch 2" in problem for problem in client.log.verify())


# --- recovery -------------------------------------------------------------------------------------------------------
def recovery(client: RolloutClient) -> list[tuple[str, str, int]]:
    found = client.log.read(types=["RecoveryDecided"])
    return [(r.stream, r.event.decision, len(r.event.units)) for r in found if isinstance(r.event, ev.RecoveryDecided)]


def test_every_choice_of_a_recovery_is_logged_and_stale_work_dropped(start_system: StartSystem, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    settings: dict[str, Any] = {"explorer": {"max_concurrency": 2, "max_staleness": 1}}
    client = start_system(**settings)
    assert recovery(client) == []
    client.submit_batch(batch_id="old", tasks=[*sleepers(2), *sleepers(2, seconds=60)], batch_type="train")
    wait_until(lambda: client.batch("old").completed_task_count == 2, "two tasks")
    kill_system(client)
    client = start_system(**settings)
    assert recovery(client) == [("batch/old", "resume", 0), ("batch/old", "redo", 2)]
    assert client.status()["recovered"] == {"resume": 1, "redo": 1}
    client.sync_weights(1, weights)
    client.sync_weights(2, weights)
    client.submit_batch(batch_id="new", tasks=sleepers(2, seconds=60), batch_type="train")
    assert client.batch("old").state == "running"
    kill_system(client)
    client = start_system(**settings)
    assert recovery(client)[2:] == [("batch/old", "drop_stale", 0), ("batch/new", "resume", 0)]
    state = client.batch("old")
    assert (state.state, state.completed_task_count) == ("aborted", 2)
    assert client.status()["recovered"] == {"drop_stale": 1, "resume": 1}
    assert [b["batch_id"] for b in client.status()["batches"]] == ["new"]
    assert client.finalize_train_batch("old")["finished_task_count"] == 2  # it ended, and says what was done
    client.abort_batch("new", reason="it has the places")
    generate(client, "old")
    assert client.log.verify() == []


def test_answers_too_old_at_the_end_are_named_and_not_delivered(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(explorer={"max_staleness": 1})
    for batch_id in ("old", "new"):
        client.submit_batch(batch_id=batch_id, tasks=sleepers(2), batch_type="train")
        wait_until(lambda batch_id=batch_id: client.batch(batch_id).completed_task_count == 2, "two tasks")
        client.sync_weights(1 if batch_id == "old" else 2, tmp_path)
    metrics = client.finalize_train_batch("old", timeout=60)["metrics"]
    assert metrics["experience_pipeline/max_staleness/dropped_count"] == 2
    assert list(client.experiences("old")) == []
    assert client.finalize_train_batch("new", timeout=60)["metrics"]["experience_pipeline/dropped_count"] == 0
    assert len(list(client.experiences("new"))) == 2
    old, new = events(client, ev.BatchFinalized)
    assert (old.dropped, list(old.dropped_by), len(old.dropped_by["max_staleness"])) == (2, ["max_staleness"], 2)
    assert (new.dropped, new.dropped_by, new.model_versions) == (0, {}, [(2, 1)])
    assert client.log.verify() == []


@pytest.mark.slow
def test_the_prompts_of_a_step_that_was_dropped_as_stale_are_submitted_again(tmp_path: Path) -> None:
    path = make_config(tmp_path / "run", trainer={})
    # Slow enough that step 2 goes on, and step 3 has not begun, until everything is killed.
    settings = ["mode=explore", "explorer.max_staleness=0", "explorer.rollout_model.script.latency_seconds=0.5"]
    config = trinity_es.load_config(path, settings)
    options = [part for setting in settings for part in ("--set", setting)]
    with command("run", path, *options, cwd=tmp_path) as running:
        def begun() -> bool:
            try:
                with trinity_es.open_log(config.store.url) as log:
                    return 2 in {b.batch_id for b in log.batches() if b.finished}
            except trinity_es.TrinityError:
                return False

        wait_until(begun, "step 2", timeout=60)
        with trinity_es.connect(config) as client:
            client.sync_weights(7, tmp_path)
        kill_run(config, running)
    went_well("resume", path, *options, cwd=tmp_path)
    with trinity_es.open_log(config.store.url) as log:
        [decided] = [r.event for r in log.read(types=["RecoveryDecided"])]
        assert decided.decision == "drop_stale"
        assert prompts_used(log, "questions") == dict.fromkeys(range(ROWS), 1)
        versions = {b.batch_id: b.model_version for b in log.batches()}
        assert (versions[1], versions[2], versions[3]) == (0, 7, 7)
        assert len(list(log.read(stream="batch/2", types=["BatchSubmitted"]))) == 2
        assert log.verify() == []
