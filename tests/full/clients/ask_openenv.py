"""OpenEnv's capture proxy before an endpoint, and an agent that talks to it. Arguments and answers are JSON."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from typing import Any

import openai
from openenv.core.harness.capture import CaptureServer, to_turn_records, validate_llm
from openenv.core.harness.capture.export import export_session


def main(given: Any) -> Any:
    report = validate_llm(given["base_url"], given["model"], api_key=given["key"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = CaptureServer(
        llm_url=given["base_url"], model=given["model"], api_key=given["key"], port=port, max_output_tokens=12)
    server.start()
    try:
        session = server.registry.create(purpose="train", capture_level=report.capture_level)
        agent = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=session.session_id, max_retries=0)
        messages: list[Any] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{turn}="})
            said = agent.chat.completions.create(model="whatever", messages=messages, stream=turn == 1)
            if turn == 1:
                text = "".join(c.choices[0].delta.content or "" for c in said if c.choices)
            else:
                text = said.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
        document = export_session(session, capture_level=report.capture_level)
        return {
            "report": dataclasses.asdict(report), "fixes": [str(fix) for fix in server.inference.param_fixes],
            "turns": [[n.prompt_ids, n.sampled_ids, n.sampled_logprobs] for n in session.graph.nodes()],
            "trained": len(to_turn_records(session.graph, document)),
        }
    finally:
        server.stop()


print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
