"""A PostgreSQL server that goes away while its log is read, and comes back: readers are told so, and miss nothing."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.helpers.faults import Server, Wire, rewind
from tests.helpers.handmade import ROOT
from tests.helpers.pages import Listener, append
from trinity_es.dashboard import live
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogRewound, LogUnavailable
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify import log as verifying
from trinity_es.projections.verify import tables
from trinity_es.projections.verify.log import verify_log
from trinity_es.testing import wait_until

pytestmark = pytest.mark.postgres


@pytest.fixture
def urls(own_server: Server, wire: Wire) -> tuple[str, str]:
    """The way to a new log that can be cut, and one that can't."""
    name = own_server.new_database()
    with EventLog.open(own_server.url(name), create=True, durability="process", projectors=projectors()):
        pass
    add(own_server.url(name), 3)
    return wire.url(name), own_server.url(name)


def add(url: str, count: int) -> None:
    with EventLog.open(url, durability="process", projectors=projectors()) as log:
        version = log.stream_version("batch/1")
        new: list[ev.Event] = [] if version else [
            ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1], tasks=[{}])]
        new += [ev.TasksDispatched(runner="r", incarnation=1, model_version=0, units=[])
                for _ in range(count - len(new))]
        log.append([Write(stream="batch/1", expected_version=version, events=new)], commit_id=f"batch {version}")


def impatient(url: str) -> Log:
    return Log(EventLog.open(url, read_only=True, patience=0.1), url)


class Command:
    def __init__(self, *words: str) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        # As the command line, with a log that is less patient: 20 s of silence would be 20 s of this test.
        code = ("import sys; from trinity_es.projections.reading import log_reader as reader\n"
                "from trinity_es.events.store.log import EventLog\n"
                "reader.open_log = lambda url: reader.Log(EventLog.open(url, read_only=True, patience=0.2), url)\n"
                "from trinity_es.cli import main; sys.exit(main())")
        self.process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))

    def says(self, lines: list[str], what: str, count: int = 1) -> None:
        wait_until(lambda: sum(what in line for line in lines) >= count or self.process.poll() is not None,
                   what=f"{what!r}, {count} times", timeout=60)
        assert sum(what in line for line in lines) == count, (self.out, self.err, self.process.poll())


@pytest.fixture
def started() -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*words: str) -> Command:
        commands.append(Command(*words))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait(30)


def test_events_f_waits_and_misses_nothing(urls: tuple[str, str], wire: Wire, started: Callable[..., Command]) -> None:
    following = started("events", "-f", "--json", "--log", urls[0])
    following.says(following.out, '"position":', 3)
    wire.cut()
    following.says(following.err, "waiting for the log: ")
    assert "can't be reached" in following.err[-1]
    add(urls[1], 5)
    wire.join()
    following.says(following.err, "the log is back")
    following.says(following.out, '"position":', 8)
    assert [int(re.findall(r'"position":\s*(\d+)', line)[0]) for line in following.out] == list(range(1, 9))


def test_watch_waits_for_the_server(urls: tuple[str, str], wire: Wire, started: Callable[..., Command]) -> None:
    watching = started("watch", "--every", "0.1", "--log", urls[0])
    watching.says(watching.out, "position 3 ")
    wire.cut()
    watching.says(watching.out, "waiting for the log: ")
    add(urls[1], 2)
    wire.join()
    watching.says(watching.out, "the log is back")
    watching.says(watching.out, "position 5 ")


def test_who_follows_a_log_that_comes_back_shorter_is_told(urls: tuple[str, str], wire: Wire) -> None:
    trouble: list[LogUnavailable | None] = []

    def away(error: LogUnavailable | None) -> None:
        trouble.append(error)
        if len(trouble) == 1:
            with EventLog.open(urls[1], durability="process") as log:
                rewind(log, 2)
            add(urls[1], 4)
            wire.join()

    with impatient(urls[0]) as log:
        following = log.follow(stop=lambda: False, interval=0.01, trouble=away)
        assert [next(following).position for _ in range(3)] == [1, 2, 3]
        wire.cut()
        with pytest.raises(LogRewound, match="no longer has the event read at position 3"):
            next(following)


def test_without_trouble_who_follows_gets_the_error(urls: tuple[str, str], wire: Wire) -> None:
    with impatient(urls[0]) as log:
        following = log.follow(stop=lambda: False, interval=0.01)
        assert next(following).position == 1
        wire.cut()
        with pytest.raises(LogUnavailable, match="can't be reached"):
            list(following)


async def test_a_page_s_stream_tells_it(urls: tuple[str, str], wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.1)
    tail = live.Tail(urls[0], interval=0.01)
    await tail.start()
    try:
        page = Listener(tail, 3)
        _, told = await page.until("notice")
        assert told["text"] == ""  # the first thing that a page hears
        wire.cut()
        _, told = await page.until("notice")
        assert "can't be reached" in str(told["text"])
        append(urls[1], "a", "b", "c")
        wire.join()
        _, told = await page.until("notice")
        assert told["text"] == ""
        assert await page.until("log") == (
            6, {"position": 6, "events": 3, "streams": ["runner/a", "runner/b", "runner/c"]}
        )
        add(urls[1], 1)
        assert (await page.until("log"))[0] == 7
    finally:
        await asyncio.wait_for(tail.stop(), 30)


def test_a_page_says_so_and_comes_back(
    urls: tuple[str, str], wire: Wire, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends between two queries of one page, and when the server refuses new ones too."""
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.3)
    with TestClient(create_app(urls[0]), base_url="http://localhost") as client:
        read, cut = Log.batches, [wire.cut]

        def batches(log: Log, **options: Any) -> Any:
            if cut:
                cut.pop()()
            return read(log, **options)

        monkeypatch.setattr(Log, "batches", batches)
        for path in ("/batches", "/batches"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "can&#39;t be reached" in answer.text
            assert "Traceback" not in answer.text
        assert client.get("/metrics").status_code == 503
        wire.join()
        assert client.get("/batches").status_code == 200
        cut.append(own_server.end_connections)
        assert client.get("/batches").status_code == 200  # a connection that ends is made again


def test_verify_accuses_no_log_whose_server_went_away(
    urls: tuple[str, str], wire: Wire, monkeypatch: pytest.MonkeyPatch, own_server: Server
) -> None:
    """In the last transaction, where a connection that is lost can't be made again."""
    parts = [(verifying._Fold, name) for name in ("_check_definitions", "_check_checkpoints", "_check_leases")]
    for place, part in [*parts, (tables, "_compare")]:
        whole = getattr(place, part)

        def ended(*given: Any, real: Any = whole) -> None:
            own_server.end_connections()
            real(*given)

        with monkeypatch.context() as patched:
            patched.setattr(place, part, ended)
            with pytest.raises(LogUnavailable, match="can't be reached"):
                verify_log(urls[0])
    assert verify_log(urls[0]).problems == []
