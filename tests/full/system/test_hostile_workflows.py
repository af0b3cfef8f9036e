"""Async workflows share their runner's event loop: what one does to it fails that one, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.parity_rows import NewId
from tests.helpers.systems import StartSystem, pid_of, play_batch
from trinity_es import Task, Workflow
from trinity_es.actors.guardian.supervision import CHECK_SECONDS
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.events.vocabulary import AttemptFailed
from trinity_es.testing import wait_until


def one() -> list[Experience]:
    return [Experience(tokens=[1, 2], prompt_length=1, reward=1.0)]


class Good(Workflow):
    """Asks the model, waits, uses a thread and a task of its own."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        await self.model.generate_async(["a", "b"])
        child = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0.3)
        child.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await child
        assert await asyncio.to_thread(lambda: 1) == 1
        async with asyncio.timeout(5):
            await self.model.generate_async("c")
        return one()


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def cancel_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def cancel_by_the_base_class() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        asyncio.Task.cancel(task)


def from_a_thread(call: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(call))
    thread.start()
    thread.join()


def raises(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


async def child_raises(error: BaseException) -> None:
    async def child() -> None:
        raise error

    await asyncio.create_task(child())


async def swallows() -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except BaseException:
            continue


async def uses_up_the_threads() -> None:
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 4) for _ in range(200)))


def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


HOSTILE: dict[str, Callable[[], Any]] = {
    "cancels all tasks": cancel_all,
    "cancels all other tasks": cancel_others,
    "cancels itself": lambda: asyncio.current_task().cancel(),  # type: ignore[union-attr]
    "stops the loop": lambda: loop().stop(),
    "closes the loop": lambda: loop().close(),
    "ends the loop's threads": lambda: loop().shutdown_default_executor(),
    "takes the loop's threads away": lambda: loop().set_default_executor(None),  # type: ignore[arg-type]
    "ends all generators": lambda: loop().shutdown_asyncgens(),
    "changes how tasks are made": lambda: loop().set_task_factory(None),
    "changes who is told of errors": lambda: loop().set_exception_handler(raises(SystemExit())),
    "raises SystemExit": raises(SystemExit(3)),
    "raises KeyboardInterrupt": raises(KeyboardInterrupt()),
    "raises GeneratorExit": raises(GeneratorExit()),
    "raises BaseException": raises(BaseException("no")),
    "raises CancelledError": raises(asyncio.CancelledError()),
    "has a child that raises SystemExit": lambda: child_raises(SystemExit(3)),
    "has a child that raises BaseException": lambda: child_raises(BaseException("no")),
    "swallows its cancellation": swallows,
    "handles signals": lambda: loop().add_signal_handler(signal.SIGTERM, print),
    "changes a signal": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "runs another loop": lambda: asyncio.run(swallows()),
    "uses up the threads": uses_up_the_threads,
}
"""What fails its own unit."""

def never() -> Any:
    """No timer that is set now ends any more, so no timeout does."""
    for timer in gc.get_objects():
        if type(timer).__name__ == "TimerHandle":  # asyncio's, or uvloop's
            timer.cancel()
    return asyncio.Event().wait()


ENDS_ITS_RUNNER: dict[str, Callable[[], Any]] = {
    "blocks the loop": lambda: time.sleep(600),
    "ends all timers": never,
    "cancels all tasks, each by the base class": cancel_by_the_base_class,
}

HARMLESS: dict[str, Callable[[], Any]] = {
    "cancels all tasks later": lambda: loop().call_later(0.2, cancel_all),
    "cancels all tasks from a thread": lambda: from_a_thread(cancel_all),
    "stops the loop later": lambda: loop().call_later(0.2, loop().stop),
    "stops the loop from a thread": lambda: from_a_thread(loop().stop),
    "raises SystemExit later": lambda: loop().call_later(0.1, raises(SystemExit())),
    "raises KeyboardInterrupt from a thread": lambda: from_a_thread(raises(KeyboardInterrupt())),
    "has another event loop": lambda: asyncio.set_event_loop(asyncio.new_event_loop()),
    "freezes the collector": gc.freeze,
    "blocks the loop for a moment": lambda: time.sleep(2.5),
}
"""What fails nobody."""


class Hostile(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.sleep(0.1)
        how = self.task.workflow_args["how"]
        done = {**HOSTILE, **HARMLESS, **ENDS_ITS_RUNNER}[how]()
        if asyncio.iscoroutine(done):
            await done
        await asyncio.sleep(0.3)
        return one()


class HostileAtItsBirth(Workflow):
    is_async = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        cancel_all()

    async def run_async(self) -> list[Experience]:
        return one()


def lives(client: RolloutClient) -> list[str]:
    return [r.type for r in client.log.events() if r.type in ("RunnerStarted", "RunnerLost")]


@pytest.mark.parametrize("how", [*HOSTILE, *HARMLESS, "at its birth"])
def test_s2_what_an_async_workflow_does_to_the_loop_fails_it(system_for: StartSystem, new_id: NewId, how: str) -> None:
    system = system_for(explorer={"max_concurrency": 8, "max_timeout": 3.0, "max_retry_times": 1})
    batch, again, bad = new_id(), new_id(), Task(workflow=Hostile, workflow_args={"how": how})
    if how == "at its birth":
        bad = Task(workflow=HostileAtItsBirth)
    play_batch(system, batch, [bad, *(Task(workflow=Good) for _ in range(5))], timeout=40)
    statuses = system.batch(batch).statuses
    assert [statuses[i].ok for i in range(1, 6)] == [True] * 5, statuses
    # What comes a moment later meets its own unit where the machine is slow, and fails that.
    assert statuses[0].ok == (how in HARMLESS) or how.endswith(" later"), statuses
    play_batch(system, again, [Task(workflow=Good) for _ in range(8)], timeout=40)
    assert all(s.ok for s in system.batch(again).statuses.values())
    assert lives(system) == ["RunnerStarted"]


class Waits(Workflow):
    """In its first attempt for longer than a hostile one needs; then not at all."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        note = self.task.workflow_args["note"]
        if not os.path.exists(note):
            open(note, "w").close()
            await asyncio.sleep(600)
        return one()


@pytest.mark.parametrize("how", ["blocks the loop", "ends all timers"])
def test_s2_who_can_not_be_ended_costs_a_life_of_the_runner_and_is_blamed_alone(
    start_system: StartSystem, tmp_path: Path, how: str
) -> None:
    client = start_system(
        explorer={"max_concurrency": 8, "max_timeout": 2.0 if how == "ends all timers" else 60.0, "max_retry_times": 0},
        # the first beat that shows the loop blocked for long enough for the runner shows it for the guardian too
        system={"hang_timeout": 5.9, "heartbeat_timeout": 60.0},
    )
    bad = Task(workflow=Hostile, workflow_args={"how": how})
    others = [Task(workflow=Waits, workflow_args={"note": str(tmp_path / str(i))}) for i in range(3)]
    tasks = [bad, *others] if how == "blocks the loop" else [bad]
    client.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
    if how == "blocks the loop":  # a coordinator that is slow to answer changes nothing about who is blamed
        wait_until(lambda: all((tmp_path / str(i)).exists() for i in range(3)), "the others to begin")
        coordinator = psutil.Process(pid_of(client, "coordinator"))
        log = Path(client.config.system.log_dir, "runner-0.log")
        coordinator.suspend()
        try:
            wait_until(lambda: "is given up" in log.read_text(), "the runner to give it up", timeout=60)
            time.sleep(3 * CHECK_SECONDS)
        finally:
            coordinator.resume()
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == len(tasks)
    statuses = client.batch(1).statuses
    assert [statuses[i].ok for i in range(len(tasks))] == [False, True, True, True][: len(tasks)], statuses
    [failed] = [r.event for r in client.log.events(1) if isinstance(r.event, AttemptFailed) and r.event.task == 0]
    assert failed.kind == "workflow"
    assert ("blocked the engine's loop" if how == "blocks the loop" else "after its timeout") in failed.message
    wait_until(lambda: lives(client) == ["RunnerStarted", "RunnerLost", "RunnerStarted"], "another life")


def test_s2_a_runner_whose_own_tasks_were_cancelled_is_replaced(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_concurrency": 8, "max_retry_times": 1}, system={"restart_pause": 0.1})
    bad = Task(workflow=Hostile, workflow_args={"how": "cancels all tasks, each by the base class"})
    play_batch(client, 1, [bad])
    assert not client.batch(1).statuses[0].ok
    play_batch(client, 2, [Task(workflow=Good) for _ in range(4)])
    assert all(s.ok for s in client.batch(2).statuses.values())
