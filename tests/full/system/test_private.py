"""What a run makes is its user's alone: another local user can neither read it nor hold its locks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.systems import StartSystem, play_batch, scripted, tasks
from trinity_es.events.errors import AlreadyRunning, LogUnavailable, StartupError, SyncError
from trinity_es.events.store.log import EventLog
from trinity_es.system import lifecycle
from trinity_es.system.run_lock import RunLock
from trinity_es.weights import shared_memory

_HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may read: pytest's own is its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def held() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def hold(file: Path, held: list[subprocess.Popen[bytes]]) -> int:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    held.append(process)
    process.stdout.readline()
    return process.pid


def test_another_user_can_open_nothing_of_a_run_in_an_open_folder(folder: Path, start_system: StartSystem) -> None:
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to be another user")
    config = scripted(folder)
    log, logs = Path(config.store.url.removeprefix("sqlite:///")), Path(config.system.log_dir)
    for made in (log.parent, logs):
        made.mkdir(parents=True, exist_ok=True)
    for above in {log.parent, logs, *log.parent.relative_to(folder).parents, *logs.relative_to(folder).parents}:
        (folder / above).chmod(0o755)
    client = start_system(folder=folder, system={"keeper": True})
    play_batch(client, 1, tasks(2, folder / "ran", 0.0))
    with RunLock(config, "explorer")._file:
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        found = subprocess.run(
            [*nobody, "find", folder, "-type", "f", "-readable", "-print"], capture_output=True, text=True, check=False
        )
    made = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"start.lock", "guardian.log", f"{log.name}.lock", f"{log.name}-wal", f"{log.name}-shm"} <= made
    # What a user's own code writes has the mode that he chose.
    assert found.stdout.split() == ([str(folder / "ran")] if (folder / "ran").stat().st_mode & 0o004 else [])


def test_who_waits_for_a_lock_is_told_which_process_holds_it_and_waits_no_longer_than_it_should(
    tmp_path: Path, held: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = scripted(tmp_path)
    folder = Path(config.system.log_dir)
    folder.mkdir(parents=True)
    (folder / "start.lock").touch()
    pid = hold(folder / "start.lock", held)
    monkeypatch.setattr(lifecycle, "START_LOCK_SECONDS", 0.2)
    monkeypatch.setattr("trinity_es.events.private_files.TELL_SECONDS", 0.1)
    with pytest.raises(StartupError, match=f"process {pid} .*start.lock"):
        lifecycle.start(config)
    assert f"process {pid}" in caplog.text

    with EventLog.open(str(tmp_path / "log.db"), create=True, patience=0.2) as log:
        pid = hold(tmp_path / "log.db.lock", held)
        with pytest.raises(LogUnavailable, match=f"process {pid} "):
            log.acquire_lease("coordinator", {})

    file = RunLock._open(config, "explorer")
    file.close()
    pid = hold(Path(file.name) if isinstance(file.name, str) else next(folder.glob("explorer*.lock")), held)
    with pytest.raises(AlreadyRunning, match=f"process {pid} "):
        RunLock(config, "explorer")


def test_weights_are_not_written_into_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("needs root, to make a folder of another user")
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    theirs = shared_memory.memory_dir(scripted(tmp_path))
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 65534, 65534)
    with pytest.raises(SyncError, match="belongs to another user"):
        shared_memory._make_private(theirs)
