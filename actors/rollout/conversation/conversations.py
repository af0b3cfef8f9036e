"""Conversations as token ids: prompts by the model's chat template, and whole conversations as experiences.

Asks nothing of an engine but its tokenizer.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import Completion, Tokenizer
from trinity_es.actors.engines.long_texts import encode, is_large, off_the_loop, refuse_too_long
from trinity_es.actors.rollout.conversation.turns import Marks, Turn
from trinity_es.events.errors import TrinityError, WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["Conversing", "Message", "experience_of", "plain_messages"]

Message = dict[str, Any]

_ANSWER = "Zq7"
"""An answer that no template has in its own text."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_log = logging.getLogger(__name__)


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return copies of the messages. Raises WorkflowError for what is no list of mappings."""
    given = list(messages) if isinstance(messages, Iterable) else [messages]
    if isinstance(messages, Mapping) or not all(isinstance(m, Mapping) for m in given):
        raise WorkflowError(
            f"messages are {repr(messages)[:80]}: a list of {{'role': ..., 'content': ...}} is expected; a text is a "
            "prompt for generate"
        )
    return [dict(m) for m in given]


def experience_of(c: Completion, text: str, spans: list[list[int]]) -> Experience:
    """Return an answer to the prompt `text` as an experience; `spans` are `[version, start, end]` over its tokens.

    Raises WorkflowError for an answer without a token.
    """
    if not c.token_ids:
        raise WorkflowError("the model's answer has no token, so there is nothing to learn from: set rollout_args."
                            "max_tokens to 1 or more, and no stop string that the answer begins with")
    return Experience(
        tokens=np.array([*c.prompt_token_ids, *c.token_ids], dtype=np.int32), prompt_length=len(c.prompt_token_ids),
        logprobs=None if c.logprobs is None else np.array(c.logprobs, dtype=np.float32),
        truncate_status="response_truncated" if c.finish_reason == "length" else None,
        info={"version_spans": spans} if spans else {}, prompt_text=text, response_text=c.text,
    )


class Conversing:
    """What can be done with messages by who has a tokenizer."""

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    @property
    def context(self) -> int | None:
        """The maximum of a prompt's and an answer's tokens; None where nobody knows."""
        return None

    def render(self, messages: list[Message], tools: Any, template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the prompt of a chat; `template` are further variables of the chat template (`enable_thinking`).

        Raises WorkflowError for messages that the chat template refuses.
        """
        return _flat(self._template(messages, tools, tokenize=True, **_asking(messages, template)))

    async def prompt_of(
        self, messages: list[Message], tools: Any, template: Mapping[str, Any] | None = None,
        exact: Callable[[str], list[int] | None] | None = None,
    ) -> tuple[list[int], str | None]:
        """Return a chat's prompt and its text; None where the text does not give these ids again.

        `exact` gives the ids of a prompt, by its text, that goes on from what is known by its ids. Raises EngineError
        for a text that is too long for the model, and as `render`.
        """
        return await off_the_loop(is_large([messages, tools]), lambda: self._prompt(messages, tools, template, exact))

    def _prompt(
        self, messages: list[Message], tools: Any, template: Mapping[str, Any] | None,
        exact: Callable[[str], list[int] | None] | None,
    ) -> tuple[list[int], str | None]:
        how = _asking(messages, template)
        text = self._template(messages, tools, tokenize=False, **how)
        ids: list[int] | None = None
        if isinstance(text, str):
            refuse_too_long(self.tokenizer, text, self.context)
        if not isinstance(text, str) or not isinstance(getattr(self.tokenizer, "chat_template", None), str):
            ids = _flat(self._template(messages, tools, tokenize=True, **how))
            if not isinstance(text, str) or self.encode(text) != ids:
                return ids, None
        known = exact(text) if exact is not None else None
        return known or ids or self.encode(text), text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that has its special tokens written out."""
        return encode(self.tokenizer, text)

    def marks(self) -> Marks:
        """Return what the chat template writes around an answer, as it renders three short conversations."""
        asked: list[Message] = [{"role": "user", "content": "q"}]
        given = [*asked, {"role": "assistant", "content": _ANSWER}]
        try:
            first, asks = self._text(asked, None), self._text(asked, None, answer=True)
            opened, closed, ends = self._text(given, None).rpartition(_ANSWER)
            later = self._text([*given, *asked], None, answer=True).partition(_ANSWER)[2]
        except WorkflowError:
            return Marks()
        return Marks(
            asks=asks.removeprefix(first) if asks.startswith(first) else "",
            opens=white if opened.startswith(asks) and (white := opened[len(asks) :]).isspace() else "",
            closes=_shared(ends, later) if closed else None,
            ends=ends if closed else None,
        )

    def earlier_prompts(
        self, messages: Sequence[Message], tools: Any, template: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """Yield what these messages had as their prompt before each answer in them, newest first."""
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") == "assistant" and messages[i - 1].get("role") != "assistant":
                how = {"add_generation_prompt": True, **(template or {})}
                yield str(self._template(list(messages[:i]), tools, tokenize=False, **how))

    def tokenized(
        self, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None, limit: int | None = None
    ) -> Experience:
        """Return a whole conversation as one experience: the first assistant turn and all after it are the response.

        action_mask is true for what the assistant wrote (its end-of-turn token included) and false for what others
        wrote and for the template's own marks. The mask is the chat template's where that has {% generation %} marks,
        else found from where the rendered conversation grows by each assistant turn. A turn that the template renders
        differently once others follow (one whose reasoning is dropped then) is not what the model wrote any more: its
        mask is false, and `info["untrained_turns"]` names its message. `logprobs` are None. Asks nothing of the engine,
        so it is for any thread.

        Of more than `limit` tokens the rest is cut off: `truncate_status` is "response_truncated", or, where no token
        of a response is left, "prompt_truncated" with a mask that is all false.

        Without an assistant turn there is nothing to learn from: the mask is all false, behind a prompt of one token.
        Raises WorkflowError when no assistant turn can be learned from.
        """
        given = plain_messages(messages)
        marked = self._template_mask(given, tools)
        tokens, mask, others = (*marked, []) if marked is not None else self._grown_mask(given, tools)
        if True not in mask and any(m.get("role") == "assistant" for m in given):
            raise WorkflowError("the chat template gives the assistant's turns no tokens")
        first = max(mask.index(True), 1) if True in mask else 1
        status = None
        if limit is not None and len(tokens) > limit:
            _log.warning("a conversation of %d tokens is cut to %d", len(tokens), limit)
            tokens, mask, status = tokens[:limit], mask[:limit], "response_truncated"
            if first >= limit:
                first, mask, status = limit - 1, [False] * limit, "prompt_truncated"
        return Experience(
            tokens=tokens, prompt_length=first, action_mask=mask[first:], messages=given, tools=tools,
            prompt_text=self.tokenizer.decode(tokens[:first]), response_text=self.tokenizer.decode(tokens[first:]),
            truncate_status=status, info={"untrained_turns": others} if others else {},
        )

    def sampled(
        self, turn: Turn, messages: list[Message] | None, tools: list[dict[str, Any]] | None = None,
        learned: Collection[Turn] | None = None,
    ) -> Experience:
        """Return a conversation as the ids that its model read and wrote: the sequence that ends with this turn.

        The mask is true on what was sampled (in the turns `learned`; all of them by default). `logprobs` are those that
        the tokens were sampled with, 0 where they were not sampled; None where an answer came without.
        `info["sampling"]` is what was asked for, in the last turn; `info["turn_sampling"]` in each, where they differ.
        `info["untrained_turns"]` names the assistant's messages that were not sampled in this sequence: given by
        others, or rendered otherwise since.
        """
        turns = [t for t in turn.chain() if learned is None or t in learned]
        mask = np.zeros(len(turn.tokens), dtype=bool)
        logprobs = np.zeros(len(turn.tokens), dtype=np.float32)
        first, spans, adapters = turns[0].begin, list[list[int]](), list[list[Any]]()
        for t in turns:
            mask[t.begin : len(t.tokens)] = True
            if t.logprobs is not None:
                logprobs[t.begin : len(t.tokens)] = t.logprobs
            for name, found in (("version_spans", spans), ("adapter_spans", adapters)):
                found += [[*of, a + t.begin - first, b + t.begin - first] for *of, a, b in t.info.get(name, ())]
        info: dict[str, Any] = {"version_spans": spans} if all(t.info.get("version_spans") for t in turns) else {}
        if adapters:
            info["adapter_spans"] = adapters
        if further := {k: v for t in turns for k, v in t.info.get("further_sampling", {}).items()}:
            info["further_sampling"] = further
        asked = [t.info.get("sampling") for t in turns]
        if None not in asked:
            info["sampling"] = asked[-1]
            if any(how != asked[-1] for how in asked):
                info["turn_sampling"] = asked
        if messages is not None and (others := self._not_sampled(turn, messages, tools)):
            info["untrained_turns"] = others
        tokens = turn.tokens.tolist()
        return Experience(
            tokens=turn.tokens, prompt_length=first, action_mask=mask[first:], messages=messages, tools=tools,
            prompt_text=self.tokenizer.decode(tokens[:first]), response_text=self.tokenizer.decode(tokens[first:]),
            logprobs=None if any(t.logprobs is None for t in turns) else logprobs[first:], info=info,
        )

    def _not_sampled(self, turn: Turn, messages: list[Message], tools: Any) -> list[int]:
        """Return the numbers of the assistant's messages that are none of a sequence's answers."""
        answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        chain = turn.chain()
        if len(chain) >= len(answers):
            return []
        prompts = {t.rendered for t in chain}
        try:
            return [i for i in answers[:-1] if self._text(messages[:i], tools, answer=True) not in prompts]
        except WorkflowError:  # messages as a client sent them, which their server brought into the template's form
            return answers[: len(answers) - len(chain)]

    def _template_mask(self, messages: list[Message], tools: Any) -> tuple[list[int], list[bool]] | None:
        template = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str) or not _MARKS.search(template):
            return None
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens = [int(t) for t in rendered["input_ids"]]
            mask = [bool(m) for m in rendered["assistant_masks"]]
        except (KeyError, TypeError, ValueError, NotImplementedError):
            return None  # a slow tokenizer has no offsets to make the mask of
        return (tokens, mask) if len(mask) == len(tokens) and any(mask) else None

    def _grown_mask(self, messages: list[Message], tools: Any) -> tuple[list[int], list[bool], list[int]]:
        """Return tokens, mask, and the assistant's messages that the whole conversation renders differently."""
        tokens = self._tokens(messages, tools)
        text = self._text(messages, tools)
        mask, others, own = [False] * len(tokens), [], 0
        end_of_turn = getattr(self.tokenizer, "eos_token_id", None)
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            own += 1
            before, after = messages[:i], messages[: i + 1]
            closed = self._text(after, tools)
            opened = self._text(before, tools, answer=True) if before else self._opening(closed, message)
            # What opens a turn may hold more than the turn has in the end ("<think>"): the turn is what follows both.
            begun = closed.startswith(opened) or (bool(before) and closed.startswith(self._text(before, tools)))
            if not begun or not text.startswith(closed):
                others.append(i)
                continue
            # By tokens, not by counting: two texts that share a start may not share the token on its edge.
            opening = self._tokens(before, tools, answer=True) if before else self.encode(opened)
            start = _common(opening, tokens)
            stop = _common(self._tokens(after, tools), tokens)
            if end_of_turn is not None and end_of_turn in tokens[start:stop]:
                # what the template puts behind the end of a turn (a newline, often) was not generated
                stop -= tokens[start:stop][::-1].index(end_of_turn)
            mask[start:stop] = [True] * (stop - start)
        if others and len(others) == own:
            raise WorkflowError(
                f"the chat template renders message {others[0]} differently inside the whole conversation: return an "
                "experience for each turn (chat_async gives one) instead of one for all"
            )
        return tokens, mask, others

    def _opening(self, text: str, first: Message) -> str:
        """Return what a text has before its first message, an assistant's: templates render no empty conversation."""
        asks = self.marks().asks
        before, found, _ = text.partition(asks) if asks else ("", "", "")
        return before + found if found else text[: max(text.find(str(first.get("content"))), 0)]

    def _tokens(self, messages: list[Message], tools: Any, answer: bool = False) -> list[int]:
        return _flat(self._template(messages, tools, tokenize=True, add_generation_prompt=answer))

    def _text(self, messages: list[Message], tools: Any, answer: bool = False) -> str:
        return str(self._template(messages, tools, tokenize=False, add_generation_prompt=answer))

    def _template(self, messages: list[Message], tools: Any, **how: Any) -> Any:
        if tools is not None:
            how["tools"] = tools
        try:
            return self.tokenizer.apply_chat_template(messages, **how)
        except TrinityError:
            raise
        except Exception as e:  # a template is a program of the model's author: it may raise anything
            raise WorkflowError(f"the chat template refuses these messages: {type(e).__name__}: {e}") from e


def _asking(messages: Sequence[Message], template: Mapping[str, Any] | None) -> dict[str, Any]:
    if not messages:
        raise WorkflowError("a chat needs at least one message")
    last = messages[-1].get("role") == "assistant"
    return {"continue_final_message" if last else "add_generation_prompt": True, **(template or {})}


def _common(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _shared(a: str, b: str) -> str:
    return "".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _flat(rendered: Any) -> list[int]:
    """Token ids out of `apply_chat_template`, which gives a list, or since transformers 5 a dict of one."""
    if hasattr(rendered, "keys"):
        rendered = rendered["input_ids"]
    return [int(t) for t in rendered]
