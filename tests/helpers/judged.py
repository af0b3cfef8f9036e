"""Workflow that calls a tool and a judge, for engines of all kinds."""

from __future__ import annotations

import hashlib

from trinity_es.events.experience import Experience
from trinity_es.workflows.workflow import MultiTurnWorkflow


class JudgedWithATool(MultiTurnWorkflow):
    """Conversation of two answers with a tool call between them. A judge rates it, and then its last turn alone."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        messages = [{"role": "user", "content": str(self.task.task_desc)}]
        [first] = await self.model.chat_async(messages)
        messages.append({"role": "assistant", "content": first.response_text or ""})
        messages.append({"role": "tool", "content": lookup(first.response_text or "")})
        [second] = await self.model.chat_async(messages)
        messages.append({"role": "assistant", "content": second.response_text or ""})
        [said] = await self.auxiliary["judge"].chat_async([{"role": "user", "content": second.response_text or ""}])
        reward = float(len(set(said.response_text or "")))
        whole = await self.process_messages_to_experience_async(messages, reward, {"judge": said.response_text})
        second.eid.step, second.reward = 1, reward
        return [whole, second]


def lookup(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
