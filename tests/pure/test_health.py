"""What `trinity-es status` calls a problem of a runner, and the way out that it names."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trinity_es.cli.common import find_batch
from trinity_es.cli.render.status import print_status
from trinity_es.client import health
from trinity_es.client import problems as of_system
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.values import local_time
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.why.answer import Waiting, Why

URL = "http://gpu-7:8000"
SERVER = {"runner": "runner-0", "url": URL, "wanted": True}
AWAITED = f"{URL} does not answer (ConnectError)"


def problems(
    row: dict[str, Any], servers: list[dict[str, Any]], child: str | None = None, server_list: str = ""
) -> list[str]:
    """Ask with one runner, in this state of its slot; without one it has none."""
    runner = {"runner": "runner-0", "incarnation": 1, "state": "ready", "reason": "it broke", "seen": time.time()} | row
    children = [{"name": "coordinator", "state": "up", "pid": 1}]
    children += [] if child is None else [{"name": "runner-0", "state": child, "incarnation": 1, "pid": 2}]
    live = {
        "system": {"children": children}, "weights_version": 0, "batches": [], "outputs": [], "runners": [runner],
        "servers": servers, "server_list": server_list,
    }
    config = Config.model_validate({})  # as where only the log is named
    return list(of_system.problems(config, UP | {"coordinator": {"pid": 1}}, live, []))


DOWN: dict[str, Any] = {
    "up": False, "keeper": None, "keeper_ended": None, "coordinator": None, "runners": [], "batches": [], "store": "s",
    "problems": [], "ends": "", "led_by": "", "last_batch": None, "run": None, "killed": {}, "held": {},
}
UP = DOWN | {"up": True, "admin": {"pid": 1}}


def shown(found: dict[str, Any]) -> str:
    out = io.StringIO()
    print_status(Console(file=out, width=200), found)
    return out.getvalue()


def wrong(found: dict[str, Any], live: dict[str, Any] | None = None, whys: Sequence[Why] = ()) -> list[str]:
    return list(of_system.problems(Config.model_validate({}), found, live, list(whys)))


def test_a_runner_that_was_let_go_is_not_hung_but_a_system_without_servers_needs_one() -> None:
    gone = {"state": "retired", "silent": 5.0, "seen": time.time() - 360.0}
    assert problems(gone, [SERVER, SERVER | {"runner": "runner-1"}]) == []
    [only] = problems(gone, [])
    assert "there is no server" in only
    assert "`trinity-es scale CONFIG --add URL`" in only


def test_a_list_of_servers_that_can_not_be_read_is_a_problem() -> None:
    told = "the list of servers (servers.command): servers.command failed with exit status 3"
    [listed] = problems({}, [SERVER], "up", told)
    assert listed.startswith(told)
    assert problems({"state": "retired"}, [], None, told) == [listed, *problems({"state": "retired"}, [])]


REFUSAL = f"{URL} can't load weights. Start it with VLLM_SERVER_DEV_MODE=1 in its environment"
AGAIN, AWAY = "`trinity-es restart-runner runner-0`", f"`trinity-es scale CONFIG --remove {URL}`"
REFUSES: dict[str, Any] = {"places": 4, "model_version": 0, "refused": REFUSAL}
LOADS: dict[str, Any] = {"places": 4, "model_version": 0, "loading": 1}


@pytest.mark.parametrize(("row", "ago", "begins", "says"), [
    ({"state": "started", "waits_for": AWAITED}, {"progressed": 60.0},
     f"waits to start its engine: {AWAITED}; start or fix the server {URL}, or remove it", [AWAY]),
    ({"state": "started", "waits_for": AWAITED}, {"progressed": 1.0}, None, []),
    ({"state": "failed"}, {}, "failed: it broke; fix what it names", [AGAIN, AWAY]),
    ({"state": "failed", "places": 4}, {}, "failed: it broke; it is started again", []),
    ({"state": "quarantined"}, {}, "was quarantined and is not started again: it broke; fix", [AGAIN, AWAY]),
    (REFUSES, {}, f"goes on with weights version 0: it can't load version 0: {REFUSAL}; fix what it names, or publish "
     "a newer version: it tries again by itself; or remove its server", [AWAY]),
    (REFUSES | {"state": "failed", "reason": f"it could not load weights 1: {REFUSAL}"}, {},
     f"failed: it could not load weights 1: {REFUSAL}; fix what it names, or publish a newer version", [AWAY]),
    (REFUSES | {"refused": ""}, {}, None, []),
    (LOADS, {"loading_since": 3600.0}, "has been loading weights version 1 for 60 min, and gets no work meanwhile: "
     f"see whether {URL} is working, else `trinity-es", [AGAIN, AWAY]),
    (LOADS, {"loading_since": 30.0}, None, []), (LOADS | {"loading": None}, {}, None, []),
])
def test_what_is_wrong_with_a_runner_is_told_with_the_way_out(
    row: dict[str, Any], ago: dict[str, float], begins: str | None, says: list[str]
) -> None:
    at = {name: time.time() - seconds for name, seconds in ago.items()}
    child = row.get("state") if row.get("state") != "ready" and "refused" not in row else None
    found = problems(row | at, [SERVER], child)
    assert len(found) == (begins is not None)
    for line in found:
        assert line.startswith(f"runner-0 {begins}")
        assert [said for said in says if said not in line] == []
        assert "trinity-es down" not in line


@pytest.mark.parametrize(("row", "said"), [
    ({"loading": 1, "loading_since": 1e9},
     f"loading weights version 1 since {local_time(1e9).partition('T')[2]}, pid 2"),
    ({"load": 64, "places": 64}, ", 64 of 64 places taken\n"), ({"load": 3, "places": 64}, ", 3 of 64 places taken\n"),
    ({"load": 70, "places": 64}, ", 64 of 64 places taken, 6 more units sent ahead\n"),
    ({"state": "started", "waits_for": AWAITED}, f"waits to start its engine: {AWAITED}, pid 2"),
])
def test_a_person_is_shown_what_a_runner_does_or_waits_for(row: dict[str, Any], said: str) -> None:
    runner = {"runner": "runner-0", "state": "ready", "pid": 2} | row
    text = shown(UP | {"runners": [runner], "problems": ["something"]})
    assert said in text
    assert "all is well" not in text


@pytest.mark.parametrize(("run", "said"), [
    (None, "nothing runs, and no batch is open: no batch has ended yet"),
    ({"step": 5, "total_steps": 5, "complete": True}, "no batch is open: the run is complete, with step 5"),
    ({"step": 5, "total_steps": 9, "complete": False},
     "no batch is open: the run's last step is 5 of 9, and `trinity-es resume s` goes on with it"),
    ({"step": 5, "total_steps": None, "complete": None},
     "the run's last step is 5, and `trinity-es resume s` goes on with it, or says that it is complete"),
    ({"step": 5, "total_steps": 9, "complete": False, "trained": 4, "last_at": 1e9},
     f"the run's last step is 5 of 9, the log's last event was at {local_time(1e9)}, the last trained step is 4, and "
     "`trinity-es resume s` goes on with it"),
])
def test_of_a_run_of_which_nothing_runs_is_told_how_far_it_is(run: dict[str, Any] | None, said: str) -> None:
    assert shown(DOWN | {"run": run}).endswith(f"{said}\n")
    hangs = "when its process 7 has ended (`kill -9 7` if it hangs), `trinity-es resume s`"
    held = shown(DOWN | {"run": run, "held": {"explorer": 7, "trainer": 7}})
    assert held.endswith(said.replace("`trinity-es resume s`", hangs) + "\n")


@pytest.mark.parametrize(("run", "told"), [
    (None, 0), ({"step": 5, "total_steps": 9, "complete": False}, 1),
    ({"step": 9, "total_steps": 9, "complete": True}, 0),
])
def test_a_system_that_ends_with_its_owner_is_a_problem_if_work_is_left(run: dict[str, Any] | None, told: int) -> None:
    ends = "process 5, which had started it, has ended"
    found = wrong(DOWN | {"ends": ends, "run": run})
    assert len(found) == told
    for line in found:
        assert line.startswith(f"the actor system ends: {ends}; `trinity-es resume s` goes on with the run")


@pytest.mark.parametrize(("run", "way"), [
    (None, "start it again, and it goes on where the log ends"),
    ({"step": 5, "total_steps": None, "complete": None}, "`trinity-es resume /runs/log.sqlite` goes on with it"),
    ({"step": 9, "total_steps": 9, "complete": True}, None),
])
def test_a_trainer_that_was_killed_between_two_batches_is_told(run: dict[str, Any] | None, way: str | None) -> None:
    found = DOWN | {"store": "sqlite:////runs/log.sqlite", "run": run, "killed": {"trainer": 7}}
    said = "the run did not end in order: its trainer (pid 7) died in the middle of it; "
    assert wrong(found) == ([] if way is None else [said + way])
    assert wrong(found | {"killed": {}}) == []
    for killed, who in (({"explorer": 7, "trainer": 7}, "its explorer and trainer (pid 7)"),
                        ({"explorer": 7, "trainer": 8}, "its explorer (pid 7) and its trainer (pid 8)")):
        for line in wrong(found | {"killed": killed}):
            assert f": {who} died in the middle of it; " in line
    facts = f"(the log's last event was at {local_time(1e9)}, the last trained step is 4); "
    if run is not None:
        for line in wrong(found | {"run": run | {"trained": 4, "last_at": 1e9}}):
            assert f"died in the middle of it {facts}" in line


@pytest.mark.parametrize(("step", "said"), [(None, ", and no trainer has acknowledged it"), (7, "")])
def test_since_when_nobody_asks_for_anything_is_told(step: int | None, said: str) -> None:
    last = {"batch_id": 7, "batch_type": "train", "state": "finalized", "ended_at": time.time() - 200.5,
            "trained_step": step}
    found = UP | {"runners": [{"runner": "runner-0", "state": "ready", "pid": 2}], "last_batch": last}
    assert shown(found).endswith(
        f"nothing is wrong here, and no batch is open: the last, 7, was finalized 3 min 20 s ago{said}\n")


def test_a_batch_that_is_not_there_may_come_after_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    config = Config.model_validate({"store": {"url": url}})
    EventLog.open(url, create=True, projectors=projectors()).close()
    row = {"runner": "runner-0", "incarnation": 1, "state": "started"}
    live: dict[str, Any] = {"system": {"children": []}, "weights_version": 0, "batches": [], "runners": [row]}

    def said() -> str:
        monkeypatch.setattr(health, "facts", lambda config: (live, {"up": True}))
        with pytest.raises(BatchNotFound) as failed:
            health.explain(config, "1", find_batch)
        return failed.value.message

    assert "no batch 1 in" in said()
    assert said().endswith("it holds none yet; `trinity-es batches` lists all batches; "
                           "the system is starting: runner-0 loading engine…")
    row["state"] = "ready"
    assert said().endswith("lists all batches")
    del live["weights_version"]
    assert said().endswith("the system is starting: its coordinator is not up yet")


def test_batches_are_told_by_the_log_which_is_read_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'log.sqlite'}"
    config = Config.model_validate({"store": {"url": url}})

    def submitted(batch_id: int) -> ev.BatchSubmitted:
        return ev.BatchSubmitted(batch_id=batch_id, batch_type="train", repeat_times=[1, 1], tasks=[{}, {}])

    failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=1,
                              kind="workflow", message="boom", retry=False)
    sent = ev.TasksDispatched(runner="runner-0", incarnation=1, model_version=0,
                              units=[ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)])
    ended = ev.BatchFinalized(result={"batch_id": 1, "batch_type": "train", "metrics": {}})
    written: dict[int, list[ev.Event]] = {1: [submitted(1), ended], 2: [submitted(2), sent, failed], 3: [submitted(3)]}
    with EventLog.open(url, create=True, projectors=projectors()) as log:
        for number, events in written.items():
            log.append([Write(stream=f"batch/{number}", expected_version=0, events=events)], commit_id=str(number))
    before = [{"batch_id": n, "batch_type": "train", "state": "running", "tasks": 2, "settled": 0, "running_units": 2,
               "pending_units": 0, "failed_attempts": 0, "waited_for": 0} for n in (1, 2)]
    live = {"system": {"children": []}, "weights_version": 0, "batches": before, "runners": []}
    monkeypatch.setattr(health, "facts", lambda config: (live, {"up": True}))
    told = shown(health.read_health(config))
    assert "open batches 2\n" in told
    assert "  2: running, 1 of 2 tasks, 0 units running, 1 waiting, 1 failed attempts\n" in told
    assert "  3: running, 0 of 2 tasks, 0 units running, 2 waiting\n" in told
    assert "finalized" not in told


@pytest.mark.parametrize(("state", "says"), [
    ("ready", "all is well"), ("starting", "nothing is wrong, and no engine is ready yet"),
])
def test_all_is_well_where_an_engine_serves(state: str, says: str) -> None:
    assert shown(UP | {"runners": [{"runner": "runner-0", "state": state, "pid": 2}]}).endswith(f"{says}\n")


@pytest.mark.parametrize(("run", "way"), [
    ({"step": 3, "total_steps": None, "complete": None},
     "`trinity-es resume s` (`trinity-es resume CONFIG` if you changed the config file: the log holds the old one) "
     "generates it again"),
    (None, "start its trainer again"),
])
def test_a_last_batch_of_which_every_run_failed_is_a_problem(run: dict[str, Any] | None, way: str) -> None:
    last = {"batch_id": 3, "failed_whole": True}
    [line] = wrong(DOWN | {"run": run, "last_batch": last})
    assert line == ("batch 3, the last, gave nothing: each of its runs failed; `trinity-es why 3` says how: fix "
                    f"that, then {way}")
    for other in (DOWN | {"last_batch": last | {"failed_whole": False}}, DOWN | {"last_batch": last, "batches": [{}]}):
        assert wrong(other | {"run": run}) == []


def test_a_host_that_is_away_or_lost_is_a_problem() -> None:
    host = {"host": "b", "state": "joined", "connected": True, "reason": "", "away_for": None, "why_away": "",
            "lost_after": 15.0}

    def told(**changes: Any) -> list[str]:
        live = {"system": {"children": []}, "runners": [], "batches": [], "weights_version": 0}
        live["hosts"] = [host | changes]
        return wrong(UP | {"coordinator": {"pid": 2, "epoch": 1}}, live)

    assert told() == []
    [away] = told(connected=False, away_for=3.0, why_away="it ended the connection")
    assert away.startswith("host b has not been heard of for 3.0 s (it ended the connection): after 15")
    [lost] = told(state="lost", connected=False, away_for=20.0, reason="not heard of for 15 s")
    assert lost.startswith("host b was lost: not heard of for 15 s; its work is attempted elsewhere")


@pytest.mark.parametrize(("cause", "tells_more"), [("running", False), ("loading", True)])
def test_why_is_named_where_it_tells_more(cause: str, tells_more: bool) -> None:
    told = Why(
        batch_id=4, batch_type="train", state="running", tasks=1, settled=0, running_units=0, pending_units=1,
        failed_attempts=0, moved_at=0.0, now=1.0, stalled=True,
        waiting=(Waiting(cause=cause, what="runner-0 #1", text="runner-0 #1 is loading its engine"),))
    live = {"system": {}, "weights_version": 0, "runners": []}
    [line] = wrong(DOWN | {"up": True, "coordinator": {"pid": 1}}, live, [told])
    assert line.endswith("; `trinity-es why 4` says more") == tells_more
    assert any("its runner's text log in system.log_dir" in s for s in told.sentences()) == tells_more


def test_what_runs_wait_for_outside_of_the_system_is_a_problem_while_they_do() -> None:
    outside = "2 of its runs wait for the OpenEnv server http://h:1: refused, for 12 s; it gives up in 48 s"
    [line] = problems({"runs_wait": outside}, [SERVER])
    assert line.startswith(f"runner-0 is up, and {outside}: see to that")
    assert problems({"runs_wait": ""}, [SERVER]) == []
