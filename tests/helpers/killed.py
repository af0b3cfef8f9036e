"""Processes that test_kill.py kills: a writer and a subscriber, started as `python -m tests.helpers.killed`.

The i-th commit of a writer is always the same: id, streams and events (`commit_of`). A restarted writer continues
after its acknowledged commits, and repeats the last one, like a client that lost the answer.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from pathlib import Path

from tests.helpers.projectors import Counts
from trinity_es.events.errors import ConcurrencyError
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.vocabulary import TaskDropped

SHARED = 4


def commit_of(writer: int, i: int) -> tuple[str, dict[str, list[TaskDropped]]]:
    """Return id and events by stream of a writer's i-th commit: its own stream, and a shared one."""
    commit_id = f"w{writer}-{i}"
    events = [TaskDropped(tasks=[writer, i, k], reason=commit_id) for k in range(1 + i % 3)]
    return commit_id, {f"own/{writer}": events[:1], f"shared/{i % SHARED}": events}


def acknowledged(acks: Path) -> list[list[str]]:
    """Return `[commit id, first position, last position]` of acknowledged commits. A torn last line is skipped."""
    if not acks.exists():
        return []
    return [line.split() for line in acks.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write(url: str, folder: Path, writer: int, ready: Path) -> None:
    log = EventLog.open(url, durability="process", projectors=[Counts()], patience=30)
    acks = folder / f"acks-{writer}"
    done = acknowledged(acks)
    i = max((int(a[0].split("-")[1]) for a in done), default=0)
    this_life = 0
    out = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while not (folder / "stop").exists():
        commit_id, by_stream = commit_of(writer, i)
        while True:
            writes = [Write(stream=s, expected_version=log.stream_version(s), events=e) for s, e in by_stream.items()]
            try:
                committed = log.append(writes, commit_id=commit_id)
                break
            except ConcurrencyError:
                continue
        os.write(out, f"{commit_id} {committed.first_position} {committed.last_position}\n".encode())
        i, this_life = i + 1, this_life + 1
        if this_life == 4:  # the first commit may only repeat one of an earlier process
            ready.touch()
    log.close()


def subscribe(url: str, folder: Path, ready: Path) -> None:
    """Store each position of the log exactly once, in the subscriber's own database."""
    log = EventLog.open(url, durability="process")
    mine = sqlite3.connect(folder / "seen.db", isolation_level=None)
    mine.execute("CREATE TABLE IF NOT EXISTS seen (position INTEGER PRIMARY KEY, stream TEXT, version INTEGER)")
    ready.touch()
    while not (folder / "stop-reading").exists():
        last = mine.execute("SELECT coalesce(max(position), 0) FROM seen").fetchone()[0]
        found = [(r.position, r.stream, r.version) for r in log.read(after=last, limit=100)]
        mine.execute("BEGIN")
        mine.executemany("INSERT INTO seen VALUES (?, ?, ?)", found)
        mine.execute("COMMIT")
        time.sleep(0 if found else 0.01)
    mine.close()
    log.close()


if __name__ == "__main__":
    role, url_, folder_, ready_ = sys.argv[1:5]
    if role == "subscriber":
        subscribe(url_, Path(folder_), Path(ready_))
    else:
        write(url_, Path(folder_), int(role), Path(ready_))
