"""P52: what Trinity-RFT's `TrinityClient` sends, to a proxy that asks for no key."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.helpers.serving import HELLO, serving
from tests.helpers.systems import StartSystem
from trinity_es import Config
from trinity_es.events.errors import ConfigError


def test_p52_the_known_client_chats_rewards_commits_and_reads_metrics(start_system: StartSystem) -> None:
    client = start_system(mode="serve", explorer={"proxy_without_key": True})
    with serving(client.config) as proxy:
        root = proxy.base_url.removesuffix("/v1")  # its proxy_url
        assert httpx.get(f"{root}/health").status_code == 200
        ask = openai.OpenAI(base_url=f"{root}/v1", api_key="EMPTY", max_retries=0)
        model = ask.models.list().data[0].id
        said = [ask.chat.completions.create(model=model, messages=HELLO, max_tokens=4) for _ in range(3)]
        for answer, reward in zip(said[:2], (0.5, 1), strict=True):
            body = {"reward": reward, "msg_ids": [answer.id], "task_id": "a1b2c3"}
            assert httpx.post(f"{root}/feedback", json=body).json()["status"] == "success"
        metrics = httpx.get(f"{root}/metrics").json()
        assert metrics == {
            "rollout/total_experience_count": 3, "rollout/ready_experience_count": 2, "explore_step_num": 0,
            "rollout/model_0/total_request_count": 3, "rollout/model_0/model_version": 0,
        }
        committed = httpx.post(f"{root}/commit", timeout=60).json()
        assert (committed["status"], committed["count"]) == ("success", 2)
        assert httpx.get(f"{root}/metrics").json()["explore_step_num"] == 1

        # What a browser sends for a page of another site is not of this machine's people.
        for headers in (
            {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            refused = httpx.post(f"{root}/commit", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_local"), headers
        assert httpx.get(f"{root}/metrics", headers={"Origin": root}).status_code == 200


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_p52_a_proxy_without_a_key_is_for_loopback_alone(address: str) -> None:
    explorer = {"proxy_without_key": True, "listen_address": address}
    with pytest.raises(ConfigError, match="proxy_without_key"):
        Config.from_dict({"explorer": explorer})
