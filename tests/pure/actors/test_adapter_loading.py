"""LoRA adapters: which runners are told to load what, when they are told again, and who serves meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.adapters import published
from tests.helpers.live_log import LiveLog
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.wait_for_runners import Awaited
from trinity_es.actors.coordinator.fleet.weight_loading import WeightLoading
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.messages import AdaptersLoadResult, LoadAdapters, RunnerDied, RunnerStatus
from trinity_es.events import vocabulary as ev


class Fleet(LiveLog):
    """The coordinator's part, and runners that load what is not in `bad`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bad: set[str] = set()
        self.engines: dict[str, dict[str, int]] = {}
        self.take_over(most=2)

    def take_over(self, most: int) -> None:
        """Another coordinator: what is not in the log is not known."""
        self.live = LiveState(self.log, self.payloads)
        self.registry = RunnerRegistry(self.live, self, clock=lambda: self.clock)
        self.lives = RunnerLifecycle(self.registry, WeightLoading(self.registry), Dispatcher(self.registry), most)

    def come_up(self, name: str, incarnation: int) -> None:
        self.engines[name] = {}
        self.speak(name, incarnation)

    def speak(self, name: str, incarnation: int, state: str = "ready") -> None:
        self.tell(name, incarnation, state)
        self.turn()

    def tell(self, name: str, incarnation: int, state: str) -> None:
        self.lives.on_status(RunnerStatus(
            name=name, incarnation=incarnation, pid=1, host="h", engine="scripted", state=state, places=1,
            adapters=dict(self.engines[name]),
        ), name)

    def speak_for(self, seconds: int, name: str, incarnation: int) -> None:
        for _ in range(seconds):
            self.clock += 1.0
            self.speak(name, incarnation)

    def publish(self, name: str, version: int = 1) -> Awaited:
        waiter = self.lives.adapters.publish(published(name, version))
        self.turn()
        return waiter

    def look(self) -> None:
        orders, self.sent = self.sent, []
        for to, message in orders:
            self.load(to, message)

    def load(self, name: str, order: LoadAdapters) -> None:
        loaded: list[tuple[str, int, float]] = []
        errors: list[tuple[str, int, str]] = []
        for gone in self.engines[name].keys() - {event.adapter for event in order.adapters}:
            del self.engines[name][gone]
        for event in order.adapters:
            if event.adapter in self.bad:
                errors.append((event.adapter, event.version, "it is bad"))
            elif self.engines[name].get(event.adapter) != event.version:
                self.engines[name][event.adapter] = event.version
                loaded.append((event.adapter, event.version, 0.1))
        self.lives.adapters.on_load_result(AdaptersLoadResult(
            name=name, incarnation=order.incarnation, number=order.number, loaded=loaded, errors=errors,
            adapters=dict(self.engines[name]),
        ))
        if loaded or errors:
            self.tell(name, order.incarnation, "ready")

    def serving(self) -> list[str]:
        return [r.name for r in self.registry.staying_runners() if r.has_adapters]

    def failures(self) -> list[str]:
        return [r.event.reason for r in self.log.read() if isinstance(r.event, ev.RunnerFailed)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    made.come_up("a", 1)
    made.come_up("b", 1)
    yield made
    made.close()


def test_an_adapter_that_nobody_ever_had_keeps_no_runner_from_serving(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.bad = {"code"}
    assert "it is bad" in str(fleet.publish("code").error())
    assert fleet.serving() == ["a", "b"]
    fleet.take_over(most=2)
    fleet.speak("a", 1)
    fleet.come_up("b", 2)
    assert (fleet.serving(), fleet.failures()) == (["a", "b"], [])
    assert fleet.live.loaded_adapters == LiveState(fleet.log, fleet.payloads).loaded_adapters == {"math"}


def test_an_adapter_that_somebody_had_is_waited_for_until_it_is_removed(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.bad = {"math"}
    fleet.take_over(most=2)
    fleet.come_up("a", 2)
    assert fleet.serving() == []
    assert "version 1 of adapter 'math': it is bad" in fleet.failures()[0]
    fleet.lives.adapters.remove("math")
    fleet.publish("math", 2)
    fleet.take_over(most=2)
    fleet.speak("a", 2)
    assert (fleet.serving(), fleet.live.loaded_adapters) == (["a"], set()), "nobody has had what came after"


def states(fleet: Fleet, incarnation: int) -> list[str]:
    """Return the events of this life of runner a, but for those of each adapter."""
    lives = [r.event for r in fleet.log.read(stream="runner/a") if getattr(r.event, "incarnation", 0) == incarnation]
    return [type(e).__name__ for e in lives if not isinstance(e, ev.AdapterFailed | ev.AdapterLoaded)]


def test_a_runner_that_lacks_an_adapter_stays_failed_until_it_has_it(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.bad = {"math"}
    fleet.come_up("a", 2)

    def wait() -> None:
        for _ in range(100):
            fleet.clock += 1.0
            fleet.speak("a", 2)
            life = fleet.registry.runners["a"].life
            assert (life.state, life.reason) == ("failed", fleet.failures()[0])

    wait()
    assert states(fleet, 2) == ["RunnerStarted", "RunnerReady", "RunnerFailed"], "each is said once"
    fleet.take_over(most=2)
    wait()
    assert "RunnerReady" not in states(fleet, 2)[2:], "another coordinator goes on with it"
    assert len(fleet.failures()) == 3, "it lacks it, and why"
    fleet.bad.clear()
    fleet.clock += 640.0
    fleet.speak("a", 2)
    assert (states(fleet, 2)[-1], fleet.serving()) == ("RunnerReady", ["a"])


def test_a_new_version_is_ordered_at_once_from_a_runner_that_failed_and_waited_for(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.bad = {"math"}
    fleet.come_up("a", 2)
    fleet.speak_for(200, "a", 2)
    assert (fleet.registry.runners["a"].adapters_failures, fleet.registry.runners["a"].state) == (5, "failed")
    fleet.bad.clear()
    fleet.engines["c"] = {}
    fleet.speak("c", 1, "started")
    waiter = fleet.lives.adapters.publish(published("math", 2))
    assert waiter.waiting_on == {"a", "b"}, "not for one whose engine is still loading"
    fleet.turn()
    assert (waiter.waiting_on, waiter.error(), fleet.engines["a"]) == (set(), None, {"math": 2})
    assert fleet.serving() == ["a", "b"]


def test_a_removal_is_no_longer_put_off_by_what_could_not_be_loaded(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.publish("code")
    fleet.bad = {"math"}
    fleet.come_up("a", 2)
    fleet.speak_for(200, "a", 2)
    fleet.lives.adapters.remove("math")
    fleet.turn()
    fleet.speak("a", 2)
    assert (fleet.serving(), fleet.registry.runners["a"].adapters_failures) == (["a", "b"], 0)


def test_a_log_with_adapters_is_served_without_them_where_the_config_has_none(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.take_over(most=0)
    fleet.come_up("a", 2)
    assert (fleet.serving(), fleet.engines["a"]) == (["a"], {})


def test_a_log_with_more_adapters_than_there_is_room_for_names_them_and_the_key(fleet: Fleet) -> None:
    fleet.publish("math")
    fleet.publish("code")
    fleet.take_over(most=1)
    fleet.come_up("a", 2)
    assert (fleet.serving(), fleet.engines["a"]) == ([], {})
    assert fleet.failures() == [
        "there are adapters code, math, and engines have room for 1: raise "
        "explorer.rollout_model.lora.max_adapters and restart, or remove_adapter some"
    ]
    fleet.lives.adapters.remove("code")
    fleet.speak("a", 2)
    assert (fleet.serving(), fleet.engines["a"]) == (["a"], {"math": 1})


@pytest.mark.parametrize("end", ["retired", "died"])
def test_who_waits_for_a_runner_that_ends_waits_no_more(fleet: Fleet, end: str) -> None:
    waiter = fleet.lives.adapters.publish(published())
    assert waiter.waiting_on == {"a", "b"}
    fleet.sent.clear()
    fleet.live.turn.durable_calls.clear()  # the orders never arrive
    if end == "died":
        fleet.lives.on_death(RunnerDied("b", 1, "it was killed"))
    else:
        fleet.speak("b", 1, "retired")
    assert "b" not in waiter.waiting_on


def test_what_a_runner_could_not_load_it_tries_again_ever_more_seldom(fleet: Fleet) -> None:
    fleet.bad = {"math"}
    fleet.publish("math")

    def tries() -> int:
        return sum(isinstance(r.event, ev.AdapterFailed) and r.event.runner == "a" for r in fleet.log.read())

    fleet.speak_for(3600, "a", 1)
    assert tries() == 1 + len([10, 20, 40, 80, 160, 320, 640, 640, 640, 640])
    fleet.publish("math", 2)
    assert tries() == 12, "a new version is tried at once"
    fleet.bad.clear()
    fleet.clock += 641
    fleet.speak("a", 1)
    assert fleet.engines["a"] == {"math": 2}
    fleet.engines["a"].clear()
    fleet.speak("a", 1)
    assert fleet.engines["a"] == {"math": 2}, "what is lost for another reason it is told at once"
