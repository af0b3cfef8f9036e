"""I1: the runner is killed while a client of openai's asks: the client waits for another, and gets no error."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.serving import answers, client_of, recorded, serving
from tests.helpers.systems import StartSystem, pid_of
from trinity_es.testing import wait_until

pytestmark = pytest.mark.timeout(240)

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
