"""P36: the end of the proxy, and what its clients have of it."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.serving import HELLO, post, serving
from tests.helpers.systems import StartSystem
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
