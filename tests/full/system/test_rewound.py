"""Promise 13: a log that lost what was acknowledged is not gone on with, whoever is left of those who know it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from typer.testing import CliRunner

import trinity_es
from tests.helpers.database_trouble import on
from tests.helpers.faults import Server, rewind
from tests.helpers.handmade import copied, put_back
from tests.helpers.systems import StartSystem, kill_all, kill_system, pid_of, play_batch, scripted, sleepers
from trinity_es.cli import app
from trinity_es.client import accept_rewind, health, teardown
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config
from trinity_es.events.errors import LogRewound, NotRunning
from trinity_es.events.store.log import EventLog
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.system import lifecycle, remembered_log_end, running_system
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
PROMPT = 10.0
"""Seconds in which who asks has to be told."""


def play(client: RolloutClient, *batches: int) -> None:
    for batch in batches:
        play_batch(client, batch, sleepers(2), timeout=40)


def store(config: Config) -> Path:
    return Path(config.store.url.removeprefix("sqlite:///"))


def forget(config: Config) -> None:
    remembered_log_end.memory(config).path.unlink()


def command(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(args))
    return done.exit_code, done.output


def config_file(config: Config, folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_bytes(orjson.dumps(config.to_dict()))  # JSON is YAML
    return str(path)


def refused(client: RolloutClient, match: str = "restored from an older copy") -> None:
    calls: list[Any] = [
        lambda: client.submit_batch(batch_id=90, tasks=sleepers(1), batch_type="train"),
        lambda: client.finalize_train_batch(2, timeout=30),
        client.status,
        lambda: client.why(2),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(LogRewound, match=match):
            call()
        assert time.monotonic() - began < PROMPT


def births(url: str) -> int:
    with open_log(url) as log:
        return sum(1 for _ in log.read_rare(["CoordinatorStarted"]))


@pytest.mark.postgres
def test_a_database_that_fails_over_to_an_older_copy_stops_the_work_until_a_person_says_that_it_is_meant(
    own_server: Server, start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(**on(own_server.url(own_server.new_database())))
    config, url = client.config, client.config.store.url
    play(client, 1)
    own_server.keep_copy()
    play(client, 2, 3)
    before = client.log.head().position
    own_server.fail_over()
    left = client.log.head().position
    assert left < before
    started = births(url)
    psutil.Process(pid_of(client, "coordinator")).kill()
    refused(client)
    time_of_death = time.monotonic()
    with trinity_es.connect(config) as another:  # who knows nothing is told too
        refused(another)
    with pytest.raises(LogRewound):
        client.batch(3)
    child = next(c for c in client._link.where().status["children"] if c["name"] == "coordinator")
    assert child["deaths"] == 1, "the successor died too"
    assert (births(url), client.log.head().position) == (started, left), "something was written"
    assert time.monotonic() - time_of_death < 3 * PROMPT
    file = config_file(config, tmp_path)
    for args in (("status", "--config", file), ("why", "--config", file), ("up", file), ("verify", "--config", file)):
        code, said = command(*args)
        assert (code, "restored from an older copy" in said) == (1, True), (args, code, said)
    assert "positions" in (health.read_health(config)["problems"] or [""])[0]
    assert any(f"was at position {before} and is at {left}" in problem for problem in client.log.verify())

    code, said = command("accept-rewind", file, "--reason", "the old primary burnt", "--json")
    assert code == 0, said
    accepted = orjson.loads(said)["accepted"]
    assert (accepted["first"], accepted["last"], accepted["kept"]) == (left + 1, before, left)
    positions = {lost["position"] for lost in accepted["lost"]}  # each has the one that it last heard of
    assert max(positions) == before
    assert min(positions) > left
    assert running_system.find(config) is None
    assert command("accept-rewind", file)[0] == 1, "nothing is left to accept"
    again = start_system(**on(url))
    play(again, 2, 4)
    play(client, 5)  # who remembers the lost part goes on too
    event = next(again.log.read_rare(["RewindAccepted"])).event
    assert (event.reason, event.kept) == ("the old primary burnt", left)
    assert again.log.verify() == []
    assert "positions" in command("events", "--log", url)[1]


def test_a_file_replaced_by_an_older_copy_when_dead_is_refused(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    config, file = client.config, config_file(client.config, tmp_path)
    play(client, 1)
    copied(store(config), tmp_path / "older")
    play(client, 2)
    position = client.log.head().position
    kill_system(client)  # the file beside the key alone remembers it
    client.close()
    assert remembered_log_end.memory(config).claims()[0].mark.position == position
    assert command("verify", "--config", file)[0] == 0
    shutil.copy(store(config), tmp_path / "whole")
    put_back(tmp_path / "older", store(config))
    for args in (("up", file), ("verify", "--config", file), ("verify", "--log", str(store(config))),
                 ("resume", str(store(config))), ("run", file), ("status", "--log", str(store(config)))):
        code, said = command(*args)
        assert (code, f"was at position {position}" in said) == (1, True), (args, code, said)
    with pytest.raises(LogRewound):
        lifecycle.start(config)
    with pytest.raises(LogRewound):
        trinity_es.connect(config)
    assert running_system.find(config) is None

    code, said = command("accept-rewind", "--log", str(store(config)))
    assert code == 0
    assert f"to {position}" in said
    again = start_system()
    play(again, 2, 3)
    assert again.log.verify() == []
    again.shutdown()
    put_back(tmp_path / "older", store(config))  # from before it was accepted
    with pytest.raises(LogRewound, match="another log"):
        lifecycle.start(config)


def test_another_log_of_the_same_length_is_not_gone_on_with(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    config = client.config
    play(client, 1)
    client.shutdown()
    other = start_system(folder=tmp_path / "other")
    play(other, 1)
    other.shutdown()
    put_back(store(other.config), store(config))
    with pytest.raises(LogRewound, match="is another log"):
        lifecycle.start(config)
    for suffix in ("", "-wal", "-shm"):
        store(config).with_name(store(config).name + suffix).unlink(missing_ok=True)
    with pytest.raises(LogRewound, match="there is no log any more"):
        lifecycle.start(config)
    file = config_file(config, tmp_path)
    assert command("accept-rewind", file)[0] == 0
    play(start_system(), 1)


def test_a_client_alone_remembers_it_and_that_outlives_a_start(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    config = client.config
    play(client, 1)
    copied(store(config), tmp_path / "older")
    play(client, 2)
    kill_system(client)
    forget(config)
    put_back(tmp_path / "older", store(config))
    lifecycle.start(config)  # nobody is left on this host who knows
    try:
        with trinity_es.connect(config) as another:
            another.status()
            refused(client)
            refused(another)
        teardown.end_system(config)
        with pytest.raises(LogRewound, match=r"a client \(pid"):
            lifecycle.start(config)
        with pytest.raises(LogRewound):
            client.status()
        assert accept_rewind.accept(config, "") is not None
        lifecycle.start(config)
        play(client, 3)
    finally:
        teardown.end_system(config)


def test_guardian_and_runners_remember_it_where_the_file_beside_the_key_is_gone(start_system: StartSystem) -> None:
    client = start_system()
    play(client, 1)
    sent = max(r.position for r in client.log.events(1) if r.type == "TasksDispatched")
    forget(client.config)
    psutil.Process(pid_of(client, "coordinator")).suspend()  # so that it tells nobody more, and writes no other file
    with EventLog.open(client.config.store.url) as log:
        rewind(log, sent)  # what came of it a runner was told at once, the guardian every two seconds
    psutil.Process(pid_of(client, "coordinator")).kill()
    with trinity_es.connect(client.config) as another:
        refused(another)
    assert all(r.type != "TaskFinished" for r in client.log.events(1))


def test_the_keeper_starts_nothing_on_a_log_that_lost_what_it_knew(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(system={"keeper": True})
    config = client.config
    play(client, 1)
    copied(store(config), tmp_path / "older")
    play(client, 2)
    time.sleep(3)  # the keeper looks every two seconds
    admin = client._link.admin
    guardian, family = psutil.Process(admin["guardian"]), running_system.processes(admin)
    put_back(tmp_path / "older", store(config))
    forget(config)
    kill_all([guardian, *family])
    keeper_log = Path(config.system.log_dir) / "keeper.log"
    wait_until(lambda: "was at position" in keeper_log.read_text(), "the keeper to refuse", timeout=30)
    refused(client)
    assert running_system.find(config) is None


def test_a_store_that_was_removed_with_its_folder_is_new_and_one_that_was_moved_goes_on(tmp_path: Path) -> None:
    config = scripted(tmp_path / "a")
    with trinity_es.running(config) as client:
        play(client, 1)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = scripted(tmp_path / "b")
    for settings in (moved, config):  # moved, and made anew where it was
        with trinity_es.running(settings) as client:
            play(client, 2)
            assert client.log.verify() == []
    with open_log(moved.store.url) as log:
        assert [b.batch_id for b in log.batches()] == [1, 2]
    with pytest.raises(NotRunning):
        trinity_es.connect(moved)
