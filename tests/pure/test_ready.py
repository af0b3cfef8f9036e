"""What a start waits for and tells meanwhile, and when the keeper makes another one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trinity_es.actors.guardian.supervision import Policy
from trinity_es.cli.commands.system import Progress
from trinity_es.cli.render.progress import step_reward
from trinity_es.client.progress_lines import report_progress
from trinity_es.events.errors import StartupError
from trinity_es.system import keeper
from trinity_es.system.lifecycle import wait_ready


def status(states: dict[str, str], wanted: dict[str, bool], quarantined: str = "") -> dict[str, Any]:
    """How a system is: runners, and those of them that are for servers of others."""
    return {
        "runners": [{"runner": name, "state": state, "reason": "it broke"} for name, state in states.items()],
        "servers": [{"runner": name, "wanted": is_wanted} for name, is_wanted in wanted.items()],
        "system": {"children": [{"name": quarantined, "state": "quarantined", "deaths": 4, "reason": "it broke"}]
                   if quarantined else []},
    }


@pytest.mark.parametrize(("states", "wanted", "quarantined"), [
    ({"runner-0": "ready"}, {"runner-0": True}, ""),
    ({"runner-0": "ready", "runner-1": "failed"}, {"runner-0": True, "runner-1": False}, ""),
    ({"runner-0": "ready", "runner-1": "lost"}, {"runner-0": True, "runner-1": False}, "runner-1"),
    ({"runner-0": "ready", "runner-1": "ready"}, {"runner-0": True, "runner-1": True}, ""),
])
def test_a_start_waits_for_no_removed_server(states: dict[str, str], wanted: dict[str, bool], quarantined: str) -> None:
    wait_ready(lambda: status(states, wanted, quarantined), 0.0, runners=2, servers=2, logs="logs")


@pytest.mark.parametrize(("states", "wanted", "servers", "needed"), [
    ({"runner-0": "ready", "runner-1": "started"}, {"runner-0": True, "runner-1": True}, 2, 2),
    ({"runner-0": "started", "runner-1": "ready"}, {"runner-0": True, "runner-1": False}, 2, 1),
    ({"runner-1": "ready"}, {"runner-1": False}, 2, 1),
    ({}, {}, 2, 1),
    ({"runner-0": "ready"}, {}, 0, 2),  # engines of one's own
])
def test_a_start_waits_for_servers_that_are_to_be_there_and_for_one_at_least(
    states: dict[str, str], wanted: dict[str, bool], servers: int, needed: int
) -> None:
    with pytest.raises(StartupError, match=f"not all of {needed} runners were ready"):
        wait_ready(lambda: status(states, wanted), 0.0, runners=2, servers=servers, logs="logs")


def test_a_start_that_gives_up_says_what_each_runner_waits_for() -> None:
    now = status({"runner-0": "started", "runner-1": "retired"}, {})
    for row in now["runners"]:
        row["waits_for"] = "http://a:1 does not answer (ConnectError)"
    with pytest.raises(StartupError) as failed:
        wait_ready(lambda: now, 0.0, runners=2, logs="logs")
    assert str(failed.value) == (
        "not all of 2 runners were ready after 0.0 s: runner-0 waits to start its engine: http://a:1 does "
        "not answer (ConnectError); runner-1 retired"
    )


def test_a_start_that_gives_up_says_what_is_wrong_with_the_list_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    now = status({}, {}) | {"server_list": "the list of servers (/l): it is no regular file"}
    with pytest.raises(StartupError, match=r"after 0\.0 s: the list of servers \(/l\): it is no regular file"):
        wait_ready(lambda: now, 0.0, runners=1, logs="logs")
    tell = Progress()
    tell(now)
    tell(now)
    assert capsys.readouterr().err.splitlines() == ["the list of servers (/l): it is no regular file"]


def test_a_start_tells_what_a_runner_waits_for_while_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    now, tell = status({"runner-0": "started"}, {}), Progress()
    tell(now)
    now["runners"][0]["waits_for"] = "http://a:1 does not answer (ConnectError)"
    tell(now)
    tell(now)
    assert capsys.readouterr().err.splitlines() == [
        "runner-0: loading engine…",
        "runner-0: waits to start its engine: http://a:1 does not answer (ConnectError)",
    ]


def test_a_runner_that_loads_weights_is_not_ready_yet(capsys: pytest.CaptureFixture[str]) -> None:
    now = status({"runner-0": "ready"}, {})
    now["runners"][0] |= {"loading": 3, "waits_for": "the restart command of http://a:1"}
    with pytest.raises(StartupError, match="runner-0 loading weights version 3, waits for the restart command of"):
        wait_ready(lambda: now, 0.0, runners=1, logs="logs")
    Progress()(now)
    assert capsys.readouterr().err == (
        "runner-0: loading weights version 3, waits for the restart command of http://a:1\n")
    now["runners"][0] |= {"loading": None}
    wait_ready(lambda: now, 0.0, runners=1, logs="logs")


def test_a_program_is_told_by_its_logging_or_without_one_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("bare")
    report_progress(logger, "engines load: 3 %")
    assert capsys.readouterr() == ("", "engines load: 3 %\n")
    logger.addHandler(logging.NullHandler())
    report_progress(logger, "engines load: 4 %")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("missing", "dropped", "line"), [
    (0, 0, "0.500"), (2, 0, "0.500 (2 runs missing)"), (0, 3, "0.500 (3 filtered out)"),
    (1, 3, "0.500 (1 run missing, 3 filtered out)"),
])
def test_a_step_s_mean_reward_says_what_it_leaves_out(missing: int, dropped: int, line: str) -> None:
    assert step_reward(0.5, missing, dropped) == line


SYSTEM: dict[str, Any] = {"admin": {"pid": 1}, "memory": "/nowhere"}


def test_a_start_that_was_killed_is_made_again_until_no_system_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([(0, SYSTEM), (-9, None), (1, None), (0, None)])
    asked: list[Any] = []
    monkeypatch.setattr(keeper, "_wait_for_end", lambda system, remember: "it is gone")
    monkeypatch.setattr(keeper, "_run_start", lambda request: (asked.append(request), next(ends))[1])
    monkeypatch.setattr(keeper.time, "sleep", lambda seconds: asked.append(seconds))
    keeper._restart_while_needed({}, SYSTEM, {"pid": 2}, Policy())
    pause = keeper.AGAIN_SECONDS
    assert [a if isinstance(a, float) else a["cause"] for a in asked] == [
        "it is gone", "it is gone", pause, "it is gone", pause, "it is gone"]
    assert next(ends, None) is None
