"""What a killed writer leaves in SQLite's write-ahead log is no damage; a changed frame that counts is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import sample_log
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.checks import sqlite_file
from trinity_es.events.store.database.file_identity import frames_in_use
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import verify_log

FRAME = 24 + 4096

KILLED = """
import os, signal, sqlite3, sys
path, how = sys.argv[1:]
database = sqlite3.connect(path, isolation_level=None)
database.execute("PRAGMA wal_autocheckpoint=0")
database.execute("PRAGMA cache_size=5")  # pages: what does not fit is written before the commit
with open(path + "-shm", "r+b") as index:
    counted = index.read(96)
    database.execute("BEGIN IMMEDIATE")
    database.execute("UPDATE es_stream SET version = version + 1")
    database.execute("CREATE TABLE large AS SELECT randomblob(3000) FROM es_event LIMIT 60")
    if how == "before it is counted":
        database.execute("COMMIT")
        index.seek(0)
        index.write(counted)
        index.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def append(log: EventLog, name: str) -> None:
    retired = ev.RunnerRetired(runner=name, incarnation=1)
    log.append([Write(stream=f"runner/{name}", expected_version=0, events=[retired])], commit_id=name)


@pytest.fixture(params=["before its commit", "before it is counted"])
def left(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A log at work: a writer was killed in a large commit, `request.param`, and a small one was written since."""
    monkeypatch.setattr(sqlite_file, "PAUSE", 0.0)
    path = tmp_path / "log.db"
    sample_log.make(str(path), batches=2, tasks=4, payloads=False)
    with EventLog.open(str(path), durability="process", projectors=projectors()) as log:
        append(log, "before")
        done = subprocess.run([sys.executable, "-c", KILLED, str(path), request.param], check=False)
        assert done.returncode == -9
        append(log, "after")
        assert log.head().position == verify_log(str(path)).events
        yield path


def copied(log: Path, to: Path) -> Path:
    """The file, its write-ahead log and the index of that, as they are."""
    to.mkdir()
    for beside in ("", "-wal", "-shm"):
        shutil.copy(f"{log}{beside}", to)
    return to / log.name


def test_a_commit_that_a_killed_writer_left_half_written_is_no_change(
    request: pytest.FixtureRequest, left: Path, tmp_path: Path
) -> None:
    [counted] = frames_in_use(left).values()
    assert Path(f"{left}-wal").stat().st_size > 32 + (counted + 40) * FRAME, "much of it is left"
    assert verify_log(str(left)).problems == []
    with open_log(str(left)) as log:
        assert log.verify() == []
    copy = copied(left, tmp_path / "all of them dead")
    assert verify_log(str(copy)).problems == []
    if request.node.callspec.params["left"] == "before its commit":
        Path(f"{copy}-shm").unlink()
        assert verify_log(str(copy)).problems == [], "also where no index can tell: no commit follows"


def test_a_changed_frame_that_counts_is_found_beside_it_also_by_who_comes_second(left: Path, tmp_path: Path) -> None:
    [counted] = frames_in_use(left).values()
    for number in (1, counted // 2, counted - 1):
        copy = copied(left, tmp_path / str(number))
        wal = bytearray(Path(f"{copy}-wal").read_bytes())
        wal[32 + number * FRAME - 100] ^= 1
        Path(f"{copy}-wal").write_bytes(wal)
        for who in ("the first", "the second", "who has no index"):
            problems = verify_log(str(copy)).problems
            assert [p for p in problems if f"-wal: frame {number} (" in p], (who, number, problems)
            if who == "the second":
                Path(f"{copy}-shm").unlink()
