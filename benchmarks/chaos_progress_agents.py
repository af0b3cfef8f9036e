"""Agents of 20 turns under kills at random moments: is a known answer requested again, or a known step done again?

Half of the agents use the OpenAI SDK and do not depend on trinity_es, half use `self.model` and make their tool calls
as steps. Payers make steps that are not idempotent. The engine, the tools and the steps add a line to one file (the
story) when they begin, and again when the caller has the result. The order of the lines shows what was known before a
kill.
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
    show_progress,
    system,
)
from trinity_es import Task, Workflow
from trinity_es.events.experience import Experience

TURNS, PAYMENTS = 20, 8
KILLED = {"runner": 6, "coordinator": 2, "everything": 2}
"""{target of a kill: its weight}."""
INTERVAL = 0.1
"""Seconds between two records of the journal; most answers take longer."""
LONGEST_PAUSE = 1.5
"""Maximum number of seconds from a ready system to its next kill."""


async def converse(client: Any, model: str, question: str, tool: Callable[[int], Awaitable[str]]) -> None:
    """Have a conversation by an OpenAI client. The tool returns the message after each answer."""
    messages = [{"role": "user", "content": question}]
    for turn in range(1, TURNS + 1):
        answer = await client.chat.completions.create(model=model, messages=messages)
        narrate("got", digest_of("".join(f"{m['content']}\n" for m in messages)))
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": await tool(turn)})


def message(number: int, turn: int) -> str:
    """Return the tool's message to agent `number` in a turn. The answer to it takes about 0.15 s."""
    length = random.Random(f"{number} {turn}").randrange(40, 400)
    return prompt_of(number, length, length / 1500)


def rewarded(model: Any) -> list[Experience]:
    experiences: list[Experience] = model.extract_experience_from_history()
    for experience in experiences:
        experience.reward = float(experience.tokens.sum() % 1000)
    return experiences


class BySDK(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        from openai import AsyncOpenAI

        number, here = self.task.workflow_args["number"], self.model.openai_endpoint()

        async def tool(turn: int) -> str:
            return message(number, turn)

        async with AsyncOpenAI(base_url=here.base_url, api_key=here.token) as client:
            await converse(client, here.model, message(number, 0), tool)
        return rewarded(self.model)


def look_up(number: int, turn: int) -> str:
    narrate("begun", f"{number}/{turn}")
    return message(number, turn)


class ByModel(Workflow):
    """Workflow of the same agent by `self.model`, with tool calls as steps."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        number = self.task.workflow_args["number"]
        messages = [{"role": "user", "content": message(number, 0)}]
        for turn in range(1, TURNS + 1):
            [answer] = await self.model.chat_async(messages, n=1)
            narrate("got", digest_of("".join(f"{m['content']}\n" for m in messages)))
            messages.append({"role": "assistant", "content": answer.response_text})
            said = await self.step_async("look", look_up, number, turn, idempotent=True)
            narrate("done", f"{number}/{turn}")
            messages.append({"role": "user", "content": said})
        return rewarded(self.model)


async def pay(number: int, payment: int) -> int:
    narrate("begun", f"{number}/{payment}")
    await asyncio.sleep(0.05)
    return payment


class Payer(Workflow):
    """Workflow of payments that are not idempotent, each after an answer."""

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
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KILLED, 0))
    runs: int = 0
    calls: int = 0
    asked_again: int = 0
    """Requests for an answer that the agent already had."""
    goes_on: int = 0
    """Requests that continued a partial answer."""
    unsampled: int = 0
    """Trained tokens that the engine did not generate, or that have another logprob."""
    different: int = 0
    """Experiences that differ from the undisturbed run."""
    steps: int = 0
    done_again: int = 0
    """Idempotent steps that were done again after their result was known."""
    payments: int = 0
    deaths: int = 0
    """Lost attempts of payers."""
    named: int = 0
    """Possibly delivered steps that experiences name: one for each run that started over."""
    paid_again: int = 0
    """Attempts of payers that repeated a payment which no experience names as possibly delivered."""

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


def play_agents(url: str, kills: int, seed: int, width: int = 8) -> Agents:
    """Play batches of `width` agents of each kind and as many payers, until `kills` kills have happened."""
    chance, made, number = random.Random(seed), Agents(), 1
    tasks = [Task(workflow=kind, workflow_args={"number": 100 * place + i})
             for place, kind in enumerate((BySDK, ByModel, Payer), 1) for i in range(width)]
    with system(url, INTERVAL, 100_000, places=len(tasks)) as on, ThreadPoolExecutor(1) as thread:
        on.submit(number, tasks)
        on.finalize(number)
        expected = [trained_fields(e) for e in on.experiences(number)]
        while made.all_kills < kills:
            number += 1
            on.notes.clear()
            on.submit(number, tasks)
            ended = thread.submit(on.finalize, number)
            while made.all_kills < kills and not ended.done():
                [killed] = chance.choices(list(KILLED), list(KILLED.values()))
                kill = on.killer(killed)
                if wait([ended], chance.uniform(0.0, LONGEST_PAUSE)).done:
                    break
                kill()
                made.kills[killed] += 1
                show_progress(f"agents: {made.all_kills} kills of {kills}")
            ended.result()
            add_counts(on, number, made, expected)
    return made


def trained_fields(experience: Experience) -> tuple[Any, ...]:
    e = experience
    arrays = [None if a is None else a.tolist() for a in (e.tokens, e.logprobs, e.action_mask)]
    return e.eid.task, e.eid.run, e.eid.step, e.prompt_length, e.reward, *arrays


def add_counts(on: System, batch: int, made: Agents, expected: Sequence[Any]) -> None:
    """Add the counts of a batch to `made`. `expected`: experiences of the undisturbed run."""
    experiences, requests, story = on.experiences(batch), on.notes.requests(), on.notes.story()
    fields = sorted(map(trained_fields, experiences))
    made.different += sum(a != b for a, b in zip(fields, sorted(expected), strict=True))
    made.goes_on += sum(r.kept > 0 for of_prompt in requests.values() for r in of_prompt)
    made.unsampled += sum(count_unsampled(e, requests) for e in experiences)
    made.runs += len({e.eid.task for e in experiences})
    lives = count_story(story, made)
    made.deaths += sum(len(of_payer) - 1 for of_payer in lives.values())
    names = sum(len(e.info.get("possibly_delivered", ())) for e in experiences)
    made.named += names
    made.paid_again += max(0, sum(map(count_repeats, lives.values())) - names)


def count_repeats(lives: Sequence[set[str]]) -> int:
    """Count the attempts (sets of payments) that repeated a payment made since the payer last started over."""
    count, since = 0, set[str]()
    for life in lives:
        again = bool(life & since)
        count, since = count + again, life if again else since | life
    return count


def count_story(story: Sequence[Sequence[str]], made: Agents) -> dict[str, list[set[str]]]:
    """Count calls and steps in the lines of the story. Return {payer: payments of each of its attempts}."""
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


def count_unsampled(experience: Experience, requests: dict[str, list[Request]]) -> int:
    """Count the trained tokens that no request generated, or whose logprob differs from the engine's."""
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
