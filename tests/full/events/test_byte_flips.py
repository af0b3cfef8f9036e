"""D4: one byte changed anywhere in a log's database file or payloads is found and named, or changes nothing that it
says.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import sample_log
from tests.helpers.logs import answers
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.checks.log_end import MemoryFile
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import verify_log

NAMES = {"es_event": "position", "es_stream": "stream", "es_log_head": "head", "es_lease": "lease",
         "es_checkpoint": "checkpoint"}
"""What a problem calls a table; the read models are called by their names."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with something in every table, and its payloads; nobody has it open."""
    path = tmp_path_factory.mktemp("sound") / "log.db"
    sample_log.make(str(path), batches=4, tasks=6, seed=3)
    store = open_payloads(str(path))
    digest = store.put(b"what the proxy answered")
    store.put(b"no event names this")
    store.close()
    with EventLog.open(str(path), durability="process", projectors=projectors()) as log:
        log.append([Write(stream="answers", expected_version=0, events=answers(digest))], commit_id="answers")
    found = verify_log(str(path))
    assert found.problems == []
    assert found.payloads > 5
    assert [n.partition(" ")[2].partition(":")[0] for n in found.notes] == ["payloads are named by no event"]
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(f"{sound}.payloads", f"{tmp_path / 'log.db'}.payloads")
    return Path(shutil.copy(sound, tmp_path / "log.db"))


def write(path: Path, data: bytes, at: int, by: int) -> None:
    path.write_bytes(data[:at] + bytes([data[at] ^ by]) + data[at + 1 :])


def said(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of all tables, the definitions (white space is as good as any other), what SQLite finds wrong."""
    with closing(sqlite3.connect(path)) as connection:
        rows = {"": [(kind, name, table, " ".join(sql.split()) if sql else sql) for kind, name, table, sql in
                     connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")]}
        rows["the database file"] = connection.execute("PRAGMA integrity_check").fetchall()
        for kind, name, _, _ in rows[""]:
            if kind == "table":
                rows[str(name)] = connection.execute(f"SELECT * FROM {name}").fetchall()
        return rows


def differing(path: Path, before: dict[str, list[tuple[object, ...]]]) -> list[str] | None:
    """Return the tables that say something else than before; None where they can't all be read."""
    try:
        now = said(path)
    except (sqlite3.Error, UnicodeDecodeError):
        return None
    return [name for name in before if now.get(name) != before[name]]


def test_d4_a_byte_changed_at_a_hundred_random_places_is_found_and_named(
    copy: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, before, chance, hits = sound.read_bytes(), said(sound), random.Random(5), 0
    held = [at for at in range(100, len(data)) if data[at]]
    for at in [chance.randrange(len(data)) for _ in range(30)] + chance.sample(held, 60):
        for beside in ("-wal", "-shm"):
            Path(f"{copy}{beside}").unlink(missing_ok=True)
        write(copy, data, at, by := chance.randrange(1, 256))
        problems = verify_log(str(copy)).problems
        differs = differing(copy, before)
        hits += bool(problems)
        assert problems or differs == [], f"byte {at} ^ {by} was not found, and changes {differs}"
        told = "\n".join(problems)
        for table in differs or ():
            assert "the database file" in told or NAMES.get(table, table) in told, (at, by, table, problems)
    copy.write_bytes(data)
    files = sorted(p for p in Path(f"{copy}.payloads").rglob("*") if p.is_file())
    for _ in range(10):
        file = chance.choice(files)
        whole = file.read_bytes()
        write(file, whole, chance.randrange(len(whole)), chance.randrange(1, 256))
        problems = verify_log(str(copy)).problems
        file.write_bytes(whole)
        assert [file.name in problem for problem in problems] == [True], (file, problems)
        hits += 1
    with capsys.disabled():
        sys.stdout.write(f"\nD4: {hits} of 100 changed bytes found and named; the others changed nothing\n")
    assert hits >= 70


def test_what_sqlite_drops_after_a_changed_byte_of_the_write_ahead_log_is_told_by_what_the_host_remembers(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    """SQLite itself goes on without what was committed since, and says nothing."""
    written = tmp_path / "run" / "log.db"
    shutil.copytree(sound.parent, written.parent)
    with EventLog.open(str(written), durability="process", projectors=projectors()) as log:
        log.memory = MemoryFile.of(str(copy), copy.parent / "logs")
        for i in range(6):
            started = ev.RunnerRetired(runner=f"late-{i}", incarnation=1)
            log.append([Write(stream=f"runner/late-{i}", expected_version=0, events=[started])], commit_id=f"late {i}")
        end = log.head().position
        shutil.copy(written, copy)
        wal = Path(f"{written}-wal").read_bytes()
    assert len(wal) > 6 * 4096
    chance = random.Random(7)
    for at in [None, 5, *(chance.randrange(32, len(wal)) for _ in range(6))]:
        Path(f"{copy}-shm").unlink(missing_ok=True)
        write(Path(f"{copy}-wal"), wal, at or 0, 0 if at is None else chance.randrange(1, 256))
        problems = verify_log(str(copy)).problems
        assert [f"was at position {end}" in problem for problem in problems] == ([] if at is None else [True]), at
