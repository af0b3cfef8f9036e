"""Reads of experiences from the payload store by the log's references, and writes of delivered experiences.

Raw payloads come from runners, delivered payloads from the pipeline. A delivered payload holds only the differences
from the raw ones, its sources. Sources belong to the same batch, so `store.retention` deletes them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby, islice
from typing import Any

from trinity_es.events.errors import CorruptPayload, PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.experience_encoding import Decoder, array_fields_of, columns_of, difference, source_numbers
from trinity_es.events.payload_format import Payload, decoding, encode
from trinity_es.events.store.payloads.payload_store import PayloadStore, inline, inlined, is_inline
from trinity_es.events.vocabulary import PayloadRef

__all__ = [
    "ExperienceKey", "ExperienceReader", "StoredPayloads", "key_of", "read_columns", "read_experiences", "sources_of",
    "write_delivered",
]

PER_PAYLOAD = 1024
"""Maximum number of experiences in a delivered payload."""
INLINE_BYTES = 2**13
"""Maximum bytes of a delivered payload that is kept in the event itself instead of the store."""
LEAST_SHARE = 0.5
"""Minimum share of a raw payload's experiences that must be delivered to refer to it, since readers read all of it."""

Fields = dict[str, Any]
ExperienceKey = tuple[Any, ...]
"""Batch, task, run, step and suffix of an experience's id."""


# --- reading --------------------------------------------------------------------------------------------------------
def read_experiences(
    payloads: PayloadStore, refs: Sequence[PayloadRef], kept: dict[str, bytes] | None = None
) -> list[Experience]:
    """Return the experiences of these refs in order, with writable arrays. Reads and decodes each payload once.

    The bytes of each referenced payload are added to the dict `kept`, by digest. Raises PayloadNotFound,
    CorruptPayload.
    """
    return read_columns(payloads, refs, kept).experiences()


def read_columns(
    payloads: PayloadStore, refs: Sequence[PayloadRef], kept: dict[str, bytes] | None = None, *, mapped: bool = False
) -> ExperienceColumns:
    """Return the experiences of these refs as columns; otherwise like `read_experiences`.

    With `mapped`, large files are mapped into memory (`PayloadStore.view`).
    """
    opened, decoder = _OpenPayloads(payloads, mapped), Decoder()
    opened.open([ref.digest for ref in refs], kept)
    rows = accumulate((ref.count for ref in refs), initial=0)
    for (digest, _), stretch in groupby(zip(refs, rows, strict=False), lambda p: (p[0].digest, p[0].first - p[1])):
        parts = [ref for ref, _ in stretch]  # they follow one another in the payload
        opened.add(decoder, digest, opened.payloads[digest], parts[0].first, sum(ref.count for ref in parts))
    return ExperienceColumns(decoder.decoded())


class ExperienceReader:
    """Reader of parts of payloads, which keeps the last payload open."""

    def __init__(self, payloads: PayloadStore) -> None:
        self._payloads = payloads
        self._last: tuple[str, Payload] | None = None

    def read(self, digest: str, first: int, count: int) -> ExperienceColumns:
        """Return `count` experiences of a payload from `first` on. Raises PayloadNotFound, CorruptPayload."""
        opened, decoder = _OpenPayloads(self._payloads), Decoder()
        if self._last is None or self._last[0] != digest:
            opened.open([digest])
            self._last = digest, opened.payloads[digest]
        payload = self._last[1]
        if count >= len(payload.items):  # the caller gets the payload's own arrays and may change them
            self._last = None
        opened.add(decoder, digest, payload, first, count)
        return ExperienceColumns(decoder.decoded())


class _OpenPayloads:
    """Payloads that were opened for one read, by digest."""

    def __init__(self, store: PayloadStore, mapped: bool = False) -> None:
        self._store, self._mapped = store, mapped
        self.payloads: dict[str, Payload] = {}

    def open(self, digests: Sequence[str], kept: dict[str, bytes] | None = None) -> None:
        """Open these payloads, and add their bytes to `kept`. Raises PayloadNotFound, CorruptPayload."""
        new_names = [name for name in dict.fromkeys(digests) if name not in self.payloads]
        for name in filter(is_inline, new_names):
            with decoding():
                self.payloads[name] = Payload(inlined(name))
        new_digests = [name for name in new_names if not is_inline(name)]
        for digest, data in zip(new_digests, self._store.get_all(new_digests, mapped=self._mapped), strict=True):
            if kept is not None:
                kept[digest] = bytes(data)
            with _name_payload(digest):
                self.payloads[digest] = Payload(data, checked=True)  # the store compared its digest

    def add(self, decoder: Decoder, digest: str, payload: Payload, first: int, count: int) -> None:
        """Add experiences of an open payload to the decoder, after opening the sources that they need."""
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
    """Return the digests of the payloads to which a payload refers; [] if it holds no experiences."""
    try:
        return Payload(data, checked=True).sources
    except Exception:  # it holds other data, such as tasks
        return []


@contextmanager
def _name_payload(digest: str) -> Iterator[None]:
    """Add the payload's digest (or the beginning of an inline payload) to any decoding error in this block."""
    try:
        with decoding():
            yield
    except CorruptPayload as e:
        if "digest" in e.details:
            raise
        raise CorruptPayload(f"payload {digest[:80]} matches its digest, but: {e.message}", digest=digest) from e


# --- writing --------------------------------------------------------------------------------------------------------
def write_delivered(
    payloads: PayloadStore, experiences: Iterable[Experience], raw: Mapping[str, bytes],
    keys: Sequence[ExperienceKey] | None = None,
) -> list[PayloadRef]:
    """Write delivered experiences, which a pipeline made from those in the `raw` payloads. Return references to them.

    The new payloads refer to raw ones for unchanged fields, so the raw ones must be kept as long. A small payload is in
    its reference itself. If `raw` is {}, the new payloads are complete and in the store. Pass the `keys` of all
    experiences if `experiences` is a generator. All of them must be valid (`Experience.validate`).
    """
    if keys is None:
        experiences = list(experiences)
        keys = [*map(key_of, experiences)]
    originals, rest = _Originals(raw, keys), iter(experiences)
    refs = []
    while chunk := list(islice(rest, PER_PAYLOAD)):
        data = originals.encode(chunk)
        name = inline(data) if raw and len(data) <= INLINE_BYTES else payloads.put(data)
        refs.append(PayloadRef(digest=name, first=0, count=len(chunk)))
    return refs


class StoredPayloads(Mapping[str, bytes]):
    """Mapping of these digests to payloads, which are read at each access."""

    def __init__(self, payloads: PayloadStore, digests: Iterable[str]) -> None:
        self._payloads, self._digests = payloads, dict.fromkeys(digests)

    def __getitem__(self, digest: str) -> bytes:
        return self._payloads.get(digest)

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


class _Originals:
    """Raw experiences to which delivered experiences may refer."""

    def __init__(self, raw: Mapping[str, bytes], keys: Sequence[ExperienceKey]) -> None:
        self._raw = raw
        self._opened: dict[str, tuple[Payload, list[Fields]]] = {}
        raw_locations: dict[ExperienceKey, tuple[str, int]] = {}
        sizes = {}
        for digest in raw:  # opened one by one, and again when needed, since a batch may be large
            payload = Payload(raw[digest], checked=True)
            sizes[digest] = len(payload.items)
            if not payload.sources:
                raw_locations |= {tuple(item["eid"]): (digest, number) for number, item in enumerate(payload.items)}
        self._locations = {key: raw_locations[key] for key in keys if key in raw_locations}
        delivered_counts = Counter(digest for digest, _ in self._locations.values())
        self._remaining = {digest: count for digest, count in delivered_counts.items()
                           if count >= LEAST_SHARE * sizes[digest]}

    def encode(self, experiences: Sequence[Experience]) -> bytes:
        """Encode these experiences as a payload, as differences from their originals if possible.

        Only one experience refers to an original, because two would share its arrays.
        """
        sources: dict[str, int] = {}
        items, arrays = [], []
        for e in experiences:
            item, fields = e.item(), e.__dict__
            location = self._locations.pop(key_of(e), None)
            if location is not None and location[0] in self._remaining:
                digest, number = location
                base_place = (sources.setdefault(digest, len(sources)), number)
                payload, base_fields = self._open(digest)
                item, fields = difference(fields, item, base_fields[number], payload.items[number], base_place)
                self._remaining[digest] -= 1
                if not self._remaining[digest]:  # free the decoded payload, since a batch may be large
                    del self._opened[digest]
            items.append(item)
            arrays.append(fields)
        return encode(items, columns_of(arrays), list(sources))

    def _open(self, digest: str) -> tuple[Payload, list[Fields]]:
        """Return a raw payload and the array fields of all its experiences. Open it at the first call."""
        if digest not in self._opened:
            payload = Payload(self._raw[digest], checked=True)
            self._opened[digest] = payload, array_fields_of(payload)
        return self._opened[digest]


def key_of(e: Experience) -> ExperienceKey:
    return e.eid.batch, e.eid.task, e.eid.run, e.eid.step, e.eid.suffix
