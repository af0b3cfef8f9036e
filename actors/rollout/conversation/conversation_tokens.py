"""Conversations as token ids: prompts rendered by the chat template, and whole conversations as experiences."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import Completion, Tokenizer
from trinity_es.actors.engines.long_text_tokenization import decode, encode, is_large, off_the_loop, refuse_too_long
from trinity_es.actors.rollout.conversation.turns import Ids, Marks, Turn
from trinity_es.events.errors import TrinityError, WorkflowError
from trinity_es.events.experience import Experience

__all__ = ["Conversing", "Message", "experience_of", "plain_messages"]

Message = dict[str, Any]

_ANSWER = "Zq7"
"""Text of a test answer, which occurs in no template."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_log = logging.getLogger(__name__)


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return copies of the messages as dicts. Raises WorkflowError for anything but a list of mappings."""
    items = list(messages) if isinstance(messages, Iterable) else [messages]
    if isinstance(messages, Mapping) or not all(isinstance(m, Mapping) for m in items):
        raise WorkflowError(
            f"messages are {repr(messages)[:80]}, expected a list of {{'role': ..., 'content': ...}}: call generate "
            "to continue a text"
        )
    return [dict(m) for m in items]


def experience_of(c: Completion, prompt: Ids, prompt_text: str, spans: list[list[int]]) -> Experience:
    """Return an answer as an experience. `prompt`: ids of its prompt; `spans`: `[version, start, end]` of its tokens.

    Raises WorkflowError for an answer without tokens.
    """
    if not c.token_ids:
        raise WorkflowError("the model's answer has no tokens, so there is nothing to learn from: set rollout_args."
                            "max_tokens to 1 or more, and no stop string that the answer begins with")
    return Experience(
        tokens=np.concatenate((prompt, np.asarray(c.token_ids, dtype=np.int32))), prompt_length=len(prompt),
        logprobs=None if c.logprobs is None else np.array(c.logprobs, dtype=np.float32),
        truncate_status="response_truncated" if c.finish_reason == "length" else None,
        info={"version_spans": spans} if spans else {}, prompt_text=prompt_text, response_text=c.text,
    )


class Conversing:
    """Base of models that renders and tokenizes messages."""

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and answer together; None if unknown."""
        return None

    def render(self, messages: list[Message], tools: Any, template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a chat's prompt. `template`: variables for the chat template.

        Raises WorkflowError if the chat template refuses the messages.
        """
        arguments = _template_arguments(messages, template)
        return _token_ids(self._apply_template(messages, tools, tokenize=True, **arguments))

    async def prompt_of(
        self, messages: list[Message], tools: Any, template: Mapping[str, Any] | None = None,
        exact: Callable[[str], list[int] | None] | None = None,
    ) -> tuple[list[int], str | None]:
        """Return the token ids of a chat's prompt, and its text (None if encoding the text gives other ids).

        `exact` gets this text and returns its ids if it continues a sampled answer, else None. Raises EngineError if
        the text is too long for the model, and WorkflowError like `render`.
        """
        return await off_the_loop(is_large([messages, tools]), lambda: self._prompt(messages, tools, template, exact))

    def _prompt(
        self, messages: list[Message], tools: Any, template: Mapping[str, Any] | None,
        exact: Callable[[str], list[int] | None] | None,
    ) -> tuple[list[int], str | None]:
        """Return what `prompt_of` returns; computed in the calling thread."""
        arguments = _template_arguments(messages, template)
        text = self._apply_template(messages, tools, tokenize=False, **arguments)
        ids: list[int] | None = None
        if isinstance(text, str):
            refuse_too_long(self.tokenizer, text, self.context)
        # Only if the template is a text, the ids are certain to be those of the rendered text.
        if not isinstance(text, str) or not isinstance(getattr(self.tokenizer, "chat_template", None), str):
            ids = _token_ids(self._apply_template(messages, tools, tokenize=True, **arguments))
            if not isinstance(text, str) or self.encode(text) != ids:
                return ids, None
        continued = exact(text) if exact is not None else None
        return continued or ids or self.encode(text), text

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return decode(self.tokenizer, ids)

    def marks(self) -> Marks:
        """Return the texts that the chat template writes around an answer, found by rendering short conversations."""
        question: list[Message] = [{"role": "user", "content": "q"}]
        whole_chat = [*question, {"role": "assistant", "content": _ANSWER}]
        try:
            chat, prompt = self._text(question, None), self._text(question, None, begin_answer=True)
            before, answer, after = self._text(whole_chat, None).rpartition(_ANSWER)
            after_and_more = self._text([*whole_chat, *question], None, begin_answer=True).partition(_ANSWER)[2]
        except WorkflowError:
            return Marks()
        opens = before.removeprefix(prompt) if before.startswith(prompt) else ""
        return Marks(
            asks=prompt.removeprefix(chat) if prompt.startswith(chat) else "", opens=opens if opens.isspace() else "",
            closes=os.path.commonprefix([after, after_and_more]) if answer else None,  # noqa: RUF071  # texts, no paths
            ends=after if answer else None,
        )

    def earlier_prompts(
        self, messages: Sequence[Message], tools: Any, template: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """Yield the rendered prompt before each answer in these messages, newest first."""
        for i in range(len(messages) - 1, 0, -1):
            if messages[i].get("role") == "assistant" and messages[i - 1].get("role") != "assistant":
                arguments = {"add_generation_prompt": True, **(template or {})}
                yield str(self._apply_template(list(messages[:i]), tools, tokenize=False, **arguments))

    def tokenized(
        self, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None = None, limit: int | None = None
    ) -> Experience:
        """Return a whole conversation as one experience; the response begins with the first assistant turn.

        action_mask is true on the assistant's tokens (with the end of turn), and false on all others and the template's
        marks. It comes from the chat template's {% generation %} marks, or else from rendering the conversation turn by
        turn. A turn is masked if the template renders it differently once other turns follow (without reasoning, say);
        `info["untrained_turns"]` has its message's index. `logprobs` are None. Any thread may call this.

        Tokens after `limit` are cut off: `truncate_status` is "response_truncated", or, if no token of the response is
        left, "prompt_truncated" with a mask that is all false.

        Without an assistant turn the prompt is one token, and the mask is all false. Raises WorkflowError if all
        assistant turns are masked.
        """
        chat = plain_messages(messages)
        marked = self._template_mask(chat, tools)
        tokens, mask, untrained = self._mask_by_turns(chat, tools) if marked is None else (*marked, [])
        if True not in mask and any(m.get("role") == "assistant" for m in chat):
            raise WorkflowError("the chat template renders no tokens for the assistant's turns: check their content")
        first = max(mask.index(True), 1) if True in mask else 1
        status = None
        if limit is not None and len(tokens) > limit:
            _log.warning("a conversation of %d tokens is cut to %d", len(tokens), limit)
            tokens, mask, status = tokens[:limit], mask[:limit], "response_truncated"
            if first >= limit:
                first, mask, status = limit - 1, [False] * limit, "prompt_truncated"
        return Experience(
            tokens=tokens, prompt_length=first, action_mask=mask[first:], messages=chat, tools=tools,
            prompt_text=self.decode(tokens[:first]), response_text=self.decode(tokens[first:]),
            truncate_status=status, info={"untrained_turns": untrained} if untrained else {},
        )

    def sampled(
        self, turn: Turn, messages: list[Message] | None, tools: list[dict[str, Any]] | None = None,
        learned: Collection[Turn] | None = None,
    ) -> Experience:
        """Return the sequence that ends with this turn as an experience, with its exact ids.

        The mask is true on the sampled tokens of the turns `learned` (default: all). `logprobs` are those of the
        sampling, 0 for masked tokens; None if an answer has none. `info["sampling"]` is that of the last turn,
        `info["turn_sampling"]` that of each turn if they differ. `info["untrained_turns"]` lists the assistant's
        messages that were not sampled in this sequence: others wrote them, or they are rendered differently now.
        """
        turns = [t for t in turn.chain() if learned is None or t in learned]
        mask = np.zeros(len(turn.tokens), dtype=bool)
        logprobs = np.zeros(len(turn.tokens), dtype=np.float32)
        first = turns[0].begin  # the prompt's length; offsets of the response count from here
        spans, adapters = list[list[int]](), list[list[Any]]()
        for t in turns:
            mask[t.begin : len(t.tokens)] = True
            if t.logprobs is not None:
                logprobs[t.begin : len(t.tokens)] = t.logprobs
            offset = t.begin - first
            for name, all_spans in (("version_spans", spans), ("adapter_spans", adapters)):
                all_spans += [[*labels, a + offset, b + offset] for *labels, a, b in t.info.get(name, ())]
        info: dict[str, Any] = {"version_spans": spans} if all(t.info.get("version_spans") for t in turns) else {}
        if adapters:
            info["adapter_spans"] = adapters
        if splices := [at + t.begin - first for t in turns for at in t.info.get("splices", ())]:
            info["splices"] = splices
        if further := {k: v for t in turns for k, v in t.info.get("further_sampling", {}).items()}:
            info["further_sampling"] = further
        samplings = [t.info.get("sampling") for t in turns]
        if None not in samplings:
            info["sampling"] = samplings[-1]
            if any(sampling != samplings[-1] for sampling in samplings):
                info["turn_sampling"] = samplings
        untrained = [] if messages is None else self._unsampled_messages(turn, messages, tools)
        if untrained:
            info["untrained_turns"] = untrained
        return Experience(
            tokens=turn.tokens, prompt_length=first, action_mask=mask[first:], messages=messages, tools=tools,
            prompt_text=self.decode(turn.tokens[:first]), response_text=self.decode(turn.tokens[first:]),
            logprobs=None if any(t.logprobs is None for t in turns) else logprobs[first:], info=info,
        )

    def _unsampled_messages(self, turn: Turn, messages: list[Message], tools: Any) -> list[int]:
        """Return the indexes of the assistant's messages that are not turns of the sequence that ends with `turn`."""
        answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        chain = turn.chain()
        if len(chain) >= len(answers):
            return []
        prompts = {t.rendered for t in chain}
        try:
            return [i for i in answers[:-1] if self._text(messages[:i], tools, begin_answer=True) not in prompts]
        except WorkflowError:  # messages in a client's form, which only the engine's server can render
            return answers[: len(answers) - len(chain)]

    def _template_mask(self, messages: list[Message], tools: Any) -> tuple[list[int], list[bool]] | None:
        """Return tokens and mask by the template's {% generation %} marks; None if they are missing or mark nothing."""
        template = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str) or not _GENERATION_MARK.search(template):
            return None
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens = [int(t) for t in rendered["input_ids"]]
            mask = [bool(m) for m in rendered["assistant_masks"]]
        except (KeyError, TypeError, ValueError, NotImplementedError):
            return None  # a slow tokenizer lacks the offsets that the mask needs
        return (tokens, mask) if len(mask) == len(tokens) and any(mask) else None

    def _mask_by_turns(self, messages: list[Message], tools: Any) -> tuple[list[int], list[bool], list[int]]:
        """Return tokens, mask, and indexes of the assistant messages that render differently once others follow."""
        tokens = self._tokens(messages, tools)
        text = self._text(messages, tools)
        mask = [False] * len(tokens)
        answer_count, untrained = 0, []
        end_of_turn = getattr(self.tokenizer, "eos_token_id", None)
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            answer_count += 1
            before, after = messages[:i], messages[: i + 1]
            closed = self._text(after, tools)
            opened = self._text(before, tools, begin_answer=True) if before else self._opening(closed, message)
            # The generation prompt may have text that the finished turn lacks ("<think>"); the turn begins after both.
            begins = closed.startswith(opened) or (before and closed.startswith(self._text(before, tools)))
            if not begins or not text.startswith(closed):
                untrained.append(i)
                continue
            # Compare tokens, since two texts with a common start may differ in the token at its end.
            opening = self._tokens(before, tools, begin_answer=True) if before else self.encode(opened)
            start = _common_length(opening, tokens)
            stop = _common_length(self._tokens(after, tools), tokens)
            if end_of_turn is not None and end_of_turn in tokens[start:stop]:
                # the model did not generate the template's text after the end of a turn (often a newline)
                stop -= tokens[start:stop][::-1].index(end_of_turn)
            mask[start:stop] = [True] * (stop - start)
        if untrained and len(untrained) == answer_count:
            raise WorkflowError(
                f"the chat template renders message {untrained[0]} differently inside the whole conversation: return "
                "an experience for each turn (chat_async gives one) instead of one for all"
            )
        return tokens, mask, untrained

    def _opening(self, text: str, first: Message) -> str:
        """Return the text before a first message by the assistant. Templates can't render an empty conversation."""
        asks = self.marks().asks
        before, separator, _ = text.partition(asks) if asks else ("", "", "")
        return before + separator if separator else text[: max(text.find(str(first.get("content"))), 0)]

    def _tokens(self, messages: list[Message], tools: Any, begin_answer: bool = False) -> list[int]:
        return _token_ids(self._apply_template(messages, tools, tokenize=True, add_generation_prompt=begin_answer))

    def _text(self, messages: list[Message], tools: Any, begin_answer: bool = False) -> str:
        return str(self._apply_template(messages, tools, tokenize=False, add_generation_prompt=begin_answer))

    def _apply_template(self, messages: list[Message], tools: Any, **arguments: Any) -> Any:
        """Call the tokenizer's `apply_chat_template`, and return its result. Raises WorkflowError if it fails."""
        if tools is not None:
            arguments["tools"] = tools
        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except TrinityError:
            raise
        except Exception as e:  # a template is a program, and may raise anything
            raise WorkflowError(f"the chat template refuses these messages: {type(e).__name__}: {e}") from e


def _template_arguments(messages: Sequence[Message], template: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` for a prompt, so that a last message by the assistant goes on."""
    if not messages:
        raise WorkflowError("the list of messages is empty: a chat needs at least one")
    ends_with_assistant = messages[-1].get("role") == "assistant"
    return {"continue_final_message" if ends_with_assistant else "add_generation_prompt": True, **(template or {})}


def _common_length(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _token_ids(rendered: Any) -> list[int]:
    """Return token ids from the result of `apply_chat_template`: a list, or since transformers 5 a dict with one."""
    if hasattr(rendered, "keys"):
        rendered = rendered["input_ids"]
    return [int(t) for t in rendered]
