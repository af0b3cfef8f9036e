"""Servers of others, given what was folded, when a list or a person changes them, then these events."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_es.actors.config.models import ServersConfig
from trinity_es.actors.coordinator.decisions import server_decisions as servers
from trinity_es.actors.coordinator.fleet import polled_server_list
from trinity_es.actors.coordinator.fleet.external_servers import ServerFleet
from trinity_es.actors.coordinator.fleet.polled_server_list import ServerList, parse_list
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.actors.engines.http.weights import run_command
from trinity_es.actors.server_addresses import checked_url
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.projections.runner import RunnerLife, RunnerState, Weights
from trinity_es.projections.servers import Servers, evolve_servers, leaving_runners
from trinity_es.testing import wait_until

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def fold(found: Servers, events: Iterable[ev.Event]) -> Servers:
    for event in events:
        evolve_servers(found, event)
    return found


def after(*events: ev.Event) -> Servers:
    return fold({}, events)


def added(url: str, runner: int, by: str = "list") -> ev.ServerAdded:
    return ev.ServerAdded(url=url, runner=f"runner-{runner}", by=by)  # type: ignore[arg-type]


def removed(url: str, runner: int, by: str = "list") -> ev.ServerRemoved:
    return ev.ServerRemoved(url=url, runner=f"runner-{runner}", by=by)  # type: ignore[arg-type]


# --- a list ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("known", "now", "before", "then"), [
    ([], [A, B], None, [added(A, 0), added(B, 1)]),
    ([], [A, A], None, [added(A, 0)]),
    ([added(A, 0)], [A], [A], []),
    ([added(A, 0)], [A, B], [A], [added(B, 1)]),
    ([added(A, 0), added(B, 1)], [B], [A, B], [removed(A, 0)]),
    ([added(A, 0), added(B, 1)], [], [A, B], []),  # a file that is just written anew
    ([added(A, 0), removed(A, 0)], [B, A], [B], [added(B, 1), added(A, 0)]),  # it comes back as the same runner
    ([added(A, 0), added(B, 1, "scale")], [A], [A], []),  # no list has it, and it stays
    ([added(A, 0), removed(A, 0, "scale")], [A], [A], []),  # the list still has it, and it stays away
    ([added(A, 0), removed(A, 0, "scale")], [A], None, []),  # so it does for the next coordinator
    ([added(A, 0), removed(A, 0, "scale")], [B, A], [B], [added(B, 1), added(A, 0)]),  # it left the list and came back
    ([added(A, 0), added(B, 1)], [B, C], None, [added(C, 2), removed(A, 0)]),  # another config since
])
def test_a_list_says_which_servers_there_are(
    known: list[ev.Event], now: list[str], before: list[str] | None, then: list[ev.Event]
) -> None:
    assert servers.apply_list(after(*known), now, before) == then


# --- a person -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("known", "add", "remove", "then"), [
    ([], [A], [], [added(A, 0, "scale")]),
    ([added(A, 0)], [B], [A], [added(B, 1, "scale"), removed(A, 0, "scale")]),
    ([added(A, 0)], [A], [], [added(A, 0, "scale")]),  # from now on it stays, whatever the list says
    ([added(A, 0, "scale")], [A], [], []),
    ([added(A, 0), removed(A, 0)], [], [A], [removed(A, 0, "scale")]),  # so that no list brings it back
    ([added(A, 0), removed(A, 0, "scale")], [], [A], []),
    ([added(A, 0), removed(A, 0, "scale")], [A], [], [added(A, 0, "scale")]),
])
def test_a_persons_word_goes_before_the_list(
    known: list[ev.Event], add: list[str], remove: list[str], then: list[ev.Event]
) -> None:
    assert servers.apply_scale(after(*known), add, remove) == then


def test_what_can_not_be_is_refused_with_the_way_out() -> None:
    with pytest.raises(DataError, match=r"http://b:1 can't be removed, as .*; its servers: http://a:1"):
        servers.apply_scale(after(added(A, 0)), [], [B])
    with pytest.raises(DataError, match="added and removed in one command"):
        servers.apply_scale({}, [A], [A])


@given(st.lists(st.tuples(st.sampled_from(["list", "add", "remove"]), st.sets(st.sampled_from([A, B, C])))))
def test_no_two_servers_have_one_runner_and_a_repetition_changes_nothing(steps: list[tuple[str, set[str]]]) -> None:
    found: Servers = {}
    before: Iterable[str] | None = None
    for what, urls in steps:
        if what == "list":
            fold(found, servers.apply_list(found, sorted(urls), before))
            before = sorted(urls) or before
            assert servers.apply_list(found, sorted(urls), before) == []
        else:
            known = {u for u in urls if u in found} if what == "remove" else urls
            args = (known, set[str]()) if what == "add" else (set[str](), known)
            fold(found, servers.apply_scale(found, *args))
            assert servers.apply_scale(found, *args) == []
        assert len({s.runner for s in found.values()}) == len(found)
        assert leaving_runners(found) == {s.runner for s in found.values() if not s.wanted}


# --- those that leave -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("units", "waited", "proxied", "then"), [
    (0, 0.0, False, True), (3, 9.0, False, False), (3, 10.0, False, True), (0, 9.0, True, False), (0, 10.0, True, True),
])
def test_a_runner_leaves_when_it_has_nothing_more_to_do_or_had_its_time(
    units: int, waited: float, proxied: bool, then: bool
) -> None:
    assert servers.is_drained(units, waited, timeout=10.0, proxied=proxied) is then


@pytest.mark.parametrize("state", list(RunnerState))
def test_a_runner_has_left_when_the_log_has_its_end(state: RunnerState) -> None:
    over = state in (RunnerState.RETIRED, RunnerState.LOST, RunnerState.QUARANTINED)
    assert servers.has_retired(RunnerLife(name="runner-0", incarnation=1, state=state)) is over
    assert servers.has_retired(None)


@pytest.mark.parametrize(("loading", "waited", "then"), [(None, 0.0, True), (3, 0.0, False), (3, 10.0, True)])
def test_a_runner_that_loads_weights_is_let_go_after_it(loading: int | None, waited: float, then: bool) -> None:
    life = RunnerLife(name="runner-0", incarnation=1, state=RunnerState.READY)
    runner, now = RunnerRecord(life, loading=loading), [0.0]
    live: Any = SimpleNamespace(lives={("runner-0", 1): life}, batches={})
    registry: Any = SimpleNamespace(live=live, runners={"runner-0": runner}, actor=SimpleNamespace(now=lambda: now[0]))
    fleet = ServerFleet(settings_of(urls=[A]), registry, None, proxied=False)
    fleet._is_drained(life, 0)
    now[0] = waited
    assert fleet._is_drained(life, 0) is then


def settings_of(**changes: Any) -> ServersConfig:
    return ServersConfig(**{"poll_interval": 1.0, "drain_timeout": 10.0, **changes})


class Leaving:
    """A coordinator's servers, of which A was taken away; `clock`, and what the guardian is told."""

    def __init__(self, state: RunnerState = RunnerState.READY, *, proxied: bool = False) -> None:
        self.clock = 0.0
        self.told: list[Any] = []
        life = RunnerLife(name="runner-0", incarnation=1, state=state)
        live = SimpleNamespace(
            servers=after(added(A, 0), added(B, 1), removed(A, 0, "scale")), lives={("runner-0", 1): life}, batches={},
            weights=Weights(), in_flight=UnitsInFlight(), record=lambda *events: None, when_durable=lambda call: call(),
        )
        self.registry = RunnerRegistry(live, self, clock=lambda: 0.0)  # type: ignore[arg-type]  # stand-ins
        self.fleet = ServerFleet(settings_of(urls=[A, B]), self.registry, "guardian", proxied=proxied)

    def send(self, to: Any, message: Any) -> None:
        self.told.append(message)

    def now(self) -> float:
        return self.clock

    def look(self, at: float) -> dict[str, int]:
        self.clock = at
        self.fleet.update()
        return self.told[-1].retire


def test_in_mode_serve_a_runner_that_serves_is_retired_when_its_requests_had_their_time() -> None:
    assert Leaving().look(0.0) == {"runner-0": 1}
    served = Leaving(proxied=True)
    assert [served.look(at) for at in (0.0, 9.0, 10.0)] == [{}, {}, {"runner-0": 1}]
    not_ready = Leaving(RunnerState.STARTED, proxied=True)
    assert not_ready.look(0.0) == {"runner-0": 1}, "nobody asks it"


# --- what a list may say --------------------------------------------------------------------------------------------
def test_a_list_is_a_url_a_line() -> None:
    urls, problems = parse_list(f"# ours\n{A}/\n\n  {B}  # the second\nHTTP://A:1\ngpu-7\nhttp://user:word@c:1\n")
    assert urls == [A, B]
    assert problems[0] == "a server must be like http://host:8000, not 'gpu-7'"
    assert "credentials" in problems[1]
    assert "word" not in "".join(problems)


@pytest.mark.parametrize(("url", "said"), [
    *((url, "must be like http://host:8000") for url in (
        "", "gpu-7:8000", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://a?x=1", "http://a#x",
        "http://a b", "http://a\n", "http://a\x01b", "http://[a",
    )),
    ("http://a:8000/v1/", "leave /v1 out"),
])
def test_no_url(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_url(url)


@pytest.mark.parametrize(("url", "same"), [
    ("HTTP://Gpu-7:8000//", "http://gpu-7:8000"), ("http://a", "http://a:80"), ("https://a/", "https://a:443"),
    ("https://a:443/Gpu/7/", "https://a:443/Gpu/7"), ("http://[::1]:8000", "http://[::1]:8000"),
])
def test_a_server_is_one_however_it_is_spelled(url: str, same: str) -> None:
    assert checked_url(url) == checked_url(same) == same


@pytest.mark.parametrize("url", [
    "http://u:s3same/w@h", "http://h?key=s3same", "http://h#s3same", "http://h --key s3same",
])
def test_what_may_be_a_secret_in_a_url_is_not_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be like|credentials") as refused:
        checked_url(url)
    assert "s3same" not in str(refused.value)
    servers = {"urls": [url]}
    with pytest.raises(ConfigError) as wrong:
        Config.from_dict({"explorer": {"rollout_model": {"engine_type": "http", "servers": servers}}})
    assert "s3same" not in str(wrong.value)


def test_an_unreadable_list_is_told_once_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[list[str]] = []
    file = tmp_path / "servers"
    reader = ServerList(settings_of(file=str(file)), told.append)
    reader.read()
    reader.read()
    file.write_text(f"{A}\n")
    reader.read()
    file.write_text(f"{B}\nhttp:/a:1\n")
    reader.read()
    assert told == [[A]]
    assert len([r for r in caplog.records if "No such file" in r.message]) == 1
    assert reader.trouble.startswith(f"the list of servers ({file}): a server must be like")
    file.write_text(f"{A}\n")
    reader.read()
    assert reader.trouble == ""
    told.pop()
    failing = ServerList(settings_of(command=f"echo {A}; exit 3"), told.append)
    failing.read()
    assert told == [[A]]
    assert "(servers.command): servers.command failed with exit status 3:" in failing.trouble
    assert failing.trouble in caplog.text
    assert "exit 3" not in caplog.text, "a command may hold a key"
    ServerList(settings_of(command=f"echo {B}"), told.append).read()
    assert told[-1] == [B]


def test_a_command_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polled_server_list, "COMMAND_SECONDS", 0.5)
    command = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    told: list[list[str]] = []
    ServerList(settings_of(command=command), told.append).read()
    assert told == []
    assert "servers.command did not end within 0.5 s" in caplog.text
    assert "sleep" not in caplog.text
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text(), "its child to end", 5.0)


def test_a_list_without_end_changes_nothing_and_fills_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polled_server_list, "COMMAND_SECONDS", 5.0)
    told: list[list[str]] = []
    file = tmp_path / "servers"
    file.write_text(f"{A}\n" * (2 * polled_server_list.LIST_BYTES // len(A)))
    for settings in (settings_of(file=str(file)), settings_of(command=f"cat {file}; sleep 60")):
        caplog.clear()
        ServerList(settings, told.append).read()
        assert f"the list has more than {polled_server_list.LIST_BYTES:,} bytes: write" in caplog.text
    assert told == []


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_list_in_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "servers"
    os.mkfifo(file) if kind == "fifo" else file.symlink_to("/dev/zero")
    fleet = ServerFleet(settings_of(file=str(file)), SimpleNamespace(live=None), None)  # type: ignore[arg-type]
    assert fleet.trouble == ""
    fleet.start_reading()
    wait_until(lambda: bool(fleet.trouble), "the list to be read", 5.0)
    assert f"({file}): [Errno 22] it is no regular file" in str(fleet.trouble)


# --- a restart command ------------------------------------------------------------------------------------------------
def test_a_value_with_the_name_of_another_in_it_stays_in_its_quotes(tmp_path: Path) -> None:
    values = {"url": "http://a:1/{path}", "path": f"/it's; touch {tmp_path}/broken; '", "version": "3"}
    command = f"printf '%s\\n' {{url}} {{path}} {{version}} {{other}} > {tmp_path}/told"
    asyncio.run(run_command(command, values, seconds=10.0))
    assert (tmp_path / "told").read_text().splitlines() == [*values.values(), "{other}"]
    assert not (tmp_path / "broken").exists()
