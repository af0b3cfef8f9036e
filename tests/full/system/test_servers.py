"""Servers of others as engines: the acceptance with a real `vllm serve` among them, and what else may happen to one."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import trinity_es
from tests.helpers.engines import largest_difference
from tests.helpers.real_engine import TOLERANCE
from tests.helpers.servers import (
    EXTENSION,
    ServerProcess,
    ended,
    letters,
    over_http,
    real_server,
    restarted_by_command,
    runs_by,
    stand_in,
)
from tests.helpers.systems import StartSystem, events
from tests.helpers.vllm_stand_in import FIRST, LAST
from trinity_es import Task, Workflow
from trinity_es.cli import app
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, StartupError, SyncError
from trinity_es.events.experience import Experience
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(600)
_log = logging.getLogger(__name__)


def tokens_by(client: RolloutClient, batch: int | str) -> Counter[str]:
    """How many tokens of a batch's experiences each runner made."""
    made_by: dict[tuple[int | str, int], str] = {
        (e.event.task, r.run): e.event.runner for e in client.log.events(batch_id=batch)
        if isinstance(e.event, ev.RunsFinished) for r in e.event.runs
    }
    found = Counter[str]()
    for e in client.experiences(batch):
        found[made_by[e.eid.task, e.eid.run]] += e.tokens.size - e.prompt_length
    return found


def written_by(weights: Path, e: Experience) -> bool:
    """Whether a stand-in with these weights would have given this answer; the runs of a task are asked for together."""
    prompt = [int(t) for t in e.tokens[: e.prompt_length]]
    ids = [int(t) for t in e.tokens[e.prompt_length :]]
    task, run = int(e.eid.task), e.eid.run
    return ids in [
        [random.Random(f"{prompt}/{at}/{n}/{weights}/{seed!r}").randint(FIRST, LAST) for at in range(len(ids))]
        for seed, n in ((task + run, 0), (task, run))
    ]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_i3_four_servers_share_the_work_and_three_troubles_in_one_batch_lose_nothing(
    start_system: StartSystem, tiny: Path, other: Path, tmp_path: Path
) -> None:
    token_seconds = 0.02
    speed = ("--token-seconds", str(token_seconds))
    real = real_server(tiny, tmp_path / "real.log", "--enable-scale-out", "--worker-extension-cls", EXTENSION).start()
    first, second, third, late = (stand_in(tiny, tmp_path / f"stand-in-{n}.log", *speed) for n in range(4))
    with ended(real, first, second, third, late):
        for server in (first, second, third):
            server.start().ready()
        real.ready(240)
        urls = [real.url, first.url, second.url, third.url]
        client = start_system(explorer=over_http(tiny, urls=urls) | {"max_concurrency": 8})
        client.submit_batch(batch_id=1, tasks=letters(32), batch_type="train")  # what is compiled on first use
        client.finalize_train_batch(1, timeout=120)

        # A server gets what it is fast enough for: make the stand-ins as fast as the real one is on this machine.
        client.submit_batch(batch_id="speed", tasks=letters(200), batch_type="train")
        client.finalize_train_batch("speed", timeout=120)
        shares = tokens_by(client, "speed")
        mean = sum(shares[f"runner-{n}"] for n in (1, 2, 3)) / 3
        for server in (first, second, third):
            server.tell("/set_token_seconds", seconds=token_seconds * mean / shares["runner-0"])

        client.submit_batch(batch_id=2, tasks=letters(400), batch_type="train")
        assert client.finalize_train_batch(2, timeout=200)["finished_task_count"] == 400
        shares = tokens_by(client, 2)
        total = sum(shares.values())
        assert total == 400 * 2 * 8
        assert all(0.15 <= shares[f"runner-{n}"] / total <= 0.35 for n in range(4)), shares

        client.sync_weights(1, other)
        long = letters(400)
        for task in long:  # so that those who come take part
            task.rollout_args["max_tokens"] = 24
        client.submit_batch(batch_id=3, tasks=long, batch_type="train")
        wait_until(lambda: sum(runs_by(client, 3).values()) > 100, "some to be finished")
        first.kill()
        late.start()
        client.scale_servers(add=[late.url])
        second.kill()
        second.start()  # with the weights that it was started with
        assert client.finalize_train_batch(3, timeout=300)["finished_task_count"] == 400
        experiences = list(client.experiences(3))
        assert len({(e.eid.task, e.eid.run) for e in experiences}) == len(experiences) == 800, "lost, or twice"
        assert sum(runs_by(client, 3).values()) == 800
        assert {tuple(map(tuple, e.info["version_spans"])) for e in experiences} == {((1, 0, 24),)}
        made_by: dict[tuple[int | str, int], str] = {
            (e.event.task, r.run): e.event.runner for e in client.log.events(batch_id=3)
            if isinstance(e.event, ev.RunsFinished) for r in e.event.runs
        }
        of_stand_ins = [e for e in experiences if made_by[e.eid.task, e.eid.run] != "runner-0"]
        for e in of_stand_ins:
            assert written_by(other, e)
            assert not written_by(tiny, e)

        def ready() -> set[str]:
            return {r["runner"] for r in client.status()["runners"] if r["state"] == "ready"}

        wait_until(lambda: {"runner-2", "runner-4"} <= ready(), "who came, and who came back", 120)
        client.submit_batch(batch_id=4, tasks=letters(200), batch_type="train")
        assert client.finalize_train_batch(4, timeout=200)["finished_task_count"] == 200
        assert {"runner-0", "runner-2", "runner-3", "runner-4"} == set(runs_by(client, 4))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ["--enable-scale-out", "--no-enable-scale-out"])
def test_logprobs_of_a_real_server_agree_with_torch_before_and_after_a_sync(
    start_system: StartSystem, tiny: Path, tmp_path: Path, route: str
) -> None:
    from examples.grpo.trainer import GRPOTrainer

    server = real_server(tiny, tmp_path / "real.log", route, "--worker-extension-cls", EXTENSION).start()
    with ended(server):
        server.ready(240)
        client = start_system(explorer=over_http(tiny, urls=[server.url]))
        trainer = GRPOTrainer(str(tiny))

        def play(batch: int) -> list[Experience]:
            client.submit_batch(batch_id=batch, tasks=letters(16), batch_type="train")
            client.finalize_train_batch(batch, timeout=120)
            return list(client.experiences(batch))

        before = play(1)
        assert largest_difference(trainer, before) < TOLERANCE
        rng = np.random.default_rng(0)
        for e in before:
            e.advantages = np.full(e.tokens.size - e.prompt_length, rng.normal(), dtype=np.float32)
        trainer.step(before)
        trainer.save(str(tmp_path / "v1"))
        client.sync_weights(1, tmp_path / "v1")
        after = play(2)
        assert {tuple(map(tuple, e.info["version_spans"])) for e in after} == {((1, 0, 8),)}
        assert largest_difference(trainer, after) < TOLERANCE
        assert largest_difference(trainer, before) > 10 * TOLERANCE


def test_a_server_that_is_not_there_yet_is_waited_for_and_is_not_late(
    start_system: StartSystem, tiny: Path, tmp_path: Path
) -> None:
    here, later = stand_in(tiny, tmp_path / "here").start(), stand_in(tiny, tmp_path / "later")
    with ended(here, later):
        here.ready()
        client = start_system(
            explorer=over_http(tiny, urls=[here.url, later.url]), wait=False,
            system={"startup_timeout": 30.0, "restarts": 0},
        )
        wait_until(lambda: [s["state"] for s in client.status()["servers"]] == ["ready", "started"], "the one", 60)
        client.submit_batch(batch_id=1, tasks=letters(4), batch_type="train")
        assert client.finalize_train_batch(1, timeout=30)["finished_task_count"] == 4
        wait_until(lambda: "does not answer" in client.status()["servers"][1]["waits_for"], "it to say so")
        time.sleep(35)  # longer than an engine may take to start
        assert not events(client, ev.RunnerLost)
        later.start()
        wait_until(lambda: client.status()["servers"][1]["state"] == "ready", "the other", 60)


def test_the_key_is_in_no_file_of_the_run(
    start_system: StartSystem, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_ES_ENGINE_KEY", "open-sesame-12345")
    server = stand_in(tiny, tmp_path / "server.log", "--api-key", "open-sesame-12345").start()
    with ended(server):
        server.ready()
        run = tmp_path / "run"
        run.mkdir()
        client = start_system(folder=run, explorer=over_http(tiny, urls=[server.url]))
        client.submit_batch(batch_id=1, tasks=letters(4), batch_type="train")
        assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 4
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


def test_an_auxiliary_model_may_be_a_server_too(
    start_system: StartSystem, tiny: Path, tmp_path: Path
) -> None:
    server = stand_in(tiny, tmp_path / "server.log").start()
    with ended(server):
        judge = {"name": "judge", "engine_type": "http", "model_path": str(tiny), "servers": {"urls": [server.url]}}
        client = start_system(explorer={"auxiliary_models": [judge]})
        task = Task(workflow=AsksTheJudge, raw_task={"prompt": "a"})
        client.submit_batch(batch_id=1, tasks=[task], batch_type="train")
        assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 1
        [experience] = client.experiences(1)
        assert experience.metrics["judged"] == 3.0


def test_servers_are_added_and_taken_away_by_hand_and_stay_so_over_a_restart(
    start_system: StartSystem, three: list[ServerProcess], tiny: Path, tmp_path: Path
) -> None:
    a, b, c = (server.url for server in three)
    client = start_system(
        explorer=over_http(tiny, urls=[a, b], drain_timeout=0.5), store={"url": f"sqlite:///{tmp_path}/log.sqlite"}
    )
    with pytest.raises(DataError, match="no server of this run"):
        client.scale_servers(remove=[c])
    with pytest.raises(DataError, match="add: a server must be like http"):
        client.scale_servers(add=["gpu-7"])
    slow = letters(4)
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
    assert "runner-0" not in runs_by(client, 1), "it had its time to end, which was too short"
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
    again.submit_batch(batch_id=2, tasks=letters(8), batch_type="train")
    assert again.finalize_train_batch(2, timeout=60)["finished_task_count"] == 8
    assert set(runs_by(again, 2)) == {"runner-1", "runner-2"}


def test_a_server_that_is_killed_and_comes_back_with_old_weights_serves_none_of_them(
    start_system: StartSystem, three: list[ServerProcess], tiny: Path, other: Path, tmp_path: Path
) -> None:
    a, b, _ = three
    client = start_system(explorer=over_http(tiny, urls=[a.url, b.url]))
    client.sync_weights(1, other)
    account = tmp_path / "account"
    account.unlink()
    client.submit_batch(batch_id=1, tasks=letters(60), batch_type="train")
    wait_until(lambda: runs_by(client, 1)["runner-0"] > 4, "some to be finished")
    a.kill()
    a.start()  # with the model that it was started with: version 0
    assert client.finalize_train_batch(1, timeout=90)["finished_task_count"] == 60
    experiences = list(client.experiences(1))
    assert len(experiences) == sum(runs_by(client, 1).values()) == 120
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


def _finished(client: RolloutClient, most: int) -> bool:
    return sum(runs_by(client, 1).values()) > most


def test_a_server_that_ends_twice_in_a_batch_fails_no_task_though_none_is_attempted_again(
    start_system: StartSystem, three: list[ServerProcess], tiny: Path
) -> None:
    server = three[0]
    client = start_system(explorer=over_http(tiny, urls=[server.url]) | {"max_retry_times": 0})
    client.submit_batch(batch_id=1, tasks=letters(40), batch_type="train")
    for most in (8, 16):
        wait_until(partial(_finished, client, most), "some to be finished", 60)
        server.kill()
        server.start()
    result = client.finalize_train_batch(1, timeout=120)
    assert result["metrics"]["rollout/failed_task_count"] == 0
    assert sum(runs_by(client, 1).values()) == 80
    lost = events(client, ev.AttemptFailed)
    assert lost
    assert not any(e.blamed for e in lost)


def said(client: RolloutClient, *command: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*command, "--log", client.config.store.url])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_that_fails_all_takes_no_task_with_it_while_another_serves(
    start_system: StartSystem, tiny: Path, tmp_path: Path, status: int
) -> None:
    broken, good = (stand_in(tiny, tmp_path / f"{n}.log", "--token-seconds", "0.02").start() for n in range(2))
    with ended(broken, good):
        client = start_system(explorer=over_http(tiny, urls=[broken.ready().url, good.ready().url]))
        client.submit_batch(batch_id=1, tasks=letters(60), batch_type="train")
        wait_until(lambda: len(runs_by(client, 1)) == 2, "both to have finished runs", 60)
        broken.tell("/fail_with", status=status)
        assert client.finalize_train_batch(1, timeout=120)["finished_task_count"] == 60
        failed = [e.event for e in client.log.events(batch_id=1) if isinstance(e.event, ev.AttemptFailed)]
        assert failed, "the server did fail what it had"
        assert {(e.retry, e.blamed) for e in failed} == {(True, False)}
        assert len(failed) <= 4 * 4, "what it had at each of its lives, not what the other would have done"


def test_a_server_that_can_t_have_the_current_weights_is_named_everywhere_and_holds_up_the_next_start(
    start_system: StartSystem, tiny: Path, other: Path, tmp_path: Path
) -> None:
    server = stand_in(tiny, tmp_path / "server.log", "--no-dev").start()
    with ended(server):
        explorer, store = over_http(tiny, urls=[server.ready().url]), {"url": f"sqlite:///{tmp_path}/log.sqlite"}
        client = start_system(explorer=explorer, store=store)
        with pytest.raises(SyncError, match="takes no weights"):
            client.sync_weights(1, other)
        behind = "goes on with weights version 0: it can't load version 1"
        reason = "takes no weights. Start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        way = "publish a newer version: it tries again by itself"
        client.submit_batch(batch_id=1, tasks=letters(4), batch_type="train")
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
            again.submit_batch(batch_id=2, tasks=letters(4), batch_type="train")
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


def test_a_restart_command_restarts_a_server_once_a_version(
    start_system: StartSystem, tiny: Path, other: Path, tmp_path: Path
) -> None:
    with restarted_by_command(tiny, tmp_path) as (server, command, pids):
        explorer = over_http(tiny, urls=[server.url], restart_command=command, restart_after=1.0)
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
        client.submit_batch(batch_id=1, tasks=letters(4), batch_type="train")
        assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 4
        assert {e.info["model_version"] for e in client.experiences(1)} == {1}
        assert restarts() == 2, "once, with the current weights"
        client.shutdown()
        again = start_system(explorer=explorer, store=store)
        again.sync_weights(2, tiny)
        assert restarts() == 3
