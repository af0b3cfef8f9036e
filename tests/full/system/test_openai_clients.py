"""P15: the rollout model as an OpenAI client sees it, from workflows in their processes and from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.handmade import cli
from tests.helpers.systems import StartSystem, play_batch
from trinity_es import Task, Workflow
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.system_key import engine_token, read_key
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import EngineError, StartupError
from trinity_es.events.experience import Experience
from trinity_es.system import running_system
from trinity_es.testing import ScriptedEngine, wait_until


class AsksForMuch(Workflow):
    """Says what OpenAI's clients and vLLM's may, in its process and to its judge."""

    def run(self) -> list[Experience]:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        more = {"chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 2, "repetition_penalty": 1.1}
        for model in (self.model, self.auxiliary["judge"]):
            said = model.get_openai_client().chat.completions.create(
                model=model.model_path, messages=messages, max_tokens=4, presence_penalty=0.5, frequency_penalty=0.5,
                logprobs=True, top_logprobs=1, response_format={"type": "json_object"}, extra_body=more,
            )
            assert [len(t.top_logprobs) for t in said.choices[0].logprobs.content] == [1] * 4
        # ... and without a client: the judge is asked over HTTP
        [other] = self.auxiliary["judge"].chat(messages, max_tokens=4, presence_penalty=0.5, top_logprobs=2)
        assert other.info["sampling"]["presence_penalty"] == 0.5
        return rewarded(self.model.extract_experience_from_history(), None)


class AsksOnItsOwn(Workflow):
    """An agent with clients of its own, and one that is a program."""

    def run(self) -> list[Experience]:
        here = self.model.openai_endpoint()
        openai.OpenAI(base_url=here.base_url, api_key=here.token, max_retries=0).completions.create(
            model=here.model, prompt="hi", max_tokens=4)
        url, headers = f"{here.base_url}/models", {"Authorization": f"Bearer {here.token}"}
        assert httpx.get(url, headers=headers).status_code == 200
        get = f"import urllib.request as u; u.urlopen(u.Request({url!r}, headers={headers!r}), timeout=20)"
        subprocess.run([sys.executable, "-c", get], check=True)
        return self.kept()

    def kept(self) -> list[Experience]:
        experiences = rewarded(self.model.extract_experience_from_history(), None)
        for experience in experiences:
            experience.info["past"] = [os.environ["NO_PROXY"], os.environ["no_proxy"]]
        return experiences


class AsksOnItsOwnAsync(AsksOnItsOwn):
    """The same in the runner's process."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        here = self.model.openai_endpoint()
        ask = openai.AsyncOpenAI(base_url=here.base_url, api_key=here.token, max_retries=0)
        await ask.completions.create(model=here.model, prompt="hi", max_tokens=4)
        return self.kept()


def rewarded(experiences: list[Experience], texts: list[str] | None) -> list[Experience]:
    assert texts is None or [e.response_text for e in experiences] == texts
    for experience in experiences:
        experience.reward = 1.0
    return experiences


def runner(client: RolloutClient) -> dict[str, Any]:
    (found,) = client.status()["runners"]
    return found


def token(client: RolloutClient) -> str:
    return engine_token(read_key(running_system.key_file(client.config)))


def test_p55_a_workflow_s_clients_may_say_penalties_formats_and_template_variables(start_system: StartSystem) -> None:
    client = start_system(explorer={"auxiliary_models": [{"name": "judge", "engine_type": "scripted"}]})
    play_batch(client, 1, [Task(workflow=AsksForMuch)])
    [experience] = client.experiences(1)
    asked = experience.info["sampling"]
    assert {k: asked[k] for k in ("presence_penalty", "min_tokens", "repetition_penalty", "json_schema")} == {
        "presence_penalty": 0.5, "min_tokens": 2, "repetition_penalty": 1.1, "json_schema": "{}"}


def test_a_run_s_endpoint_is_asked_past_every_proxy(start_system: StartSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "corp.invalid")
    client = start_system()
    tasks = [Task(workflow=workflow) for workflow in (AsksOnItsOwn, AsksOnItsOwnAsync)]
    play_batch(client, 1, tasks)
    assert [e.info["past"] for e in client.experiences(1)] == [["corp.invalid,127.0.0.1,localhost"] * 2] * 2


def test_p15_the_endpoint_is_in_the_status_and_asks_for_the_token(shared: RolloutClient, tmp_path: Path) -> None:
    wait_until(lambda: runner(shared)["endpoint"], "the endpoint in the status")
    endpoint = runner(shared)["endpoint"]
    assert endpoint.startswith("http://127.0.0.1:")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(shared.config.to_dict()))  # JSON is YAML
    told = json.loads(cli("status", "--config", config, "--json").stdout)
    assert [r["endpoint"] for r in told["runners"]] == [endpoint]
    assert endpoint in cli("status", "--config", config).stdout
    right = {"base_url": endpoint + "/v1", "max_retries": 0, "timeout": 20}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "rollout"}
    with openai.OpenAI(api_key=token(shared), **right) as ask:
        answer = ask.chat.completions.create(**asked)
    assert len(answer.choices[0].message.content or "") == 3
    for wrong in ("wrong", read_key(running_system.key_file(shared.config)).decode()):
        with openai.OpenAI(api_key=wrong, **right) as ask, pytest.raises(openai.AuthenticationError) as error:
            ask.chat.completions.create(**asked)
        assert error.value.status_code == 401
    assert httpx.get(endpoint + "/health").status_code == 200


class Unservable(ScriptedEngine):
    """Its runner can't serve it; tells when it is stopped."""

    async def start(self) -> None:
        from trinity_es.actors.serving import engine_server

        async def start(server: Any) -> str:
            raise StartupError("no port is left")

        engine_server.EngineServer.start = start  # type: ignore[method-assign]  # in the runner's process alone

    async def stop(self) -> None:
        Path(os.environ["TRINITY_ES_TEST_STOPPED"]).touch()


def test_an_engine_that_cannot_be_served_is_a_failed_start(
    start_system: StartSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_ES_TEST_STOPPED", str(tmp_path / "stopped"))
    kind = f"{__name__}:Unservable"
    client = start_system(wait=False, explorer={"rollout_model": {"engine_type": kind}})
    with pytest.raises(StartupError, match="no port is left"):
        client.wait_ready(60)
    assert runner(client)["state"] == "failed"
    assert runner(client)["endpoint"] == ""
    assert (tmp_path / "stopped").exists()


class Mortal(ScriptedEngine):
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        if prompt == "die":
            raise EngineError("it is gone", dead=True)
        return await super().generate(prompt, sampling)


def test_an_engine_that_a_request_finds_dead_is_replaced(start_system: StartSystem) -> None:
    """There need be no batch for it, as where engines only serve."""
    client = start_system(explorer={"rollout_model": {"engine_type": f"{__name__}:Mortal"}})
    before = runner(client)
    head = {"Authorization": f"Bearer {token(client)}"}
    answer = httpx.post(before["endpoint"] + "/v1/completions", headers=head, json={"prompt": "die"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it is gone")
    wait_until(lambda: runner(client)["incarnation"] > before["incarnation"], "the next runner", 60)
