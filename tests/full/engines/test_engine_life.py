"""What is left of an engine when it ends: nothing, however it ends."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.engine_sessions import HELLO, Session, serving
from tests.helpers.engines import Live, SharedEngine
from trinity_es.actors.engines.interface import EngineConfig, Sampling
from trinity_es.actors.engines.vllm import engine as vllm_engine
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.actors.rollout.model import Model
from trinity_es.events.errors import ConfigError, EngineError
from trinity_es.testing import ByteTokenizer

real = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def with_marks(*marks: pytest.MarkDecorator):  # type: ignore[no-untyped-def]  # a decorator of decorators
    def decorate(test):  # type: ignore[no-untyped-def]
        for mark in marks:
            test = mark(test)
        return test

    return decorate


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while left := [p for p in pids if alive(p)]:
        assert time.monotonic() < end, f"processes {left} are alive after {seconds} s"
        time.sleep(0.05)


@pytest.mark.parametrize(("path", "why"), [
    ("/no/such/folder", "does not exist"), ("", "does not exist"), ("./tiny", "does not exist"),
    ("a/b/c", "does not exist"),
    ("EMPTY", "config.json"), ("FILE", "is a file"), ("nobody/nothing", "HF_HUB_OFFLINE"),
])
def test_a_model_that_is_not_there_is_told_before_anything_starts(
    path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "nobody/nothing":
        pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    path = {"EMPTY": str(tmp_path), "FILE": str(tmp_path / "file")}.get(path, path)
    with pytest.raises(ConfigError, match=why):
        VLLMEngine(EngineConfig(model_path=path))


@with_marks(*real)
def test_an_unknown_engine_argument_is_told_by_name(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_length"):
        Live(EngineConfig(model_path=str(tiny), options={"max_model_length": 64}))


@with_marks(*real, pytest.mark.last)
def test_stop_leaves_no_process_and_no_request_waiting(live: Live, tiny: Path) -> None:
    engine, pids = live.engine, live.engine.pids()
    assert pids
    waiting = [live.spawn(engine.generate("c=", Sampling(max_tokens=250, n=8, ignore_eos=True))) for _ in range(20)]
    while engine._llm.get_num_unfinished_requests() < 20:
        time.sleep(0.001)
    live.run(engine.stop(), timeout=30)
    wait_until_gone(pids, 0)
    cut_off = 0
    for asked in waiting:
        try:
            answers = asked.result(10)
        except EngineError:
            cut_off += 1
        else:  # done before the end
            assert {a.finish_reason for a in answers} == {"length"}
    assert cut_off
    with pytest.raises(EngineError, match="stopped"):
        live.run(engine.generate("c=", Sampling()))
    with pytest.raises(EngineError, match="stopped"):
        live.run(engine.load_weights(1, str(tiny)))
    assert engine.pids() == []
    live.run(engine.stop())  # does nothing, and raises nothing


class Forgetful:
    """A vLLM that never answers."""

    errored = False

    async def generate(self, *_: object, **__: object) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield None

    def shutdown(self) -> None:
        """And says nothing at its end."""


async def test_a_request_that_vllm_forgets_ends_with_its_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text("{}")
    engine = VLLMEngine(EngineConfig(model_path=str(tmp_path)))
    engine._llm, engine._why_dead = Forgetful(), None
    asked = asyncio.create_task(engine._last_output([1], None))
    given_up = asyncio.create_task(engine._last_output([1], None))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await engine.stop()
    await asyncio.wait({asked}, timeout=10)
    assert asked.done(), "the request still waits"
    with pytest.raises(EngineError, match="stopped") as e:
        asked.result()
    assert e.value.details["dead"]


@pytest.fixture(scope="module")
def templated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """An engine whose server has a chat template of its own."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}{{ more }}>{{ m.content }}{% endfor %}{{ '=' }}")
    args = {"chat_template": str(template), "default_chat_template_kwargs": {"more": "!"}}
    engine = SharedEngine(EngineConfig(model_path=str(tiny), server_args=args))
    yield engine
    engine.close()


@with_marks(*real)
def test_a_chat_template_of_the_server_holds_for_workflows_too(templated: SharedEngine) -> None:
    live, config = templated.get(), templated.config
    with serving(live, **config.server_args) as server:
        told = Session(live, server).openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    [mine] = live.run(Model(live.engine).chat_async(HELLO, max_tokens=2))
    assert mine.prompt_text == "<user!>c=="
    assert mine.tokens[: mine.prompt_length].tolist() == told.prompt_token_ids  # type: ignore[attr-defined]
    afar = VLLMEngine.load_tokenizer(config)  # of those who ask it as an auxiliary model
    assert afar.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True) == "<user!>c=="
    with pytest.raises(ConfigError, match=r"server_args\.chat_template can't be read"):
        VLLMEngine.load_tokenizer(replace(config, server_args={"chat_template": "nowhere.jinja"}))


@with_marks(*real)
def test_a_dead_engine_core_is_an_error_of_every_call_and_no_hang(templated: SharedEngine, tiny: Path) -> None:
    live = templated.get()
    pids = live.engine.pids()
    os.kill(pids[0], signal.SIGKILL)
    for call in (
        live.engine.generate("c=", Sampling(max_tokens=200, ignore_eos=True)), live.engine.load_weights(1, str(tiny)),
    ):
        with pytest.raises(EngineError) as e:
            live.run(call, timeout=20)
        assert e.value.details["dead"]
    live.run(live.engine.stop())
    assert live.engine.pids() == []
    wait_until_gone(pids, 30)


async def test_an_engine_whose_task_on_the_event_loop_ended_is_dead(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = VLLMEngine(EngineConfig(model_path=str(tmp_path)))
    llm: Any = Forgetful()
    engine._llm, engine._why_dead = llm, None
    assert engine.dead is None
    llm.errored, llm.is_running = True, False  # as vLLM's AsyncLLM says where its output handler is done
    assert engine.dead == "vLLM's task on the event loop ended"
    with pytest.raises(EngineError, match="task on the event loop ended"):
        await engine.generate("c=", Sampling())


# --- speculation ------------------------------------------------------------------------------------------------------
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}


class Two(Forgetful):
    """A vLLM that tells these logprobs of two tokens at its last place."""

    def __init__(self, *logprobs: float) -> None:
        self.logprobs, self.asked = logprobs, list[Any]()

    async def generate(self, prompt: object, params: Any, request: str, **_: object) -> AsyncIterator[Any]:
        self.asked.append(params)
        told = [{t: SimpleNamespace(logprob=p) for t, p in zip((97, 98), row, strict=True)}
                for row in ((math.log(0.5),) * 2, self.logprobs)]
        answer = SimpleNamespace(index=0, token_ids=[97, 98], logprobs=told, text="", finish_reason="length")
        yield SimpleNamespace(outputs=[answer], finished=True)


def speculating(folder: Path, *logprobs: float) -> VLLMEngine:
    (folder / "config.json").write_text("{}")
    engine: Any = VLLMEngine(EngineConfig(model_path=str(folder), options=NGRAM))
    engine._llm, engine._why_dead, engine.version = Two(*logprobs), None, "vllm 0 on cpu"
    engine.tokenizer = ByteTokenizer()
    return engine  # type: ignore[no-any-return]


async def test_a_speculation_with_other_logprobs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "sampling_params", lambda s, more: SimpleNamespace(stop=s.stop, **more))
    right = speculating(tmp_path, math.log(0.1), math.log(0.9))
    await right._check_speculation([7] * 4)
    assert [params.allowed_token_ids for params in right._llm.asked] == [[97, 98]]
    for wrong in ((-5.56, -5.56), (0.0, -0.7), (math.nan, math.nan), (-math.inf, -math.inf)):
        with pytest.raises(ConfigError, match=r"speculative_config: vllm 0 on cpu gives wrong .* leave it"):
            await speculating(tmp_path, *wrong)._check_speculation([7] * 4)


async def test_a_stop_text_beside_a_speculation_is_refused_since_tokens_follow_it(tmp_path: Path) -> None:
    """vLLM finds a stop text in what several tokens of one step say, and keeps them all (vllm 47616)."""
    engine = speculating(tmp_path, 0.0, 0.0)
    with pytest.raises(EngineError, match="allows no stop texts") as refused:
        await engine._last_output([1], SimpleNamespace(stop=["x"]))
    assert refused.value.details == {"refused": True}


@pytest.mark.all
@with_marks(*real)
def test_vllms_own_speculation_on_a_cpu_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.speculative_config: vllm \S+ on cpu gives wrong logprobs"):
        Live(EngineConfig(model_path=str(tiny), options=NGRAM))
