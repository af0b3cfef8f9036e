"""Every command and page reads the same from both databases, on equal events with hostile texts, one of a megabyte."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from sqlalchemy import event, text
from starlette.testclient import TestClient

from benchmarks.sample_log import make
from benchmarks.sample_run import START, TimedLog
from tests.helpers.handmade import cli
from tests.helpers.timed_logs import long_batch
from trinity_es.client.argument_checks import whole_number
from trinity_es.dashboard.app import create_app
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.testing import wait_until

pytestmark = pytest.mark.postgres

LONG = "[red]no markup[/red]" + "<script>alert(1)</script>\x1b[31m\0" * 40_000
NOW = START + 86_400


def fill(url: str) -> None:
    make(url, batches=11, tasks=5, seed=4, hostile=True, dead=True)
    long = [*long_batch(url, LONG), ev.TaskDropped(tasks=[0], reason=LONG)]
    weights: list[ev.Event] = [ev.WeightsPublished(version=5, path=LONG, method="m\0" * 3000)]
    lost: list[ev.Event] = [ev.RunnerLost(runner="runner-0", incarnation=99, reason=LONG)]
    with TimedLog.open(url, durability="process", projectors=projectors()) as log:
        log.times = [NOW - 3600.0] * 9
        log.append([
            Write(stream=stream, expected_version=log.stream_version(stream), events=events)
            for stream, events in (("batch/long", long), ("weights", weights), ("runner/runner-0", lost))
        ], commit_id="long")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, postgres: Callable[[], str]) -> list[str]:
    urls = [str(tmp_path_factory.mktemp("both") / "log.sqlite"), postgres()]
    for url in urls:
        fill(url)
    return urls


@pytest.fixture(autouse=True)
def _at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """"For 3 s" is the same on both."""
    monkeypatch.setattr(time, "time", lambda: NOW)


def same(said: str, url: str) -> str:
    """Without where it was read, and how long that took."""
    for name in sorted({url, masked(url), escape(url), escape(masked(url))}, key=len, reverse=True):
        said = said.replace(name, "URL")
    said = re.sub("&#39;URL&#39;|'URL'", "URL", said)  # where a shell needs it
    said = said.replace("resume CONFIG", "resume URL")  # where a password is left out of the URL
    said = re.sub(r'(?<=title="URL">)[^<]*|postgresql\+psycopg://\S*…', "URL", said)  # cut to what has room
    return re.sub(r'"seconds": [0-9.e-]+|in [0-9.]+ s \([0-9,]+ events/s\)', "SECONDS", said)


COMMANDS: list[list[object]] = [
    ["batches"], ["batches", "--slowest", 3], ["batches", "--sort", "reward", "-n", 4, "-d"],
    ["batches", "--state", "finalized", "--type", "eval"], ["batches", "--since", 40],
    *(["batches", "--sort", sort] for sort in ("seconds", "staleness", "step", "type", "state", "trained")),
    ["show", 2], ["show", "long", "--all"], ["show", 2, "--task", 1], ["show", 2, "--task", 1, "--run", 0, "--all"],
    ["show", "long", "--task", 0, "--run", 0, "--all"], ["show", "nobody"],
    ["events"], ["events", "-n", 7, "--after", 30], ["events", "--last", 9], ["events", 2],
    ["events", "--type", "RunnerLost"], ["events", "--type", "TaskFinished", "--last", 4],
    ["events", "--type", "WeightsLoaded", "--last", 4], ["events", "--runner", "runner-1", "--last", 5],
    ["events", "--since", "2026-03-01T08:00:02+00:00", "-n", 3],
    ["replay", 2], ["replay", 2, "--at", 60], ["replay", 2, "--at", "2026-03-01T08:00:12+00:00"], ["replay", "long"],
    ["diff", 2, "--at", 60], ["diff", 2, "--at", 60, "--at", 70], ["why"], ["why", "long"], ["watch", "--once"],
    ["runners"], ["runners", "runner-0"], ["weights"], ["usage"], ["prompts"], ["prompts", "--never"], ["status"],
    ["what-if", 2, "--timeout", 1], ["verify"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(map(str, c)))
def test_a_command_says_the_same(both: list[str], command: list[object]) -> None:
    for form in ([], ["--json"]):
        done = [cli(*command, *form, "--log", url) for url in both]
        said = [(d.exit_code, same(d.stdout, url), same(d.stderr, url)) for d, url in zip(done, both, strict=True)]
        assert said[0] == said[1]
        assert said[1][0] in ((0, 1) if "nobody" not in command else (2,)), said[1]
        assert said[1][1] or "nobody" in command


def test_exports_are_the_same(both: list[str], tmp_path: Path) -> None:
    kinds = {"--experiences": "e.jsonl", "--events": "v.jsonl", "--trace": "t.json"}
    for options in (["--as-made", "long"], []):
        found: list[list[str]] = []
        for url in both:
            done = cli("export", *options, *(a for k, f in kinds.items() for a in (k, tmp_path / f)), "--force",
                       "--log", url)
            assert done.exit_code == 0, done.output
            found.append([(tmp_path / f).read_text() for f in kinds.values()])
        assert found[0] == found[1]
    pages = []
    for url in both:
        assert cli("export", 2, "--html", tmp_path / "p.html", "--force", "--log", url).exit_code == 0
        pages.append(same((tmp_path / "p.html").read_text(), url))
    assert pages[0] == pages[1]


def test_the_two_are_one_log(both: list[str]) -> None:
    """By their hashes; and the read models were made again from the events on each."""
    done = cli("diff", *both, "--json")
    assert done.exit_code == 0, done.output
    for url in both:
        assert cli("rebuild", "--log", url).exit_code == 0
        assert json.loads(cli("verify", "--json", "--log", url).stdout)["problems"] == []


@pytest.fixture(scope="module")
def clients(both: list[str]) -> Iterator[list[TestClient]]:
    with TestClient(create_app(both[0]), base_url="http://localhost") as one, \
            TestClient(create_app(both[1]), base_url="http://localhost") as other:
        yield [one, other]


def body(client: TestClient, path: str, url: str) -> tuple[int, str]:
    with open_log(url) as log:
        generation = log.head().generation
    answer = client.get(path)
    return answer.status_code, same(answer.text.replace(generation, "GENERATION"), url)


OF_LONG = ["/batch?id=long", "/rollouts?id=long", "/rollout?id=long&task=0&run=0"]
"""Pages of a batch with texts of a megabyte take a while: not all of them."""


def test_every_page_is_the_same(both: list[str], clients: list[TestClient]) -> None:
    """From the first one by its links, a few of each kind."""
    left, seen, kinds = deque(["/", "/metrics", "/events?kind=rare", *OF_LONG]), set[str](), Counter[str]()
    while left:
        path = left.popleft()
        parts = urlsplit(path)
        if path in seen or kinds[parts.path] >= 3:
            continue
        seen.add(path)
        kinds[parts.path] += 1
        one, other = (body(client, path, url) for client, url in zip(clients, both, strict=True))
        assert one == other, path
        assert one[0] == 200, (path, one)
        links = re.findall(r'href="([^"#]*)', one[1])
        left.extend(re.sub("&amp;|&#38;", "&", link) for link in links if link.startswith(("/", "?"))
                    and not re.match("/static/|.*id=long", link))
    assert {"/", "/batch", "/rollout", "/runner", "/weights", "/events"} <= {urlsplit(p).path for p in seen}
    assert len(seen) > 20


NOBODY = ["a\0b", "\0", "\x1b[31m", "a\nb"]


@pytest.mark.parametrize("name", [*NOBODY, "\ud800"], ids=repr)
def test_a_name_that_no_batch_can_have_is_not_found(both: list[str], clients: list[TestClient], name: str) -> None:
    for url, client in zip(both, clients, strict=True):
        with open_log(url) as log:
            asked: list[Callable[[Any], Any]] = [log.replay, log.events, log.batch_row, log.why, log.check_result]
            for ask in asked:
                with pytest.raises(BatchNotFound):
                    ask(name)
        quoted = quote(name, errors="surrogatepass")
        for path in (f"/batch?id={quoted}", f"/rollouts?id={quoted}", f"/rollout?id={quoted}&task=0&run=0",
                     f"/runner?name={quoted}", f"/compare?id={quoted}&at=9&id2={quoted}&at2=12"):
            answer = client.get(path)
            assert answer.status_code == 404 or (path[:4], answer.status_code) == ("/com", 200), (url, path)


def test_rebuild_beside_a_live_writer_is_safe(store_url: str) -> None:
    """It has the writer's turn while it works: the writer waits, and what it writes then is in the new tables."""
    stop, written = threading.Event(), list[int]()

    def work() -> None:
        with EventLog.open(store_url, create=True, durability="process", projectors=projectors()) as log:
            while not stop.is_set():
                i = len(written)
                opened = ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1], tasks=[{}])
                log.append([Write(stream=f"batch/{i}", expected_version=0, events=[opened])], commit_id=f"b{i}")
                written.append(i)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        wait_until(lambda: len(written) > 5, what="the writer to write", timeout=30)
        for _ in range(5):
            before = len(written)
            done = cli("rebuild", "--json", "--log", store_url)
            assert done.exit_code == 0, done.output
            assert json.loads(done.stdout)["events"] >= before
            wait_until(lambda n=before: len(written) > n + 2, what="the writer to go on", timeout=30)  # type: ignore[misc]  # mypy can't infer a lambda with defaults
    finally:
        stop.set()
        writer.join(30)
    with open_log(store_url) as log:
        assert [row.batch_id for row in log.batches()] == written
        assert log.verify() == []


def test_the_last_event_of_a_type_is_found_at_the_end_of_its_stream(postgres: Callable[[], str]) -> None:
    """PostgreSQL would read all of them: it takes the stream and the type for independent, and expects few rows."""
    url, pad = postgres(), "x" * 1000
    with EventLog.open(url, create=True, durability="process") as log:
        published = [ev.WeightsPublished(version=i, path=pad) for i in range(600)]
        log.append([Write(stream="weights", expected_version=0, events=published)], commit_id="c")
        with log.engine.begin() as connection:  # many more of something else
            connection.execute(text(
                "INSERT INTO es_event SELECT 1000 + g, 'batch/1', g, 'TasksDispatched', 1, '', '', 0, 'd', g, '' "
                "FROM generate_series(1, 40000) AS g"
            ))
        asked: list[tuple[str, Any]] = []
        event.listen(log.engine, "before_cursor_execute",
                     lambda _c, _cursor, statement, values, *_: asked.append((statement, values)))
        with log.engine.begin() as connection:
            connection.execute(text("ANALYZE es_event"))
        found = log.last("weights", "WeightsPublished")
        assert found.version == 600
        statement, values = asked[-1]
        with log.engine.connect() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", values).scalar()
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 20


def test_numbers_that_a_column_can_not_hold_are_refused_where_they_are_given() -> None:
    """A version or a step of the trainer; SQLite would take it, and the log could never move to PostgreSQL."""
    for number in (2**31, -(2**31), 10**400):
        with pytest.raises(DataError, match=r"version is .*: a whole number from 0 to 2147483647 is expected"):
            whole_number("version", number)
    assert whole_number("version", 2**31 - 1) == 2**31 - 1
