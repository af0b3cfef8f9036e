"""The agent loop for verl on a running system, against the classes of verl 0.9.1 in its one file (verl is not
imported).
"""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from tests.helpers.client_packages import installed
from tests.helpers.systems import StartSystem
from trinity_es.errors import ConfigError, WorkflowError
from trinity_es.integrations import verl
from trinity_es.integrations.verl import RolloutLoop

pytestmark = pytest.mark.timeout(300)

FILE = "verl.experimental.agent_loop.agent_loop"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What `AgentLoopWorker.generate_sequences` says."""


@pytest.fixture(scope="module")
def source() -> ast.Module:
    folder = installed("verl==0.9.1", beside=True)["PYTHONPATH"]
    return ast.parse(Path(folder, f"{FILE.replace('.', '/')}.py").read_text())


def class_of(source: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name)


@pytest.fixture
def outputs(source: ast.Module, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with verl's own two classes of what a loop gives."""
    import torch

    module = ModuleType(FILE)
    vars(module).update(BaseModel=BaseModel, ConfigDict=ConfigDict, Optional=Optional, Any=Any, torch=torch)
    classes: list[ast.stmt] = [class_of(source, name) for name in ("AgentLoopMetrics", "AgentLoopOutput")]
    exec(compile(ast.Module(classes, []), FILE, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, FILE, module)
    return module


def given(**more: Any) -> dict[str, Any]:
    """Return what `AgentLoopWorker._run_agent_loop` makes a loop with."""
    rollout = SimpleNamespace(prompt_length=16, response_length=6)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return {"trainer_config": SimpleNamespace(config=config), "data_config": SimpleNamespace(config={}),
            "server_manager": None, "tokenizer": None, "processor": None, "hf_model_type": None, "dataset_cls": None,
            "tools": None, **more}


def test_the_interface_is_that_of_verls_base(source: ast.Module) -> None:
    methods = {node.name: node.args for node in class_of(source, "AgentLoopBase").body
               if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {arg.arg for arg in methods["__init__"].args} - {"self"} <= set(given())
    assert [arg.arg for arg in methods["run"].args] == ["self", "sampling_params"]
    assert methods["run"].kwarg is not None


def test_rollouts_are_played_here_and_are_exact_experiences_there(
    start_system: StartSystem, tmp_path: Path, outputs: ModuleType
) -> None:
    client = start_system(folder=tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({
        "explorer": {"rollout_model": {"engine_type": "scripted"}}, "store": {"url": client.config.store.url}}))
    chat = np.array([{"role": "user", "content": "a="}], dtype=object)
    row = {"raw_prompt": chat, "answer": "a", "index": np.int64(3), "extra_info": {"split": "train"}, "uid": "u"}

    async def played() -> list[Any]:
        loops = [RolloutLoop(str(file), reward_fn="tests.helpers.trl_rewards:vowels", **given()) for _ in range(5)]
        return list(await asyncio.gather(*(loop.run(dict(SAMPLING), **row) for loop in loops)))

    try:
        made = asyncio.run(played())
        experiences = {e.eid.uid: e for batch in client.log.batches()
                       for e in client.read([r for t in client.batch(batch.batch_id).tasks for r in t.payloads])}
        assert len({output.extra_fields["experience_id"] for output in made}) == len(experiences) == 5
        for output in made:
            e = experiences[output.extra_fields["experience_id"]]
            assert isinstance(output, outputs.AgentLoopOutput)
            told = output.as_dict()
            assert told["prompts"].tolist() == e.tokens[: e.prompt_length].tolist() == list(b"a=\n")
            assert told["responses"].tolist() == e.tokens[e.prompt_length :].tolist()
            assert told["response_mask"].tolist() == [1] * 6
            assert told["rollout_log_probs"].tolist() == pytest.approx(e.logprobs.tolist())
            assert told["rm_scores"].tolist() == pytest.approx([0.0] * 5 + [e.reward])
            assert (told["num_turns"], output.extra_fields["min_global_steps"]) == (2, 0)
        [submitted] = client.log.submission_events(next(iter(client.log.batches())).batch_id)
        [task] = client.log.tasks_of(submitted)
        assert task["raw_task"] == {
            "prompt": chat.tolist(), "answer": "a", "index": 3, "extra_info": {"split": "train"}, "uid": "u"}
        broken = "tests.helpers.trl_rewards:broken"
        with pytest.raises(WorkflowError, match="no run succeeded"):
            asyncio.run(RolloutLoop(str(file), reward_fn=broken, **given()).run(SAMPLING, **row))
    finally:
        verl._client(str(file)).close()
        verl._client.cache_clear()


def test_variables_of_the_template_that_a_workflow_would_not_get_are_refused() -> None:
    template = SimpleNamespace(config={"apply_chat_template_kwargs": {"enable_thinking": False}})
    assert RolloutLoop("x", **given(data_config=template))._task["workflow_args"] == {
        "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ConfigError, match="apply_chat_template_kwargs does not reach the workflow react"):
        RolloutLoop("x", workflow="react", **given(data_config=template))
