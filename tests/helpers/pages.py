"""Contents of a dashboard page."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser

import orjson

from trinity_es.dashboard.live import Tail, messages
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.tables.read_models import projectors


class Seen(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def links(self) -> list[str]:
        return [href for _, attrs in self.elements if (href := attrs.get("href"))]


def append(path: str, *streams: str) -> None:
    """Append an event to each of these streams, in one commit."""
    with EventLog.open(path, durability="process", projectors=projectors()) as log:
        writes = [
            Write(stream=f"runner/{s}", expected_version=log.stream_version(f"runner/{s}"),
                  events=[ev.RunnerRetired(runner=s, incarnation=1)]) for s in streams
        ]
        log.append(writes, commit_id=f"at {log.head().position}")


class Listener:
    """Client of a page's event stream."""

    def __init__(self, tail: Tail, after: int, generation: str | None = None) -> None:
        self.stream = messages(tail, after, tail.generation if generation is None else generation)

    async def until(self, name: str) -> tuple[int | None, dict[str, object]]:
        """Return id and data of the next message of this name."""
        async with asyncio.timeout(20):
            async for block in self.stream:
                lines = dict(line.split(b": ", 1) for line in block.decode().encode().splitlines() if b": " in line)
                if lines.get(b"event") == name.encode():
                    ident = lines.get(b"id")
                    return None if ident is None else int(ident), orjson.loads(lines[b"data"])
        raise AssertionError(f"the stream ended without {name!r}")
