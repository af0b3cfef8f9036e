"""LoRA adapters: what a folder may hold, which may be published, and what a runner's answer means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import MODULES, SHAPES, make_adapter, published, tensors_of
from trinity_es.actors.coordinator.decisions import adapter_decisions as decisions
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord
from trinity_es.actors.coordinator.handlers.serve_routes import _route_row
from trinity_es.actors.engines.adapter_checks import checked_adapter
from trinity_es.actors.engines.interface import Completion, EngineConfig, LoRASettings, Sampling
from trinity_es.actors.engines.vllm.adapters import AdapterServing, lora_arguments
from trinity_es.actors.messages import AdaptersLoadResult
from trinity_es.actors.rollout.model import Model
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import EngineError, SyncError, WorkflowError
from trinity_es.projections.adapter_versions import Adapters, current_adapters, evolve_adapters
from trinity_es.projections.runner import RunnerLife
from trinity_es.testing import ScriptedEngine

Q, UP = MODULES
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


# --- folders --------------------------------------------------------------------------------------------------------
def test_a_folder_tells_its_rank_its_size_and_its_digest(tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "a", rank=4)
    found = checked_adapter(first, max_rank=4, shapes=SHAPES)
    files = [first / "adapter_config.json", first / "adapter_model.safetensors"]
    assert (found.rank, found.size) == (4, sum(f.stat().st_size for f in files))
    assert checked_adapter(make_adapter(tmp_path / "b", rank=4)) == found, "the same bytes elsewhere"
    assert checked_adapter(make_adapter(tmp_path / "b", rank=4, seed=1)).digest != found.digest
    assert checked_adapter(make_adapter(tmp_path / "b", rank=4, lora_alpha=9)).digest != found.digest
    assert checked_adapter(make_adapter(tmp_path / "b", rank=2, rank_pattern={"up_proj": 8})).rank == 8
    vision = {f"model.language_model.{name.removeprefix('model.')}": shape for name, shape in SHAPES.items()}
    assert checked_adapter(first, shapes=vision) == found, "a checkpoint may have another prefix"


def without(*names: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors_of().items() if name not in names}


NAN = tensors_of()[A].copy()
NAN[0, 0] = np.nan
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "LOHA"}, "peft_type in adapter_config.json is 'LOHA'"),
    "dora": ({"use_dora": True}, "use_dora is set"),
    "saved": ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    "bias": ({"bias": "all"}, "bias in adapter_config.json is 'all'"),
    "start": ({"init_lora_weights": "pissa"}, "'pissa', which changes the base model's weights"),
    "rank": ({"r": 0}, "r in adapter_config.json is 0"),
    "pattern": ({"rank_pattern": {"x": "9"}}, "rank_pattern is {'x': '9'}: ranks must be"),
    "high": ({"rank_pattern": {"up_proj": 9}}, "its rank is 9, and engines take at most 8. Raise explorer"),
    "half": ({"tensors": without(B)}, f"{Q} has lora_A and no lora_B"),
    "unknown": ({"tensors": tensors_of() | {"x.weight": np.zeros(1)}}, "x.weight is no tensor of a LoRA adapter"),
    "elsewhere": (
        {"tensors": {n.replace("layers.0", "layers.7"): t for n, t in tensors_of().items()}},
        "model.layers.7.*is not in the model that is served",
    ),
    "shape": (
        {"tensors": tensors_of() | {A: np.zeros((2, 5), np.float32)}},
        rf"{Q} has shape \[8, 8\] in the model that is served, not \[8, 5\]",
    ),
    "ranks": ({"tensors": tensors_of() | {A: np.zeros((3, 8), np.float32)}}, r"lora_A \[3, 8\] and lora_B \[8, 2\]"),
    "nan": ({"tensors": tensors_of() | {A: NAN}}, f"{A} holds NaN or infinite"),
    "half nan": ({"tensors": tensors_of() | {A: NAN.astype(np.float16)}}, f"{A} holds NaN or infinite"),
    "integers": ({"tensors": tensors_of() | {A: np.zeros((2, 8), np.int64)}}, "of type I64"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_engines_can_not_serve_is_named(tmp_path: Path, wrong: str) -> None:
    changes, said = WRONG[wrong]
    folder = make_adapter(tmp_path / "a", **changes)
    with pytest.raises(SyncError, match=said):
        checked_adapter(folder, max_rank=8, shapes=SHAPES)


def test_what_is_no_adapter_at_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="there is no such folder"):
        checked_adapter(tmp_path / "none")
    folder = make_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(SyncError, match=r"adapter_model.safetensors can't be read"):
        checked_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(SyncError, match=r"adapter_model.safetensors can't be read.*save_pretrained"):
        checked_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SyncError, match=r"adapter_config.json is not JSON"):
        checked_adapter(folder)


# --- what may be published ------------------------------------------------------------------------------------------
def after(*events: ev.AdapterPublished | ev.AdapterRemoved) -> Adapters:
    adapters: Adapters = {}
    for event in events:
        evolve_adapters(adapters, event)
    return adapters


def test_a_version_follows_another_and_adapters_are_apart() -> None:
    assert decisions.publish({}, published(version=0), 1) == [published(version=0)]
    two = after(published(version=3), published("code", 1))
    assert decisions.publish(two, published("code", 2), 2) == [published("code", 2)]
    assert decisions.publish(two, published(version=3), 2) == [], "said again it changes nothing"
    moved = published(version=3, path="/elsewhere")
    assert decisions.publish(two, moved, 2) == [moved], "the same files may lie elsewhere now"
    assert current_adapters(two) == {"code": published("code", 1), "math": published(version=3)}


@pytest.mark.parametrize(("new", "most", "said"), [
    (published(version=2), 2, "version 2 of adapter 'math' is older than the current one, 3"),
    (published(version=3, digest="other"), 2, "published with other contents: publish a higher version"),
    (published("code"), 1, "engines have room for 1 adapters and serve math. Call remove_adapter"),
    (published("gone", 1), 2, "version 1 of adapter 'gone' was removed: publish a higher version"),
    (published("tiny"), 2, "a model has that name. Give the adapter another name"),
    (published(), 0, "engines serve no adapters; set explorer.rollout_model.lora"),
])
def test_what_may_not_be_published_is_refused(new: ev.AdapterPublished, most: int, said: str) -> None:
    known = after(published("gone"), ev.AdapterRemoved(adapter="gone", version=1), published(version=3))
    before = dict(known)
    with pytest.raises(SyncError, match=said):
        decisions.publish(known, new, most, {"rollout", "tiny"})
    assert known == before


def test_one_that_is_removed_makes_room_and_comes_back_with_a_new_version() -> None:
    known = after(published(version=3))
    [removed] = decisions.remove(known, "math")
    assert removed == ev.AdapterRemoved(adapter="math", version=3)
    assert isinstance(removed, ev.AdapterRemoved)
    evolve_adapters(known, removed)
    assert (current_adapters(known), decisions.remove(known, "math")) == ({}, [])
    assert decisions.publish(known, published("code"), 1) == [published("code")]
    assert decisions.publish(known, published(version=4), 1) == [published(version=4)]
    with pytest.raises(SyncError, match="there is no adapter 'maths'; current adapters: none"):
        decisions.remove(known, "maths")


# --- what a runner says ---------------------------------------------------------------------------------------------
def result(*, loaded: Any = (), errors: Any = (), **has: int) -> AdaptersLoadResult:
    return AdaptersLoadResult(
        name="runner-0", incarnation=2, number=1, loaded=list(loaded), errors=list(errors), adapters=has
    )


LIFE = RunnerLife(name="runner-0", incarnation=2)
WHO: dict[str, Any] = {"runner": "runner-0", "incarnation": 2}
TWO, BOTH = after(published(), published("code", 5)), {"math", "code"}


def test_what_was_loaded_and_what_was_not_is_recorded() -> None:
    told = result(loaded=[("math", 1, 0.5)], errors=[("code", 5, "no such file")], math=1, code=4)
    expected = [
        ev.AdapterLoaded(**WHO, adapter="math", version=1, seconds=0.5),
        ev.AdapterFailed(**WHO, adapter="code", version=5, error="no such file"),
    ]
    found = decisions.apply_load_result(LIFE, told, TWO, BOTH, had_all=False)
    assert found == expected, "it has version 4 of code to go on with"


def test_a_life_that_comes_up_without_an_adapter_fails_and_says_what_to_do() -> None:
    told = result(loaded=[("math", 1, 0.5)], errors=[("code", 5, "no such file")], math=1)
    *_, failed = decisions.apply_load_result(LIFE, told, TWO, BOTH, had_all=False)
    assert failed.reason == (
        "it could not load version 5 of adapter 'code': no such file; publish a new version (sync_adapter), or "
        "remove_adapter it"
    )
    assert len(decisions.apply_load_result(LIFE, told, TWO, BOTH, had_all=True)) == 2, "one that served goes on"
    assert len(decisions.apply_load_result(LIFE, told, TWO, {"math"}, had_all=False)) == 2, "nobody ever had code"


# --- the model of a workflow ----------------------------------------------------------------------------------------
class Deaf(ScriptedEngine):
    """An engine that knows nothing of adapters, and so does not look for one."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        return await super().generate(prompt, replace(sampling, adapter=""))


def scripted(kind: type[ScriptedEngine] = ScriptedEngine) -> ScriptedEngine:
    engine = kind(EngineConfig(model_path=""))
    engine.adapters = {"math": 3}
    return engine


async def test_what_an_adapter_answered_says_so_and_its_logprobs_are_asked_of_it() -> None:
    model = Model(scripted(), defaults={"adapter": "math", "max_tokens": 5})
    [plain] = await model.generate_async("a", adapter="")
    [by_adapter] = await model.generate_async("a")
    assert "adapter_spans" not in plain.info
    assert by_adapter.info["adapter_spans"] == [["math", 3, 0, 5]]
    assert by_adapter.info["version_spans"] == plain.info["version_spans"] == [[0, 0, 5]]
    assert (by_adapter.info["sampling"]["adapter"], plain.info["sampling"].get("adapter")) == ("math", None)
    assert (await model.logprobs_async([1, 2, 3])).size == 2
    model.engine.adapters.clear()  # type: ignore[attr-defined]  # the scripted one has them
    with pytest.raises(EngineError, match="there is no adapter 'math': this engine serves none"):
        await model.logprobs_async([1, 2, 3])
    with pytest.raises(WorkflowError, match="adapter is 7: give the name of a LoRA adapter"):
        await model.generate_async("a", adapter=7)


async def test_an_answer_that_an_adapter_did_not_make_is_never_taken_for_its() -> None:
    with pytest.raises(EngineError, match="this model's engine serves no adapter 'math'") as refused:
        await Model(scripted(Deaf)).generate_async("a", adapter="math")
    assert refused.value.details["refused"]


# --- engines and proxies --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("on_cpu", "places"), [(False, (3, 5)), (True, (6, 6))])
def test_an_engine_has_room_for_earlier_versions_and_a_cpu_a_free_place(on_cpu: bool, places: tuple[int, int]) -> None:
    found = lora_arguments(LoRASettings(max_adapters=2, max_rank=20), on_cpu)
    assert found == {"enable_lora": True, "max_lora_rank": 32, "max_loras": places[0], "max_cpu_loras": places[1]}
    assert lora_arguments(None, on_cpu) == {}


class Serving(AdapterServing):
    """The part of the vLLM engine that serves adapters; `meanwhile` is done while vLLM reads the files."""

    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        super().__init__()
        config = SimpleNamespace(max_loras=3, max_cpu_loras=5, max_lora_rank=8)
        self.calls: list[tuple[str, Any]] = []

        async def add(request: Any) -> bool:
            self.calls.append(("add", request.lora_name))
            meanwhile()
            return True

        async def remove(number: int) -> None:
            self.calls.append(("remove", number))

        self._on_cpu, self._shapes = False, None
        self._llm = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=config), add_lora=add, remove_lora=remove)

    def _live_llm(self) -> Any:
        return self._llm


async def test_files_that_changed_meanwhile_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = lambda name, number, path: SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=request))
    folder = make_adapter(tmp_path / "a")
    engine = Serving(lambda: None)
    await engine.load_adapter("math", 1, str(folder), checked_adapter(folder).digest)
    assert (engine.adapters, engine.calls) == ({"math": 1}, [("add", "math@1")])
    engine = Serving(lambda: make_adapter(folder, seed=1))
    with pytest.raises(SyncError, match=r"version 2 .*changed since they were published.*no version of it is served"):
        await engine.load_adapter("math", 2, str(folder), checked_adapter(folder).digest)
    assert (engine.adapters, engine.calls) == ({}, [("add", "math@2"), ("remove", 1)])
    engine = Serving(lambda: None)
    with pytest.raises(SyncError, match="changed since they were published"):
        await engine.load_adapter("math", 2, str(folder), "of what was published")


def test_a_proxy_sends_nothing_to_an_engine_that_has_not_all_adapters_yet() -> None:
    runner = RunnerRecord(LIFE)
    assert not _route_row(runner)["serving"]
    runner.has_adapters = True
    assert _route_row(runner)["serving"]
