"""A payload store in memory."""

from __future__ import annotations

from typing import Any

from trinity_es.events.errors import PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.payloads import PayloadStore, digest_of
from trinity_es.events.vocabulary import PayloadRef


class Memory(PayloadStore):
    """Payload store with the methods that experiences need."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked: list[str] = []

    def put(self, data: bytes) -> str:
        self.held[digest_of(data)] = data
        return digest_of(data)

    def get(self, digest: str) -> bytes:
        self.asked.append(digest)
        if digest not in self.held:
            raise PayloadNotFound(f"no payload {digest} in memory", digest=digest)
        return self.held[digest]


def put(store: Any, *groups: list[Experience]) -> list[PayloadRef]:
    return [PayloadRef(digest=store.put(Experience.serialize_many(g)), first=0, count=len(g)) for g in groups]
