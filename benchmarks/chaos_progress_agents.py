"""Agents of 20 turns under kills at random moments: is a known answer asked for again, or a known step done again?

Half of the agents use the OpenAI SDK and know nothing of this software, half use `self.model` and make their tool calls
as steps. Payers make steps that are not idempotent. The engine, the tools and the steps each add a line to one file as
they begin and as their caller has got the result. So its order tells what was known before a kill.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos_progress_engine import (
    Request,
    System,
    answer_to,
    digest_of,
    narrate,
    prompt_of,
    system,
    told,
)
from trinity_es import Task, Workflow
from trinity_es.events.experience import Experience

TURNS, PAYMENTS = 20, 8
KILLED = {"runner": 6, "coordinator": 2, "everything": 2}
"""What is killed, and how often relative to the others."""
INTERVAL = 0.1
"""Seconds between two records of the journal, less than most answers take."""
LONGEST_PAUSE = 1.5
"""Maximum of seconds between a system that is ready and its next kill."""


async def agent(client: Any, model: str, question: str, tool: Callable[[int], Awaitable[str]]) -> None:
    """Have a conversation by an OpenAI client: after each answer the tool says the next message."""
    messages = [{"role": "user", "content": question}]
    for turn in range(1, TURNS + 1):
        answer = await client.chat.completions.create(model=model, messages=messages)
        narrate("got", digest_of("".join(f"{m['content']}\n" for m in messages)))
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": await tool(turn)})


def message(number: int, turn: int) -> str:
    """Return the tool's message to an agent, whose answer takes about 0.15 s."""
    length = random.Random(f"{number} {turn}").randrange(40, 400)
    return prompt_of(number, length, length / 1500)


class BySDK(Workflow):
    """The agent on the OpenAI SDK."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        from openai import AsyncOpenAI

        number, here = self.task.workflow_args["number"], self.model.openai_endpoint()

        async def tool(turn: int) -> str:
            return message(number, turn)

        async with AsyncOpenAI(base_url=here.base_url, api_key=here.token) as client:
            await agent(client, here.model, message(number, 0), tool)
        experiences: list[Experience] = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = float(experience.tokens.sum() % 1000)
        return experiences


def look(number: int, turn: int) -> str:
    narrate("begun", f"{number}/{turn}")
    return message(number, turn)


class ByModel(Workflow):
    """The same agent by `self.model`, with tool calls that are steps."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        number = self.task.workflow_args["number"]
        messages = [{"role": "user", "content": message(number, 0)}]
        for turn in range(1, TURNS + 1):
            [answer] = await self.model.chat_async(messages, n=1)
            narrate("got", digest_of("".join(f"{m['content']}\n" for m in messages)))
            messages.append({"role": "assistant", "content": answer.response_text})
            said = await self.step_async("look", look, number, turn, idempotent=True)
            narrate("done", f"{number}/{turn}")
            messages.append({"role": "user", "content": said})
        experiences: list[Experience] = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = float(experience.tokens.sum() % 1000)
        return experiences


async def pay(number: int, payment: int) -> int:
    narrate("begun", f"{number}/{payment}")
    await asyncio.sleep(0.05)
    return payment


class Payer(Workflow):
    """Payments that are not idempotent, each after an answer."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        number = self.task.workflow_args["number"]
        narrate("life", str(number))
        for payment in range(PAYMENTS):
            [answer] = await self.model.generate_async(prompt_of(number * 100 + payment, 50, 0.05))
            await self.step_async("pay", pay, number, payment)
            narrate("done", f"{number}/{payment}")
        answer.reward = 1.0
        return [answer]


@dataclass
class Agents:
    """What the agents and payers of all batches did under the kills."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KILLED, 0))
    runs: int = 0
    """Agents and payers."""
    calls: int = 0
    """Answers that the agents got."""
    asked_again: int = 0
    """Requests for an answer that its agent had already."""
    goes_on: int = 0
    """Requests that went on from a part of their answer."""
    unsampled: int = 0
    """Tokens to train on that the engine did not give, or with another logprob."""
    different: int = 0
    """Experiences that are not those of the undisturbed run."""
    steps: int = 0
    done_again: int = 0
    """Idempotent steps that were done again after their result was known."""
    payments: int = 0
    deaths: int = 0
    """Lost attempts of payers."""
    named: int = 0
    """Runs that started over, by the names of possibly delivered steps in the experiences."""
    paid_again: int = 0
    """Lives of payers that repeated a payment, although no possibly delivered one is named for it."""

    @property
    def all_kills(self) -> int:
        return sum(self.kills.values())

    @property
    def bad(self) -> list[str]:
        names = ("asked_again", "unsampled", "different", "done_again", "paid_again")
        return [f"agents: {name} {getattr(self, name)}" for name in names if getattr(self, name)]

    def report(self) -> list[str]:
        kills = ", ".join(f"{killed} {n}" for killed, n in self.kills.items())
        return [
            f"agents of {TURNS} turns by the OpenAI SDK and by self.model, and payers: {self.runs} under "
            f"{self.all_kills} kills ({kills})",
            f"  of {self.calls:,} known answers {self.asked_again} asked for again; {self.goes_on} requests went "
            f"on from a part; tokens to train on that were not sampled: {self.unsampled}; experiences that differ from "
            f"the undisturbed run: {self.different}",
            f"  of {self.steps:,} known steps {self.done_again} done again; {self.deaths:,} deaths around "
            f"{self.payments:,} payments: {self.named} runs started over and name theirs, {self.paid_again} repeated "
            "one without a name",
        ]


def agents(url: str, kills: int, seed: int, width: int = 8) -> Agents:
    """Play batches of `width` agents of each kind and as many payers, until so many kills have come."""
    chance, made, number = random.Random(seed), Agents(), 1
    tasks = [Task(workflow=kind, workflow_args={"number": 100 * place + i})
             for place, kind in enumerate((BySDK, ByModel, Payer), 1) for i in range(width)]
    with system(url, INTERVAL, 100_000, places=len(tasks)) as on, ThreadPoolExecutor(1) as thread:
        on.submitted(number, tasks)
        on.finalized(number)
        expected = [bare(e) for e in on.experiences(number)]
        while made.all_kills < kills:
            number += 1
            on.notes.clear()
            on.submitted(number, tasks)
            ended = thread.submit(on.finalized, number)
            while made.all_kills < kills and not ended.done():
                [killed] = chance.choices(list(KILLED), list(KILLED.values()))
                kill = on.killing(killed)
                if wait([ended], chance.uniform(0.0, LONGEST_PAUSE)).done:
                    break
                kill()
                made.kills[killed] += 1
                told(f"agents: {made.all_kills} kills of {kills}")
            ended.result()
            check(on, number, made, expected)
    return made


def bare(experience: Experience) -> tuple[Any, ...]:
    """Return what a trainer reads of an experience."""
    e = experience
    arrays = [None if a is None else a.tolist() for a in (e.tokens, e.logprobs, e.action_mask)]
    return e.eid.task, e.eid.run, e.eid.step, e.prompt_length, e.reward, *arrays


def check(on: System, batch: int, made: Agents, expected: Sequence[Any]) -> None:
    """Add the account of a batch."""
    experiences, requests, story = on.experiences(batch), on.notes.requests(), on.notes.story()
    made.different += sum(a != b for a, b in zip(sorted(map(bare, experiences)), sorted(expected), strict=True))
    made.goes_on += sum(r.kept > 0 for of_prompt in requests.values() for r in of_prompt)
    made.unsampled += sum(unsampled(e, requests) for e in experiences)
    made.runs += len({e.eid.task for e in experiences})
    lives = follow(story, made)
    made.deaths += sum(len(of_payer) - 1 for of_payer in lives.values())
    names = sum(len(e.info.get("possibly_delivered", ())) for e in experiences)
    made.named += names
    made.paid_again += max(0, sum(map(starts_over, lives.values())) - names)


def starts_over(lives: Sequence[set[str]]) -> int:
    """Count the lives of a payer that repeated a payment made since it last started over."""
    count, since = 0, set[str]()
    for life in lives:
        again = bool(life & since)
        count, since = count + again, life if again else since | life
    return count


def follow(story: Sequence[Sequence[str]], made: Agents) -> dict[str, list[set[str]]]:
    """Add what the story tells of calls and steps; return the payments of each life of each payer."""
    known, done, lives = set[str](), set[str](), dict[str, list[set[str]]]()
    for word, what in story:
        if word == "asked":
            made.asked_again += what in known
        elif word == "got":
            known.add(what)
        elif word == "done":
            done.add(what)
        elif word == "life":
            lives.setdefault(what, []).append(set())
        elif (payer := what.partition("/")[0]) in lives:
            lives[payer][-1].add(what)
            made.payments += 1
        else:
            made.done_again += what in done
    made.calls += len(known)
    made.steps += sum(what.partition("/")[0] not in lives for what in done)
    return lives


def unsampled(experience: Experience, requests: dict[str, list[Request]]) -> int:
    """Count the tokens to train on that no request gave, or that have another logprob than the engine gave."""
    tokens, first = experience.tokens.tolist(), experience.prompt_length
    size = len(tokens) - first
    mask = [True] * size if experience.action_mask is None else experience.action_mask.tolist()
    logprobs = [] if experience.logprobs is None else experience.logprobs.tolist()
    starts = [i for i in range(size) if mask[i] and (i == 0 or not mask[i - 1])]
    missing = 0
    for start in starts:
        end = next((i for i in range(start, size) if not mask[i]), size)
        asked = bytes(tokens[: first + start]).decode()
        given = {i for r in requests.get(asked, ()) for i in range(r.kept, r.kept + r.given)}
        right = zip(*answer_to(asked), strict=True) if given else ()
        sampled = [pair for i, pair in enumerate(right) if i in given]
        got = list(zip(tokens[first + start : first + end], logprobs[start:end], strict=True))
        missing += sum(a != b for a, b in zip(got, sampled, strict=False)) + max(0, len(got) - len(sampled))
    return missing
