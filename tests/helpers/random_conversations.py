"""Random conversations over chat templates of real models, with a model that samples anything, and checks of them.

The client sends new questions, further ones, tool results, repeated requests and requests for several answers. It
returns answers unchanged, stripped, changed, or as parsed tool calls. The checks compare texts, ids, and logprobs that
are unique for each sampled token. They don't use the tested code.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.helpers.chat_templates import STYLES, TOOLS, tokenizer
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine

CITIES = ("Paris", "São Paulo", 'a "b"')
WORDS = st.sampled_from(["the weather", "it rains", "forty-two", "Grüße", "a\n\nb", "{}", "42", "", "ja, 你好"])
WHITE = st.sampled_from(["", "", "", " ", "\n", " \n\n"])
THOUGHTS = st.sampled_from([
    "", "", "<think>\n\n</think>\n\n", "<think>\nwell\n</think>\n\n", "<think>hm</think>", "</think>",
])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Plan of one answer: how it is sampled, and how the client sends it back."""

    text: str
    city: str | None
    """City for which the answer calls the tool, in the template's format; None for no call."""
    before: str
    """Text before a tool call."""
    padded: dict[str, str]
    """Further fields that the client adds to the message."""
    compact: bool
    """True for a tool call in JSON without spaces, which no template writes."""
    split: int
    """Bit mask of the words that are sampled byte by byte."""
    special: int
    """Position of a sampled special token; -1 for none."""
    end: str
    """End of the answer: `eos`, `cut` (no end token) or `other` (another special token)."""
    back: str
    """How the client returns the answer: `same`, `strip` or `change`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    thread: int
    """Index of the conversation to continue. An index beyond the last starts a new one."""
    again: bool
    """True if the step repeats an earlier request."""
    ask: str
    answers: list[Answer]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    text = draw(THOUGHTS) + draw(WHITE) + draw(WORDS) + draw(WHITE)
    return Answer(
        text=text, city=draw(st.sampled_from([None, None, *CITIES])),
        before=draw(st.sampled_from(["", "", "\n\n", "it rains\n\n", "it rains"])),
        padded=draw(st.sampled_from([{}, {}, {"reasoning_content": " "}])),
        compact=draw(st.sampled_from([False, False, True])),
        split=draw(st.sampled_from([0, 0, 1, 5, 63])), special=draw(st.sampled_from([-1, -1, -1, 0, 1, 2])),
        end=draw(st.sampled_from(["eos", "eos", "eos", "cut", "other"])),
        back=draw(st.sampled_from(["same", "same", "same", "same", "strip", "change"])),
    )


STEPS = st.builds(
    Step, thread=st.integers(0, 4), again=st.sampled_from([False, False, False, True]), ask=WORDS.filter(bool),
    answers=st.lists(answers(), min_size=1, max_size=2),
)
talks = st.tuples(st.booleans(), st.booleans(), st.lists(STEPS, min_size=1, max_size=8), st.integers(0, 8))
"""(with tools, with a system prompt, steps, number of steps after which experiences are extracted)."""


class Sampler(ScriptedEngine):
    def __init__(self, style: str) -> None:
        super().__init__(EngineConfig(model_path=""))
        self.tokenizer = tokenizer(style)
        self.next: list[list[int]] = []
        self.asked: list[int] = []
        self.logprobs_asked = self.count = 0

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        assert isinstance(prompt, list)
        self.asked, made = prompt, list[Completion]()
        for ids in self.next:
            self.count += len(ids)
            logprobs = [-float(n) for n in range(self.count - len(ids) + 1, self.count + 1)]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            made.append(Completion(
                prompt_token_ids=list(prompt), token_ids=ids, logprobs=logprobs, text=text,
                finish_reason="stop" if ids and ids[-1] in self.tokenizer.all_special_ids else "length",
            ))
        return made

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        self.logprobs_asked += 1
        return [0.0] * (len(token_ids) - 1)


@dataclass(slots=True, eq=False)
class Sampled:
    rendered: str
    prompt: list[int]
    ids: list[int]
    text: str
    first: int
    """Number of its first sampled token; `-logprob` of it."""
    before: Sampled | None = None
    followed: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.ids]

    def chain(self) -> list[Sampled]:
        return [*([] if self.before is None else self.before.chain()), self]


@dataclass(slots=True)
class Thread:
    messages: list[dict[str, Any]]
    made: dict[int, Sampled] = field(default_factory=dict)
    """Index of the assistant's message -> its sampled answer."""
    changed: bool = False
    """True if the client changed the last answer."""


def loose(text: str) -> str:
    """Return a text without white space around tags in angle brackets, and without blank reasoning."""
    text = re.sub(r"<think>\s*</think>", "", text)
    return re.sub(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])\s*", r"\1", text).strip()


class Talk:
    """Player of conversations, which checks each step."""

    def __init__(self, style: str, tools: bool, system: bool) -> None:
        self.style, self.name = STYLES[style], style
        self.engine = Sampler(style)
        self.tokenizer = self.engine.tokenizer
        self.model = Model(self.engine)
        self.tools = TOOLS if tools and self.style.call is not None else None
        self.start = [{"role": "system", "content": "Be kind."}] if system else []
        self.threads: list[Thread] = []
        self.sampled: list[Sampled] = []
        self.forked: set[str] = set()
        self.given_out: list[Experience] = []
        self.counts = dict.fromkeys(("turns", "continued", "forks", "as_the_template", "conversations"), 0)

    # --- playing ------------------------------------------------------------------------------------------------------
    async def play(self, steps: Sequence[Step], cleared: int) -> None:
        for number, step in enumerate(steps):
            await self.ask(step)
            if number + 1 == cleared:
                self.take()
        self.take()
        self.every_sampled_token_is_learned_from_once()
        for thread in self.threads:
            await self.whole(thread)

    def new(self) -> Thread:
        return Thread(messages=[*self.start])

    async def ask(self, step: Step) -> None:
        known = step.thread < len(self.threads)
        thread = self.threads[step.thread] if known else self.new()
        messages, made = [*thread.messages], dict(thread.made)
        if known and step.again:  # the earlier request again
            while messages[-1]["role"] == "assistant":
                made.pop(len(messages) - 1, None)
                messages.pop()
        elif known and messages[-1].get("tool_calls"):
            messages.append({"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"})
        else:
            messages.append({"role": "user", "content": step.ask})
        self.engine.next = [self.ids_of(answer) for answer in step.answers]
        first = self.engine.count + 1
        rendered = self.render(messages)
        given = await self.model.chat_async(messages, tools=self.tools, n=len(step.answers))
        before = self.prompt_is_sound(rendered, messages, made)
        for answer, ids, experience in zip(step.answers, self.engine.next, given, strict=True):
            assert experience.tokens.tolist() == [*self.engine.asked, *ids]
            one = Sampled(rendered, self.engine.asked, ids, experience.response_text or "", first, before)
            first += len(ids)
            self.sampled.append(one)
            self.counts["turns"] += 1
            message, changed = self.back(answer, one)
            self.threads.append(Thread([*messages, message], {**made, len(messages): one}, changed))
        if before is not None:
            before.followed = True

    def render(self, messages: list[dict[str, Any]]) -> str:
        return str(self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=True
        ))

    def ids_of(self, answer: Answer) -> list[int]:
        """Return the sampled ids of an answer, with some words byte by byte, and perhaps a special token."""
        text = answer.text
        if self.calls(answer):
            text = self.before(answer) + self.style.call(self.arguments(answer))
        pieces = text.split(" ")
        ids: list[int] = []
        for n, piece in enumerate(pieces):
            piece = piece if n == 0 else f" {piece}"
            if answer.special == n:
                ids.append(self.tokenizer.convert_tokens_to_ids(self.style.special[-1]))
            if answer.split >> n & 1 and not any(s in piece for s in (*self.style.special, *self.style.added)):
                ids += [self.tokenizer.convert_tokens_to_ids(t) for t in self.bytes_of(piece)]
            else:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        if answer.end == "eos":
            ids.append(self.eos)
        elif answer.end == "other":
            ids.append(self.tokenizer.convert_tokens_to_ids(self.style.special[0]))
        return ids or [self.eos]

    def bytes_of(self, text: str) -> list[str]:
        from tokenizers import pre_tokenizers

        [(letters, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text) or [
            ("", (0, 0))
        ]
        return list(letters)

    @property
    def eos(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.style.eos))

    def calls(self, answer: Answer) -> bool:
        return self.tools is not None and answer.city is not None and answer.back != "change"

    def before(self, answer: Answer) -> str:
        """Return the text before a tool call, which is blank if the template allows no text there."""
        return "\n\n" if answer.before and self.name == "deepseekv3" else answer.before

    def arguments(self, answer: Answer) -> str:
        separators = (",", ":") if answer.compact else None
        return json.dumps({"city": answer.city}, ensure_ascii=False, separators=separators)

    def back(self, answer: Answer, one: Sampled) -> tuple[dict[str, Any], bool]:
        """Return the message that the client makes of an answer, and True if it differs from the sampled one."""
        if self.calls(answer):
            given: Any = json.loads(self.arguments(answer))
            if self.style.arguments is str:
                given = self.arguments(answer)
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": given}}
            content: str | None = self.before(answer) if answer.back == "same" else self.before(answer).strip()
            content = None if self.name == "deepseekv3" else content
            return {"role": "assistant", "content": content, "tool_calls": [call], **answer.padded}, False
        content = {"same": one.text, "strip": one.text.strip(), "change": f"{one.text}!"}[answer.back]
        return {"role": "assistant", "content": content, **answer.padded}, answer.back == "change"

    # --- what must hold -----------------------------------------------------------------------------------------------
    def prompt_is_sound(
        self, rendered: str, messages: list[dict[str, Any]], made: dict[int, Sampled]
    ) -> Sampled | None:
        """Check the prompt of a request, and return the answer that it continues."""
        asked, whole = self.engine.asked, self.tokenizer.encode(rendered, add_special_tokens=False)
        template = self.tokenizer.apply_chat_template(messages, tools=self.tools, add_generation_prompt=True)
        assert whole == list(template["input_ids"])
        fits = [s for s in self.sampled if asked[: len(s.tokens)] == s.tokens]
        longest = max((len(s.tokens) for s in fits), default=0)
        same = [s for s in fits if len(s.tokens) == longest]
        before = next((s for s in reversed(same) if not s.followed), same[-1] if same else None)
        # Every token is rendered from the template, or belongs to a sampled answer at that place in the text.
        if asked != whole:
            assert before is not None, "neither the template's nor what was sampled"
            tail = asked[longest:]
            assert tail == whole[len(whole) - len(tail) :], "what follows an answer is not what the template has there"
            assert self.bare(asked) == self.bare(whole), "it tells something else"
        newest = made[max(made)] if made else None
        goes_on = newest is not None and self.is_kept(rendered, newest)
        if newest is not None and not goes_on:
            self.forked.add(rendered)
        assert self.model.usage.forks == len(self.forked)
        if goes_on:
            assert before.rendered == newest.rendered
            self.ended_once(before, asked[longest:])
            if whole[:longest] == before.tokens:  # the text tokenizes to the sampled ids
                assert asked == whole
            self.counts["continued"] += 1
        self.counts["as_the_template"] += bool(made) and asked == whole
        self.counts["forks"] = len(self.forked)
        return before

    def bare(self, ids: list[int]) -> str:
        """Return the text of ids without special tokens, white space and blank reasoning."""
        return "".join(self.tokenizer.decode(ids, skip_special_tokens=True).split()).replace("<think></think>", "")

    def is_kept(self, rendered: str, newest: Sampled) -> bool:
        """Return True if a prompt has an answer as it was sampled, but for white space around it and its marks, and its
        turn ends.
        """
        for one in self.sampled:
            if one.rendered != newest.rendered or not rendered.startswith(one.rendered):
                continue
            rest = rendered[len(one.rendered) :]
            end = self.tokenizer.decode(one.ids[-1:])
            hidden = "" if one.text.endswith(end) else end
            full = self.tokenizer.decode(one.ids).removesuffix(hidden)
            for said in (one.text, full):
                core = said.strip()
                lead, _, trail = said.partition(core) if core else (said, "", "")
                ends = {self.style.eos, hidden} - {""}
                for before, after in itertools.product({lead, "", " "}, {trail, ""}):
                    given = before + core + after
                    if any(rest.startswith(given + end) for end in ends):
                        return True
                ended = (at for end in ends for at in range(len(rest)) if rest.startswith(end, at))
                if any(loose(rest[:at]) == loose(said) for at in ended):
                    return True
        return False

    def ended_once(self, before: Sampled, tail: list[int]) -> None:
        """Check that the turn ends once: with the sampled token or with the template's."""
        ended = before.ids[-1] == self.eos
        assert (tail[0] == self.eos) != ended

    def take(self) -> None:
        """Extract the experiences; check that there is one for each conversation that was not continued."""
        kept = self.model.extract_experience_from_history(clear_history=False)
        found = self.model.extract_experience_from_history()
        assert [e.tokens.tolist() for e in kept] == [e.tokens.tolist() for e in found]
        assert self.model.extract_experience_from_history() == []
        self.given_out += found
        self.counts["conversations"] = len(self.given_out)

    def every_sampled_token_is_learned_from_once(self) -> None:
        """Check masks and logprobs against the sampled tokens, one by one."""
        told = {s.first + i: t for s in self.sampled for i, t in enumerate(s.ids)}
        seen: list[int] = []
        for e in self.given_out:
            seen += self.learned(e, told)
        assert sorted(seen) == sorted(told)
        assert len(seen) == self.model.usage.response_tokens

    def learned(self, e: Experience, told: dict[int, int]) -> list[int]:
        """Return the numbers of the tokens that an experience trains on."""
        response = e.tokens[e.prompt_length :]
        assert len(response) == len(e.logprobs) == len(e.action_mask)
        assert e.action_mask[0]
        assert not e.logprobs[~e.action_mask].any()
        numbers = (-e.logprobs[e.action_mask]).astype(int).tolist()
        assert [told[n] for n in numbers] == response[e.action_mask].tolist()
        spans = np.zeros(len(response), dtype=bool)
        for version, a, b in e.info["version_spans"]:
            assert version == 0
            spans[a:b] = True
        assert (spans == e.action_mask).all()
        return numbers

    async def whole(self, thread: Thread) -> None:
        """Check the experience of a conversation that ends here."""
        if thread.changed:
            return
        before = self.engine.logprobs_asked
        e = await self.model.convert_messages_to_experience_async(thread.messages, tools=self.tools)
        last = max(thread.made)
        same = [s for s in self.sampled if s.rendered == thread.made[last].rendered]
        end = int(-e.logprobs[-1])
        one = next((s for s in same if s.first + len(s.ids) - 1 == end), None)
        assert self.engine.logprobs_asked == before
        told = {s.first + i: t for s in one.chain() for i, t in enumerate(s.ids)}
        assert sorted(self.learned(e, told)) == sorted(told)
        prompts = {s.rendered for s in one.chain()}
        others = [i for i, s in thread.made.items() if s.rendered not in prompts]
        assert e.info.get("untrained_turns", []) == others
