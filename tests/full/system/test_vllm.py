"""A real vLLM engine in a runner actor: what fails leaves it serving, and what dies comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import trinity_es
from tests.helpers.engines import largest_difference
from tests.helpers.real_engine import TOLERANCE, letters, run, vllm_system
from tests.helpers.systems import everything, finalize_in_thread, kill_all, pid_of
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.vocabulary import TasksDispatched
from trinity_es.system import running_system
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[RolloutClient]:
    with vllm_system(tmp_path_factory.mktemp("system"), tiny) as made:
        yield made


def test_a_failed_sync_leaves_the_engine_serving(client: RolloutClient, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny / "config.json").read_text())
    version = client.status()["weights_version"] + 1
    with pytest.raises(trinity_es.TrinityError, match=r"was not published: .*holds no weights"):
        client.sync_weights(version, broken)
    assert len(run(client, 10)) == 64


def test_p12_a_request_that_takes_too_long_for_its_finalize_loses_nothing(client: RolloutClient) -> None:
    client.submit_batch(batch_id=20, tasks=letters(64), batch_type="train")
    with pytest.raises(TimeoutError):
        client.finalize_train_batch(20, timeout=0.01)
    assert client.finalize_train_batch(20, timeout=120)["finished_task_count"] == 64


def runner(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(pid_of(client, "runner-0"))]


def engine_core(client: RolloutClient) -> list[psutil.Process]:
    found = [p for p in runner(client)[0].children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert found
    return found


def coordinator(client: RolloutClient) -> list[psutil.Process]:
    return [psutil.Process(pid_of(client, "coordinator"))]


def runner_and_coordinator(client: RolloutClient) -> list[psutil.Process]:
    return [*runner(client), *coordinator(client)]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("number", "victims"), list(enumerate([runner_and_coordinator, engine_core, everything])),
    ids=["runner and coordinator", "engine core", "everything"],
)
def test_b2_what_is_killed_while_it_generates_comes_back_with_the_right_weights_and_loses_nothing(
    client: RolloutClient, tiny: Path, tmp_path: Path, number: int,
    victims: Callable[[RolloutClient], list[psutil.Process]],
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    batch, version = 30 + 2 * number, 9 + number
    trainer = GRPOTrainer(str(tiny), lr=1e-3 * (number + 1))  # other weights every time
    trainer.step(run(client, batch))
    trainer.save(str(tmp_path / "weights"))
    client.sync_weights(version, tmp_path / "weights")
    before = runner(client)
    family = before[0].children(recursive=True)
    assert family
    client.submit_batch(batch_id=batch + 1, tasks=letters(256), batch_type="train")
    waiter, answers = finalize_in_thread(client, batch + 1, timeout=600)
    wait_until(lambda: client.batch(batch + 1).completed_task_count > 8, "some tasks to finish")
    finished = set(client.batch(batch + 1).statuses)
    kill_all(victims(client))
    wait_until(lambda: not running_system.wait_gone(before, 0), "the runner to end")
    # Beside others on two cores a process of vLLM that was killed takes seconds to give its memory back.
    assert not running_system.wait_gone(family, 10.0), "an engine process outlived its runner by 10 s"
    waiter.join(timeout=600)
    assert answers
    assert answers[0]["finished_task_count"] == 256, answers
    state = client.batch(batch + 1)
    assert all(s.ok for s in state.statuses.values())
    later = [r.event for r in client.log.events(batch + 1) if isinstance(r.event, TasksDispatched)][1:]
    assert not {u.task for event in later for u in event.units if u.attempt > 1} & finished
    experiences = list(client.experiences(batch + 1))
    assert {e.info["model_version"] for e in experiences} == {version}
    assert largest_difference(trainer, experiences) < TOLERANCE
