"""Commands as they travel: what is sent is what arrives, and what can't be a command is refused by name."""

from __future__ import annotations

import enum
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest

from trinity_es.actors import commands
from trinity_es.actors.commands import COMMANDS, Command, decode, encode
from trinity_es.actors.commands.fields import NAME_LENGTH, TASKSET_LENGTH, TEXT_LENGTH
from trinity_es.actors.requests import Parcel
from trinity_es.events.errors import DataError, TrinityError
from trinity_es.events.vocabulary import Answer, PayloadRef, TasksetSource

TASKS = Parcel(b"[]")
REF = PayloadRef(digest="0" * 64, first=0, count=3)
ANSWER = Answer(message="m", runner="r", incarnation=1, model_version=0, model_version_end=1, payload=REF)
EXAMPLES: list[Command[Any]] = [
    commands.SubmitBatch(
        batch_id="12/x", tasks=TASKS, batch_type="train", min_wait_num=None,
        cursor=[commands.Cursor(taskset="t" * TASKSET_LENGTH, epoch=0, offset=4)],
        sources=[TasksetSource(taskset="t", is_eval=True, path="hub:a/b", subset=None, split="train", asked=None,
                               revision="c" * 40, args="", rows=7)],
    ),
    commands.FinalizeBatch(batch_id=1, batch_type="eval", timeout=1e9),
    commands.AbortBatch(batch_id=1, reason="x" * TEXT_LENGTH, keep_partial_results=True),
    commands.RedoTasks(batch_id=1, tasks=[0, 2], reason=""),
    commands.ProcessExperiences(refs=[REF]),
    commands.GetStatus(),
    commands.AddTasks(batch_id=1, tasks=Parcel(None, "a" * 64), cursor=None),
    commands.GetNextBatch(after=2**62, timeout=None),
    commands.AcknowledgeBatch(batch_id=1, step=3, metrics={"loss": 0.5, "n": 2}),
    commands.ResumeTrainer(step=0),
    commands.TakeExperiences(n=1, timeout=0.5, step=None),
    commands.SyncWeights(version=1, path="/p", timeout=1.0),
    commands.SyncAdapter(adapter="a.b-c_1", version=0, path="/p", rank=8, size=2**40, digest="0" * 64, timeout=1.0),
    commands.RemoveAdapter(adapter="a" * 100),
    commands.CheckWeightGroup(),
    commands.JoinWeightGroup(address="::1", port=65_535, workers=1, engines=0, timeout=1),
    commands.RestartRunner(runner="x" * NAME_LENGTH, incarnation=1, reason="r"),
    commands.ScaleServers(add=["http://a:1"], remove=[]),
    commands.DrainHost(host="gpu-7", reason="r"),
    commands.GetRunnerStates(names=["a", ""]),
    commands.ScheduleTasks(batch_id=1, tasks=Parcel(None, "a" * 64)),
    commands.PollBatch(batch_id=1, at_least=2**31 - 1, seconds=-1.0, resume=True),
    commands.PollAllBatches(settled=-1, seconds=0),
    commands.DropOpenTasks(batch_id=None, reason="r"),
    commands.TakeResults(batch_id=1, tasks=[0], submission=""),
    commands.PauseBatches(batches=[1, "two"]),
    commands.ResumeBatches(),
    commands.RecordAnswers(answers=[ANSWER]),
    commands.RewardAnswers(messages=["m"], reward=1, task=None, run=None),
    commands.DeliverAnswers(),
    commands.CountAnswers(),
    commands.GetRoutes(proxy="p", url="", knows=-1),
]


def test_there_is_an_example_of_every_command() -> None:
    assert {type(command) for command in EXAMPLES} == set(COMMANDS.values())


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: command.name)
def test_what_is_sent_arrives_as_it_was_and_in_plain_values(command: Command[Any]) -> None:
    sent = encode(command)
    assert decode(command.name, sent) == command
    assert plain(sent)
    assert isinstance(command.writes, bool)
    assert command.__doc__
    for field in fields(command):  # type: ignore[arg-type]  # every command is a dataclass
        with pytest.raises(FrozenInstanceError):
            setattr(command, field.name, None)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool, Parcel)


@pytest.mark.parametrize("command", EXAMPLES, ids=lambda command: command.name)
def test_a_field_too_many_and_one_too_few_are_named(command: Command[Any]) -> None:
    sent = encode(command)
    with pytest.raises(DataError, match=f"request '{command.name}': unknown key 'more'"):
        decode(command.name, sent | {"more": 1})
    with pytest.raises(DataError, match=f"request '{command.name}': it must be a mapping of keys"):
        decode(command.name, None)
    may_be_absent = {"method", "again", "return_partial", "sources", "groups", "continues"}
    for name in sent.keys() - may_be_absent:
        with pytest.raises(DataError, match=f"request '{command.name}': {name} is required"):
            decode(command.name, {key: value for key, value in sent.items() if key != name})
    decode(command.name, {key: value for key, value in sent.items() if key not in may_be_absent})


@pytest.mark.parametrize("name", ["no_such_command", "__init__", "", "name", "a\0b", None, 7, ["status"], {}])
def test_an_unknown_command_is_refused_by_name(name: Any) -> None:
    with pytest.raises(TrinityError, match=r"unknown command .*install the same trinity-es") as refused:
        decode(name, {})
    assert type(refused.value) is TrinityError


WRONG: list[tuple[str, str, Any, str]] = [
    ("submit", "cursor", [{"taskset": "t", "epoch": 0}], r"cursor\[0\]\.offset is required"),
    ("submit", "cursor", [{"taskset": "t", "epoch": 0, "offset": -1}],
     r"cursor\[0\]\.offset must be greater than or equal to 0, not -1"),
    ("submit", "cursor", [{"taskset": "t" * 401, "epoch": 0, "offset": 0}],
     r"cursor\[0\]\.taskset must have at most 400 characters"),
    ("submit", "batch_type", "collect", "batch_type must be one of 'train', 'eval', not 'collect'"),
    ("submit", "tasks", Parcel(None, "../../etc/passwd"), "tasks must be JSON bytes, or the SHA-256 digest"),
    ("finalize", "timeout", float("nan"), "timeout must be a finite number, not nan"),
    ("acknowledge", "metrics", {"a\0": 1.0}, "metrics.* must be text with no NUL"),
    ("acknowledge", "metrics", {"a": float("inf")}, "metrics.a must be a finite number, not inf"),
    ("acknowledge", "step", True, "step must be a whole number, not true"),
    ("sync_adapter", "adapter", "a/b", "adapter must match .*, not 'a/b'"),
    ("sync_adapter", "adapter", "a" * 101, "adapter must match"),
    ("acknowledge", "step", 10**5000, "step must be less than .*, not a whole number of more than 4,300 digits"),
    ("record_answers", "answers", [encode(commands.RecordAnswers(answers=[ANSWER]))["answers"][0] | {"payload": {}}],
     r"answers\[0\]\.payload\.digest is required"),
    ("runner_states", "names", "a", "names must be a list, not 'a'"),
    ("pause", "batches", [1.5], r"batches\[0\] is no batch id: batch_id is 1.5"),
    ("sync_weights", "method", None, "method must be text, not nothing"),
    ("join_weight_group", "port", 65_536, "port must be less than 65536, not 65536"),
    ("routes", "knows", 2**63, "knows must be less than 9223372036854775808"),
]


@pytest.mark.parametrize(("name", "field", "value", "says"), WRONG, ids=[" ".join(wrong[:2]) for wrong in WRONG])
def test_a_field_that_can_not_be_is_named(name: str, field: str, value: Any, says: str) -> None:
    good = next(encode(command) for command in EXAMPLES if command.name == name)
    with pytest.raises(DataError, match=says):
        decode(name, good | {field: value})


class Colour(enum.StrEnum):
    RED = "red"


@dataclass
class Own:
    x: object


def test_a_user_s_classes_do_not_travel() -> None:
    class Whole(int):
        pass

    sent = encode(commands.PollBatch(batch_id=Colour.RED, at_least=Whole(3), seconds=0.0, resume=False))
    assert (sent["batch_id"], sent["at_least"]) == ("red", 3)
    assert plain(sent)
    with pytest.raises(DataError, match=r"abort: reason must be text, not <object"):
        encode(commands.AbortBatch(batch_id=1, reason=object(), keep_partial_results=False))  # type: ignore[arg-type]  # as users do
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DataError, match=r"pause: batches\[0\] is no batch id"):
        encode(commands.PauseBatches(batches=endless))
    cursor = commands.Cursor(taskset="t", epoch=-1, offset=0)
    with pytest.raises(DataError, match=r"submit: cursor\[0\]\.epoch must be greater than or equal to 0, not -1"):
        encode(commands.SubmitBatch(batch_id=1, tasks=TASKS, batch_type="train", min_wait_num=None, cursor=[cursor]))
    with pytest.raises(DataError, match=r"record_answers: answers\[0\]\.model_version must be less than"):
        encode(commands.RecordAnswers(answers=[replace(ANSWER, model_version=2**70)]))
    with pytest.raises(DataError, match="reason must be text, not Own"):
        encode(commands.AbortBatch(batch_id=1, reason=Own(object()), keep_partial_results=False))  # type: ignore[arg-type]  # as above


def test_these_are_refused_at_once_while_the_log_can_not_be_written() -> None:
    """All others read, or wait for runners or for other clients anyway: those ask again."""
    refused = {name for name, command in COMMANDS.items() if command.writes and not command.waits}
    assert refused == {
        "abort", "acknowledge", "add_tasks", "deliver_answers", "drain_host", "drop_rest", "pause",
        "process_experiences", "record_answers", "redo", "remove_adapter", "resume", "reward_answers", "scale",
        "schedule", "submit", "take",
    }
