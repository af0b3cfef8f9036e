"""Types of pages and of requests for them, and links between pages.

A page is made by a function from a `PageRequest` to a `Page`. It runs in a thread and may read the log. URLs pass
values only as query parameters, because a batch's id may contain any character, including `/` and `..`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from trinity_es.events.errors import BatchNotFound
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.safe_text import batch_named

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log

__all__ = [
    "Attachment", "Nav", "Page", "PageRequest", "Route", "batch_id_of", "batch_ref", "batch_url", "link", "rollout_url",
    "rollouts_url", "runner_url", "weights_url",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nav:
    """Entry of the navigation bar. The keys `g` and then `key` open its page."""

    name: str
    title: str
    path: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    template: str
    title: str
    nav: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    watch: tuple[str, ...] | None = None
    """Streams (or prefixes ending in `/`) whose new events make the browser reload the page; None: all streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Text that the browser saves as a file."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Route:
    """Path of a page or attachment, with the function that makes it."""

    path: str
    make: Callable[[PageRequest], Page | Attachment]


@dataclass(kw_only=True)
class PageRequest:
    log: Log
    path: str
    query: Mapping[str, str]
    position: int
    """The log's last position before the page began to read. `/live` reports later events."""
    now: float
    """Unix seconds."""
    open_other_log: Callable[[], Log] | None = None
    """Function that opens the second log, with which this one is compared; None if there is none."""
    server_values: dict[str, Any] = field(default_factory=dict)
    """Values that pages keep between requests, by name. All requests share this dict."""

    def text(self, name: str, default: str = "") -> str:
        return self.query.get(name, default)

    def choice(self, name: str, allowed: tuple[str, ...] | list[str], default: str = "") -> str:
        """Return the URL parameter `name` if its value is allowed, else the default."""
        value = self.query.get(name, default)
        return value if value in allowed else default

    def number(self, name: str, default: int = 0, *, low: int = 0, high: int = 2**53) -> int:
        """Return the URL parameter `name` as an integer, limited to `low` to `high`; else the default."""
        text = self.query.get(name, "")
        if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20):
            return default
        return min(max(int(text), low), high)

    def page_number(self, total: int, size: int) -> tuple[int, int]:
        """Return the number of the requested page of a list, and the number of pages with `size` rows each."""
        pages = max(1, -(-total // size))
        return self.number("page", 1, low=1, high=pages), pages

    def url(self, **changes: object) -> str:
        """Return the URL of this page with changed parameters. None removes a parameter."""
        return link(self.path, **{**self.query, **changes})

    def batch_id(self) -> BatchId:
        """Return the id of the batch that the URL parameter `id` names. Raises BatchNotFound."""
        return batch_id_of(self.log, self.text("id"))


def link(path: str, **query: object) -> str:
    """Return a URL of this server with these parameters. Parameters that are None are left out."""
    values = {k: str(v) for k, v in query.items() if v is not None}
    return f"{path}?{urlencode(values)}" if values else path


def batch_ref(batch_id: BatchId) -> str:
    """Return a batch's name in URLs: 12 for the number 12, '12' in quotes for the text "12"."""
    return batch_stream(batch_id).removeprefix("batch/")


def batch_id_of(log: Log, ref: str) -> BatchId:
    """Return the id of the batch with this name in URLs. Raises BatchNotFound."""
    if (batch_id := batch_named(log, ref)) is not None:
        return batch_id
    raise BatchNotFound(f"there is no batch {ref!r} in {log.url}: the page /batches lists all batches")


def batch_url(batch_id: BatchId, **query: object) -> str:
    return link("/batch", id=batch_ref(batch_id), **query)


def rollout_url(batch_id: BatchId, task: int, run: int) -> str:
    return link("/rollout", id=batch_ref(batch_id), task=task, run=run)


def rollouts_url(batch_id: BatchId, **query: object) -> str:
    return link("/rollouts", id=batch_ref(batch_id), **query)


def runner_url(name: str) -> str:
    return link("/runner", name=name)


def weights_url(version: int | None = None) -> str:
    return link("/weights", version=version)
