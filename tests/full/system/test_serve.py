"""P36: an OpenAI-compatible proxy over the engines, whose answers are experiences and can be rewarded later."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml

import trinity_es
from tests.helpers.paths import ROOT
from tests.helpers.serving import HELLO, Load, Serving, answers, client_of, post, recorded, serving
from tests.helpers.systems import StartSystem, end, events, pid_of, scripted, started
from trinity_es.audit.export import Exported, experience_tables
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AnswerNotFound
from trinity_es.serve.proxy import Proxy
from trinity_es.system import running_system
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(240)

ODD = "a\u2028b\x85c\r\nd\x1ce"


def stats(proxy: Proxy) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {proxy.api_key}"}
    return dict(httpx.get(proxy.base_url.removesuffix("/v1") + "/stats", headers=headers, timeout=30).json())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RolloutClient, Proxy]]:
    script = {"rules": [{"prompt": "odd", "response": ODD}]}
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    explorer = {"listen_address": "127.0.0.2", "proxy_port": port, "rollout_model": {"script": script}}
    client = started(tmp_path_factory.mktemp("serve"), mode="serve", explorer=explorer)
    try:
        with serving(client.config) as proxy:
            yield client, proxy
    finally:
        end(client)


def test_p36_the_openai_client_chats_completes_streams_and_lists_models(served: tuple[RolloutClient, Proxy]) -> None:
    log, proxy = served
    assert proxy.base_url == f"http://127.0.0.2:{proxy.config.explorer.proxy_port}/v1"
    client = client_of(proxy)
    [model] = client.models.list().data
    answer = client.chat.completions.create(model=model.id, messages=HELLO, max_tokens=12)
    assert answer.id.startswith("chatcmpl-")
    text = answer.choices[0].message.content
    assert len(text) == 12
    assert answer.choices[0].logprobs is None  # it did not ask for them
    assert answer.usage.completion_tokens == 12
    [experience] = recorded(log, answer.id)  # it is in the log by now, with exact token ids
    assert experience.eid.suffix == answer.id
    assert experience.tokens.tolist() == [*b"hello\n", *text.encode()]
    assert experience.prompt_length == 6
    assert experience.logprobs.shape == (12,)
    assert experience.messages == [*HELLO, {"role": "assistant", "content": text}]
    assert (experience.info["model_version"], experience.reward) == (0, None)
    assert log.log.experiences_of_answer(answer.id)[0].tokens.tolist() == experience.tokens.tolist()
    with pytest.raises(AnswerNotFound, match="nobody"):
        log.log.experiences_of_answer("nobody")
    whole = client.completions.create(model=model.id, prompt="a text", max_tokens=5, logprobs=1, n=2)
    assert whole.id.startswith("cmpl-")
    assert len(whole.choices[0].logprobs.token_logprobs or []) == 5
    both = log.log.experiences_of_answer(whole.id)
    assert [e.response_text for e in both] == [c.text for c in whole.choices]
    assert np.allclose(both[0].logprobs, whole.choices[0].logprobs.token_logprobs)  # type: ignore[arg-type]
    odd: Any = [{"role": "user", "content": "say odd"}]
    [*_, last] = client.chat.completions.create(model=model.id, messages=odd, stream=True)
    assert recorded(log, last.id)[0].response_text == ODD  # ends of lines to some, and no end of an event
    chunks = list(client.chat.completions.create(
        model=model.id, messages=HELLO, max_tokens=9, stream=True, stream_options={"include_usage": True}
    ))
    assert chunks[-1].usage.completion_tokens == 9
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    [streamed] = recorded(log, chunks[0].id)
    assert streamed.response_text == said
    assert streamed.tokens.tolist() == [*b"hello\n", *said.encode()]
    assert streamed.logprobs.shape == (9,)


def test_p36_the_async_client_too_many_at_once(served: tuple[RolloutClient, Proxy]) -> None:
    log, proxy = served

    async def ask() -> list[str]:
        client = openai.AsyncOpenAI(base_url=proxy.base_url, api_key=proxy.api_key, max_retries=0)

        async def one(i: int) -> str:
            messages: Any = [{"role": "user", "content": f"question {i}"}]
            if i % 2:
                stream = await client.chat.completions.create(
                    model="rollout", messages=messages, max_tokens=8, stream=True
                )
                return {chunk.id async for chunk in stream}.pop()
            return (await client.chat.completions.create(model="rollout", messages=messages, max_tokens=8)).id

        return await asyncio.gather(*(one(i) for i in range(64)))

    before = len(events(log, ev.AnswersRecorded))
    ids = asyncio.run(ask())
    assert len(set(ids)) == 64
    assert set(ids) <= answers(log).keys()
    assert len(events(log, ev.AnswersRecorded)) - before < 64  # many in one group


def test_p36_who_has_no_key_and_who_asks_nonsense_is_told_so(served: tuple[RolloutClient, Proxy]) -> None:
    _, proxy = served
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=proxy.base_url, api_key="wrong", max_retries=0).models.list()
    root = proxy.base_url.removesuffix("/v1")
    for path in ("/feedback", "/commit", "/v1/completions"):
        assert httpx.post(root + path, json={}).status_code == 401
    assert httpx.get(root + "/stats").status_code == 401
    told = httpx.get(root + "/health").json()
    assert (told["status"], told["engines"], 1 <= told["connections"] < told["most_connections"]) == ("ok", 1, True)
    client = client_of(proxy)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="rollout", messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=HELLO)
    for body, field in (
        ({"msg_ids": [], "reward": 1.0}, "msg_ids"), ({"msg_ids": ["x"]}, "reward"),
        ({"msg_ids": ["x"], "reward": True}, "reward"), ({"msg_ids": ["x"], "reward": 1, "run_id": -1}, "run_id"),
        ({"msg_ids": ["x"], "reward": 1, "run_id": 10**30}, "run_id"),
        ({"msg_ids": ["x"], "reward": 1, "rewards": 1}, "rewards"),
        ({"msg_ids": ["x", "a\0"], "reward": 1}, "msg_ids"),  # PostgreSQL has no NUL in a text
        ({"msg_ids": ["x"], "reward": 1, "task_id": "a\0b"}, "task_id"),
    ):
        answer = post(proxy, "/feedback", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    long = post(proxy, "/feedback", {"msg_ids": ["x" * 100_000], "reward": 1.0})
    assert (long.status_code, "100,000 characters" in long.text) == (400, True)
    assert "2147483647" in post(proxy, "/feedback", {"msg_ids": ["x"], "reward": 1, "run_id": -1}).text
    assert post(proxy, "/feedback", {"msg_ids": ["chatcmpl-none"], "reward": 1.0}).status_code == 404
    assert httpx.post(root + "/v1/chat/completions", content=b"{", headers={
        "Authorization": f"Bearer {proxy.api_key}"}).status_code == 400
    assert httpx.get(root + "/nothing").status_code == 404
    assert "x-api-key" in httpx.get(root + "/stats").text
    told = httpx.get(root + "/feedback")
    assert (told.status_code, "takes POST only" in told.text) == (405, True)
    for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages"),
                        ("/v1/feedback", "/feedback"), ("/v1/commit", "/commit")):
        told = httpx.post(root + path, json={})
        assert (told.status_code, f"(POST {meant} is one)" in told.text) == (404, True)


def test_p36_rewards_posted_later_are_in_the_committed_experiences(served: tuple[RolloutClient, Proxy]) -> None:
    log, proxy = served
    client = client_of(proxy)
    ids = [
        client.chat.completions.create(model="rollout", messages=HELLO, max_tokens=8, seed=i).id
        for i in range(4)
    ]
    last = log.log.head().position
    for run, message in enumerate(ids[:2]):
        reward = {"msg_ids": [message], "reward": 0.5 + run, "task_id": "sum", "run_id": run}
        assert post(proxy, "/feedback", reward).json() == {"status": "success", "count": 1}
        assert post(proxy, "/feedback", reward).json() == {"status": "success", "count": 1}  # sent again
    assert len(list(log.log.read(types=["AnswersRewarded"], after=last))) == 2
    assert post(proxy, "/feedback", {"msg_ids": [ids[2]], "reward": 9.0}).status_code == 200
    assert post(proxy, "/feedback", {"msg_ids": [ids[2]], "reward": 7.0}).status_code == 200  # the last one holds
    committed = post(proxy, "/commit", {}).json()
    assert committed["count"] == 3
    assert committed["metrics"]["experience_pipeline/experience_count"] == 3
    [(_, delivered)] = list(log.processed_experiences(last))
    found = {e.eid.suffix: e for e in delivered}
    assert found.keys() == set(ids[:3])
    assert [(e.reward, e.eid.task, e.eid.run) for e in (found[m] for m in ids[:2])] == [
        (0.5, "sum", 0), (1.5, "sum", 1)
    ]
    assert (found[ids[2]].reward, found[ids[2]].eid.task) == (7.0, ids[2])
    assert found[ids[0]].advantages[0] < 0 < found[ids[1]].advantages[0]  # type: ignore[index]  # one group of GRPO
    assert {runner for table in experience_tables(log.log, Exported()) for runner in table["runner"]} == {"runner-0"}
    states = answers(log)
    assert [(states[m].reward, states[m].delivered) for m in ids] == [
        (0.5, True), (1.5, True), (7.0, True), (None, False)
    ]
    again = post(proxy, "/feedback", {"msg_ids": [ids[0]], "reward": 3.0})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_committed")
    assert post(proxy, "/commit", {}).json() == {"status": "success", "count": 0, "metrics": {}}
    assert stats(proxy)["answers"]["rewarded"] == 0
    assert log.log.verify() == []


def weights(folder: Path, version: int) -> Path:
    path = folder / f"v{version}"
    path.mkdir()
    return path


def two_engines(**script: Any) -> dict[str, Any]:
    return {"max_concurrency": 8, "min_running_model_num": 1,
            "rollout_model": {"engine_num": 2, "script": {"latency_seconds": [0.0, 0.05], **script}}}


def test_p36_while_weights_are_updated_engine_by_engine_no_request_fails_and_one_always_serves(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(mode="serve", explorer=two_engines(load_seconds=0.4))
    with serving(client.config) as proxy, Load(proxy) as load, Serving(client) as seen:
        for version in (1, 2):
            client.sync_weights(version, weights(tmp_path, version), timeout=60)
            load.more()
    assert load.failed == []
    assert min(seen.counts) == 1
    assert max(seen.counts) == 2
    loaded = [e for e in events(client, ev.WeightsLoaded) if e.version in (1, 2)]
    assert sorted((e.version, e.runner) for e in loaded) == [
        (1, "runner-0"), (1, "runner-1"), (2, "runner-0"), (2, "runner-1")
    ]
    times = [r.recorded_at for r in client.log.read(types=["WeightsLoaded"])]
    assert all(b - a > 0.3 for a, b in zip(times[::2], times[1::2], strict=True))  # one after the other
    states = answers(client)
    assert {m for m, _ in load.answered} <= states.keys()
    assert {s.model_version for s in states.values()} == {0, 1, 2}
    for message, text in load.answered[-20:]:
        assert [e.response_text for e in recorded(client, message)] == [text]


def test_p36_a_single_engine_loads_weights_too_and_requests_wait_for_it(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(mode="serve", explorer={"rollout_model": {"script": {"load_seconds": 0.5}}})
    with serving(client.config) as proxy, Load(proxy, clients=4) as load:
        client.sync_weights(1, weights(tmp_path, 1), timeout=60)
        load.more()
    assert load.failed == []
    assert client.status()["runners"][0]["model_version"] == 1


def test_p36_weights_that_cannot_be_loaded_leave_every_engine_serving(system_for: StartSystem, tmp_path: Path) -> None:
    client = system_for(mode="serve", explorer=two_engines())
    with serving(client.config) as proxy, Load(proxy, clients=4) as load:
        (tmp_path / "bad").mkdir()
        with pytest.raises(trinity_es.TrinityError, match="these engines keep their weights"):
            client.sync_weights(1, tmp_path / "bad", timeout=60)
        load.more()
        assert [w.serving for w in proxy.engines.all()] == [True, True]
        client.sync_weights(2, weights(tmp_path, 2), timeout=60)
        load.more()
    assert load.failed == []


def test_p36_a_conversation_goes_back_to_its_engine_and_others_are_spread(system_for: StartSystem) -> None:
    client = system_for(mode="serve", explorer=two_engines())
    with serving(client.config) as proxy:
        openai_client = client_of(proxy)
        wait_until(lambda: sum(w.serving for w in proxy.engines.all()) == 2, "both engines")

        def runner_of(messages: list[dict[str, str]], **options: Any) -> tuple[str, str]:
            answer = openai_client.chat.completions.create(
                model="rollout", messages=messages, max_tokens=4, **options  # type: ignore[arg-type]
            )
            return recorded(client, answer.id)[0].info["runner"], answer.choices[0].message.content or ""

        firsts = set()
        for i in range(4):
            messages = [{"role": "user", "content": f"conversation {i}"}]
            first, text = runner_of(messages)
            firsts.add(first)
            for turn in range(3):
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
                again, text = runner_of(messages)
                assert again == first
        assert firsts == {"runner-0", "runner-1"}
        session = {"extra_headers": {"X-Session-Id": "mine"}}
        assert len({runner_of([{"role": "user", "content": str(i)}], **session)[0] for i in range(6)}) == 1


@pytest.mark.parametrize("victim", ["runner-0", "coordinator"])
def test_p36_a_process_that_is_killed_fails_no_request_that_was_not_begun(system_for: StartSystem, victim: str) -> None:
    client = system_for(mode="serve", explorer=two_engines())
    with serving(client.config) as proxy, Load(proxy) as load:
        pid = pid_of(client, victim)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid_of(client, victim) not in (0, pid), f"another {victim}", 60)
        load.more()
        wait_until(lambda: sum(w.serving for w in proxy.engines.all()) == 2, "both engines", 60)
        load.more()
    # A stream whose first bytes its client had can't be begun again: that is told as an error, in its place.
    assert [e for e in load.failed if "in the middle of this stream" not in str(e)] == []
    assert {m for m, _ in load.answered} <= answers(client).keys()


def test_p36_after_the_proxy_was_killed_and_then_everything_a_reward_finds_its_answer(tmp_path: Path) -> None:
    config = scripted(tmp_path, mode="serve", system={"detach": True})  # it is to outlive the proxy that starts it
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))

    def start() -> tuple[subprocess.Popen[str], str, str]:
        command = [sys.executable, "-m", "trinity_es", "serve", str(file), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = ""
        while "}" not in lines:
            line = process.stdout.readline()
            assert line, "the proxy ended"
            lines += line
        told = json.loads(lines)
        return process, told["base_url"], told["api_key"]

    process, url, key = start()
    try:
        ids = [
            openai.OpenAI(base_url=url, api_key=key).completions.create(model="rollout", prompt=str(i)).id
            for i in range(3)
        ]
        headers = {"Authorization": f"Bearer {key}"}
        admin = running_system.find(config)
        assert admin is not None
        process.kill()  # the proxy alone: the system goes on
        process.wait(30)
        process, url, key = start()
        assert running_system.find(config) == admin
        root = url.removesuffix("/v1")
        body = {"msg_ids": ids[:1], "reward": 1.0}
        assert httpx.post(f"{root}/feedback", json=body, headers=headers, timeout=30).status_code == 200
        for victim in [process.pid, *(p.pid for p in running_system.processes(admin))]:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        process.wait(30)
        process, url, key = start()
        root = url.removesuffix("/v1")
        body = {"msg_ids": ids[1:], "reward": 0.5, "task_id": "later"}
        assert httpx.post(f"{root}/feedback", json=body, headers=headers, timeout=30).status_code == 200
        committed = httpx.post(f"{root}/commit", json={}, headers=headers, timeout=30).json()
        assert committed["count"] == 3
        with trinity_es.connect(config) as client:
            [(_, delivered)] = list(client.processed_experiences())
        assert {e.eid.suffix: e.reward for e in delivered} == dict(zip(ids, (1.0, 0.5, 0.5), strict=True))
        admin = running_system.find(config)
        assert admin is not None
        family = running_system.processes(admin)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert running_system.wait_gone(family, 10) == []  # what it started, it ended
    finally:
        if process.poll() is None:
            process.kill()
        from trinity_es.client import teardown

        teardown.end_system(config)


def test_p36_a_coordinator_that_dies_in_an_update_leaves_one_engine_serving_and_the_next_one_goes_on(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(mode="serve", explorer=two_engines(load_seconds=2.0))
    with serving(client.config) as proxy, Load(proxy, clients=4) as load:
        path = weights(tmp_path, 1)
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(lambda: client.sync_weights(1, path, timeout=60))
            wait_until(lambda: events(client, ev.WeightsPublished), "the weights to be published")
            pid = pid_of(client, "coordinator")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: pid_of(client, "coordinator") not in (0, pid), "another coordinator", 60)
            synced.result(90)
        load.more()
    assert load.failed == []
    loaded = list(client.log.read(types=["WeightsLoaded"]))
    assert sorted(r.event.runner for r in loaded if isinstance(r.event, ev.WeightsLoaded)) == ["runner-0", "runner-1"]
    assert loaded[1].recorded_at - loaded[0].recorded_at > 1.9


def test_the_code_in_the_page_on_serving_runs(served: tuple[RolloutClient, Proxy]) -> None:
    _, proxy = served
    ask, read = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "SERVING.md").read_text(), re.DOTALL)
    url = 'load_config("config.yaml").store.url'
    assert url in read

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "OPENAI_BASE_URL": proxy.base_url, "OPENAI_API_KEY": proxy.api_key},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(ask).split() == ["4", "4.0"]
    assert run(read.replace(url, repr(proxy.config.store.url))).count(" True [") >= 4
