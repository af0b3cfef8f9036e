"""Orders to load wait on a host until what they name is there; the coordinator sees a runner that loads."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_es.actors import messages
from trinity_es.actors.hosts.folder_files import FolderName
from trinity_es.actors.hosts.pulled_loads import PulledLoads
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.testing import wait_until


class Puller:
    def __init__(self) -> None:
        self.asked: list[tuple[FolderName, Path | None]] = []
        self.ends: dict[FolderName, asyncio.Future[Path]] = {}
        self.cancelled: list[FolderName] = []
        self.kept: set[str] = set()
        self.loop: asyncio.AbstractEventLoop

    async def pull(self, name: FolderName, own: Path | None, tell: Callable[[str], None]) -> Path:
        self.loop = asyncio.get_running_loop()
        self.ends[name] = self.loop.create_future()
        tell(f"{name}: half of it")
        self.asked.append((name, own))
        try:
            return await self.ends[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def delete_all_but(self, labels: Collection[str]) -> None:
        self.kept = set(labels)

    def end(self, name: FolderName, what: Path | Exception) -> None:
        end = self.ends[name]
        give = end.set_exception if isinstance(what, Exception) else end.set_result
        self.loop.call_soon_threadsafe(give, what)


class Host:
    """An agent's part of it, with runners b0 and b1."""

    def __init__(self) -> None:
        self.puller = Puller()
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.given: list[tuple[str, Any]] = []
        self.to_head: list[tuple[str, Any]] = []
        self.loads = PulledLoads(
            self.puller, to_runner=lambda *it: self.given.append(it),  # type: ignore[arg-type]  # it has what is used
            to_head=lambda *it: self.to_head.append(it), post=self.posted.put, log=logging.getLogger("test"),
        )

    def until(self, what: Callable[[], Any], name: str) -> None:
        def turn() -> bool:
            while not self.posted.empty():
                self.posted.get()()
            return bool(what())

        wait_until(turn, name, 10)

    def weights(self, version: int, *runners: str, path: str = "") -> None:
        for runner in runners:
            self.loads.load_weights(runner, messages.LoadWeights(7, version, path or f"/head/{version}"))
        self.until(lambda: (of(version), Path(path or f"/head/{version}")) in self.puller.asked, f"a pull of {version}")

    def status(self, runner: str, version: int = 0, **told: Any) -> messages.RunnerStatus:
        said = messages.RunnerStatus(
            name=runner, incarnation=7, state="ready", pid=1, host="b", engine="scripted", model_version=version,
            **told)
        return self.loads.complete_message(said)

    def loaded(self, runner: str, version: int) -> messages.WeightsLoadResult:
        result = messages.WeightsLoadResult(runner, 7, version, 1.0)
        return self.loads.complete_message(result)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.loads.stop()


def of(version: int) -> FolderName:
    return FolderName("weights", version=version)


def adapter(name: str, version: int) -> ev.AdapterPublished:
    return ev.AdapterPublished(adapter=name, version=version, path=f"/head/{name}", rank=8, size=9, digest="d")


def test_one_pull_is_for_all_runners_and_until_then_they_load(host: Host) -> None:
    host.weights(1, "b0", "b1")
    host.until(lambda: host.loads.complete_message(messages.Heartbeat("b0", 7, 1)).waits_for, "how far it is")
    assert host.loads.complete_message(messages.Heartbeat("b0", 7, 1)).waits_for == "version 1: half of it"
    assert host.loads.complete_message(messages.Heartbeat("b2", 7, 1)).waits_for == ""
    assert (host.status("b0").loading, host.status("b2").loading) == (1, None)
    assert host.given == []
    host.puller.end(of(1), Path("/here/1"))
    host.until(lambda: host.given, "the order")
    assert host.given == [(b, messages.LoadWeights(7, 1, "/here/1")) for b in ("b0", "b1")]
    assert len(host.puller.asked) == 1
    assert host.status("b0").loading is None
    assert host.loads.complete_message(messages.Heartbeat("b0", 7, 1)).waits_for == ""
    assert host.loaded("b0", 1).seconds > 1.0, "the time of the pull is in it"


def test_a_newer_version_ends_the_pull_of_an_older_one_and_that_is_never_loaded(host: Host) -> None:
    host.weights(1, "b0", "b1")
    host.weights(2, "b0", "b1")
    host.until(lambda: host.puller.cancelled, "the end of the pull of version 1")
    host.puller.end(of(2), Path("/here/2"))
    host.until(lambda: len(host.given) == 2, "the orders")
    assert {(order.version, order.path) for _, order in host.given} == {(2, "/here/2")}
    assert host.to_head == []


def test_a_version_that_was_published_again_elsewhere_is_pulled_anew(host: Host) -> None:
    host.weights(1, "b0")
    host.weights(1, "b0", path="/head/again")
    host.until(lambda: host.puller.cancelled, "the end of the first pull")
    host.puller.end(of(1), Path("/here/1"))
    host.until(lambda: host.given, "the order")


def test_a_runner_whose_order_was_dropped_with_a_pull_says_that_it_loads_nothing(host: Host) -> None:
    """Where weights are rolled out engine by engine: then the coordinator tells it again."""
    host.weights(1, "b0", "b1")
    host.weights(2, "b0")
    host.until(lambda: host.status("b1").loading is None, "b1's order is dropped")
    assert host.status("b0").loading == 2


def test_a_pull_that_failed_is_the_runner_s_failure_and_is_tried_again_when_told(host: Host) -> None:
    host.weights(1, "b0")
    host.puller.end(of(1), SyncError("version 1 can't be pulled: no room"))
    host.until(lambda: host.to_head, "the answer")
    [(name, answer)] = host.to_head
    assert (name, answer.name, answer.incarnation, answer.version) == ("b0", "b0", 7, 1)
    assert answer.error == "version 1 can't be pulled: no room"
    assert host.given == []
    host.loads.load_weights("b0", messages.LoadWeights(7, 1, "/head/1"))
    host.until(lambda: len(host.puller.asked) == 2, "another pull")


def test_what_a_runner_serves_is_kept_and_what_none_does_is_removed(host: Host) -> None:
    host.weights(1, "b0", "b1")
    host.puller.end(of(1), Path("/here/1"))
    host.until(lambda: len(host.given) == 2, "the orders")
    host.loaded("b0", 1)
    host.loaded("b1", 1)
    host.weights(2, "b0", "b1")
    host.puller.end(of(2), Path("/here/2"))
    host.until(lambda: len(host.given) == 4, "the orders")
    host.loaded("b0", 2)
    host.until(lambda: host.puller.kept == {of(1).label, of(2).label}, "b1 serves version 1 still")
    host.loads.complete_message(messages.RunnerDied("b1", 7, "it died"))
    host.loaded("b0", 2)
    host.until(lambda: host.puller.kept == {of(2).label}, "version 1 is of no use")


def test_an_order_for_adapters_waits_for_those_that_its_runner_lacks(host: Host) -> None:
    host.status("b0", adapters={"old": 1})
    order = messages.LoadAdapters(7, 1, (adapter("math", 2), adapter("none", 1), adapter("old", 1)))
    host.loads.load_adapters("b0", order)
    host.until(lambda: len(host.puller.asked) == 2, "two pulls")
    host.puller.end(FolderName("adapter", "math", 2), Path("/here/math"))
    host.puller.end(FolderName("adapter", "none", 1), SyncError("it can't be pulled"))
    host.until(lambda: host.given, "the order")
    [(_, given)] = host.given
    assert [event.path for event in given.adapters] == ["/here/math", "/head/none", "/head/old"]
    result = messages.AdaptersLoadResult(
        name="b0", incarnation=7, number=1, loaded=[("math", 2, 0.1)], errors=[("none", 1, "/head/none is no folder")],
        adapters={"old": 1, "math": 2},
    )
    assert host.loads.complete_message(result).errors == [("none", 1, "it can't be pulled")]
    kept = {FolderName("adapter", *it).label for it in (("math", 2), ("none", 1), ("old", 1))} | {of(0).label}
    host.until(lambda: host.puller.kept == kept, "what is kept")


def test_weights_that_the_trainer_sends_are_pulled_by_nobody(host: Host) -> None:
    order = messages.LoadWeights(7, 1, "/head/1", from_group=True)
    host.loads.load_weights("b0", order)
    assert host.given == [("b0", order)]
    assert host.puller.asked == []
