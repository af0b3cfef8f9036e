"""Taking experiences from the queue, on the running system (P29)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import trinity_es
from tests.helpers.parity_rows import NewId
from tests.helpers.systems import StartSystem, kill_everybody, pid_of, play_batch
from trinity_es import Task
from trinity_es.client import connection
from trinity_es.client.async_client import RolloutCoordinator
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, TakeTimeout, TrinityError
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId
from trinity_es.testing import SleepWorkflow, wait_until

pytestmark = pytest.mark.timeout(240)


def generate(client: RolloutClient, *batch_ids: BatchId, n: int = 4) -> None:
    for batch_id in batch_ids:
        tasks = [Task(workflow=SleepWorkflow, workflow_args={"reward": i}) for i in range(n)]
        play_batch(client, batch_id, tasks, timeout=90)


def names(experiences: list[Experience]) -> list[str]:
    return [f"{e.eid.batch}/{e.eid.task}" for e in experiences]


def queue(**keys: Any) -> dict[str, Any]:
    return {"queue": {"priority_fn": "fifo", **keys}}


def taken(client: RolloutClient) -> list[ev.ExperiencesTaken]:
    return [r.event for r in client.log.read(stream="queue") if isinstance(r.event, ev.ExperiencesTaken)]


def test_p29_experiences_are_taken_across_batches_once_each(system_for: StartSystem, new_id: NewId) -> None:
    client, a, b = system_for(buffer=queue()), new_id(), new_id()
    before, earlier = client.status()["queue"]["experiences"], len(taken(client))
    generate(client, a, b)
    client.submit_batch(batch_id=f"{b}/eval", tasks=[Task(workflow=SleepWorkflow)], batch_type="eval")
    client.finalize_eval_batch(f"{b}/eval", timeout=60)
    first = client.take_experiences(6, timeout=10, step=1)
    assert names(first) == [f"{a}/0", f"{a}/1", f"{a}/2", f"{a}/3", f"{b}/0", f"{b}/1"]
    assert [e.info["use_count"] for e in first] == [1] * 6
    assert all(e.advantages is not None for e in first)
    assert first[0] == Experience.deserialize_many(Experience.serialize_many(first))[0]
    with pytest.raises(TakeTimeout, match="2 of 3 experiences") as e:
        client.take_experiences(3, timeout=0.3)
    assert e.value.details == {"available": 2, "wanted": 3}
    assert names(client.take_experiences(2, timeout=10)) == [f"{b}/2", f"{b}/3"]
    assert [(t.step, sum(i.count for i in t.items)) for t in taken(client)[earlier:]] == [(1, 6), (None, 2)]
    for wrong in (0, -1, "2", 1.5):
        with pytest.raises(DataError):
            client.take_experiences(wrong)  # type: ignore[arg-type]
    status = client.status()["queue"]
    assert status == {"experiences": before + 8, "available": 0, "waiting": 0}
    assert client.log.verify() == []


def test_p29_columns_are_taken_and_read_as_experiences_are(system_for: StartSystem, new_id: NewId) -> None:
    client, batch = system_for(buffer=queue()), new_id()
    earlier = len(taken(client))
    generate(client, batch)
    columns = client.take_columns(3, timeout=10, step=1)
    assert names(columns.experiences()) == [f"{batch}/0", f"{batch}/1", f"{batch}/2"]
    assert [info["use_count"] for info in columns.field("info")] == [1] * 3
    assert columns.advantages.present.all()
    assert names(client.take_experiences(1, timeout=10)) == [f"{batch}/3"]
    assert [(t.step, sum(i.count for i in t.items)) for t in taken(client)[earlier:]] == [(1, 3), (None, 1)]
    whole = client.columns(batch)
    assert whole.experiences() == list(client.experiences(batch))
    assert whole.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(BatchNotFound):
        client.columns(f"{batch}/none")
    client.submit_batch(batch_id=f"{batch}/open", tasks=[Task(workflow=SleepWorkflow)], batch_type="train")
    with pytest.raises(DataError, match="is running, not FINALIZED: call finalize_train_batch first"):
        client.columns(f"{batch}/open")
    client.abort_batch(f"{batch}/open", reason="test")


def test_p29_who_waits_gets_experiences_when_they_are_delivered_or_have_cooled_down(start_system: StartSystem) -> None:
    client = start_system(buffer=queue(max_use_count=2, reuse_cooldown_time=1.0))
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(client.take_experiences(4)))
    waiting.start()
    wait_until(lambda: client.status()["queue"]["waiting"] == 1, "the request to wait")
    generate(client, 1)
    waiting.join(timeout=20)
    assert names(got[0]) == ["1/0", "1/1", "1/2", "1/3"]
    [finalized] = client.log.read(types=["BatchFinalized"])
    [given] = client.log.read(types=["ExperiencesTaken"])
    assert given.commit_id == finalized.commit_id  # at once, in one transaction
    began = time.monotonic()
    again = client.take_experiences(4, timeout=30)
    assert time.monotonic() - began > 0.2
    assert [e.info["use_count"] for e in again] == [2] * 4
    first, second = taken(client)
    assert second.at - first.at >= 1.0
    with pytest.raises(TakeTimeout, match="0 of 1"):
        client.take_experiences(1, timeout=1.5)


async def test_p29_the_async_coordinator_takes_too(system_for: StartSystem, new_id: NewId) -> None:
    client, batch = system_for(buffer=queue()), new_id()
    coordinator = await RolloutCoordinator.get_actor(client.config)
    await coordinator.submit_batch(batch_id=batch, tasks=[Task(workflow=SleepWorkflow)] * 2, batch_type="train")
    await coordinator.finalize_train_batch(batch, timeout=60)
    assert names(await coordinator.take_experiences(1, timeout=10, step=1)) == [f"{batch}/0"]
    assert names((await coordinator.take_columns(1, timeout=10, step=1)).experiences()) == [f"{batch}/1"]
    assert names((await coordinator.columns(batch)).experiences()) == [f"{batch}/0", f"{batch}/1"]
    await coordinator.shutdown()


def test_p29_kill_9_of_all_takes_nothing_twice(start_system: StartSystem) -> None:
    sections = {"buffer": queue(max_use_count=2)}
    client = start_system(**sections)
    generate(client, 1, 2)
    uses = Counter(names(client.take_experiences(3, timeout=10)))
    uses += Counter(names(client.take_experiences(7, timeout=10)))
    kill_everybody(client)
    client.close()
    again = start_system(**sections)
    uses += Counter(names(again.take_experiences(5, timeout=30)))
    with pytest.raises(TakeTimeout, match="1 of 2"):
        again.take_experiences(2, timeout=0.2)
    uses += Counter(names(again.take_experiences(1, timeout=10)))
    assert uses == {f"{batch}/{task}": 2 for batch in (1, 2) for task in range(4)}
    assert again.log.verify() == []


def test_p29_asked_again_after_a_lost_answer_it_is_the_same_experiences(
    system_for: StartSystem, new_id: NewId, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, batch = system_for(buffer=queue()), new_id()
    generate(client, batch)
    earlier, request = len(taken(client)), f"the same request for {batch}"
    monkeypatch.setattr(connection.uuid, "uuid4", lambda: SimpleNamespace(hex=request))
    first = client.take_experiences(3, timeout=10)
    assert names(client.take_experiences(3, timeout=10)) == names(first)
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    monkeypatch.undo()
    assert names(client.take_experiences(1, timeout=30)) == [f"{batch}/3"]  # another request, at the next coordinator
    monkeypatch.setattr(connection.uuid, "uuid4", lambda: SimpleNamespace(hex=request))
    assert names(client.take_experiences(3, timeout=10)) == names(first)
    assert len(taken(client)) == earlier + 2


def test_p29_the_coordinator_dies_again_and_again_under_those_who_take(system_for: StartSystem, new_id: NewId) -> None:
    client, batches = system_for(buffer=queue()), [new_id() for _ in range(5)]
    earlier = len(taken(client))
    generate(client, *batches, n=8)
    got: list[str] = []

    def trainer() -> None:
        for _ in range(5):
            got.extend(names(client.take_experiences(4)))

    threads = [threading.Thread(target=trainer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for takes in (2, 5, 8):
        wait_until(lambda: len(taken(client)) >= earlier + takes, f"{takes} takes", 60)  # noqa: B023  # waited for in this turn
        os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=90)
    assert sorted(got) == sorted(f"{batch}/{task}" for batch in batches for task in range(8))


def test_p29_a_trainer_back_at_its_checkpoint_takes_again_what_later_steps_took(start_system: StartSystem) -> None:
    client = start_system(buffer=queue())
    generate(client, 1, 2)
    client.take_experiences(2, timeout=10)
    one = names(client.take_experiences(2, timeout=10, step=1))
    two = names(client.take_experiences(2, timeout=10, step=2))
    three = names(client.take_experiences(1, timeout=10, step=3))
    os.kill(pid_of(client, "coordinator"), signal.SIGKILL)
    for _ in range(2):  # it came back twice: that is one return
        with trinity_es.connect(client.config, resumed_at=1) as trainer:
            assert trainer.status()["queue"]["available"] == 4
    with trinity_es.connect(client.config, resumed_at=1) as trainer:
        assert names(trainer.take_experiences(2, timeout=10, step=2)) == two
        assert names(trainer.take_experiences(1, timeout=10, step=3)) == three
        assert set(one) & set(names(trainer.take_experiences(1, timeout=10, step=4))) == set()
    returned = [r.event for r in client.log.read(stream="queue") if isinstance(r.event, ev.ExperiencesReturned)]
    assert returned == [ev.ExperiencesReturned(step=1)]


def test_p29_lost_clients_get_nothing(system_for: StartSystem, new_id: NewId, monkeypatch: pytest.MonkeyPatch) -> None:
    client, batch = system_for(buffer=queue()), new_id()
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 3600.0)  # it asks once, and never again
    dead = trinity_es.connect(client.config)

    def ask() -> None:
        with contextlib.suppress(TrinityError):
            dead.take_experiences(2)

    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: client.status()["queue"]["waiting"] == 1, "the request to wait")
    monkeypatch.undo()
    time.sleep(16)  # longer than the coordinator waits for a sign of life
    generate(client, batch, n=2)
    assert names(client.take_experiences(2, timeout=10)) == [f"{batch}/0", f"{batch}/1"]
    dead.close()
