"""What becomes of requests in flight when new weights come: `synchronizer.in_flight`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.systems import StartSystem
from trinity_es import Task, Workflow
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine, wait_until

pytestmark = pytest.mark.timeout(120)
TOKENS = 40


class Noting(ScriptedEngine):
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        Path(os.environ["BEGAN"]).touch()
        return await super().generate(prompt, sampling)

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        Path(os.environ["BEGAN"]).touch()
        async for part in super().stream(prompt, sampling):
            yield part


class TwoTurns(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        answers = [(await self.model.generate_async([65, 66], max_tokens=TOKENS))[0] for _ in range(2)]
        for answer in answers:
            answer.reward = 1.0
        return answers


class TwoTurnsOverHTTP(TwoTurns):
    async def run_async(self) -> list[Experience]:
        client = self.model.get_openai_async_client()
        for _ in range(2):
            await client.completions.create(model=client.model_path, prompt="x", max_tokens=TOKENS)
        answers = self.model.extract_experience_from_history()
        for answer in answers:
            answer.reward = 1.0
        return answers


@pytest.mark.parametrize(("in_flight", "workflow"), [
    ("finish", TwoTurns), ("finish", TwoTurnsOverHTTP), ("keep", TwoTurns),
])
def test_requests_in_flight_end_with_the_weights_that_they_began_with_if_the_config_says_so(
    in_flight: str, workflow: type[Workflow], start_system: StartSystem, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = tmp_path / "began"
    monkeypatch.setenv("BEGAN", str(began))
    client = start_system(
        explorer={"rollout_model": {
            "engine_type": "tests.full.system.test_in_flight:Noting", "engine_args": {"token_seconds": 0.05},
        }}, synchronizer={"in_flight": in_flight},
    )
    client.submit_batch(batch_id=1, tasks=[Task(workflow=workflow)], batch_type="train")
    wait_until(began.exists, "the first request")
    client.sync_weights(1, tmp_path)
    client.finalize_train_batch(1, timeout=60)
    spans: list[Any] = [e.info.get("version_spans") for e in client.experiences(1)]
    first = [[0, 0, TOKENS]] if in_flight == "finish" else None  # the scripted engine does not say which made which
    assert spans == [first, [[1, 0, TOKENS]]]
