"""What a client sends is checked whole: its error is its own, and nothing that it sends ends a coordinator for long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import trinity_es
from tests.helpers.database_trouble import births, on
from tests.helpers.faults import Server
from tests.helpers.of_the_day import of_the_day
from tests.helpers.systems import StartSystem, play_batch, sleepers
from trinity_es.actors.requests import Parcel
from trinity_es.client import connection
from trinity_es.events.errors import DataError, RequestRefused, TrinityError

DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]

LONG, HUGE = "x" * 501, 2**70
ONE_TASK = Parcel(b'[{"workflow":"trinity_es.testing:SleepWorkflow"}]')
BAD_NAMES = ["a\0b", "line\nfeed", "\ud800", LONG, "", 7, None, ["a"]]
BAD_TEXTS = ["a\0b", "\ud800", "x" * 20_000, 7, None]
BAD_NUMBERS = [HUGE, -HUGE, float("nan"), float("inf"), "1", None, [1], True]
BAD_ANSWERS: list[dict[str, Any]] = [
    {"message": "a\0b"}, {"message": "x" * 300}, {"model_version": HUGE}, {"payload": {"digest": 1}},
]
BAD_IDS = ["a\0b", "\ud800", "x" * 300, HUGE, 1.5, None, True, [1]]


def cursor(**over: Any) -> list[dict[str, Any]]:
    return [{"taskset": "t", "epoch": 0, "offset": 1} | over]


def bad_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of every command each argument, each with what it can't be, all else as it should be."""
    good: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
        "submit": (
            {"batch_id": "bad", "tasks": ONE_TASK, "batch_type": "train", "min_wait_num": None, "cursor": []},
            {
                "batch_id": BAD_IDS, "batch_type": ["test", None, "a\0b"], "min_wait_num": [HUGE, "1", float("nan")],
                "tasks": [None, b"[]", Parcel(None, "../../etc/passwd"), Parcel(b"{}"), Parcel(b"nonsense"),
                          Parcel(b"[1]"), Parcel(b'[{"workflow":"w","repeat_times":"2"}]'),
                          Parcel(b'[{"workflow":"w","repeat_times":1e300}]'), Parcel(None), Parcel(b"[" * 100_000),
                          Parcel(b'[{"workflow":"w","repeat_times":1000000000}]')],
                "cursor": ["t", [{}], [1], *(cursor(taskset=name) for name in BAD_NAMES),
                           *(cursor(offset=value) for value in BAD_NUMBERS), cursor(epoch=-1), cursor(more=1)],
            },
        ),
        "finalize": ({"batch_id": "no", "batch_type": "train", "timeout": 1.0},
                     {"batch_id": BAD_IDS, "timeout": ["1", float("nan"), float("inf"), HUGE]}),
        "abort": ({"batch_id": "no", "reason": "r", "keep_partial_results": False},
                  {"batch_id": BAD_IDS, "reason": BAD_TEXTS, "keep_partial_results": ["yes", None]}),
        "process_experiences": ({"refs": []}, {"refs": [None, [None], [{"digest": "x", "first": 0, "count": 1}],
                                                        [{"digest": "0" * 64, "first": HUGE, "count": 1}]]}),
        "next_batch": ({"after": 0, "timeout": 1.0}, {"after": [HUGE, -1, "0", None, 1.5],
                                                      "timeout": ["1", float("nan"), HUGE]}),
        "acknowledge": ({"batch_id": "no", "step": 1, "metrics": {}},
                        {"batch_id": BAD_IDS, "step": BAD_NUMBERS,
                         "metrics": [None, {"a\0b": 1.0}, {"\ud800": 1.0}, {"a": float("nan")}, {"a": "1"}, {1: 1.0}]}),
        "resume_trainer": ({"step": 0}, {"step": [-1, *BAD_NUMBERS]}),
        "take_experiences": ({"n": 1, "timeout": 0.1, "step": None},
                             {"n": [0, *BAD_NUMBERS], "timeout": ["1", float("nan")], "step": [HUGE, "1", 1.5]}),
        "sync_weights": ({"version": 1, "path": "/p", "timeout": 1.0},
                         {"version": BAD_NUMBERS, "path": ["a\0b", "\ud800", None], "timeout": [None, float("nan")],
                          "method": ["a\0b", None, 1], "again": ["yes"]}),
        "join_weight_group": ({"address": "::1", "port": 1, "workers": 1, "engines": 99, "timeout": 1.0},
                              {"address": BAD_NAMES, "port": BAD_NUMBERS, "workers": [0, HUGE], "engines": ["1"],
                               "timeout": [None, float("inf")]}),
        "restart_runner": ({"runner": "no", "incarnation": 1, "reason": "r"},
                           {"runner": BAD_NAMES, "incarnation": BAD_NUMBERS, "reason": BAD_TEXTS}),
        "runner_states": ({"names": None}, {"names": ["a", [1], [["a"]], 7]}),
        "schedule": ({"batch_id": "bad", "tasks": ONE_TASK}, {"batch_id": BAD_IDS, "tasks": [None, Parcel(b"[1]")]}),
        "poll": ({"batch_id": "no", "at_least": 0, "seconds": 0.0, "resume": False},
                 {"batch_id": BAD_IDS, "at_least": ["1", float("nan"), HUGE], "seconds": ["1", None, float("nan")],
                  "resume": [None]}),
        "poll_all": ({"settled": 0, "seconds": 0.0}, {"settled": [None, HUGE], "seconds": [None, float("inf")]}),
        "drop_rest": ({"batch_id": None, "reason": "r"},
                      {"batch_id": BAD_IDS[:3], "reason": BAD_TEXTS}),
        "take": ({"batch_id": "no", "tasks": [], "submission": "s"},
                 {"batch_id": BAD_IDS, "tasks": [None, ["0"], [HUGE], [True]], "submission": [None, "a\0b"]}),
        "pause": ({"batches": []}, {"batches": [None, 7, [1.5], ["a\0b"]]}),
        "record_answers": ({"answers": []}, {"answers": [None, [None], [{}], [{"message": "a\0b"}],
                                                        *([answer(**wrong)] for wrong in BAD_ANSWERS)]}),
        "reward_answers": ({"messages": ["no"], "reward": 1.0, "task": None, "run": None},
                           {"messages": [None, [1], ["a\0b"], ["x" * 300]], "reward": BAD_NUMBERS,
                            "task": ["a\0b", "x" * 300, 7], "run": [HUGE, "1"]}),
        "routes": ({"proxy": "p", "url": "", "knows": 0}, {"proxy": BAD_NAMES, "url": ["a\0b", None],
                                                           "knows": [None, "1"]}),
        "no_such_command": ({}, {}), "__init__": ({}, {}), "a\0b": ({}, {}),
    }
    for command, (args, wrong) in good.items():
        for name, values in wrong.items():
            for value in values:
                yield command, args | {name: value}
        yield command, args | {"something": 1}
        for name in args:
            yield command, {key: value for key, value in args.items() if key != name}


def answer(**over: Any) -> dict[str, Any]:
    return {"message": "m", "runner": "runner-0", "incarnation": 1, "model_version": 0, "model_version_end": 0,
            "payload": None} | over


def store(which: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if which == "sqlite":
        return {}
    server: Server = request.getfixturevalue("own_server")
    return on(server.url(server.new_database()))


@pytest.mark.parametrize("database", DATABASES)
def test_what_can_not_be_recorded_is_refused_by_name_and_nobody_else_hears_of_it(
    database: str, start_system: StartSystem, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_system(system={"restart_pause": 0.1}, **store(database, request))
    encode = connection.encode
    monkeypatch.setattr(
        connection, "encode", lambda c: c.raw_args if isinstance(c, SimpleNamespace) else encode(c))

    def send(command: str, args: dict[str, Any]) -> Any:
        return client._link.call(cast(Any, SimpleNamespace(name=command, raw_args=args)), 20.0)

    def innocent(number: int) -> None:
        client.submit_batch(batch_id=number, tasks=sleepers(1), batch_type="train")

    with ThreadPoolExecutor(8) as pool:
        quiet = [pool.submit(innocent, number) for number in range(1, 25)]
        bad = [(command, args, pool.submit(send, command, args)) for command, args in bad_requests()]
        for one in quiet:
            one.result()
        unnamed = []
        for command, args, future in bad:
            with pytest.raises((DataError, TrinityError)) as caught:
                future.result()
            if type(caught.value) not in (DataError, TrinityError) or "can't be used" in str(caught.value):
                unnamed.append((command, args, caught.value))
    assert unnamed == []
    assert births(client) == 1, "a coordinator died of it"
    streams = {r.stream for r in client.log.events()}
    assert {s.partition("/")[0] for s in streams} <= {"system", "runner", "batch"}
    for number in range(1, 25):
        assert client.finalize_train_batch(number, timeout=60)["finished_task_count"] == 1
    assert client.log.verify() == []


class Deadly:
    """A priority function with a bug that takes its process along: `take_experiences` is decided with it."""

    def __init__(self, armed: str) -> None:
        self.armed = Path(armed)

    def __call__(self, candidate: Any) -> float:
        if self.armed.exists():
            with self.armed.open("a") as deaths:
                deaths.write("x")
            os._exit(9)
        return 0.0


@pytest.mark.parametrize("database", of_the_day(DATABASES))  # in turns; ALL=1 plays both
def test_a_request_that_ends_coordinators_is_refused_and_named(
    database: str, start_system: StartSystem, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    client = start_system(
        system={"restart_pause": 0.1}, **store(database, request),
        buffer={"queue": {"priority_fn": f"{__name__}:Deadly", "priority_fn_args": {"armed": str(armed)}}},
    )
    play_batch(client, 1, sleepers(4))
    armed.touch()
    with pytest.raises(RequestRefused, match="take_experiences") as caught:
        client.take_experiences(3, timeout=60)
    assert "coordinator" in str(caught.value)
    assert len(armed.read_text()) == 2, "it may end two coordinators and no third"
    with trinity_es.connect(client.config) as another, pytest.raises(RequestRefused):
        another.take_experiences(3, timeout=60)  # another client, another id, the same poison
    assert len(armed.read_text()) == 2
    assert births(client) == 3
    play_batch(client, 2, sleepers(2))
    armed.unlink()
    assert len(client.take_experiences(2, timeout=20)) == 2, "another request of the same command"
