"""Delivered payloads: what they hold themselves, what they have from raw ones, what is told where those are lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.any_experience import eids, experiences, small
from tests.helpers.payloads_in_memory import Memory, put
from trinity_es.events.errors import CorruptPayload, PayloadNotFound
from trinity_es.events.experience import EID, Experience
from trinity_es.events.payload_format import Payload
from trinity_es.events.store.payloads import experiences as stored
from trinity_es.events.store.payloads.experiences import ExperienceReader, read_experiences, write_delivered
from trinity_es.events.vocabulary import PayloadRef

SIZE = 2000


@pytest.fixture(autouse=True)
def _all_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "INLINE_BYTES", 0)


def made(n: int, task: int = 0) -> list[Experience]:
    """Experiences of one task that take some room, all different."""
    random = np.random.default_rng(task)
    return [
        Experience(
            eid=EID(1, task, run, 0, "s"), tokens=random.integers(0, 9999, SIZE), prompt_length=SIZE // 2,
            logprobs=-random.random(SIZE // 2), reward=float(run), info={"run": run}, prompt_text="p" * 500,
        )
        for run in range(n)
    ]


def raw_in(*groups: list[Experience]) -> tuple[Any, list[PayloadRef], list[Experience], dict[str, bytes]]:
    """A store with a raw payload of each group, and what is read of it."""
    store: Any = Memory()
    refs = put(store, *groups)
    return store, refs, *raw_of(store, refs)


def raw_of(store: Any, refs: list[PayloadRef]) -> tuple[list[Experience], dict[str, bytes]]:
    raw: dict[str, bytes] = {}
    return read_experiences(store, refs, raw), raw


def advance(found: list[Experience]) -> list[Experience]:
    for e in found:
        e.advantages = e.returns = np.full(len(e.tokens) - e.prompt_length, e.reward, np.float32)
    return found


def copies(found: list[Experience]) -> list[Experience]:
    return Experience.deserialize_many(Experience.serialize_many(found))


def test_what_was_delivered_is_what_was_made_of_the_raw_one_and_takes_little_more() -> None:
    store, refs, found, raw = raw_in(made(4), made(4, task=1))
    found = advance(found[::-1])
    expected = copies(found)
    [ref] = write_delivered(store, found, raw)
    assert len(store.held[ref.digest]) < 1600
    assert Payload(store.held[ref.digest]).sources == [refs[1].digest, refs[0].digest]
    assert read_experiences(store, [ref]) == expected
    for e in read_experiences(store, [ref]):
        e.validate()
        e.tokens[:] = 1


@settings(max_examples=40)
@given(st.lists(st.tuples(experiences(), experiences()), max_size=3, unique_by=lambda p: str(p[0].eid)), st.data())
def test_every_difference_comes_back_to_the_last_bit(
    pairs: list[tuple[Experience, Experience]], data: st.DataObject
) -> None:
    store, _, found, raw = raw_in([before for before, _ in pairs])
    changed = []
    for e, (_, after) in zip(found, pairs, strict=True):
        if data.draw(st.booleans()):  # all of it is another's, but for its id
            after.eid = e.eid
            e = after
        elif data.draw(st.booleans()):
            e.eid = data.draw(eids)
        changed.append(e)
    written = write_delivered(store, changed, raw)
    assert read_experiences(store, written) == changed
    for number, e in enumerate(changed):
        assert read_experiences(store, [PayloadRef(digest=written[0].digest, first=number, count=1)]) == [e]


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1.0, 2.0), (1.0, None), (None, 0.0)])
def test_a_reward_that_was_changed_is_the_changed_one(before: float | None, after: float | None) -> None:
    store, _, [e], raw = raw_in([small(reward=before, info={"a": 1}, multi_modal_inputs={"p": [1.0]})])
    e.reward, e.info, e.multi_modal_inputs = after, {}, {"p": np.array([-1.0]), "q": np.array([True])}
    [ref] = write_delivered(store, [e], raw)
    [back] = read_experiences(store, [ref])
    assert back == e
    assert str(back.reward) == str(after)


def test_an_array_that_an_operator_changed_in_place_is_delivered_as_it_left_it() -> None:
    store, refs, found, raw = raw_in(made(2))
    found[0].logprobs[3] = -9.0
    expected = copies(found)
    assert read_experiences(store, write_delivered(store, found, raw)) == expected
    assert read_experiences(store, refs) == made(2)


def test_a_copy_has_arrays_of_its_own() -> None:
    store, _, [e], raw = raw_in(made(1))
    [ref] = write_delivered(store, [e, e], raw)
    one, other = read_experiences(store, [ref])
    assert one == other
    one.tokens[:], one.info["run"] = 0, 7
    assert other == e


def test_parts_of_a_delivered_payload_read_what_they_need_and_share_nothing() -> None:
    store, refs, found, raw = raw_in(made(2), made(2, task=1))
    expected = copies(advance(found))
    [ref] = write_delivered(store, found, raw)
    store.asked.clear()
    reader = ExperienceReader(store)

    def read(first: int, count: int) -> list[Experience]:
        return reader.read(ref.digest, first, count).experiences()

    first, again = read(0, 1), read(0, 1)
    assert first == again == expected[:1]
    first[0].tokens[:] = 0
    first[0].advantages[:] = 0
    assert again == expected[:1]
    assert refs[1].digest not in store.asked
    assert store.asked.count(ref.digest) == 1
    held = again[0].tokens
    while isinstance(held.base, np.ndarray):
        held = held.base
    assert held.nbytes == again[0].tokens.nbytes
    whole = read(0, 4)
    whole[0].advantages[:] = 0
    assert read(0, 4) == expected


def test_a_raw_payload_of_which_little_was_delivered_is_not_referred_to() -> None:
    store, refs, found, raw = raw_in(made(5), made(2, task=1))
    expected = copies([found[0], found[1], found[5]])
    [ref] = write_delivered(store, [found[0], found[1], found[5]], raw)
    assert Payload(store.held[ref.digest]).sources == [refs[1].digest]
    assert read_experiences(store, [ref]) == expected


def test_many_experiences_are_several_payloads_each_with_its_own_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PER_PAYLOAD", 3)
    store, _, found, raw = raw_in(made(4), made(4, task=1))
    written = write_delivered(store, found, raw)
    assert [ref.count for ref in written] == [3, 3, 2]
    assert [len(Payload(store.held[ref.digest]).sources) for ref in written] == [1, 2, 1]
    assert read_experiences(store, written) == [*made(4), *made(4, task=1)]


def test_without_raw_ones_and_of_delivered_ones_a_payload_stands_for_itself() -> None:
    store, _, found, raw = raw_in(made(2))
    [ref] = write_delivered(store, advance(found), raw)
    again, delivered = raw_of(store, [ref])
    for sources in ({}, delivered):
        [alone] = write_delivered(store, again, sources)
        assert Payload(store.held[alone.digest]).sources == []
        assert Experience.deserialize_many(store.held[alone.digest]) == copies(found)


def test_a_raw_payload_that_is_lost_or_wrong_is_named_with_the_one_that_needs_it() -> None:
    store, [raw], found, data = raw_in(made(2))
    [ref] = write_delivered(store, found, data)
    with pytest.raises(CorruptPayload, match="only the differences from experiences in another payload"):
        Experience.deserialize_many(store.held[ref.digest])
    store.held[raw.digest] = Experience.serialize_many(made(1))
    with pytest.raises(CorruptPayload, match=raw.digest) as corrupt:
        read_experiences(store, [ref])
    assert corrupt.value.details["digest"] == raw.digest
    store.held[raw.digest] = store.held[ref.digest]  # of its digest, say: a payload that refers to others itself
    with pytest.raises(CorruptPayload, match=rf"{raw.digest}.*in another payload"):
        read_experiences(store, [ref])
    del store.held[raw.digest]
    with pytest.raises(PayloadNotFound, match=rf"{raw.digest}.*to which payload {ref.digest} refers"):
        read_experiences(store, [ref])


def test_a_few_differences_are_in_the_reference_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    store, [raw], found, data = raw_in(made(2))
    expected = copies(advance(found))
    [ref] = write_delivered(store, found, data)
    assert [*store.held] == [raw.digest]
    assert read_experiences(store, [ref]) == expected
    assert ExperienceReader(store).read(ref.digest, 1, 1).experiences() == expected[1:]
    with pytest.raises(CorruptPayload, match="no base64"):
        read_experiences(store, [replace(ref, digest=ref.digest[:-1])])
    for cut in (8, 200):
        with pytest.raises(CorruptPayload):
            read_experiences(store, [replace(ref, digest=ref.digest[: 5 + cut])])
    for e in found:
        e.info["note"] = "x" * stored.INLINE_BYTES
    [ref] = write_delivered(store, found, data)
    assert ref.digest in store.held


@pytest.mark.parametrize("data", [b"[]", b"x" * 100, small().serialize()[:-1]])
def test_bytes_that_are_no_experiences_are_named_by_their_digest(data: bytes) -> None:
    store: Any = Memory()
    digest = store.put(data)
    with pytest.raises(CorruptPayload, match=digest) as caught:
        read_experiences(store, [PayloadRef(digest=digest, first=0, count=1)])
    assert caught.value.details["digest"] == digest


def test_more_than_there_is_is_a_corrupt_payload() -> None:
    store: Any = Memory()
    [ref] = put(store, made(2))
    for wrong in (PayloadRef(digest=ref.digest, first=1, count=2), PayloadRef(digest=ref.digest, first=5, count=1)):
        with pytest.raises(CorruptPayload, match="experiences, fewer than the log says"):
            read_experiences(store, [wrong])
        with pytest.raises(CorruptPayload, match="fewer"):
            ExperienceReader(store).read(wrong.digest, wrong.first, wrong.count)
    assert read_experiences(store, [ref, ref]) == [*made(2), *made(2)]
    assert read_experiences(store, []) == []
