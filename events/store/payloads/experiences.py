"""Experiences in the payload store: read by the log's references, and written when a batch delivers them.

A delivered payload refers to raw ones, its sources, for what the pipeline left unchanged, and holds only the
differences. It refers only to payloads of its own batch, which `store.retention` deletes together with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trinity_es.events.errors import CorruptPayload, PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.experience_encoding import bases_of, columns_of, difference, fields_in
from trinity_es.events.payload_format import Payload, decoding, encode
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.vocabulary import PayloadRef

__all__ = ["ExperienceReader", "read_experiences", "sources_of", "write_delivered"]

PER_PAYLOAD = 1024
"""Number of experiences in one payload of delivered ones."""
LEAST_SHARE = 0.5
"""Minimum share of a raw payload's experiences to refer to it, since readers must read all of it."""

Fields = dict[str, Any]


# --- reading --------------------------------------------------------------------------------------------------------
def read_experiences(
    payloads: PayloadStore, refs: Sequence[PayloadRef], kept: dict[str, bytes] | None = None
) -> list[Experience]:
    """Return the experiences of these refs, in order. Reads and decodes each payload once.

    The dict `kept`, if given, gets the bytes of each referenced payload, by digest. Raises PayloadNotFound,
    CorruptPayload.
    """
    numbers_by_digest: dict[str, dict[int, None]] = {}
    for ref in refs:
        numbers_by_digest.setdefault(ref.digest, {}).update(dict.fromkeys(range(ref.first, ref.first + ref.count)))
    decoded: dict[str, dict[int, Experience]] = {}
    for digest, numbers in numbers_by_digest.items():
        data = payloads.read(digest)
        if kept is not None:
            kept[digest] = bytes(data)
        experiences = _decode(payloads, digest, _open(digest, data), list(numbers))
        decoded[digest] = dict(zip(numbers, experiences, strict=True))
    return [decoded[ref.digest][number] for ref in refs for number in range(ref.first, ref.first + ref.count)]


class ExperienceReader:
    """Reader of payloads part by part, which keeps the last one open."""

    def __init__(self, payloads: PayloadStore) -> None:
        self._payloads = payloads
        self._last: tuple[str, Payload] | None = None

    def read(self, digest: str, first: int, count: int) -> list[Experience]:
        """Return `count` experiences of a payload from `first` on. Raises PayloadNotFound, CorruptPayload."""
        if self._last is None or self._last[0] != digest:
            self._last = digest, _open(digest, self._payloads.read(digest))
        payload = self._last[1]
        if count >= len(payload.items):  # the caller gets the payload's own arrays, which works once
            self._last = None
        return _decode(self._payloads, digest, payload, range(first, first + count))


def sources_of(data: bytes) -> list[str]:
    """Return the digests of the payloads that this one refers to; [] if it holds something else."""
    try:
        return Payload(data, checked=True).sources
    except Exception:  # any error means that it holds no experiences, but tasks for example
        return []


def _open(digest: str, data: bytes | bytearray) -> Payload:
    """Return a payload whose bytes the store has checked. Raises CorruptPayload, naming the digest."""
    with _name_payload(digest):
        return Payload(data, checked=True)  # the store compared its digest


def _decode(payloads: PayloadStore, digest: str, payload: Payload, numbers: Sequence[int]) -> list[Experience]:
    """Return these experiences of a payload, all different, completed from its sources."""
    if numbers and max(numbers) >= len(payload.items):
        raise CorruptPayload(f"payload {digest} holds {len(payload.items)} experiences, fewer than the log says",
                             digest=digest)
    with _name_payload(digest):
        indices_by_source = {payload.sources[source]: indices for source, indices in bases_of(payload, numbers).items()}
    bases: dict[int, Fields] = {}
    for source, indices in indices_by_source.items():
        try:
            source_payload = _open(source, payloads.read(source))
        except PayloadNotFound as e:
            raise PayloadNotFound(f"{e.message}, to which payload {digest} refers", digest=source) from e
        with _name_payload(source):
            bases.update(zip(indices.values(), fields_in(source_payload, list(indices), {}), strict=True))
    with _name_payload(digest):
        return Experience.of_fields(fields_in(payload, numbers, bases))


@contextmanager
def _name_payload(digest: str) -> Iterator[None]:
    """Add the payload's digest to a decoding error."""
    try:
        with decoding():
            yield
    except CorruptPayload as e:
        if "digest" in e.details:
            raise
        raise CorruptPayload(f"payload {digest} matches its digest, but: {e.message}", digest=digest) from e


# --- writing --------------------------------------------------------------------------------------------------------
def write_delivered(
    payloads: PayloadStore, experiences: Sequence[Experience], raw: Mapping[str, bytes]
) -> list[PayloadRef]:
    """Write experiences that were made from those in the `raw` payloads; return references to them.

    The new payloads refer to raw ones for unchanged fields, so the raw ones must be kept as long. If `raw` is {}, the
    new payloads are complete.
    """
    originals = _Originals(raw, experiences)
    chunks = (experiences[first : first + PER_PAYLOAD] for first in range(0, len(experiences), PER_PAYLOAD))
    return [PayloadRef(digest=payloads.put(originals.encode(c)), first=0, count=len(c)) for c in chunks]


class _Originals:
    """Raw experiences that delivered ones may refer to."""

    def __init__(self, raw: Mapping[str, bytes], experiences: Sequence[Experience]) -> None:
        self._payloads = {digest: Payload(data, checked=True) for digest, data in raw.items()}
        self._fields: dict[str, list[Fields]] = {}
        raw_places = {
            tuple(item["eid"]): (digest, number)
            for digest, payload in self._payloads.items() if not payload.sources
            for number, item in enumerate(payload.items)
        }
        delivered = {key: raw_places[key] for e in experiences if (key := _key(e)) in raw_places}
        delivered_counts = Counter(digest for digest, _ in delivered.values())
        self._left = {digest: count for digest, count in delivered_counts.items()
                      if count >= LEAST_SHARE * len(self._payloads[digest].items)}
        self._places = {key: place for key, place in delivered.items() if place[0] in self._left}

    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Return a payload of these experiences.

        Only one experience may refer to an original, since two of them would share its arrays.
        """
        sources: dict[str, int] = {}
        items, arrays = [], []
        for e in experiences:
            item, fields = e.item(), e.__dict__
            place = self._places.pop(_key(e), None)
            if place is not None:
                digest, number = place
                base_place = (sources.setdefault(digest, len(sources)), number)
                base_item = self._payloads[digest].items[number]
                item, fields = difference(fields, item, self._fields_of(digest)[number], base_item, base_place)
                self._release(digest)
            items.append(item)
            arrays.append(fields)
        return encode(items, columns_of(arrays), list(sources))

    def _fields_of(self, digest: str) -> list[Fields]:
        """Return the fields of all experiences of a raw payload, which is decoded once."""
        if digest not in self._fields:
            payload = self._payloads[digest]
            self._fields[digest] = fields_in(payload, range(len(payload.items)), {})
        return self._fields[digest]

    def _release(self, digest: str) -> None:
        """Count a comparison with a payload, and free it after the last one, since a batch may be large."""
        self._left[digest] -= 1
        if not self._left[digest]:
            del self._payloads[digest], self._fields[digest]


def _key(e: Experience) -> tuple[Any, ...]:
    """Return the parts of an experience's id, in the order of an item's `eid`."""
    return e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix
