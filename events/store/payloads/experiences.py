"""Experiences in the payload store: read by where the log says that they lie, and written as a batch delivers them.

What a batch delivers is mostly what its runs brought in, with some fields more. So a delivered payload refers to raw
ones, its sources, and holds what differs; whoever reads it reads those too. It refers to payloads of its own batch
alone, which `store.retention` frees with it and never before: no event has to say what refers to what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trinity_es.events.errors import CorruptPayload, PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.payload_format import Payload, decoding, encode
from trinity_es.events.payload_items import bases_of, columns_of, difference, fields_in
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.vocabulary import PayloadRef

__all__ = ["ExperienceReader", "read_experiences", "sources_of", "write_delivered"]

PER_PAYLOAD = 1024
"""Experiences that go into one payload of what was delivered."""
LEAST_SHARE = 0.5
"""Share of a raw payload's experiences that must be delivered for it to be referred to: who reads them reads it all."""

Fields = dict[str, Any]


# --- reading --------------------------------------------------------------------------------------------------------
def read_experiences(
    payloads: PayloadStore, refs: Sequence[PayloadRef], kept: dict[str, bytes] | None = None
) -> list[Experience]:
    """Return the experiences that these refs name, in their order; each payload is read and decoded once.

    `kept` gets the bytes of each payload that is named. Raises PayloadNotFound, CorruptPayload.
    """
    wanted: dict[str, dict[int, None]] = {}
    for ref in refs:
        wanted.setdefault(ref.digest, {}).update(dict.fromkeys(range(ref.first, ref.first + ref.count)))
    found: dict[str, dict[int, Experience]] = {}
    for digest, numbers in wanted.items():
        data = payloads.read(digest)
        if kept is not None:
            kept[digest] = bytes(data)
        experiences = _decoded(payloads, digest, _opened(digest, data), list(numbers))
        found[digest] = dict(zip(numbers, experiences, strict=True))
    return [found[ref.digest][number] for ref in refs for number in range(ref.first, ref.first + ref.count)]


class ExperienceReader:
    """Reads payloads part by part; the last one stays open until another one is asked for."""

    def __init__(self, payloads: PayloadStore) -> None:
        self._payloads = payloads
        self._last: tuple[str, Payload] | None = None

    def read(self, digest: str, first: int, count: int) -> list[Experience]:
        """Return `count` experiences of a payload from `first` on. Raises PayloadNotFound, CorruptPayload."""
        if self._last is None or self._last[0] != digest:
            self._last = digest, _opened(digest, self._payloads.read(digest))
        payload = self._last[1]
        if count >= len(payload.items):  # its arrays themselves are given out, which can be done once
            self._last = None
        return _decoded(self._payloads, digest, payload, range(first, first + count))


def sources_of(data: bytes) -> list[str]:
    """Return the digests of the payloads to which this one refers; [] for one that holds something else."""
    try:
        return Payload(data, checked=True).sources
    except Exception:  # tasks, say: whatever goes wrong, it is no file of experiences
        return []


def _opened(digest: str, data: bytes | bytearray) -> Payload:
    with _named(digest):
        return Payload(data, checked=True)  # the store compared its digest


def _decoded(payloads: PayloadStore, digest: str, payload: Payload, numbers: Sequence[int]) -> list[Experience]:
    """Return these experiences of a payload, which are different ones, with what they have from its sources."""
    if numbers and max(numbers) >= len(payload.items):
        raise CorruptPayload(f"payload {digest} holds fewer experiences than the log says", digest=digest)
    with _named(digest):
        needed = {payload.sources[source]: places for source, places in bases_of(payload, numbers).items()}
    bases: dict[int, Fields] = {}
    for source, places in needed.items():
        fields = _fields_of_source(payloads, source, list(places), digest)
        bases.update(zip(places.values(), fields, strict=True))
    with _named(digest):
        return Experience.of_fields(fields_in(payload, numbers, bases))


def _fields_of_source(payloads: PayloadStore, digest: str, numbers: Sequence[int], referring: str) -> list[Fields]:
    try:
        data = payloads.read(digest)
    except PayloadNotFound as e:
        raise PayloadNotFound(f"{e.message}, to which payload {referring} refers", digest=digest) from e
    with _named(digest):
        return fields_in(Payload(data, checked=True), numbers, {})


@contextmanager
def _named(digest: str) -> Iterator[None]:
    """Name the payload of which something can't be decoded."""
    try:
        with decoding():
            yield
    except CorruptPayload as e:
        if "digest" in e.details:
            raise
        raise CorruptPayload(f"payload {digest} has its digest, but: {e.message}", digest=digest) from e


# --- writing --------------------------------------------------------------------------------------------------------
def write_delivered(
    payloads: PayloadStore, experiences: Sequence[Experience], raw: Mapping[str, bytes]
) -> list[PayloadRef]:
    """Write what was made of the experiences in these `raw` payloads; returns where it lies.

    Each payload refers to raw ones for what is unchanged: they must be kept for as long. With {} it stands for itself.
    """
    originals, refs = _Originals(raw, experiences), []
    for first in range(0, len(experiences), PER_PAYLOAD):
        chunk = experiences[first : first + PER_PAYLOAD]
        data = originals.encode(chunk)
        refs.append(PayloadRef(digest=payloads.put(data), first=0, count=len(chunk)))
    return refs


class _Originals:
    """What experiences were before they were changed, as far as a payload may refer to it."""

    def __init__(self, raw: Mapping[str, bytes], experiences: Sequence[Experience]) -> None:
        self._payloads = {digest: Payload(data, checked=True) for digest, data in raw.items()}
        self._fields: dict[str, list[Fields]] = {}
        where = {
            tuple(item["eid"]): (digest, number)
            for digest, payload in self._payloads.items() if not payload.sources
            for number, item in enumerate(payload.items)
        }
        here = {key: where[key] for e in experiences if (key := _key(e)) in where}
        used = Counter(digest for digest, _ in here.values())
        self._left = {digest: n for digest, n in used.items() if n >= LEAST_SHARE * len(self._payloads[digest].items)}
        self._where = {key: place for key, place in here.items() if place[0] in self._left}

    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Return a payload of these. No two refer to one original, or its arrays would be both theirs."""
        sources: dict[str, int] = {}
        items, arrays = [], []
        for e in experiences:
            item, fields = e.item(), e.__dict__
            place = self._where.pop(_key(e), None)
            if place is not None:
                digest, number = place
                of = (sources.setdefault(digest, len(sources)), number)
                base_item = self._payloads[digest].items[number]
                item, fields = difference(fields, item, self._fields_of(digest)[number], base_item, of)
                self._let_go(digest)
            items.append(item)
            arrays.append(fields)
        return encode(items, columns_of(arrays), list(sources))

    def _fields_of(self, digest: str) -> list[Fields]:
        if digest not in self._fields:
            payload = self._payloads[digest]
            self._fields[digest] = fields_in(payload, range(len(payload.items)), {})
        return self._fields[digest]

    def _let_go(self, digest: str) -> None:
        """Take note that one of a payload was compared; after the last it is not kept, for a batch may be large."""
        self._left[digest] -= 1
        if not self._left[digest]:
            del self._payloads[digest], self._fields[digest]


def _key(e: Experience) -> tuple[Any, ...]:
    return e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix
