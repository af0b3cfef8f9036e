"""The processes of environments that misbehave: programs of these tests in place of an environment's Python."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.endpoint import until
from trinity_es.environments import environment_process as server_module
from trinity_es.environments import verifiers_tasks
from trinity_es.environments.environment_process import EnvironmentServer
from trinity_es.environments.installs import Installed
from trinity_es.environments.verifiers_tasks import ensure_tasks_file
from trinity_es.events.errors import EnvironmentFailed, TasksetError
from trinity_es.events.processes import process_start_time

HANGS = """#!/bin/sh
echo half > "$4"
sleep 600 &
tr '\\0' ' ' < /proc/$$/cmdline > {note}.command
echo $! > {note}
wait
"""
BABBLES = """
import os, socket, struct, sys, time

end = socket.socket(fileno=int(sys.argv[2]))

def send(data):
    end.sendall(struct.pack(">I", len(data)) + data)

send(b'{"id": 0, "result": {"pid": %d}}' % os.getpid())
end.recv(4)
send(b"no JSON")
time.sleep(600)
"""
DEAF = """
import json, os, socket, struct, sys, time

end = socket.socket(fileno=int(sys.argv[2]))

def send(message):
    data = json.dumps(message).encode()
    end.sendall(struct.pack(">I", len(data)) + data)

def receive():
    [size] = struct.unpack(">I", end.recv(4, socket.MSG_WAITALL))
    return json.loads(end.recv(size, socket.MSG_WAITALL))

receive()
send({"id": 0, "result": {"pid": os.getpid()}})
while True:
    message = receive()
    if "run" in message and message["run"] == "block":
        time.sleep(600)
    if "cancel" in message:
        send({"id": message["id"], "heard": True})
"""


def environment(folder: Path, python: str) -> Installed:
    """Return an environment whose Python is a program of this text."""
    program = folder / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(python)
    program.chmod(0o755)
    return Installed(name="odd", distribution="odd", packages=[], versions={"odd": "1"}, folder=folder)


async def test_an_environment_that_does_not_write_its_tasks_is_ended_with_what_it_started_and_no_secret_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    odd = environment(tmp_path / "odd", HANGS.format(note=note))
    monkeypatch.setattr(verifiers_tasks, "find", lambda name: odd)
    monkeypatch.setattr(verifiers_tasks, "TASKS_SECONDS", 5.0)
    with pytest.raises(TasksetError, match="its process was not done after 5 s"):
        ensure_tasks_file({"env": "odd", "config": {"taskset": {"key": "hush"}}})
    assert "verifiers_main.py tasks" in note.with_suffix(".command").read_text()
    assert "hush" not in note.with_suffix(".command").read_text()
    started = int(note.read_text())
    await until(lambda: process_start_time(started) is None, "what it had started to end")
    assert list((odd.folder / "tasks").iterdir()) == []


async def test_a_process_that_is_not_understood_fails_what_it_played_and_is_ended_and_reaped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "babbles.py"
    program.write_text(BABBLES)
    server = EnvironmentServer(
        environment(tmp_path / "odd", f'#!/bin/sh\nexec {sys.executable} "$@"\n'), program, {})
    await server.start()
    with pytest.raises(EnvironmentFailed, match="the process of environment odd has ended"):
        await asyncio.wait_for(server.ask({"run": {}}), 20)
    assert "the process of environment odd sent a malformed message" in caplog.text
    await until(lambda: not psutil.pid_exists(server.pid), "the process to be reaped")


async def test_a_process_that_does_not_hear_that_a_run_is_over_is_ended_and_one_that_does_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "deaf.py"
    program.write_text(DEAF)
    server = EnvironmentServer(
        environment(tmp_path / "odd", f'#!/bin/sh\nexec {sys.executable} "$@"\n'), program, {})
    await server.start()
    others = asyncio.create_task(server.ask({"run": "on"}))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.ask({"run": "on"}), 0.1)
    await until(lambda: not server._unconfirmed, "an answer to the cancel")
    assert not server.has_ended
    monkeypatch.setattr(server_module, "SILENT_SECONDS", 0.3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.ask({"run": "block"}), 0.1)
    with pytest.raises(EnvironmentFailed, match="the process of environment odd has ended"):
        await asyncio.wait_for(others, 20)
    assert "that a run is over: it is ended" in caplog.text
    await until(lambda: not psutil.pid_exists(server.pid), "the process to be reaped")
