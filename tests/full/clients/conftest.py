"""One system with real vLLM engines that serves, for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import trinity_es
from tests.helpers.serving import VLLMServed, serving
from tests.helpers.systems import end, scripted
from trinity_es.system import lifecycle


@pytest.fixture(scope="package")
def vllm_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServed]:
    """A system of mode `serve` with two real engines, for many tests, which tell their answers apart by their ids."""
    from examples.grpo.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path_factory.mktemp("model") / "served", seed=0)
    settings = json.loads((model / "config.json").read_text())
    settings["max_position_embeddings"] = 1024  # OpenEnv asks for 512 tokens
    (model / "config.json").write_text(json.dumps(settings))
    rollout = {
        "engine_type": "vllm", "model_path": str(model), "gpu_memory_utilization": 0.3, "engine_num": 2,
        "server_args": {"tool_call_parser": "hermes"},
    }
    explorer = {"proxy_without_key": True, "rollout_model": rollout}  # TRL's client knows no key
    config = scripted(tmp_path_factory.mktemp("system"), mode="serve", explorer=explorer)
    lifecycle.start(config)
    client = trinity_es.connect(config)
    try:
        client.wait_ready(600)
        with serving(config) as proxy:
            yield VLLMServed(client, proxy, model)
    finally:
        end(client)
