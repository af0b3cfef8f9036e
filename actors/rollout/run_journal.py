"""Journal of a run: model calls are recorded, and answered from the records of earlier attempts.

When an attempt is lost, the next one runs its workflow again from the beginning. A call that the journal has whole is
answered from it. A call that the journal has in part is continued if the sampling allows that (`unresumable_option`):
the engine gets the prompt and the kept tokens as its prompt. Calls are matched by fingerprint and occurrence, not by
order, so concurrent calls are matched too.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Protocol, Self, cast

import orjson

from trinity_es.actors.engines.interface import Completion, Engine, KeepsProgress, Sampling
from trinity_es.events.journal import MOST_SPLICES, KeptAnswer, KeptRun, KeptStep, Run, chunk, fingerprint, step

__all__ = ["JournalWriter", "JournaledCall", "OpenCall", "RunJournal", "unresumable_option"]

_NOTHING: Final = KeptAnswer()
_REQUEST_NUMBERS: Final = itertools.count(1)
_warn_once = lru_cache(maxsize=100)(logging.getLogger(__name__).warning)


class JournalWriter(Protocol):
    """The runner's journal, to which all its runs write."""

    open: set[OpenCall]
    """Calls whose new tokens are recorded at each interval."""

    async def write(self, records: Sequence[bytes], *, durable: bool = False) -> None:
        """Write records; return once they survive a crash of this process, or with `durable` of the machine.

        Never raises if the store can't be written.
        """


def unresumable_option(sampling: Sampling) -> str:
    """Return the name of a sampling field because of which a partial answer can't be continued; empty if there is none.

    Penalties count the tokens of the answer and not of the prompt, a schema has a state, and of top logprobs the
    journal has only the sampled token's.
    """
    fields = ("presence_penalty", "frequency_penalty", "json_schema", "top_logprobs")  # 0 or empty by default
    return next((name for name in fields if getattr(sampling, name)), "")


@dataclass(slots=True, kw_only=True, eq=False)
class OpenCall:
    """A request to the engine whose output is recorded within this context, and the tokens recorded so far."""

    journal: RunJournal
    call: str
    nth: int
    engine: Engine
    request: str
    choices: dict[int, tuple[int, KeptAnswer]]
    """By index of the engine's answer: its number among the call's answers, and the kept part that it continues."""
    forbids: str
    model: str
    max_tokens: int
    by_text: bool
    """True if the prompt is a text, so that records need its token ids too."""
    recorded: dict[int, list[int]] = field(default_factory=dict)
    """Recorded new tokens, by index of the engine's answer."""

    def __enter__(self) -> Self:
        self.journal.writer.open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.journal.writer.open.discard(self)

    def progress(self) -> list[bytes]:
        """Return records of the tokens that were generated since the last call."""
        if not hasattr(self.engine, "partial"):
            return []
        start = {i: len(tokens) for i, tokens in self.recorded.items()}
        try:
            parts = cast(KeepsProgress, self.engine).partial(self.request, start)
        except Exception as e:  # `partial` reads internals of the engine, which differ between releases
            _warn_once("the tokens of open requests can't be read, so the journal lacks them: %s: %s",
                       type(e).__name__, str(e))
            return []
        return [record for index, part in parts.items() if part.token_ids
                for record in self._record(index, part, part.token_ids, part.logprobs)]

    def end(self, completions: Sequence[Completion]) -> list[bytes]:
        """Return records of the answers' tokens that are not recorded yet, and of their ends."""
        records = []
        for index, whole in enumerate(completions):
            first = len(recorded := self.recorded.get(index, []))
            if whole.token_ids[:first] != recorded:  # a user's engine sent several calls, and chose another answer
                first, self.recorded[index] = 0, []
            new_logprobs = None if whole.logprobs is None else whole.logprobs[first:]
            records += self._record(index, whole, whole.token_ids[first:], new_logprobs)
        return records

    def _record(self, index: int, answer: Completion, tokens: list[int], logprobs: list[float] | None) -> list[bytes]:
        """Return a record of an answer's new tokens; [] if their weights are unknown or logprobs are not finite."""
        choice, before = self.choices[index]
        if not answer.version_spans or not math.isfinite(sum(() if logprobs is None else logprobs)):
            return []
        recorded = self.recorded.setdefault(index, [])
        start = len(before.tokens) + len(recorded)
        ended = answer.finish_reason not in ("", "abort", "error")
        recorded += tokens
        journal = self.journal
        return [chunk(journal.run, journal.seconds(), self.call, self.nth, choice, start, KeptAnswer(
            prompt=before.prompt or (answer.prompt_token_ids if self.by_text else []), tokens=tokens, logprobs=logprobs,
            spans=_joined_spans(before.spans, answer.version_spans, len(before.tokens)), splices=_splices_after(before),
            finish=answer.finish_reason if ended else "", text=answer.text if ended else "",
            adapter=None if answer.adapter is None else list(answer.adapter), forbids=self.forbids,
            model=self.model, max_tokens=self.max_tokens,
        ))]


Ask = Callable[[Any, Sampling, str], Awaitable[list[Completion]]]
"""Call to an engine with prompt (text or ids), sampling and request id; returns the answers."""


class RunJournal:
    """Journal of one run. `kept` has the records of earlier attempts; `clock` returns monotonic seconds."""

    def __init__(
        self, run: Run, writer: JournalWriter, kept: KeptRun | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.writer, self.kept, self._clock = run, writer, kept or KeptRun(), clock
        self._began = clock()
        self._occurrences: Counter[str] = Counter()
        self._options: tuple[Sampling | None, bytes] = None, b""
        """Sampling of the last call, and its part of the fingerprint: cached, as most calls of a run share them."""

    def seconds(self) -> float:
        """Return how long this run has taken, earlier attempts included."""
        return self.kept.seconds + self._clock() - self._began

    async def begin_step(self, key: str, idempotent: bool) -> tuple[int, KeptStep | None]:
        """Return a step's occurrence and, if the journal has it, its recorded end; else record that the step begins.

        The beginning of an idempotent step is not recorded, since it is executed again if its end is missing.
        """
        nth, self._occurrences[key] = self._occurrences[key], self._occurrences[key] + 1
        kept = self.kept.steps.get((key, nth))
        if kept is None and not idempotent:
            await self.writer.write([step(self.run, self.seconds(), key, nth, done=False)], durable=True)
        return nth, kept

    async def end_step(self, key: str, nth: int, value: Any, error: dict[str, Any] | None) -> None:
        await self.writer.write([step(self.run, self.seconds(), key, nth, done=True, value=value, error=error)])

    def call(
        self, engine: Engine, model: str, prompt: str | list[int], sampling: Sampling,
        further: Mapping[str, Any] | None = None, forbids: str = "",
    ) -> JournaledCall:
        """Begin a call to the model named `model` on this engine.

        `further`: options beyond `sampling`; `forbids`: name of an option with which a kept part can't be continued.
        """
        if further or self._options[0] is not sampling:
            options = {**sampling.recorded(), "top_logprobs": sampling.top_logprobs, **(further or {})}
            self._options = None if further else sampling, orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
        key = fingerprint(model, _prompt_bytes(prompt), self._options[1])
        nth, self._occurrences[key] = self._occurrences[key], self._occurrences[key] + 1
        return JournaledCall(
            journal=self, engine=engine, model=model, prompt=prompt, sampling=sampling, key=(key, nth),
            forbids=forbids or unresumable_option(sampling), kept=self.kept.calls.get((key, nth), {}),
        )


@dataclass(slots=True, kw_only=True)
class JournaledCall:
    """One call of a run: answers that were kept from earlier attempts, and recording of new ones."""

    journal: RunJournal
    engine: Engine
    model: str
    prompt: str | list[int]
    sampling: Sampling
    key: tuple[str, int]
    forbids: str
    kept: dict[int, KeptAnswer]
    """Kept answers, by their number among the call's `n`."""

    @property
    def is_kept(self) -> bool:
        """True if at least one answer was kept whole, or a kept part can be continued."""
        return any(answer.finish or self._can_continue(answer) for answer in self.kept.values())

    async def answers(self, ask: Ask) -> list[Completion]:
        """Return all answers. Those that were not kept are generated by `ask`, whose errors are raised."""
        if not self.kept or not self.is_kept:
            return await self._ask(ask, self.prompt, self.sampling, range(self.sampling.n))
        asking = [asyncio.ensure_future(self._answer(ask, choice)) for choice in range(self.sampling.n)]
        try:
            return list(await asyncio.gather(*asking))
        finally:
            for task in asking:  # gather leaves the others running
                task.cancel()

    def recording(
        self, request: str, choices: Sequence[int] | None = None, before: KeptAnswer | None = None
    ) -> OpenCall:
        """Return a context in which the engine's output for `request` is recorded.

        `choices`: numbers of the answers that the request generates, by default all; `before`: kept part of the answer.
        """
        numbers = range(self.sampling.n) if choices is None else choices
        return OpenCall(
            journal=self.journal, call=self.key[0], nth=self.key[1], engine=self.engine, request=request,
            forbids=self.forbids, model=self.model, max_tokens=self.sampling.max_tokens,
            by_text=before is None and isinstance(self.prompt, str),
            choices={i: (choice, before or _NOTHING) for i, choice in enumerate(numbers)},
        )

    async def record_end(self, recorded: OpenCall, answers: Sequence[Completion] | None) -> None:
        """Record the end of a request. If it failed (`answers` is None), record the tokens generated until then."""
        await self.journal.writer.write(recorded.progress() if answers is None else recorded.end(answers))

    def _can_continue(self, kept: KeptAnswer) -> bool:
        """Return True if the engine can continue this kept part of an answer."""
        name = self.sampling.adapter
        served_version = getattr(self.engine, "adapters", {}).get(name) if name else None
        return (
            bool(kept.tokens) and hasattr(self.engine, "partial") and not self.forbids
            and len(kept.splices) < MOST_SPLICES and (kept.logprobs is not None) == self.sampling.logprobs
            and (not name or kept.adapter == [name, served_version])
        )

    async def _answer(self, ask: Ask, choice: int) -> Completion:
        """Return the answer with number `choice`: the kept one, the continuation of a kept part, or a new one."""
        kept, sampling = self.kept.get(choice, KeptAnswer()), self.sampling
        ids = kept.prompt or ([] if isinstance(self.prompt, str) else self.prompt)
        if kept.finish:
            return _kept_completion(ids, kept)
        kept_length = len(kept.tokens) if self._can_continue(kept) else 0
        one_answer = replace(sampling, n=1, seed=_choice_seed(sampling.seed, choice, kept_length))
        if not kept_length:
            [answer] = await self._ask(ask, self.prompt, one_answer, [choice])
            return answer
        complete_answer = _complete_answer(cast(KeepsProgress, self.engine), ids, sampling, kept)
        if complete_answer is not None:
            return complete_answer
        min_tokens = max(0, sampling.min_tokens - kept_length)
        one_answer = replace(one_answer, max_tokens=sampling.max_tokens - kept_length, min_tokens=min_tokens)
        [answer] = await self._ask(ask, [*ids, *kept.tokens], one_answer, [choice], kept)
        return answer

    async def _ask(
        self, ask: Ask, prompt: str | list[int], sampling: Sampling, choices: Sequence[int],
        before: KeptAnswer | None = None,
    ) -> list[Completion]:
        """Have the engine generate the answers with these numbers, or continue `before`, and record the tokens."""
        request, version = f"run-{next(_REQUEST_NUMBERS)}", self.engine.model_version
        with self.recording(request, choices, before) as call:
            try:
                answers = await ask(prompt, sampling, request)
            except Exception:
                await self.record_end(call, None)
                raise
        if self.engine.model_version == version:
            answers = [
                a if a.version_spans else replace(a, version_spans=((version, 0, len(a.token_ids)),)) for a in answers
            ]
        if before is not None:
            answers = [_cut_at_stop(cast(KeepsProgress, self.engine), answers[0], self.sampling, before)]
        await self.record_end(call, answers)
        return answers if before is None else [_spliced(answers[0], before)]


def _prompt_bytes(prompt: Any) -> bytes:
    try:
        return orjson.dumps(prompt)
    except TypeError:  # a prompt that is no JSON is refused by the engine, in its own words
        return repr(prompt).encode()


def _choice_seed(seed: int | None, choice: int, offset: int) -> int | None:
    """Return the seed for an answer: from the call's seed, the answer's number, and the number of kept tokens."""
    if seed is None:
        return None
    if offset == 0:
        return seed + choice  # as vLLM numbers the answers of one request
    return int.from_bytes(hashlib.sha256(f"{seed + choice}/{offset}".encode()).digest()[:8], "little") >> 1


def _splices_after(before: KeptAnswer) -> list[int]:
    return [*before.splices, len(before.tokens)] if before.tokens else []


def _joined_spans(before: Sequence[Sequence[int]], new: Sequence[Sequence[int]], offset: int) -> list[list[int]]:
    """Return the spans of an answer and its continuation at `offset`; a span of one version goes on over the splice."""
    spans = [list(span) for span in before]
    for version, start, end in new:
        if spans and spans[-1][0] == version and spans[-1][2] == start + offset:
            spans[-1][2] = end + offset
        else:
            spans.append([version, start + offset, end + offset])
    return spans


def _kept_completion(prompt: list[int], kept: KeptAnswer) -> Completion:
    return Completion(
        prompt_token_ids=list(prompt), token_ids=list(kept.tokens),
        logprobs=None if kept.logprobs is None else list(kept.logprobs), text=kept.text, finish_reason=kept.finish,
        adapter=None if kept.adapter is None else (kept.adapter[0], kept.adapter[1]),
        version_spans=tuple((v, start, end) for v, start, end in kept.spans), splices=tuple(kept.splices),
    )


def _first_stop(engine: KeepsProgress, prompt: list[int], sampling: Sampling, tokens: list[int]) -> tuple[int, str]:
    """Return the number of tokens up to the end of the first stop text, and the text before it; (0, "") if none."""

    def before_stop(count: int) -> str | None:
        text = engine.text_of(prompt, tokens[:count])
        places = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    if not sampling.stop or before_stop(len(tokens)) is None:
        return 0, ""
    count = bisect.bisect_left(range(len(tokens)), True, key=lambda n: before_stop(n) is not None)
    return count, before_stop(count) or ""


def _complete_answer(
    engine: KeepsProgress, prompt: list[int], sampling: Sampling, kept: KeptAnswer,
) -> Completion | None:
    """Return the kept part as the whole answer if it is complete without a recorded end; None if it is not."""
    count, text = _first_stop(engine, prompt, sampling, kept.tokens)
    if count:
        spans = [[v, start, min(end, count)] for v, start, end in kept.spans if start < count]
        logprobs = None if kept.logprobs is None else kept.logprobs[:count]
        kept = replace(kept, tokens=kept.tokens[:count], logprobs=logprobs, spans=spans, finish="stop", text=text)
        return _kept_completion(prompt, kept)
    if len(kept.tokens) >= sampling.max_tokens:
        return _kept_completion(prompt, replace(kept, finish="length", text=engine.text_of(prompt, kept.tokens)))
    return None


def _cut_at_stop(engine: KeepsProgress, new: Completion, sampling: Sampling, before: KeptAnswer) -> Completion:
    """Return the new part of an answer with the text of the whole, both cut at a stop text over the splice, if any."""
    old, prompt = len(before.tokens), new.prompt_token_ids[: len(new.prompt_token_ids) - len(before.tokens)]
    whole = engine.text_of(prompt, [*before.tokens, *new.token_ids])
    left_out = len(engine.text_of(new.prompt_token_ids, new.token_ids)) - len(new.text)
    answer = replace(new, text=whole[: len(whole) - left_out] if left_out > 0 else whole)
    count, text = _first_stop(engine, prompt, sampling, [*before.tokens, *new.token_ids])
    if not old < count < old + len(new.token_ids):
        return answer
    ends = tuple((v, start, min(end, count - old)) for v, start, end in new.version_spans if start < count - old)
    logprobs = None if new.logprobs is None else new.logprobs[: count - old]
    return replace(answer, token_ids=new.token_ids[: count - old], logprobs=logprobs, text=text, version_spans=ends,
                   finish_reason="stop")


def _spliced(new: Completion, before: KeptAnswer) -> Completion:
    """Return the whole answer: the kept part and the new part, which has the text of the whole already."""
    prompt = new.prompt_token_ids[: len(new.prompt_token_ids) - len(before.tokens)]
    spans = _joined_spans(before.spans, new.version_spans, len(before.tokens))
    return replace(
        new, prompt_token_ids=prompt, token_ids=[*before.tokens, *new.token_ids],
        logprobs=None if new.logprobs is None else [*(before.logprobs or []), *new.logprobs],
        version_spans=tuple((v, start, end) for v, start, end in spans), splices=tuple(_splices_after(before)),
    )
