"""Every event goes to bytes and comes back equal; what can't is refused where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.codec import check, decode
from trinity_es.events.errors import InvalidEvent, LogCorrupt, LogTooNew
from trinity_es.events.store.records.log_values import from_row
from trinity_es.events.vocabulary import EVENTS, Event

finite = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(min_value=-(2**53), max_value=2**53)
# JSON is UTF-8: half a surrogate pair is no text.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | integers | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
st.register_type_strategy(float, finite)
st.register_type_strategy(int, integers)
st.register_type_strategy(str, texts)


def _events_of(cls: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(cls)

    def resolve(annotation: Any) -> st.SearchStrategy[Any]:
        if annotation == dict[str, Any]:
            return st.dictionaries(texts, plain, max_size=3)
        if annotation == list[dict[str, Any]] | None:
            return st.none() | st.lists(st.dictionaries(texts, plain, max_size=3), max_size=3)
        return plain if annotation is Any else st.from_type(annotation)

    return st.builds(cls, **{f.name: resolve(hints[f.name]) for f in fields(cls)})


def encode(event: Event) -> bytes:
    return check(event)[0]


@pytest.mark.parametrize("name", sorted(EVENTS))
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_event_comes_back_equal_and_encodes_to_the_same_bytes_again(name: str, data: st.DataObject) -> None:
    event = data.draw(_events_of(EVENTS[name]))
    encoded = encode(event)
    again = decode(name, event.schema_version, encoded)
    assert again == event
    assert type(again) is type(event)
    assert encode(again) == encoded


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_the_name_of_its_field(bad: float) -> None:
    """Where null may stand it would be recorded without a word; where a number must, the number is named and not it."""
    for more in ({}, {"best": None}):
        with pytest.raises(InvalidEvent, match=r"BatchFinalized\.result\.metrics\[0\]\.reward is"):
            check(ev.BatchFinalized(result={"metrics": [{"reward": bad}], **more}))
    with pytest.raises(InvalidEvent, match=r"WritingResumed\.seconds is"):
        check(ev.WritingResumed(error="", seconds=bad))
    fine = ev.BatchFinalized(result={"metrics": [{"reward": 0.5}], "best": None, "said": "null"})
    assert check(fine)[1] == fine


@pytest.mark.parametrize("bad", [object(), {1: 2}, 2**70, "\ud800", {1, 2}, b"bytes"])
def test_what_json_can_not_hold_is_refused_by_the_name_of_its_field(bad: object) -> None:
    with pytest.raises(InvalidEvent, match=r"SystemConfigured\.config"):
        encode(ev.SystemConfigured(config={"x": bad}))


@pytest.mark.parametrize("batch_id", [12, "12", "12/gsm8k"])
def test_a_number_and_the_text_of_it_stay_different(batch_id: int | str) -> None:
    event = ev.BatchSubmitted(batch_id=batch_id, batch_type="train", repeat_times=[1])
    back = decode("BatchSubmitted", event.schema_version, encode(event))
    assert back.batch_id == batch_id
    assert type(back.batch_id) is type(batch_id)


def test_the_order_of_a_dict_does_not_change_the_bytes() -> None:
    assert encode(ev.SystemConfigured(config={"a": 1, "b": 2})) == encode(ev.SystemConfigured(config={"b": 2, "a": 1}))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not JSON"), (b"[1]", "not an object"), (b"{}", "step"), (b'{"step":"x"}', "step"),
        (b'{"step":1,"mood":2}', "no field mood"), (b"\xff", "not JSON"),
    ],
)
def test_data_that_is_no_such_event_is_told(data: bytes, said: str) -> None:
    with pytest.raises(InvalidEvent, match=said):
        decode("BatchTrained", 1, data)


def test_an_event_of_a_newer_software_is_told() -> None:
    with pytest.raises(LogTooNew, match="BatchTeleported"):
        decode("BatchTeleported", 1, b"{}")
    with pytest.raises(LogTooNew, match="schema version 99"):
        decode("BatchTrained", 99, encode(ev.BatchTrained(step=1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Event):
    """Version 1 had `x`, version 2 `where`, version 3 `place`."""

    schema_version: ClassVar[int] = 3
    place: int


def test_older_schemas_are_lifted_one_version_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVENTS, "Moved", Moved)
    with pytest.raises(InvalidEvent, match="no upcaster from schema version 1 of Moved"):
        decode("Moved", 1, b'{"x":4}')
    monkeypatch.setitem(codec.UPCASTERS, ("Moved", 1), lambda d: {"where": d["x"]})
    monkeypatch.setitem(codec.UPCASTERS, ("Moved", 2), lambda d: {"place": d["where"] * 10})
    assert decode("Moved", 1, b'{"x":4}') == decode("Moved", 2, b'{"where":4}') == Moved(place=40)
    assert decode("Moved", 3, b'{"place":4}') == Moved(place=4)


def test_every_older_schema_version_in_the_vocabulary_has_its_upcaster() -> None:
    for name, cls in EVENTS.items():
        for version in range(1, cls.schema_version):
            assert (name, version) in codec.UPCASTERS


def test_what_is_not_in_the_vocabulary_is_not_recorded() -> None:
    with pytest.raises(InvalidEvent, match="vocabulary"):
        encode(Moved(place=1))


def test_a_row_that_was_damaged_is_named_with_its_place() -> None:
    row = (7, "weights", 3, "WeightsPublished", 1, b"{}", b"\0{", 1.0, "c", 0, b"h")
    with pytest.raises(LogCorrupt, match=r"position 7 \(weights 3\) can't be read .*trinity-es verify"):
        from_row(row)
