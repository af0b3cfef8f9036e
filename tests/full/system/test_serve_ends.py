"""P36: the end of the proxy or of a runner, and what clients have of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.serving import HELLO, answers, client_of, post, recorded, serving
from tests.helpers.systems import StartSystem, pid_of
from trinity_es.serve.proxy import Proxy
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(240)


def test_p36_what_goes_on_when_the_proxy_ends_is_told_so_and_is_one_line_in_its_log(
    start_system: StartSystem, caplog: pytest.LogCaptureFixture
) -> None:
    client = start_system(mode="serve", explorer={"rollout_model": {"script": {"token_seconds": 0.2}}})
    begun = threading.Event()

    def streamed(proxy: Proxy) -> str:
        body = {"messages": HELLO, "max_tokens": 1000, "stream": True}
        headers = {"x-api-key": proxy.api_key}
        with httpx.stream("POST", f"{proxy.base_url}/chat/completions", json=body, headers=headers, timeout=60) as told:
            text = ""
            for part in told.iter_text():
                text += part
                begun.set()
        return text

    with ThreadPoolExecutor(2) as pool:
        with serving(client.config) as proxy:
            stream = pool.submit(streamed, proxy)
            whole = pool.submit(post, proxy, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1000})
            assert begun.wait(30)
            wait_until(lambda: proxy.requests == 2, "both requests")
        assert (whole.result(30).status_code, "trinity-es serve ends" in whole.result().text) == (503, True)
        last = stream.result(30).strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "proxy_ends"
    [line] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "2 requests" in line


# --- I1: the runner is killed while a client of openai's asks ---------------------------------------------------------
CALLS, CLIENTS = 100, 16


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("engines", [2, 1])
def test_i1_a_runner_killed_in_100_calls_fails_none(start_system: StartSystem, engines: int, streaming: bool) -> None:
    # A stream that has begun can't begin again: these take their time before the first token, and none between them.
    rollout = {"engine_num": engines, "script": {"latency_seconds": 0.5 if streaming else [0.05, 0.15]}}
    client = start_system(mode="serve", explorer={"max_concurrency": CLIENTS, "rollout_model": rollout})
    with serving(client.config) as proxy, ThreadPoolExecutor(CLIENTS) as threads:
        ask: Any = client_of(proxy, timeout=120)
        wait_until(lambda: sum(w.serving for w in proxy.engines.all()) == engines, "every engine to serve")

        def one(i: int) -> tuple[str, str]:
            messages = [{"role": "user", "content": f"call {i}"}]
            if not streaming:
                whole = ask.chat.completions.create(model="rollout", messages=messages, max_tokens=8)
                return whole.id, whole.choices[0].message.content
            parts = list(ask.chat.completions.create(model="rollout", messages=messages, max_tokens=8, stream=True))
            return parts[0].id, "".join(c.choices[0].delta.content or "" for c in parts if c.choices)

        [victim] = [w for w in proxy.engines.all() if w.runner == "runner-0"]
        pid = pid_of(client, victim.runner)
        calls = [threads.submit(one, i) for i in range(CLIENTS if streaming else CALLS)]
        if streaming:
            wait_until(lambda: victim.open_count == CLIENTS // engines, "every stream to be asked for")
        else:
            quarter = lambda: sum(call.done() for call in calls) > CALLS // 4 and victim.open_count  # noqa: E731
            wait_until(quarter, "a quarter of the answers, with more on their way")
        os.kill(pid, signal.SIGKILL)
        calls += [threads.submit(one, i) for i in range(len(calls), CALLS)]
        said = [call.result(120) for call in calls]
        assert victim.failure_count > 0  # they were asked again
        wait_until(lambda: pid_of(client, "runner-0") not in (0, pid), "another runner-0", 60)
    assert len({message for message, _ in said}) == CALLS
    assert {message for message, _ in said} <= answers(client).keys()
    for message, text in said[::10]:
        assert [e.response_text for e in recorded(client, message)] == [text]
