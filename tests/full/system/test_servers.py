"""Servers of others as engines, and what may happen to one. Real ones are in test_vllm_servers.py."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trinity_es
from tests.helpers import servers
from tests.helpers.of_the_day import of_the_day
from tests.helpers.systems import StartSystem, events, play_batch
from trinity_es import Task, Workflow
from trinity_es.cli import app
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, StartupError, SyncError
from trinity_es.events.experience import Experience
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(600)
_log = logging.getLogger(__name__)


def test_a_server_that_is_not_there_yet_is_waited_for(start_system: StartSystem, tiny: Path, tmp_path: Path) -> None:
    here, later = servers.stand_in(tiny, tmp_path / "here").start(), servers.stand_in(tiny, tmp_path / "later")
    with servers.ended(here, later):
        here.ready()
        client = start_system(
            explorer=servers.over_http(tiny, urls=[here.url, later.url]), wait=False,
            system={"startup_timeout": 12.0, "restarts": 0},
        )
        wait_until(lambda: [s["state"] for s in client.status()["servers"]] == ["ready", "started"], "the one", 60)
        play_batch(client, 1, servers.letters(4))
        wait_until(lambda: "does not answer" in client.status()["servers"][1]["waits_for"], "it to say so")
        time.sleep(15)  # longer than an engine may take to start
        assert not events(client, ev.RunnerLost)
        later.start()
        wait_until(lambda: client.status()["servers"][1]["state"] == "ready", "the other", 60)


def test_the_key_is_in_no_file_of_the_run(
    start_system: StartSystem, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_ES_ENGINE_KEY", "open-sesame-12345")
    server = servers.stand_in(tiny, tmp_path / "server.log", "--api-key", "open-sesame-12345").start()
    with servers.ended(server):
        server.ready()
        run = tmp_path / "run"
        run.mkdir()
        client = start_system(folder=run, explorer=servers.over_http(tiny, urls=[server.url]))
        play_batch(client, 1, servers.letters(4))
        server.kill()
        wait_until(lambda: events(client, ev.RunnerLost), "its end to be noticed")
        files = [f for f in run.rglob("*") if f.is_file()]
        assert files
        assert [f for f in files if b"open-sesame" in f.read_bytes()] == []


class AsksTheJudge(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        [said] = await self.auxiliary["judge"].generate_async("a", max_tokens=3)
        [mine] = await self.model.generate_async("a", max_tokens=2)
        mine.reward = 1.0
        mine.metrics = {"judged": float(said.tokens.size - said.prompt_length)}
        return [mine]


def test_an_auxiliary_model_may_be_a_server_too(start_system: StartSystem, tiny: Path, tmp_path: Path) -> None:
    server = servers.stand_in(tiny, tmp_path / "server.log").start()
    with servers.ended(server):
        judge = {"name": "judge", "engine_type": "http", "model_path": str(tiny), "servers": {"urls": [server.url]}}
        client = start_system(explorer={"auxiliary_models": [judge]})
        task = Task(workflow=AsksTheJudge, raw_task={"prompt": "a"})
        play_batch(client, 1, [task])
        [experience] = client.experiences(1)
        assert experience.metrics["judged"] == 3.0


def test_servers_are_added_and_taken_away_by_hand_and_stay_so_over_a_restart(
    start_system: StartSystem, three: list[servers.ServerProcess], tiny: Path, tmp_path: Path
) -> None:
    a, b, c = (server.url for server in three)
    client = start_system(
        explorer=servers.over_http(tiny, urls=[a, b], drain_timeout=0.5), store={"url": f"sqlite:///{tmp_path}/log.sqlite"}
    )
    with pytest.raises(DataError, match="not a server of this run"):
        client.scale_servers(remove=[c])
    with pytest.raises(DataError, match="add: the URL of a server must be like http"):
        client.scale_servers(add=["gpu-7"])
    slow = servers.letters(4)
    for task in slow:
        task.rollout_args = {"max_tokens": 60, "ignore_eos": True, "seed": 1}  # three seconds
    client.submit_batch(batch_id=1, tasks=slow, batch_type="train")
    wait_until(lambda: len(client.batch(1).flights) == 4, "all to be sent")
    command = ["scale", "--log", client.config.store.url, "--json"]
    done = CliRunner().invoke(app, [*command, "--add", c, "--remove", a])
    assert [(s["runner"], s["wanted"], s["by"]) for s in json.loads(done.stdout)["servers"]] == [
        ("runner-0", False, "scale"), ("runner-1", True, "list"), ("runner-2", True, "scale"),
    ]
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 4
    assert "runner-0" not in servers.runs_by(client, 1), "it had its time to end, which was too short"
    given_back = [e.event for e in client.log.events(batch_id=1) if isinstance(e.event, ev.AttemptFailed)]
    assert {(e.runner, e.blamed, e.retry) for e in given_back} == {("runner-0", False, True)}
    wait_until(lambda: events(client, ev.RunnerRetired), "runner-0 to retire")
    done = CliRunner().invoke(app, ["scale", "--log", client.config.store.url])
    assert done.stdout.splitlines()[0] == f"{b}  runner-1  ready"
    config = client.config
    client.shutdown()
    again = start_system(explorer=config.explorer.model_dump(), store={"url": config.store.url})
    wait_until(lambda: len([r for r in again.status()["runners"] if r["state"] == "ready"]) == 2, "both", 60)
    assert [s["url"] for s in again.status()["servers"]] == [b, c]
    play_batch(again, 2, servers.letters(8))
    assert set(servers.runs_by(again, 2)) == {"runner-1", "runner-2"}


def test_a_server_that_is_killed_and_comes_back_with_old_weights_serves_none_of_them(
    start_system: StartSystem, three: list[servers.ServerProcess], tiny: Path, other: Path, tmp_path: Path
) -> None:
    a, b, _ = three
    client = start_system(explorer=servers.over_http(tiny, urls=[a.url, b.url]))
    client.sync_weights(1, other)
    account = tmp_path / "account"
    account.unlink()
    client.submit_batch(batch_id=1, tasks=servers.letters(60), batch_type="train")
    wait_until(lambda: servers.runs_by(client, 1)["runner-0"] > 4, "some to be finished")
    a.kill()
    a.start()  # with the model that it was started with: version 0
    assert client.finalize_train_batch(1, timeout=90)["finished_task_count"] == 60
    experiences = list(client.experiences(1))
    assert len(experiences) == sum(servers.runs_by(client, 1).values()) == 120
    assert {tuple(map(tuple, e.info["version_spans"])) for e in experiences} == {((1, 0, 8),)}
    lost = events(client, ev.RunnerLost)
    assert {e.runner for e in lost} == {"runner-0"}
    until = time.monotonic() + 60
    while not any(e.runner == "runner-0" and e.incarnation > 2 for e in events(client, ev.WeightsLoaded)):
        assert time.monotonic() < until, "it never got the current weights"
        time.sleep(0.2)
    of_a = [json.loads(line) for line in account.read_text().splitlines() if json.loads(line)["server"] == a.port]
    pids = [line["pid"] for line in of_a]
    old = [line for line in of_a if line["weights"] != [str(other)]]
    assert len(set(pids)) == 2
    assert sum(line["tokens"] for line in old) <= 4, "but for the first look at the one that came back"


def test_a_server_that_ends_twice_in_a_batch_fails_no_task_though_none_is_attempted_again(
    start_system: StartSystem, three: list[servers.ServerProcess], tiny: Path
) -> None:
    server = three[0]
    client = start_system(explorer=servers.over_http(tiny, urls=[server.url]) | {"max_retry_times": 0})
    client.submit_batch(batch_id=1, tasks=servers.letters(40), batch_type="train")
    for most in (8, 16):
        wait_until(lambda most=most: sum(servers.runs_by(client, 1).values()) > most, "some to be finished", 60)
        server.kill()
        server.start()
    result = client.finalize_train_batch(1, timeout=120)
    assert result["metrics"]["rollout/failed_task_count"] == 0
    assert sum(servers.runs_by(client, 1).values()) == 80
    lost = events(client, ev.AttemptFailed)
    assert lost
    assert not any(e.blamed for e in lost)


def said(client: RolloutClient, *command: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*command, "--log", client.config.store.url])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("status", of_the_day([400, 404]))  # in turns; ALL=1 plays both
def test_a_server_that_fails_all_takes_no_task_with_it_while_another_serves(
    start_system: StartSystem, tiny: Path, tmp_path: Path, status: int
) -> None:
    broken, good = (servers.stand_in(tiny, tmp_path / f"{n}.log", "--token-seconds", "0.02").start() for n in range(2))
    with servers.ended(broken, good):
        client = start_system(explorer=servers.over_http(tiny, urls=[broken.ready().url, good.ready().url]))
        client.submit_batch(batch_id=1, tasks=servers.letters(60), batch_type="train")
        wait_until(lambda: len(servers.runs_by(client, 1)) == 2, "both to have finished runs", 60)
        broken.tell("/fail_with", status=status)
        assert client.finalize_train_batch(1, timeout=120)["finished_task_count"] == 60
        failed = [e.event for e in client.log.events(batch_id=1) if isinstance(e.event, ev.AttemptFailed)]
        assert failed, "the server did fail what it had"
        assert {(e.retry, e.blamed) for e in failed} == {(True, False)}
        assert len(failed) <= 4 * 4, "what it had at each of its lives, not what the other would have done"


def test_a_server_that_can_t_have_the_current_weights_is_named_everywhere_and_holds_up_the_next_start(
    start_system: StartSystem, tiny: Path, other: Path, tmp_path: Path
) -> None:
    server = servers.stand_in(tiny, tmp_path / "server.log", "--no-dev").start()
    with servers.ended(server):
        explorer, store = servers.over_http(tiny, urls=[server.ready().url]), {"url": f"sqlite:///{tmp_path}/log.sqlite"}
        client = start_system(explorer=explorer, store=store)
        with pytest.raises(SyncError, match="can't load weights"):
            client.sync_weights(1, other)
        behind = "goes on with weights version 0: it can't load version 1"
        reason = "can't load weights. Start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        way = "publish a newer version: it tries again by itself"
        client.submit_batch(batch_id=1, tasks=servers.letters(4), batch_type="train")
        for command, code in ((["status"], 1), (["why", "1"], 0), (["scale"], 0)):
            exit_code, told = said(client, *command)
            assert exit_code == code, told
            assert all(part in told for part in (behind, reason, way)), told
        assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 4
        assert {e.info["model_version"] for e in client.experiences(1)} == {0}
        client.shutdown()
        with pytest.raises(StartupError, match=f"could not load weights 1: .*{reason}"):
            start_system(explorer=explorer, store=store)
        with trinity_es.connect(client.config) as again:
            again.submit_batch(batch_id=2, tasks=servers.letters(4), batch_type="train")
            for command in (["status"], ["why", "2"]):
                exit_code, told = said(again, *command)
                assert exit_code == 1, told
                assert all(part in told for part in ("could not load weights 1", reason, way)), told
            assert reason in said(again, "scale")[1]
            server.kill()
            server.command.remove("--no-dev")
            server.start()
            assert again.finalize_train_batch(2, timeout=90)["finished_task_count"] == 4
            assert {e.info["model_version"] for e in again.experiences(2)} == {1}
            assert said(again, "status")[0] == 0


def test_a_server_restarts_once_a_version(start_system: StartSystem, tiny: Path, other: Path, tmp_path: Path) -> None:
    with servers.restarted_by_command(tiny, tmp_path) as (server, command, pids):
        explorer = servers.over_http(tiny, urls=[server.url], restart_command=command, restart_after=1.0)
        store = {"url": f"sqlite:///{tmp_path}/log.sqlite"}
        client = start_system(explorer=explorer, store=store)

        def restarts() -> int:
            return len(pids.read_text().split()) - 1

        assert restarts() == 0
        client.sync_weights(1, other)
        assert restarts() == 1
        client.restart_runner("runner-0")
        client.wait_ready(60)
        assert restarts() == 1, "another runner finds it with the current weights"
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        wait_until(lambda: restarts() == 2, "it to be started again", 60)
        client.wait_ready(60)
        play_batch(client, 1, servers.letters(4))
        assert {e.info["model_version"] for e in client.experiences(1)} == {1}
        assert restarts() == 2, "once, with the current weights"
        client.shutdown()
        again = start_system(explorer=explorer, store=store)
        again.sync_weights(2, tiny)
        assert restarts() == 3
