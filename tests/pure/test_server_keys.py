"""What is said of a key that an engine's server wants."""

from __future__ import annotations

import httpx
import pytest

from trinity_es.actors.engines.http.vllm_api import VLLMServer
from trinity_es.events.errors import EngineError


@pytest.mark.parametrize(("key", "variable", "said"), [
    ("wrong", "THEIR_KEY", r"http://a:1 refuses the key in THEIR_KEY \(401\)"),
    ("", "THEIR_KEY", r"http://a:1 wants a key \(401\), and there is none: put it into .* variable THEIR_KEY"),
])
async def test_a_wrong_key_is_told_from_none(key: str, variable: str, said: str) -> None:
    refuses = httpx.MockTransport(lambda request: httpx.Response(401, text="Unauthorized"))
    server = VLLMServer("http://a:1", key=key, key_variable=variable, transport=refuses)
    with pytest.raises(EngineError, match=said):
        await server.facts()
    await server.close()
