"""Who is taken in as a host, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import pytest

from tests.helpers.adapters import published
from trinity_es.actors.config.hosts import HostsConfig
from trinity_es.actors.coordinator.decisions.host_decisions import Hello, Refusal, admit, drain, find_folder, lose
from trinity_es.actors.coordinator.fleet.host_fleet import FarProcess, HostFleet, far_runners
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.actors.hosts.link import Admission
from trinity_es.actors.messages import HostDrained, RunnerDied
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.software_version import VERSION
from trinity_es.projections.adapter_versions import Adapters
from trinity_es.projections.host_states import Hosts, evolve_hosts, host_of
from trinity_es.projections.runner import RunnerLife, RunnerState, Weights

JOINED = ev.HostJoined(host="b", epoch=1, life="1", address="10.0.0.2", pid=7, places={})
B = Hello("b", "life 1", "10.0.0.2", 7, {"gpus": 8}, "1.0")


def decide(hosts: Hosts, said: Hello, *, connected: bool = False) -> list[ev.Event] | Refusal:
    found = admit(hosts, said, build="1.0", connected=connected)
    if isinstance(found, list):
        fold(hosts, found)
    return found


def with_b() -> Hosts:
    """Host b takes part, as epoch 1."""
    hosts: Hosts = {}
    assert isinstance(decide(hosts, B), list)
    return hosts


def refused(answer: object, *, for_good: bool = True) -> str:
    assert isinstance(answer, Refusal)
    assert answer.for_good is for_good
    return answer.reason


def fold(hosts: Hosts, events: list[ev.Event]) -> list[ev.Event]:
    for event in events:
        evolve_hosts(hosts, event)
    return events


def test_a_new_host_joins_as_epoch_1() -> None:
    hosts: Hosts = {}
    assert decide(hosts, B) == [
        ev.HostJoined(host="b", epoch=1, life="life 1", address="10.0.0.2", pid=7, places={"gpus": 8})
    ]
    assert hosts["b"].is_present


def test_the_same_life_is_taken_up_again_and_nothing_recorded() -> None:
    hosts = with_b()
    assert decide(hosts, replace(B, address="10.0.0.9"), connected=True) == []
    fold(hosts, drain(hosts, "b", "SIGTERM"))
    assert decide(hosts, B) == []


@pytest.mark.parametrize("end", [ev.HostLost, ev.HostLeft])
def test_a_life_that_is_over_is_refused_for_good_and_the_next_one_is_another_epoch(end: type[ev.HostLost]) -> None:
    hosts = with_b()
    fold(hosts, [end(host="b", epoch=1, reason="gone")])
    assert "epoch 1 is over (gone)" in refused(decide(hosts, B))
    [joined] = decide(hosts, replace(B, life="life 2"))  # type: ignore[misc]  # a list, as the test asks
    assert joined.epoch == 2


def test_another_life_under_the_name_of_one_that_is_connected_has_to_wait() -> None:
    hosts = with_b()
    told = refused(decide(hosts, replace(B, life="life 2"), connected=True), for_good=False)
    assert "choose another --name" in told
    assert hosts["b"].life == "life 1"


def test_another_life_under_the_name_of_one_that_is_away_takes_its_place() -> None:
    hosts = with_b()
    gone, joined = decide(hosts, replace(B, life="life 2"))  # type: ignore[misc]  # a list, as the test asks
    assert gone == ev.HostLost(host="b", epoch=1, reason="it was restarted")
    assert isinstance(joined, ev.HostJoined)
    assert joined.epoch == 2


def test_another_build_is_refused_for_good() -> None:
    told = refused(decide({}, replace(B, build="0.9")))
    assert "0.9" in told
    assert "1.0" in told


def test_a_loss_and_a_drain_are_recorded_once_and_only_of_who_is_there() -> None:
    hosts: Hosts = {}
    assert lose(hosts, "b", "x") == drain(hosts, "b", "x") == []
    decide(hosts, B)
    assert len(fold(hosts, drain(hosts, "b", "x"))) == 1
    assert drain(hosts, "b", "x") == []
    assert len(fold(hosts, lose(hosts, "b", "x"))) == 1
    assert lose(hosts, "b", "x") == drain(hosts, "b", "x") == []


def test_what_is_said_of_an_earlier_epoch_changes_nothing() -> None:
    hosts = with_b()
    decide(hosts, replace(B, life="life 2"))
    fold(hosts, [ev.HostLost(host="b", epoch=1, reason="late")])
    assert hosts["b"].is_present


def test_runners_of_hosts_that_are_there_may_live_when_a_coordinator_takes_over() -> None:
    hosts = with_b()
    decide(hosts, replace(B, name="c"))
    fold(hosts, lose(hosts, "c", "gone"))

    def life(name: str, state: RunnerState) -> RunnerLife:
        return RunnerLife(name=name, incarnation=3, state=state)

    lives = [life("runner-0", RunnerState.READY), life("runner-0@b", RunnerState.READY),
             life("runner-1@b", RunnerState.LOST), life("runner-0@c", RunnerState.READY)]
    assert far_runners(hosts, {(it.name, it.incarnation): it for it in lives}) == {"runner-0@b": 3}
    assert [host_of(name) for name in ("runner-0", "runner-0@b")] == ["", "b"]


@pytest.mark.parametrize(("section", "said"), [
    ({"synchronizer": {"sync_method": "nccl"}, "store": {"url": "postgresql://db/run"}},
     "engines on other hosts can't join an NCCL group"),
    ({}, "SQLite file, which only one host can use"),
    ({"store": {"url": "postgresql://db/run"}, "hosts": {"address": "10.0.0.1"}}, "an address of this host and a port"),
])
def test_a_config_that_hosts_can_t_share_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.from_dict({"hosts": {"address": "10.0.0.1:7700"}, **section})


@pytest.mark.parametrize(("asked", "folder"), [
    ({"kind": "weights", "name": "", "version": 3}, "/published/3"),
    ({"kind": "adapter", "name": "math", "version": 2}, "/math/2"),
    ({"kind": "model", "name": "rollout", "version": 0}, "/models/one"),
    ({"kind": "weights", "version": 2}, "version 2 of the weights is not the current one: version 3 is"),
    ({"kind": "weights", "version": "../../etc"}, "not the current one"),
    ({"kind": "weights"}, "not the current one"),
    ({"kind": "adapter", "name": "math", "version": 1}, "not current"),
    ({"kind": "adapter", "name": "gone", "version": 1}, "not current"),
    ({"kind": "adapter", "name": "/etc", "version": 1}, "not current"),
    ({"kind": "model", "name": "judge"}, "no model 'judge' in a folder"),
    ({"kind": "model", "name": "/etc/passwd"}, "no model '/etc/passwd' in a folder"),
    ({"kind": "/etc/passwd"}, "no folders of kind"),
    ({"path": "/etc/passwd"}, "no folders of kind"),
    ({}, "no folders of kind"),
])
def test_a_host_gets_the_folders_that_log_and_config_name_and_no_other(asked: dict[str, Any], folder: str) -> None:
    adapters: Adapters = {"math": published("math", 2), "gone": ev.AdapterRemoved(adapter="gone", version=1)}
    models = {"rollout": "/models/one", "judge": "hub/judge"}
    weights = Weights(3, "/published/3", "checkpoint")
    known: dict[str, Any] = {"own_build": "1", "weights": weights, "adapters": adapters, "models": models}
    found = find_folder(asked, "1", **known)
    if folder.startswith("/"):
        assert found == folder
    else:
        assert isinstance(found, Refusal)
        assert folder in found.reason
    refused(find_folder(asked, "2", **known))
    none = find_folder(asked, "1", own_build="1", weights=Weights(), adapters={}, models={})
    assert isinstance(none, Refusal)


# --- the fleet ------------------------------------------------------------------------------------------------------
class Book:
    """The live state, as the fleet of hosts needs it; what is recorded is durable at once, while `writes`."""

    def __init__(self) -> None:
        self.writes = True
        self.hosts: Hosts = {}
        self.lives: dict[tuple[str, int], RunnerLife] = {}
        self.batches: dict[Any, Any] = {}
        self.in_flight = UnitsInFlight()
        self.weights = Weights(3, "/published/3", "checkpoint")
        self.adapters: Adapters = {}

    def record(self, *events: ev.Event) -> None:
        fold(self.hosts, list(events))

    def when_durable(self, call: Any) -> None:
        if self.writes:
            call()


class Around:
    def __init__(self, heard: Mapping[str, float] = MappingProxyType({}), timeout: float = 5.0) -> None:
        """`heard`: when an earlier coordinator heard of hosts. It is 0 o'clock."""
        self.time = 0.0
        self.sent: list[tuple[str, str, Any]] = []
        self.connections: dict[str, float] = {}
        self.hung_up: list[tuple[str, int]] = []
        self.handled: list[tuple[Any, Any]] = []
        self.died: list[RunnerDied] = []
        self.book = Book()
        self.registry = RunnerRegistry(self.book, self)  # type: ignore[arg-type]  # they have what is used here
        self.fleet = HostFleet(
            HostsConfig(address="10.0.0.1:7700", timeout=timeout), self.registry, self, epoch=4,  # type: ignore[arg-type]  # as above
            handle=lambda message, sender: self.handled.append((message, sender)), end_runner=self.died.append,
            heard_at=heard,
        )

    @classmethod
    def connected(cls) -> Self:
        it = cls()
        it.hello()
        it.fleet.take("b", 1, [])
        return it

    def last_heard(self) -> dict[str, float]:
        return self.connections

    def now(self) -> float:
        return self.time

    def send(self, host: str, to: str, message: Any) -> None:
        self.sent.append((host, to, message))

    def hang_up(self, host: str, epoch: int) -> None:
        self.hung_up.append((host, epoch))

    def hello(self, life: str = "1") -> Admission:
        [told] = self.told(life)
        return told

    def told(self, life: str) -> list[Admission]:
        answers: list[Admission] = []
        said = {"name": "b", "life": life, "pid": 7, "places": {"gpus": 8}, "build": VERSION}
        self.fleet.hello(said, "10.0.0.2", answers.append)
        return answers

    def runner(self, name: str, state: RunnerState = RunnerState.READY) -> None:
        life = self.book.lives[name, 3] = RunnerLife(name=name, incarnation=3, state=state)
        self.registry.runners[name] = RunnerRecord(life)

    def look_at(self, seconds: float) -> None:
        self.time = seconds
        self.fleet.check_connections()


def test_a_host_that_is_taken_in_and_never_connects_is_lost_with_its_runners() -> None:
    it = Around()
    assert it.hello() == Admission(1, 4)
    it.runner("runner-0@b")
    it.runner("runner-1@b", RunnerState.RETIRED)
    it.runner("runner-0")
    it.look_at(4.9)
    assert it.died == []
    it.look_at(5.0)
    assert [(d.name, d.asked) for d in it.died] == [("runner-0@b", True)]
    assert it.book.hosts["b"].state == "lost"


def test_a_host_is_there_while_it_is_connected_and_for_some_seconds_after() -> None:
    it = Around.connected()
    it.look_at(102.0)
    it.fleet.on_disconnected("b", 1, "the connection broke", heard_at=100.0)
    it.look_at(104.0)
    assert it.book.hosts["b"].is_present
    it.look_at(105.0)
    assert "the connection broke" in it.book.hosts["b"].reason
    assert it.hung_up == [("b", 1)]


@pytest.mark.parametrize(("heard", "lost"), [(-4.0, 11.0), (-60.0, 5.0), (None, 15.0)])
def test_a_silent_host_is_not_given_all_its_time_again_by_the_next_head(heard: float | None, lost: float) -> None:
    it = Around({} if heard is None else {"b": heard}, timeout=15.0)
    it.book.record(JOINED)
    it.look_at(0.0)
    it.look_at(lost - 0.1)
    assert it.book.hosts["b"].is_present
    it.look_at(lost)
    assert it.book.hosts["b"].state == "lost"


def test_a_host_that_came_back_to_the_next_coordinator_has_its_time() -> None:
    it = Around({"b": -60.0}, timeout=15.0)
    it.book.record(JOINED)
    it.look_at(4.0)
    it.hello()
    it.fleet.take("b", 1, [])
    it.fleet.on_disconnected("b", 1, "the connection broke", heard_at=10.0)
    it.look_at(24.9)
    assert it.book.hosts["b"].is_present


def test_when_hosts_were_heard_is_told_of_those_that_take_part() -> None:
    it = Around()
    it.hello()
    it.connections = {"b": 7.0, "gone": 3.0}
    assert it.fleet.last_heard() == {"b": 7.0}


def test_nobody_is_refused_for_what_is_not_in_the_log() -> None:
    """A head that was cut off takes all for lost, and is not to end them: another one leads, which has them."""
    it = Around()
    it.hello()
    it.book.writes = False
    it.look_at(6.0)
    assert it.told("1") == []
    it.book.writes = True
    assert it.hello("1").for_good


def test_a_host_whose_connection_is_no_more_is_lost_though_nobody_told_its_end() -> None:
    it = Around.connected()
    it.connections = {"b": 50.0}
    it.look_at(50.0)
    it.connections = {}
    it.look_at(60.0)
    assert it.book.hosts["b"].is_present, "its end may be told in a moment"
    it.look_at(65.0)
    assert it.book.hosts["b"].state == "lost"
    assert it.hello("2") == Admission(2, 4)


def test_what_an_earlier_epoch_says_is_dropped_and_its_connection_ended() -> None:
    it = Around()
    it.hello()
    it.fleet.take("b", 1, [("runner-0@b", "its word")])
    it.look_at(0.0)
    it.fleet.on_disconnected("b", 1, "gone", heard_at=0.0)
    it.look_at(6.0)
    assert it.hello("2") == Admission(2, 4)
    it.hung_up.clear()
    it.fleet.take("b", 1, [("runner-0@b", "its late word")])
    assert it.handled == [("its word", FarProcess("b", "runner-0@b"))]
    assert it.hung_up == [("b", 1)]


def test_a_host_speaks_for_its_own_processes_alone() -> None:
    it = Around()
    it.hello()
    it.fleet.take("b", 1, [("runner-0", "x"), ("runner-0@c", "x"), ("", "a"), ("runner-0@b", "b"), ("client 7", "c")])
    assert [message for message, _ in it.handled] == ["a", "b", "c"]


def test_a_host_that_is_drained_gets_nothing_new_at_once_and_is_told_when_it_has_nothing() -> None:
    it = Around.connected()
    it.runner("runner-0@b")
    it.runner("runner-0")
    it.registry.leaving = frozenset({"runner-9"})  # that its server was taken away is another's word
    it.fleet.drain("b", "SIGTERM")
    assert [r.name for r in it.registry.staying_runners()] == ["runner-0"]
    it.look_at(1.0)
    assert it.registry.leaving == {"runner-9"}
    assert it.sent == [("b", "", HostDrained())]


def test_who_asks_for_files_is_told_which_folder_and_does_not_join() -> None:
    it = Around()
    told: list[Admission] = []
    for asked in {"kind": "weights", "version": 3}, {"kind": "weights", "version": 2}, "/etc/passwd":
        it.fleet.hello({"name": "b", "build": VERSION, "fetch": asked}, "10.0.0.2", told.append)
    assert [a.folder for a in told] == ["/published/3", "", ""]
    assert [bool(a.refused) for a in told] == [False, True, True]
    assert it.book.hosts == {}
