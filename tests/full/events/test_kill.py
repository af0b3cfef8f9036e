"""Writers and a subscriber under SIGKILL at random moments: what was acknowledged is in the log, once."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.killed import acknowledged, commit_of
from tests.helpers.of_the_day import ALL, DAY
from tests.helpers.paths import ROOT
from tests.helpers.projectors import Counts, counts
from trinity_es.events.store.log import EventLog, Recorded

WRITERS = 3
KILLS = 52 if ALL else 24


class Cast:
    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._lives = url, folder, 0
        self._ready: dict[str, Path] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        self._lives += 1
        self._ready[role] = self._folder / f"ready-{self._lives}"
        command = [sys.executable, "-m", "tests.helpers.killed", role, self._url, str(self._folder)]
        with (self._folder / f"stderr-{role}").open("ab") as errors:
            self.processes[role] = subprocess.Popen([*command, str(self._ready[role])], cwd=ROOT, stderr=errors)

    def is_working(self, role: str) -> bool:
        code = self.processes[role].poll()
        assert code is None, f"{role} ended by itself ({code}): {self.said(role)}"
        return self._ready[role].exists()

    def said(self, role: str) -> str:
        return (self._folder / f"stderr-{role}").read_text()

    def kill(self, role: str) -> None:
        process = self.processes[role]
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL, self.said(role)

    def end(self, role: str) -> None:
        assert self.processes[role].wait(30) == 0, self.said(role)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_acknowledged_is_lost_or_doubled_when_writers_and_readers_are_killed_at_any_moment(
    store_url: str, tmp_path: Path
) -> None:
    EventLog.open(store_url, create=True, durability="process", projectors=[Counts()]).close()
    cast, chance = Cast(store_url, tmp_path), random.Random(DAY)
    roles = [*map(str, range(WRITERS)), "subscriber"]
    deadline = time.monotonic() + 240  # each kill costs the start of an interpreter, which a busy machine makes slow
    try:
        for role in roles:
            cast.start(role)
        kills = 0
        while kills < KILLS:
            assert time.monotonic() < deadline, f"only {kills} kills in time"
            role, early = chance.choice(roles), chance.random() < 0.02  # seldom while it starts, mostly at work
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that ends by itself is noticed at once
                cast.processes[role].wait(chance.uniform(0.0, 0.04))
            if cast.is_working(role) or early:
                cast.kill(role)
                cast.start(role)
                kills += 1
        (tmp_path / "stop").touch()
        for role in roles[:-1]:
            cast.end(role)
        with EventLog.open(store_url, durability="process") as log:
            _wait_until_seen(tmp_path, log.head().position, cast)
            (tmp_path / "stop-reading").touch()
            cast.end("subscriber")
            _judge(log, tmp_path)
    finally:
        for process in cast.processes.values():
            process.kill()
            process.wait()


def _wait_until_seen(folder: Path, position: int, cast: Cast) -> None:
    deadline = time.monotonic() + 30
    while True:
        last = None
        if (folder / "seen.db").exists():
            seen = sqlite3.connect(folder / "seen.db")
            try:
                last = seen.execute("SELECT max(position) FROM seen").fetchone()[0]
            except sqlite3.OperationalError:
                pass  # its table is not made yet
            finally:
                seen.close()
        if last == position:
            return
        assert time.monotonic() < deadline, f"the subscriber is at {last}, the log at {position}"
        assert cast.processes["subscriber"].poll() is None, cast.said("subscriber")
        with contextlib.suppress(subprocess.TimeoutExpired):
            cast.processes["subscriber"].wait(0.05)


def _judge(log: EventLog, folder: Path) -> None:
    recorded = list(log.read())
    assert [r.position for r in recorded] == list(range(1, log.head().position + 1))
    assert log.verify() == []

    by_commit: dict[str, list[Recorded]] = defaultdict(list)
    for r in recorded:
        by_commit[r.commit_id].append(r)
    assert len(by_commit) > KILLS, "the writers hardly wrote: the test proves little"
    for writer in range(WRITERS):
        done = sorted(int(c.split("-")[1]) for c in by_commit if c.startswith(f"w{writer}-"))
        assert done == list(range(len(done))), f"writer {writer} has a hole in its commits"
        for i in done:
            commit_id, by_stream = commit_of(writer, i)
            found = by_commit[commit_id]
            assert [(r.stream, r.event) for r in found] == [(s, e) for s, es in by_stream.items() for e in es]
            assert all(b.position == a.position + 1 for a, b in pairwise(found))
        for commit_id, first, last in acknowledged(folder / f"acks-{writer}"):
            found = by_commit[commit_id]
            assert found, f"{commit_id} was acknowledged and is lost"
            assert (found[0].position, found[-1].position) == (int(first), int(last))

    versions: dict[str, list[int]] = defaultdict(list)
    for r in recorded:
        versions[r.stream].append(r.version)
    assert all(v == list(range(1, len(v) + 1)) for v in versions.values())
    assert dict(log.streams()) == {s: len(v) for s, v in versions.items()}
    assert counts(log) == Counter(r.stream for r in recorded), "the read model in the log's database is not exact"

    seen = sqlite3.connect(folder / "seen.db")
    try:
        rows = seen.execute("SELECT position, stream, version FROM seen ORDER BY position").fetchall()
    finally:
        seen.close()
    assert rows == [(r.position, r.stream, r.version) for r in recorded], "the subscriber's own table is not exact"
