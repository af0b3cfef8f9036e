"""Weights on their way (PARITY P34): files, refusals, groups, calls of vLLM, on the stand-in of tests/engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.engines import StandIn
from trinity_es.actors import messages
from trinity_es.actors.commands import Command, JoinWeightGroup, SyncWeights
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.weight_loading import WeightLoading
from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.actors.engines.checkpoints import read_tensor, torch_type, why_unloadable
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.engines.vllm import weights as vllm_weights
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError, EngineError, SyncError, WeightNotFound
from trinity_es.projections.runner import Lives, RunnerLife, RunnerState, Weights, evolve_lives, evolve_weights
from trinity_es.weights import publisher as publishing
from trinity_es.weights import shared_memory

SHAPES = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}


def state(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(seed)
    return {name: chance.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"tie_word_embeddings": true}')
    save_file(state(), str(model / "model.safetensors"))
    made = Config.from_dict({"model": {"model_path": str(model)}}, folder=tmp_path)
    yield made
    shared_memory.free_shared_memory(made, keep="")
    assert not shared_memory.memory_dir(made).exists()


def left(config: Config) -> list[str]:
    return sorted(os.listdir(shared_memory.memory_dir(config))) if shared_memory.memory_dir(config).exists() else []


# --- shared memory --------------------------------------------------------------------------------------------------
def test_p34_what_is_written_to_memory_is_a_checkpoint_of_the_same_numbers(config: Config) -> None:
    folder = shared_memory.write_to_shared_memory(config, 1, state(1))
    assert folder.parent == shared_memory.memory_dir(config)
    assert str(folder).startswith("/dev/shm/")
    assert (folder / "config.json").is_file()
    found = load_file(str(folder / "model.safetensors"))
    assert found.keys() == state(1).keys()
    for name, tensor in state(1).items():
        np.testing.assert_array_equal(found[name], tensor)
        np.testing.assert_array_equal(read_tensor(folder, name), tensor)
    assert os.stat(folder.parent).st_mode & 0o077 == 0  # weights are nobody else's


NAN = state() | {"model.norm.weight": np.array([1.0, np.nan, 2.0, 3.0], np.float32)}
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": ({"model.norm.weight": np.zeros(4, np.float32)}, SyncError, "model.embed_tokens.weight missing"),
    "unknown": (state() | {"extra": np.zeros(1)}, SyncError, "extra not in the model"),
    "shape": (state() | {"model.norm.weight": np.zeros(5)}, SyncError, r"model.norm.weight has shape \[5\]"),
    "nan": (NAN, SyncError, "model.norm.weight holds NaN"),
    "no tensor": (state() | {"model.norm.weight": [1.0]}, DataError, r"weights\['model.norm.weight'\] is a list"),
    "empty": ({}, DataError, "a mapping"),
}


@pytest.mark.parametrize("what", WRONG)
def test_p34_wrong_weights_are_refused_by_name_before_anybody_hears_of_them(config: Config, what: str) -> None:
    given, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        shared_memory.write_to_shared_memory(config, 1, given)
    assert left(config) == []


def test_p34_memory_that_is_short_says_so_and_leaves_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(SyncError, match=r"/dev/shm has .* GiB free: enlarge it, or set synchronizer\.sync_method"):
        shared_memory.write_to_shared_memory(config, 1, state())
    assert left(config) == []


def test_p34_a_write_that_fails_half_way_leaves_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "_save", full)
    with pytest.raises(SyncError, match="No space left"):
        shared_memory.write_to_shared_memory(config, 1, state())
    assert left(config) == []


def test_p34_a_file_cut_short_is_named(config: Config) -> None:
    folder = shared_memory.write_to_shared_memory(config, 1, state())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    told = why_unloadable(str(folder), None, False)
    assert "model.safetensors can't be read" in told


def test_p34_a_weight_that_is_not_there_is_a_keyerror_with_near_names(config: Config) -> None:
    folder = shared_memory.write_to_shared_memory(config, 1, state())
    with pytest.raises(KeyError, match=r"did you mean model.norm.weight") as wrong:
        read_tensor(folder, "model.norm.wieght")
    assert isinstance(wrong.value, WeightNotFound)
    assert wrong.value.details["near"][0] == "model.norm.weight"
    with pytest.raises(WeightNotFound, match="2 other tensors are"):
        read_tensor(folder, "zzz")


def publisher(config: Config, answer: Any) -> tuple[publishing.Publisher, list[tuple[str, Any]]]:
    """One whose commands are answered so; `answer` also gets what says, by its path, which weights are current."""
    log, calls = SimpleNamespace(path=""), []

    def call(command: Command[Any], timeout: float) -> Any:
        calls.append(command)
        return answer(command, log)

    def last(stream: str, type_name: str) -> Any:
        return SimpleNamespace(event=ev.WeightsPublished(version=1, path=log.path)) if log.path else None

    log.last = last
    return publishing.Publisher(config, call, lambda: log), calls  # type: ignore[arg-type,return-value]  # a fake log


def test_p34_an_old_version_goes_when_every_engine_has_the_new_one_and_not_before(config: Config) -> None:
    have: list[str] = []

    def answer(command: SyncWeights, log: Any) -> Any:
        log.path = command.path
        return {"version": command.version, "runners": list(have), "from_group": False}

    mine, calls = publisher(config, answer)
    mine.publish(1, state(), 1.0)
    mine.publish(2, state(1), 1.0)
    assert [name.split("-")[0] for name in left(config)] == ["version_1", "version_2"]  # no engine said it has 2
    have.append("runner-0")
    mine.publish(3, state(2), 1.0)
    assert [name.split("-")[0] for name in left(config)] == ["version_3"]
    assert [command.method for command in calls] == ["memory"] * 3


@pytest.mark.parametrize(("published", "stay"), [(False, 0), (True, 1)], ids=["refused", "failed in the engines"])
def test_p34_of_a_version_that_is_not_served_only_what_was_published_stays_for_engines_that_come_back(
    config: Config, published: bool, stay: int
) -> None:
    def answer(command: SyncWeights, log: Any) -> Any:
        log.path = command.path if published else ""
        raise SyncError("weights version 1 is older than the current one, 2")

    mine, _ = publisher(config, answer)
    with pytest.raises(SyncError, match="older"):
        mine.publish(1, state(), 1.0)
    assert len(left(config)) == stay


def test_p34_a_checkpoint_that_no_engine_could_load_is_not_published(config: Config, tmp_path: Path) -> None:
    mine, calls = publisher(config, lambda command, log: pytest.fail("it was published"))
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(SyncError, match=r"version 1 was not published: .*step_1 holds no weights"):
        mine.publish(1, folder, 1.0)
    save_file(state() | {"model.norm.weight": np.zeros(5, np.float32)}, str(folder / "model.safetensors"))
    with pytest.raises(SyncError, match=r"model.norm.weight has shape \[5\]"):
        mine.publish(1, folder, 1.0)
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(SyncError, match="can't be read"):
        mine.publish(1, folder, 1.0)
    assert calls == []


# --- the coordinator's side -----------------------------------------------------------------------------------------
class FakeBook:
    def __init__(self) -> None:
        self.weights = Weights()
        self.batches: dict[Any, Any] = {}
        self.in_flight = UnitsInFlight()
        self.adapters: dict[str, Any] = {}
        self.lives: Lives = {}
        self.hosts: dict[str, Any] = {}
        self.recorded: list[ev.Event] = []

    def record(self, *events: ev.Event) -> None:
        self.recorded += events
        for event in events:
            if isinstance(event, ev.WeightsPublished):
                self.weights = evolve_weights(self.weights, event)
            else:
                evolve_lives(self.lives, event, self.weights)

    def when_durable(self, call: Any) -> None:
        call()


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []

    def send(self, to: Any, message: Any) -> None:
        self.sent.append((to, message))

    def now(self) -> float:
        return 0.0


def crew_of(*names: str) -> tuple[RunnerLifecycle, FakeBook, FakeSender]:
    live, sender = FakeBook(), FakeSender()
    registry = RunnerRegistry(live, sender)  # type: ignore[arg-type]  # stand-ins
    fleet = RunnerLifecycle(registry, WeightLoading(registry), Dispatcher(registry))
    for name in names:
        live.lives[name, 1] = RunnerLife(name=name, incarnation=1, state=RunnerState.READY, places=1, was_current=True)
        fleet.registry.runners[name] = RunnerRecord(live.lives[name, 1], f"address of {name}")
    return fleet, live, sender


GROUP = JoinWeightGroup(address="127.0.0.1", port=5000, engines=2, workers=2, timeout=1.0)


def joined_crew() -> tuple[RunnerLifecycle, FakeBook, FakeSender]:
    fleet, live, sender = crew_of("runner-0", "runner-1")
    fleet.weights.group.join("id", GROUP)
    for name in ("runner-0", "runner-1"):
        fleet.weights.group.on_join_result(messages.GroupJoinResult(name, 1, "id"))
    return fleet, live, sender


def test_p34_each_worker_of_each_engine_has_a_rank_of_its_own_after_the_trainer_s() -> None:
    fleet, _, sender = joined_crew()
    joins = [m for _, m in sender.sent if isinstance(m, messages.JoinGroup)]
    assert [(m.rank_offset, m.world_size) for m in joins] == [(1, 5), (3, 5)]
    assert fleet.weights.group.is_whole()


def load_messages(sender: FakeSender) -> list[messages.LoadWeights]:
    return [m for _, m in sender.sent if isinstance(m, messages.LoadWeights)]


def test_p34_a_whole_group_receives_and_a_runner_that_comes_later_loads_from_the_place() -> None:
    fleet, live, sender = joined_crew()
    _, from_group = fleet.weights.publish(1, "/dev/shm/x/version_1", "nccl")
    assert from_group
    assert [m.from_group for m in load_messages(sender)] == [True, True]
    assert live.recorded[-1] == ev.WeightsPublished(version=1, path="/dev/shm/x/version_1", method="nccl")
    life = RunnerLife(name="runner-0", incarnation=2, state=RunnerState.READY, places=1)
    fleet.registry.runners["runner-0"] = late = RunnerRecord(life, "new address")
    fleet.weights.load(late)
    assert not load_messages(sender)[-1].from_group
    assert load_messages(sender)[-1].path == "/dev/shm/x/version_1"
    for runner in fleet.registry.runners.values():
        runner.loading = None
    assert not fleet.weights.group.is_whole()  # another life of runner-0


@pytest.mark.parametrize("broken_by", ["death", "failure", "another coordinator"])
def test_p34_a_group_that_is_not_whole_any_more_is_not_sent_over(broken_by: str) -> None:
    fleet, _, sender = joined_crew()
    if broken_by == "death":
        fleet.on_death(messages.RunnerDied("runner-1", 1, "killed"))
    elif broken_by == "failure":
        fleet.weights.on_load_result(messages.WeightsLoadResult("runner-1", 1, 0, 0.1, "it did not come"))
    else:
        fleet, _, sender = crew_of("runner-0", "runner-1")
    _, from_group = fleet.weights.publish(1, "/p", "nccl")
    assert not from_group
    assert not any(m.from_group for m in load_messages(sender))


def test_p34_a_group_that_does_not_come_together_says_who_is_missing() -> None:
    fleet, _, _ = crew_of("runner-0", "runner-1")
    waiter = fleet.weights.group.join("id", GROUP)
    for late in (messages.GroupJoinResult("runner-1", 1, "another id"), messages.GroupJoinResult("runner-1", 2, "id")):
        fleet.weights.group.on_join_result(late)
    assert "runner-1" in waiter.waiting_on
    fleet.weights.group.on_join_result(messages.GroupJoinResult("runner-0", 1, "id"))
    fleet.on_death(messages.RunnerDied("runner-1", 1, "killed"))
    assert not waiter.waiting_on
    assert "runner-1: killed" in str(waiter.error())
    assert not fleet.weights.group.is_whole()
    with pytest.raises(SyncError, match="only 1 of 2 engines are ready"):
        fleet.weights.group.join("other", GROUP)


def test_p34_a_version_in_memory_may_be_published_again_as_a_checkpoint_and_no_other_way() -> None:
    fleet, live, sender = crew_of("runner-0")
    fleet.weights.publish(1, "/dev/shm/x/version_1", "memory")
    fleet.weights.on_load_result(messages.WeightsLoadResult("runner-0", 1, 1, 0.1))
    waiter, _ = fleet.weights.publish(1, "/disk/global_step_1", "checkpoint")
    assert not waiter.waiting_on
    assert len(load_messages(sender)) == 1  # nobody loads the same weights twice
    assert (live.weights.version, live.weights.path) == (1, "/disk/global_step_1")
    with pytest.raises(SyncError, match="served already"):
        fleet.weights.publish(1, "/disk/elsewhere", "checkpoint")
    with pytest.raises(SyncError, match="older"):
        fleet.weights.publish(0, "/dev/shm/x/version_0", "memory")


def test_p9_a_runner_that_comes_up_and_can_t_load_the_current_version_stays_failed_until_it_can() -> None:
    fleet, live, sender = crew_of()
    fleet.weights.publish(1, "/disk/1", "checkpoint")
    status = messages.RunnerStatus("runner-0", 1, "ready", 10, "here", "http", places=4, model_version=0)
    for _ in range(3):  # it says every few seconds how it is, and is told to try again
        fleet.on_status(status, "its address")
        fleet.weights.on_load_result(messages.WeightsLoadResult("runner-0", 1, 1, 0.1, "it takes no weights"))
    assert [type(e).__name__ for e in live.recorded] == [
        "WeightsPublished", "RunnerStarted", "RunnerReady", "WeightsFailed", "RunnerFailed"]
    assert [m.version for m in load_messages(sender)] == [1, 1, 1]
    [row] = fleet.registry.status()
    assert (row["state"], row["refused"]) == ("failed", "it takes no weights")
    waiter, _ = fleet.weights.publish(2, "/disk/2", "checkpoint")
    assert waiter.waiting_on == {"runner-0"}
    fleet.weights.on_load_result(messages.WeightsLoadResult("runner-0", 1, 2, 0.1))
    assert not waiter.waiting_on
    fleet.on_status(replace(status, model_version=2), "its address")
    [row] = fleet.registry.status()
    assert (row["state"], row["refused"], row["loading"]) == ("ready", "", None)


def test_it_is_told_since_when_a_runner_loads() -> None:
    fleet, _live, _sender = crew_of("runner-0")
    before = fleet.registry.clock()
    fleet.weights.publish(1, "/disk/1", "checkpoint")
    [row] = fleet.registry.status()
    assert row["loading"] == 1
    assert before <= row["loading_since"] <= fleet.registry.clock()


# --- the engine's side ----------------------------------------------------------------------------------------------
class Transferring(StandIn):
    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.init = request["init_info"]
        self.note("init")

    async def shutdown_weight_transfer_engine(self) -> None:
        self.note("leave")

    async def start_weight_update(self) -> None:
        assert self.paused
        self.note("start")

    async def update_weights(self, request: Any) -> None:
        assert self.paused
        self.names = request["update_info"]["names"]
        self.note("update")
        await asyncio.sleep(self.slow)

    async def finish_weight_update(self) -> None:
        self.note("finish")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    monkeypatch.setattr(vllm_weights, "_transfer_request", lambda name, **info: info)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"w": np.zeros(2, np.float32), "a": np.zeros(1, np.float16)}, str(tmp_path / name / "m.safetensors"))
    built = VLLMEngine(EngineConfig(model_path=str(tmp_path / "old")))
    built._llm, built._why_dead = Transferring(), None
    return built


JOINED = ["leave", "init"]
RECEIVED = ["pause", "start", "update", "finish", "trinity_pack_again", "trinity_weights_finite"]
UNDONE = ["trinity_forget_half_reload", "reload:old", "trinity_pack_again", "resume"]


async def test_p34_a_transfer_goes_through_vllm_s_own_calls_in_order(engine: VLLMEngine, tmp_path: Path) -> None:
    await engine.join_weight_group("127.0.0.1", 5000, 3, 5, 10.0)
    assert engine._llm.init == {"master_address": "127.0.0.1", "master_port": 5000, "rank_offset": 3, "world_size": 5}
    await engine.receive_weights(4, str(tmp_path / "new"), 10.0)
    assert engine._llm.calls == [*JOINED, *RECEIVED, "label:4", "resume"]
    assert engine._llm.names == ["a", "w"]
    assert engine.model_version == 4


@pytest.mark.parametrize("step", ["start", "update", "finish", "trinity_weights_finite"])
async def test_p34_a_failed_transfer_keeps_the_old_weights(engine: VLLMEngine, tmp_path: Path, step: str) -> None:
    await engine.join_weight_group("127.0.0.1", 5000, 1, 2, 10.0)
    engine._llm.fail[step] = RuntimeError("boom")
    with pytest.raises(SyncError, match="was loaded again; still serving version 0"):
        await engine.receive_weights(4, str(tmp_path / "new"), 10.0)
    assert engine._llm.calls[-4:] == UNDONE
    assert not engine._llm.paused
    assert engine.model_version == 0
    engine._llm.fail.clear()
    with pytest.raises(SyncError, match="has left its weight transfer group"):  # tensors may be on their way
        await engine.receive_weights(5, str(tmp_path / "new"), 10.0)
    await engine.load_weights(5, str(tmp_path / "new"))
    assert engine.model_version == 5


async def test_p34_an_engine_whose_transfer_hangs_is_ended_and_says_so(engine: VLLMEngine, tmp_path: Path) -> None:
    await engine.join_weight_group("127.0.0.1", 5000, 1, 2, 10.0)
    engine._llm.slow = 3600.0
    llm = engine._llm
    with pytest.raises(EngineError, match=r"weights did not come within 0.05 s") as ended:
        await engine.receive_weights(4, str(tmp_path / "new"), 0.05)
    assert ended.value.details["dead"]
    assert llm.shut_down


async def test_p34_a_group_that_can_not_be_joined_leaves_the_engine_serving(engine: VLLMEngine) -> None:
    engine._llm.fail["init"] = RuntimeError("nobody there")
    with pytest.raises(SyncError, match="nobody there"):
        await engine.join_weight_group("127.0.0.1", 5000, 1, 2, 10.0)
    assert engine._live_llm() is not None


def test_types_that_no_weight_has_are_named() -> None:
    assert torch_type("BF16") == "bfloat16"
    with pytest.raises(ValueError, match="C64"):
        torch_type("C64")
