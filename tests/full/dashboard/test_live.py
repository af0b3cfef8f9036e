"""What pages hear of the log: nothing is missed, whatever happens to the log meanwhile."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from starlette.testclient import TestClient

from tests.helpers.browser import serving
from tests.helpers.handmade import copied, finished, history, put_back, unit, write
from tests.helpers.pages import Listener, append
from trinity_es.dashboard import app, live, tokens
from trinity_es.dashboard.app import create_app
from trinity_es.dashboard.live import Tail, messages
from trinity_es.dashboard.page_urls import PageRequest
from trinity_es.dashboard.pages import rollouts
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors


@asynccontextmanager
async def tail_of(path: str) -> AsyncIterator[Tail]:
    tail = Tail(path, interval=0.01)
    await tail.start()
    try:
        yield tail
    finally:
        await tail.stop()


async def test_a_page_is_told_what_came_after_the_position_that_it_knows(hand: str) -> None:
    async with tail_of(hand) as tail:
        known = tail.position
        page = Listener(tail, known)
        append(hand, "a", "b")
        assert await page.until("log") == (
            known + 2, {"position": known + 2, "events": 2, "streams": ["runner/a", "runner/b"]}
        )
        append(hand, "a")
        assert await page.until("log") == (known + 3, {"position": known + 3, "events": 1, "streams": ["runner/a"]})


async def test_who_connects_again_is_told_the_rest_and_nothing_twice(hand: str) -> None:
    async with tail_of(hand) as tail:
        known = tail.position
        append(hand, "a")
        ident, _ = await Listener(tail, known).until("log")
        assert ident == known + 1
        append(hand, "b")
        append(hand, "c")
        counted = 0
        page = Listener(tail, ident)  # as a browser does it, with Last-Event-ID
        while ident < known + 3:
            ident, told = await page.until("log")
            counted += int(str(told["events"]))
            assert "runner/a" not in (told["streams"] or [])
        assert counted == 2


@asynccontextmanager
async def pages_of(path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[httpx.AsyncClient, Tail]]:
    """A dashboard whose tail looks when it is told to."""
    tail = Tail(path, interval=3600)
    monkeypatch.setattr(app, "Tail", lambda url: tail)
    made = app.create_app(path)
    transport = httpx.ASGITransport(made)
    async with made.router.lifespan_context(made), httpx.AsyncClient(
        transport=transport, base_url="http://localhost"
    ) as client:
        yield client, tail


async def stream_of(client: httpx.AsyncClient, tail: Tail) -> tuple[int, AsyncIterator[bytes]]:
    """The position that a page shows, and the stream that it asks for, once it was answered."""
    html = (await client.get("/events")).text
    found = re.search(r'data-position="(\d+)" data-generation="(\w+)"', html)
    position, stream = int(found[1]), messages(tail, int(found[1]), found[2])
    assert f'<output id="position">{position}</output>' in html
    assert [await anext(stream), await anext(stream)] == [b"retry: 1000\n\n", live._message("notice", {"text": ""})]
    return position, stream


async def test_a_page_ahead_of_the_tail_is_not_asked_for_again(hand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pages_of(hand, monkeypatch) as (client, tail):
        append(hand, "a")  # the tail looks a moment later
        position, stream = await stream_of(client, tail)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.wait([first], timeout=0.05)
        assert not first.done(), "nothing is told: what the page shows is what the tail knows"
        append(hand, "b")
        await tail._read_end()
        told = await asyncio.wait_for(first, 20)
        assert told == live._message("log", {"position": position + 2, "events": 2,
                                             "streams": ["runner/a", "runner/b"]}, position + 2)


async def test_what_comes_while_a_page_is_made_is_told_to_it(hand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pages_of(hand, monkeypatch) as (client, tail):
        known, loop, asked = tail.position, asyncio.get_running_loop(), app.PageRequest

        def and_meanwhile(**values: Any) -> app.PageRequest:
            ask = asked(**values)
            append(hand, "a")
            asyncio.run_coroutine_threadsafe(tail._read_end(), loop).result(20)
            return ask

        monkeypatch.setattr(app, "PageRequest", and_meanwhile)
        position, stream = await stream_of(client, tail)
        assert (position, tail.position) == (known, known + 1)
        told = await asyncio.wait_for(anext(stream), 20)
        assert told == live._message("log", {"position": known + 1, "events": 1, "streams": ["runner/a"]}, known + 1)


async def test_more_than_the_tail_remembers_is_counted_all_the_same(hand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_REMEMBERED", 3)
    async with tail_of(hand) as tail:
        known = tail.position
        append(hand, *(f"r{i}" for i in range(10)))
        ident, told = await Listener(tail, known).until("log")
        assert (ident, told["events"], told["streams"]) == (known + 10, 10, None)


async def test_a_server_that_starts_anew_tells_what_was_missed(hand: str) -> None:
    async with tail_of(hand) as tail:
        known, generation = tail.position, tail.generation
    append(hand, "a", "b", "c")
    async with tail_of(hand) as tail:
        ident, told = await Listener(tail, known, generation).until("log")
        assert (ident, told["events"]) == (known + 3, 3)


async def test_another_log_in_its_place_has_the_page_begin_anew(hand: str, tmp_path: Path) -> None:
    async with tail_of(hand) as tail:
        page = Listener(tail, tail.position)
        other = tmp_path / "other.sqlite"
        with EventLog.open(str(other), create=True, durability="process", projectors=projectors()):
            pass
        for name in tmp_path.glob("log.sqlite*"):
            name.unlink()
        shutil.move(other, hand)
        assert (await page.until("reset"))[0] == 0


async def test_who_connects_again_to_another_log_or_to_a_copy_of_before_begins_anew(hand: str, tmp_path: Path) -> None:
    copied(Path(hand), tmp_path / "copy")
    append(hand, "a")
    async with tail_of(hand) as tail:
        known, generation = tail.position, tail.generation
    put_back(tmp_path / "copy", Path(hand))
    async with tail_of(hand) as tail:
        assert await Listener(tail, known, generation).until("reset") == (known - 1, {"position": known - 1})
    write(tmp_path / "other", [("runner/x", [ev.RunnerRetired(runner="x", incarnation=1)] * (known + 5))])
    put_back(tmp_path / "other", Path(hand))
    async with tail_of(hand) as tail:
        assert await Listener(tail, known, generation).until("reset") == (known + 5, {"position": known + 5})


async def test_another_history_at_the_same_positions_has_the_page_begin_anew(hand: str, tmp_path: Path) -> None:
    async with tail_of(hand) as tail:
        known = ident = tail.position
        page = Listener(tail, known)
        append(hand, "a")
        copied(Path(hand), tmp_path / "copy")
        append(hand, "b")
        while ident is not None and ident < known + 2:
            ident, _ = await page.until("log")
        append(str(tmp_path / "copy"), "c")
        put_back(tmp_path / "copy", Path(hand))
        await page.until("reset")
        await tail._read_end()
        assert tail.position == known + 2
        page = Listener(tail, known + 2)
        append(hand, "d")
        assert (await page.until("log"))[1]["streams"] == ["runner/d"], "and then on as ever"


async def test_a_log_that_goes_away_is_a_notice_and_its_return_ends_it(hand: str, tmp_path: Path) -> None:
    async with tail_of(hand) as tail:
        page = Listener(tail, tail.position)
        away = tmp_path / "away"
        shutil.move(hand, away)
        assert await page.until("notice") == (None, {"text": ""}), "what a page showed before is over"
        _, told = await page.until("notice")
        assert "log.sqlite" in str(told["text"])
        shutil.move(away, hand)
        while told["text"]:
            _, told = await page.until("notice")
        append(hand, "a")
        assert (await page.until("log"))[1]["events"] == 1


@pytest.fixture
def locked(hand: str) -> Iterator[str]:
    """The log while another process holds all of it, as a program does that was stopped in the middle of it."""
    with sqlite3.connect(hand, isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        yield hand
        connection.execute("COMMIT")
    connection.close()


async def test_a_locked_log_is_a_notice(locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(locked, interval=0.01)
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.0)
    try:
        await asyncio.wait_for(tail.start(), 30)
        assert "locked" in tail.notice
    finally:
        await tail.stop()


async def test_a_page_ends_with_the_server(hand: str) -> None:
    async with tail_of(hand) as tail:
        page = messages(tail, tail.position, tail.generation)
        assert [await anext(page), await anext(page)] == [b"retry: 1000\n\n", live._message("notice", {"text": ""})]
        waiting = asyncio.ensure_future(anext(page, b"over"))
        await asyncio.sleep(0.05)
    assert await asyncio.wait_for(waiting, 10) == b"over"


def test_a_browser_that_connects_again_says_which_event_it_heard_last(hand: str) -> None:
    with serving(hand) as dashboard, httpx.Client(timeout=20) as client:

        def told(**headers: str) -> dict[str, object]:
            """The first message that tells of events."""
            address = f"{dashboard.url}/live?after=3"
            with client.stream("GET", address, headers={k.replace("_", "-"): v for k, v in headers.items()}) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                data = next(line for line in answer.iter_lines() if line.startswith('data: {"position"'))
            return dict(orjson.loads(data.removeprefix("data:")))

        first = told()
        last = int(str(first["position"]))
        assert first["events"] == last - 3
        append(hand, "a", "b")
        assert told(last_event_id=str(last)) == {"position": last + 2, "events": 2, "streams": ["runner/a", "runner/b"]}


# --- a log that was put back to a copy: no page shows what the server keeps of another history ------------------------
PATHS = [
    "/", "/batches", "/batch?id=open", "/batch?id=9", "/events", "/rollouts", "/rollouts?id=open", "/rollouts?id=9",
    "/rollout?id=9&task=0&run=0", "/runners", "/runner?name=runner-0", "/weights", "/weights?version=6",
    "/compare?id=3&id2=9",
]


def went_on(path: Path, reward: float) -> None:
    """As many events of the same types in every history: they differ by values alone."""
    nine: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=9, batch_type="train", repeat_times=[2], tasks=[{}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0)], model_version=6),
        finished(0, None, reward=reward),
    ]
    state = fold(nine)
    nine.append(ev.BatchFinalized(result=batch_result(state), model_versions=[(round(reward * 100), 6)]))
    write(path, [
        ("system", [ev.SystemConfigured(config={"name": f"run {reward}"})]),
        ("weights", [ev.WeightsPublished(version=6, path=f"/ckpt/{reward}")]),
        ("runner/runner-0", [ev.WeightsLoaded(runner="runner-0", incarnation=1, version=6, seconds=reward),
                             ev.RunnerLost(runner="runner-0", incarnation=1, reason=f"as of {reward}")]),
        (batch_stream("open"), [finished(0, None, reward=reward)]),
        (batch_stream(9), nine),
    ])


def test_pages_show_the_history_that_was_put_back_and_what_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "time", SimpleNamespace(time=lambda: 2e9))  # pages tell how long ago something was
    path, copy = tmp_path / "log.sqlite", tmp_path / "copy.sqlite"
    write(path, history("0" * 64))
    copied(path, copy)

    def shown(client: TestClient) -> dict[str, str]:
        """The part of each page that is the log's."""
        answers = {asked: client.get(asked).text for asked in PATHS}
        return {a: re.sub(r"(?s).*<main|</main>.*", "", text) for a, text in answers.items()}

    def as_a_new_server_does(client: TestClient) -> dict[str, str]:
        found = shown(client)
        with TestClient(create_app(str(path)), base_url="http://localhost") as anew:
            wanted = shown(anew)
        for asked in PATHS:
            assert found[asked] == wanted[asked], f"{asked} shows what was kept"
        return found

    with TestClient(create_app(str(path)), base_url="http://localhost") as client:
        went_on(path, 0.25)
        one = as_a_new_server_does(client)
        put_back(copy, path)
        shorter = as_a_new_server_does(client)
        went_on(path, 0.5)
        two = as_a_new_server_does(client)
        put_back(copy, path)
        went_on(path, 0.75)  # nobody looked in between
        three = as_a_new_server_does(client)
    for asked in PATHS:
        assert len({pages[asked] for pages in (one, shorter, two, three)}) == 4, f"{asked} tells the histories apart"


def test_the_tokenizer_is_that_of_the_config_that_was_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def decoder(config: dict[str, Any]) -> tuple[None, str]:
        asked.append(config["name"])
        return None, asked[-1]

    monkeypatch.setattr(tokens, "decoder", decoder)
    path, copy = tmp_path / "log.sqlite", tmp_path / "copy.sqlite"
    write(path, history("0" * 64))
    copied(path, copy)
    for reward in (0.25, 0.5):
        put_back(copy, path)
        went_on(path, reward)
        with open_log(str(path)) as log:
            ask = PageRequest(log=log, path="/rollout", query={}, position=0, now=0.0)
            assert rollouts._decoder(ask) == rollouts._decoder(ask) == (None, f"run {reward}")
    assert asked == ["run 0.25", "run 0.5"], "loaded once for each"
