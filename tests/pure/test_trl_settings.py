"""TRL's prompts as token ids, and its configs' words for sampling: as TRL has them, or refused."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import trinity_es
from tests.helpers.trl_trainers import Rows, StandInClient, StandInTrainer
from trinity_es.actors.engines.interface import EngineConfig, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.errors import AlreadyRunning, ConfigError, NotRunning
from trinity_es.events.values import Task
from trinity_es.integrations.answers import ANSWERS, PROMPTS, AnswerWorkflow, PromptWorkflow
from trinity_es.integrations.trl_settings import GENERATION
from trinity_es.system.run_lock import RunLock
from trinity_es.testing import ScriptedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from trinity_es.integrations import trl
    from trinity_es.integrations.trl import Rollouts
    from trinity_es.integrations.trl_async import AsyncRollouts


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import torch and transformers in the process that runs these tests, not in each that collects them."""
    from transformers import PreTrainedTokenizerFast

    from trinity_es.integrations import trl
    from trinity_es.integrations.trl_async import AsyncRollouts

    globals().update(
        trl=trl, Rollouts=trl.Rollouts, AsyncRollouts=AsyncRollouts, PreTrainedTokenizerFast=PreTrainedTokenizerFast)

TEMPLATE = (
    "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if thinking is defined and not thinking %}[no]{% endif %}"
)
CHAT = [{"role": "user", "content": "c="}]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one that begins a text with <s>, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={"<s>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", chat_template=TEMPLATE)


def trl_tokens(of: PreTrainedTokenizerFast, prompt: Any, **template: Any) -> list[int]:
    """Return what GRPOTrainer._tokenize_prompts of trl 1.16 makes of a prompt."""
    if isinstance(prompt, str):
        return list(of(text=[prompt])["input_ids"][0])
    return list(of.apply_chat_template(
        conversation=[prompt], tools=None, chat_template=None, add_generation_prompt=True, tokenize=True,
        return_dict=True, **template)["input_ids"][0])


@pytest.mark.parametrize("workflow", [PromptWorkflow, AnswerWorkflow])
@pytest.mark.parametrize(("prompt", "template"), [
    ("c=", {}), ("c=", {"thinking": False}), (CHAT, {}), (CHAT, {"thinking": False}),
], ids=["text", "text, no thinking", "chat", "chat, no thinking"])
async def test_a_prompt_has_the_tokens_that_trl_gives_it(workflow: Any, prompt: Any, template: dict[str, Any]) -> None:
    engine, own = ScriptedEngine(EngineConfig(model_path="", options={"tokens": 2})), tokenizer()
    engine.tokenizer = own  # type: ignore[assignment]
    args = {"chat_template_kwargs": template} if template else {}
    task = Task(raw_task={"prompt": prompt, "answer": "c"}, workflow_args=args,
                reward_fn="tests.helpers.trl_rewards:vowels")
    made = workflow(task=task, model=Model(engine))
    made.set_repeat_times(3, 4)
    found = await made.run_async()
    wanted = trl_tokens(own, prompt, **template)
    assert [e.tokens[: e.prompt_length].tolist() for e in found] == [wanted] * 3
    assert [e.eid.run for e in found] == [4, 5, 6]
    assert all((e.reward is None) == (workflow is AnswerWorkflow) for e in found)
    assert [(e.messages or [])[:-1] for e in found] == [[] if isinstance(prompt, str) else CHAT] * 3


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> StandInClient:
    found = StandInClient()
    monkeypatch.setattr(trl, "connect", lambda config, *, resumed_at=None: found)
    return found


def config(folder: Path) -> trinity_es.Config:
    return trinity_es.Config.from_dict(
        {"explorer": {"rollout_model": {"engine_type": "scripted"}}, "synchronizer": {"sync_method": "memory"},
         "buffer": {"pipeline": {"operators": []}}}, folder=folder)


def submitted(folder: Path, client: StandInClient, args: dict[str, Any], **given: Any) -> dict[str, Any]:
    Rollouts(config(folder), **given)(["c=", "c="], StandInTrainer([{"prompt": "c="}], **args))
    [task] = client.submitted.pop("0/trl-train-0")
    return task


def test_tasks_ask_for_prompts_as_trl_has_them(tmp_path: Path, client: StandInClient) -> None:
    args = {"chat_template_kwargs": {"thinking": False}}
    assert submitted(tmp_path, client, {})["workflow"] == ANSWERS
    task = submitted(tmp_path, client, args, reward_fn="rewards:letters", workflow_args={"x": 1})
    assert (task["workflow"], task["workflow_args"]) == (PROMPTS, {"x": 1, **args})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs, which don't reach the workflow react"):
        submitted(tmp_path, client, args, workflow="react")
    for key in ("system_prompt", "reply_prefix"):
        with pytest.raises(ConfigError, match=f"format_args has {key}, but the trainer's prompts are sent unchanged"):
            Rollouts(config(tmp_path), format_args={key: "x"})
        with pytest.raises(ConfigError, match=f"format_args has {key}"):
            AsyncRollouts(config(tmp_path), Rows([{"prompt": "c="}]), format_args={key: "x"})


def test_generation_kwargs_go_first_and_what_no_engine_knows_is_refused(tmp_path: Path, client: StandInClient) -> None:
    more = {"temperature": 0.5, "max_new_tokens": 5, "stop_strings": ["."], "top_k": 0, "do_sample": True}
    task = submitted(tmp_path, client, {"generation_kwargs": more}, rollout_args={"seed": 3})
    assert task["rollout_args"] == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 5, "stop": ["."],
        "seed": 3}
    for wrong in ({"num_beams": 4}, {"do_sample": False}, {"n": 2}):
        [name] = wrong
        with pytest.raises(ConfigError, match=f"generation_kwargs of the trainer's config has {name}="):
            submitted(tmp_path, client, {"generation_kwargs": wrong})
    assert not client.submitted
    assert set(GENERATION.values()) <= {f.name for f in fields(Sampling)}


def test_the_async_trainers_settings_hold_for_its_rollouts(tmp_path: Path) -> None:
    made = AsyncRollouts(config(tmp_path), Rows([{"prompt": CHAT}]), batch_size=1, rollout_args={"top_p": 0.5})
    args = SimpleNamespace(weight_sync_steps=1, temperature=0.7, top_p=1.0, max_completion_length=9,
                           chat_template_kwargs={"thinking": False})
    made.on_train_begin(args, SimpleNamespace(global_step=0), None)
    [task] = made._tasks(0)
    assert (task.workflow, task.workflow_args) == (PROMPTS, {"chat_template_kwargs": {"thinking": False}})
    assert task.rollout_args == {"temperature": 0.7, "top_p": 0.5, "max_tokens": 9}
    made = AsyncRollouts(config(tmp_path), Rows([{"prompt": CHAT}]), workflow="react")
    with pytest.raises(ConfigError, match="don't reach the workflow react"):
        made.on_train_begin(args, SimpleNamespace(global_step=0), None)


def test_the_async_trainer_is_the_only_one_of_its_store_and_begins_with_an_empty_queue(tmp_path: Path) -> None:
    made = AsyncRollouts(config(tmp_path), Rows([{"prompt": CHAT}]))
    made.rollout_buffer.put("of a training before")
    made.on_train_begin(SimpleNamespace(), SimpleNamespace(global_step=0), None)
    assert made.rollout_buffer.empty()
    lock = RunLock(made.config, "trainer")
    with pytest.raises(AlreadyRunning, match="a trainer runs on"):
        made.init_weight_transfer()
    lock.release()
    with pytest.raises(NotRunning):
        made.init_weight_transfer()


def test_the_async_trainers_rows_are_those_of_epochs_one_after_the_other(tmp_path: Path) -> None:
    rows = Rows([{"prompt": CHAT, "row": i} for i in range(5)])
    made = AsyncRollouts(config(tmp_path), rows, batch_size=3)
    played = [task.index["index"] for n in (0, 1, 2, 3, 4) for task in made._tasks(n)]
    assert all(sorted(played[i : i + 5]) == [0, 1, 2, 3, 4] for i in (0, 5, 10))
    assert played[:5] != played[5:10]
    assert [task.index["index"] for task in made._tasks(1)] == played[3:6]


def test_a_trainer_that_paused_and_takes_again_is_not_told_that_nothing_comes(tmp_path: Path) -> None:
    made = AsyncRollouts(config(tmp_path), Rows([{"prompt": CHAT}]), batch_size=1, num_generations=1)
    made._thread, made._last_progress, made._samples_left = threading.current_thread(), time.monotonic() - 400, {0: 1}
    made._client = SimpleNamespace(log=SimpleNamespace(why_open=lambda: ["batch 1: its units run"]))
    made.rollout_buffer.put(SimpleNamespace(group_id=0))
    made.check_health(300)
    made.rollout_buffer.get()  # an eval is over
    made.check_health(300)
    made._last_progress = time.monotonic() - 400
    with pytest.raises(RuntimeError, match=r"no rollout for 300 s\. batch 1: its units run"):
        made.check_health(300)
