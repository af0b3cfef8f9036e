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
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.experience_encoding import Decoder, columns_of, difference, fields_of, source_numbers
from trinity_es.events.payload_format import Payload, decoding, encode
from trinity_es.events.store.payloads.payload_store import PayloadStore, inline, inlined
from trinity_es.events.vocabulary import PayloadRef

__all__ = ["ExperienceReader", "read_columns", "read_experiences", "sources_of", "write_delivered"]

PER_PAYLOAD = 1024
"""Number of experiences in one payload of delivered ones."""
INLINE_BYTES = 2**13
"""Maximum bytes of a delivered payload that its event holds itself."""
LEAST_SHARE = 0.5
"""Minimum share of a raw payload's experiences to refer to it, since readers must read all of it."""

Fields = dict[str, Any]


# --- reading --------------------------------------------------------------------------------------------------------
def read_experiences(
    payloads: PayloadStore, refs: Sequence[PayloadRef], kept: dict[str, bytes] | None = None
) -> list[Experience]:
    """Return the experiences of these refs, in order, with writable arrays. Reads and decodes each payload once.

    The dict `kept`, if given, gets the bytes of each referenced payload, by digest. Raises PayloadNotFound,
    CorruptPayload.
    """
    return read_columns(payloads, refs, kept).experiences()


def read_columns(
    payloads: PayloadStore, refs: Sequence[PayloadRef], kept: dict[str, bytes] | None = None, *, mapped: bool = False
) -> ExperienceColumns:
    """Return the experiences of these refs as columns; otherwise as `read_experiences`.

    `mapped`: files are mapped into memory, as `PayloadStore.view` says.
    """
    opened, decoder = _Opened(payloads, mapped), Decoder()
    opened.open([ref.digest for ref in refs], kept)
    for ref in refs:
        opened.add(decoder, ref.digest, opened.payloads[ref.digest], ref.first, ref.count)
    return ExperienceColumns(decoder.decoded())


class ExperienceReader:
    """Reader of payloads part by part, which keeps the last one open."""

    def __init__(self, payloads: PayloadStore) -> None:
        self._payloads = payloads
        self._last: tuple[str, Payload] | None = None

    def read(self, digest: str, first: int, count: int) -> ExperienceColumns:
        """Return `count` experiences of a payload from `first` on. Raises PayloadNotFound, CorruptPayload."""
        opened, decoder = _Opened(self._payloads), Decoder()
        if self._last is None or self._last[0] != digest:
            opened.open([digest])
            self._last = digest, opened.payloads[digest]
        payload = self._last[1]
        if count >= len(payload.items):  # the caller gets the payload's own arrays, which works once
            self._last = None
        opened.add(decoder, digest, payload, first, count)
        return ExperienceColumns(decoder.decoded())


class _Opened:
    """Payloads that are opened once."""

    def __init__(self, store: PayloadStore, mapped: bool = False) -> None:
        self._store, self._mapped = store, mapped
        self.payloads: dict[str, Payload] = {}

    def open(self, digests: Sequence[str], kept: dict[str, bytes] | None = None) -> None:
        """Open these payloads; `kept` gets their bytes. Raises PayloadNotFound, CorruptPayload."""
        new_digests = list[str]()
        for digest in dict.fromkeys(digests):
            if (held_bytes := inlined(digest)) is not None:
                with decoding():
                    self.payloads[digest] = Payload(held_bytes)
            elif digest not in self.payloads:
                new_digests.append(digest)
        for digest, data in zip(new_digests, self._store.get_all(new_digests, mapped=self._mapped), strict=True):
            if kept is not None:
                kept[digest] = bytes(data)
            with _name_payload(digest):
                self.payloads[digest] = Payload(data, checked=True)  # the store compared its digest

    def add(self, decoder: Decoder, digest: str, payload: Payload, first: int, count: int) -> None:
        """Add experiences of an open payload, completed from its sources."""
        if first + count > len(payload.items):
            message = f"payload {digest[:80]} holds {len(payload.items)} experiences, fewer than the log says"
            raise CorruptPayload(message, digest=digest)
        numbers = range(first, first + count)
        with _name_payload(digest):
            names = {source: payload.sources[source] for source in sorted(source_numbers(payload, numbers))}
        try:
            self.open(list(names.values()))
        except PayloadNotFound as e:
            raise PayloadNotFound(f"{e.message}, to which payload {digest[:80]} refers", **e.details) from e
        with _name_payload(digest):
            decoder.add(payload, numbers, {source: self.payloads[name] for source, name in names.items()})


def sources_of(data: bytes) -> list[str]:
    """Return the digests of the payloads that this one refers to; [] if it holds something else."""
    try:
        return Payload(data, checked=True).sources
    except Exception:  # any error means that it holds no experiences, but tasks for example
        return []


@contextmanager
def _name_payload(digest: str) -> Iterator[None]:
    """Add the payload's digest, or the beginning of the bytes in its place, to a decoding error."""
    try:
        with decoding():
            yield
    except CorruptPayload as e:
        if "digest" in e.details:
            raise
        raise CorruptPayload(f"payload {digest[:80]} matches its digest, but: {e.message}", digest=digest) from e


# --- writing --------------------------------------------------------------------------------------------------------
def write_delivered(
    payloads: PayloadStore, experiences: Sequence[Experience], raw: Mapping[str, bytes]
) -> list[PayloadRef]:
    """Write experiences that were made from those in the `raw` payloads; return references to them.

    The new payloads refer to raw ones for unchanged fields, so the raw ones must be kept as long; a small one is in its
    reference itself. If `raw` is {}, the new payloads are complete and in the store.
    """
    originals = _Originals(raw, experiences)
    refs = []
    for first in range(0, len(experiences), PER_PAYLOAD):
        chunk = experiences[first : first + PER_PAYLOAD]
        data = originals.encode(chunk)
        name = inline(data) if raw and len(data) <= INLINE_BYTES else payloads.put(data)
        refs.append(PayloadRef(digest=name, first=0, count=len(chunk)))
    return refs


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
            decoder = Decoder()
            decoder.add(payload, range(len(payload.items)), {})
            self._fields[digest] = fields_of(decoder.decoded())
        return self._fields[digest]

    def _release(self, digest: str) -> None:
        """Count a comparison with a payload, and free it after the last one, since a batch may be large."""
        self._left[digest] -= 1
        if not self._left[digest]:
            del self._payloads[digest], self._fields[digest]


def _key(e: Experience) -> tuple[Any, ...]:
    """Return the parts of an experience's id, in the order of an item's `eid`."""
    return e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix
