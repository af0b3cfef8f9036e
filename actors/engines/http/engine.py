"""A vLLM server that somebody else runs, behind the `Engine` interface: it is asked over HTTP, supervised and fenced.

One `HTTPEngine` is for one server. What this module promises beyond the interface:
- **no answer of another life of the server counts.** The engine labels the server's weights with a name of its own when
  it meets them, and anew with each version. vLLM keeps the label in the process that holds the weights, so a server
  that restarted has lost it. Where answers carry the labels of their tokens (`--enable-scale-out`) each answer proves
  by itself who made it; else the server is asked who it is after each answer, which counts for nothing before;
- **nothing is served before its weights are known.** A server that was started with `model_path`, and whose weights
  nobody labelled since, serves the initial version; into any other the initial version is loaded first;
- **a server that fails what it answered before is no server.** Each answer that is an error, or can't be (NaN, a token
  that the model does not have), has the engine ask at once what the server answered when it was met; where that fails
  too the engine ends, so a broken server takes no work from the others. A request is at fault only where vLLM itself
  says so (400, 413, 422) and that try is answered. 429 and 503 are waited out for a while first;
- a server that ended, restarted, or was given other weights is the end of this engine, as the end of its process is for
  one in this process: the runner ends, the next one waits for the server and begins from the start.

Weights come by a path that the server reads: into one that runs (`VLLM_SERVER_DEV_MODE=1`), or by the user's
`restart_command`. Neither vllm nor torch is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

from trinity_es.actors.engines.checkpoints import auto_tokenizer, reference_shapes, resolve_model, vocabulary
from trinity_es.actors.engines.http.vllm_api import BUSY, BUSY_SECONDS, ServerGone, VLLMServer, unreached
from trinity_es.actors.engines.http.vllm_requests import (
    OTHERS,
    Answer,
    TextCutter,
    answers,
    body,
    most_bytes,
    prompt_logprobs,
    route,
)
from trinity_es.actors.engines.http.weights import WATCH_SECONDS, ServerWeights
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling, Tokenizer
from trinity_es.actors.engines.long_texts import prompt_ids
from trinity_es.actors.engines.sampling import whole_distribution
from trinity_es.events.errors import ConfigError, EngineError

__all__ = ["HTTPEngine"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

SILENT_SECONDS = 30.0
"""How long a server may say nothing, a busy one say, before it is given up. One that refuses connections is at once."""
REFUSED_LOOKS = 2
"""Looks in a row at a server that can't be reached after which it is given up."""
TRY_SECONDS = 30.0
"""How long a server that failed a request may take to answer what it answered before; one that is silent is watched."""
BRAKE_SECONDS = 0.1, 10.0
"""Pause after a request failed, which doubles with each in a row, from the first to the longest: else a server that
fails all but a try would draw more than its share."""
_TRIED = Sampling(max_tokens=4, ignore_eos=True)
"""What a server is tried with: as plain as can be."""
STOP_SECONDS = 8.0
"""How long a stop waits for a change of weights that is under way: less than the guardian waits for the stop."""
_PROBE = "Here are 12,345 of  them,\n\tça va? 好的 don't!"
"""A text that tokenizers which differ cut into other tokens."""
_NOT_STARTED = "it was not started"
_MAX_DISTRIBUTION = 2_000_000
"""Maximum (tokens x vocabulary) that `logprobs` at a temperature other than 1 fetches: 100 MB of JSON."""


class HTTPEngine(ServerWeights):
    """See the module, and `Engine`. `config.options`: the server's `url`, and explorer.rollout_model.servers."""

    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None:
        options = config.options
        if not options.get("url"):
            raise ConfigError("an engine of type http needs the url of its server")
        variable = options.get("key_variable", "")
        key = os.environ.get(variable, "")
        super().__init__(config, VLLMServer(options["url"], key=key, key_variable=variable))
        self.version = ""
        self.dead: str | None = _NOT_STARTED
        self._processed = True
        """Logprobs are of the distribution that was sampled from, whatever the sampling."""
        self._watching: asyncio.Task[None] | None = None
        self._trying: asyncio.Task[bool] | None = None
        self._looking, self._looks, self._proven = asyncio.Lock(), 0, 0
        """For `_confirm`: how many looks have begun, and the number of the newest one that ended well."""
        self.runs_wait = ""
        """What requests wait for that a person has to do, in words; empty: nothing."""
        self._answered, self._failed = 0.0, 0
        """When it last answered, with a part of a stream too, and how many requests failed since a whole answer."""

    # --- life -------------------------------------------------------------------------------------------------------
    @staticmethod
    def load_tokenizer(config: EngineConfig) -> Tokenizer:
        """Return the tokenizer of `model_path`. Raises ConfigError for a model that is not there."""
        from transformers import PreTrainedTokenizerFast  # AutoTokenizer imports torch: five seconds, and its memory

        model = resolve_model(config.model_path)
        try:
            tokenizer: Tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        except Exception:  # whatever it raises of a model without tokenizer.json
            tokenizer = auto_tokenizer(model)
        return tokenizer

    async def _check_tokenizer(self) -> None:
        """See that prompts become the tokens here that the server would make of them, where it tells."""
        told = await self.server.tokenize(_PROBE)
        if told is None or told == list(self.tokenizer.encode(_PROBE)):
            return
        self.tokenizer = await asyncio.to_thread(auto_tokenizer, self._model)
        if told != list(self.tokenizer.encode(_PROBE)):
            raise EngineError(
                f"{self.server.url} has another tokenizer than {self._model}: give explorer.rollout_model.model_path "
                "the folder or hub id that it was started with"
            )

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and response together; None before the server was met."""
        known = None if self._facts is None else self._facts.max_model_len
        return known and min(known, self.config.max_model_len or known)

    async def start(self) -> None:
        """Wait for the server, and see to it that it serves the initial version. Raises ConfigError, EngineError."""
        try:
            loading = asyncio.create_task(asyncio.to_thread(self.load_tokenizer, self.config))
            self._shapes, self._tied = await asyncio.to_thread(reference_shapes, self._model)
            self.tokenizer = await loading
            while not await self._met_and_tried():  # it went away: what others run comes and goes
                await asyncio.sleep(WATCH_SECONDS)
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.stop()
            raise

    async def _met_and_tried(self) -> bool:
        """Wait for the server and try it; return False where it went away meanwhile."""
        await self._reach()
        try:
            await self._check_tokenizer()
            await self._meet()
            await self._first_weights()
            self.dead = None
            self._open.set()
            await self._first_try()
        except EngineError as e:
            if not isinstance(e, ServerGone) and not e.details.get("dead"):
                raise
            if str(e) != self.waits_for:  # it is tried again, and this told once
                _log.warning("%s could not be met: %s", self.server.url, e)
            self.waits_for = str(e)
            self.dead, self._label = _NOT_STARTED, None
            self._died.clear()
            self._open.clear()
            return False
        return True

    async def _first_try(self) -> None:
        """Try the server, and say meanwhile what is waited for. Raises EngineError; ServerGone where it went away."""
        trying = asyncio.create_task(self._gives_processed_logprobs())
        try:
            while not (await asyncio.wait({trying}, timeout=WATCH_SECONDS))[0]:
                if ill := await self.server.unhealthy():
                    raise ServerGone(ill)
                await self._tell_what_holds_it_up()
            self._processed, self.waits_for = trying.result(), ""
        finally:
            trying.cancel()

    async def stop(self) -> None:
        """Let go of the server, which goes on. Idempotent. A change of weights may end first, where it soon does."""
        if self._changes and self.dead is None:
            await asyncio.wait(self._changes, timeout=STOP_SECONDS)
        self._die("it was stopped")
        for task in (self._watching, self._trying):
            if task is not None:
                task.cancel()
        await self.server.close()

    def _die(self, reason: str) -> None:
        if self.dead in (None, _NOT_STARTED):  # the first reason is the one to tell
            self.dead = reason
        self._open.set()  # who waits there is told
        self._died.set()

    # --- supervision ------------------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """End the engine when its server ended, or is not the one that was met."""
        heard, refused = time.monotonic(), 0
        while self.dead is None:
            await asyncio.sleep(WATCH_SECONDS)
            problem: Exception | None = None
            try:
                if ill := await self.server.unhealthy():
                    problem = EngineError(ill, dead=True)
                await self._know()  # which takes its word for it while its weights change
                await self._tell_what_holds_it_up()
            except Exception as e:
                problem = problem or e
            if problem is None or self._restarting:  # who restarts it looks after it
                heard, refused = time.monotonic(), 0
            elif isinstance(problem, ServerGone):
                refused += unreached(problem)
                if refused >= REFUSED_LOOKS or time.monotonic() - heard > SILENT_SECONDS:
                    self._die(str(problem))
            elif isinstance(problem, EngineError) and problem.details.get("dead"):
                self._die(str(problem))
            else:
                _log.warning("%s: %s", self.server.url, problem)

    async def _tell_what_holds_it_up(self) -> None:
        """See what requests wait for, but for this engine's own change of weights, which pauses the server, too."""
        url, loads = self.server.url, self._met().loads
        paused = loads and not self._changing and await self.server.rejects() and not self._changing
        pause = f"the end of a pause of {url} (somebody asked POST /pause there): POST {url}/resume ends it"
        self.runs_wait = f"its requests wait for {pause}" if paused else ""
        if not self._restarting:
            unanswered = "" if self._changing else self.server.unanswered(self._answered)
            self.waits_for = pause if paused else unanswered

    async def _know(self) -> None:
        """See that it is the server that was met, with the weights that it was given; else the engine ends."""
        wanted = self._label
        if self._changing:
            return
        if wanted is not None:
            found = await self.server.label()
            if found != wanted and wanted == self._label and not self._changing:
                self._die(f"it restarted, or somebody else changed its weights (they are labelled {found!r})")
        elif (now := await self.server.started()) != self._process and not self._changing:
            self._die(f"it restarted (its process was started at {now or '?'}, not {self._process})")

    async def _confirm(self) -> None:
        """See to it, after an answer, that the server still is who it was: one look for all that wait.

        A look that had begun before the answer came proves nothing.
        """
        before = self._looks
        async with self._looking:
            if self._proven <= before:
                self._looks = number = self._looks + 1
                await self._know()
                self._proven = number
        self._alive()

    async def _try(self) -> bool:
        """See whether a server that failed a request still answers what it did when it was met: one look for all that
        wait. Returns False if that is not known now. Raises EngineError if the engine ends by it."""
        if self._watching is None:  # it is being met: who meets it tells what it failed with
            return True
        if self._trying is None or self._trying.done():
            self._trying = asyncio.create_task(self._tried())
        known = await asyncio.shield(self._trying)
        self._alive()
        return known

    async def _tried(self) -> bool:
        begun = time.monotonic()
        path, asked, most = self._asked(self._tried_with, _TRIED)
        try:
            told = await self.server.ask("POST", path, asked, seconds=TRY_SECONDS, most=most)
            self._answers(told, _TRIED, self._tried_with)
            await self._know()
        except EngineError as e:
            status = e.details.get("status")
            silent = isinstance(e, ServerGone) and status is None  # that is for the watch to judge
            works = self._answered > begun - sum(BUSY_SECONDS) or self.server.works_since(begun)
            if silent or (status in BUSY and (works or await self.server.rejects())):
                return False
            self._die(f"it fails what it answered when it was met: {e}")
        return True

    async def _brake(self) -> None:
        self._failed += 1
        first, longest = BRAKE_SECONDS
        await self._or_death(asyncio.sleep(min(longest, first * 2.0 ** min(self._failed - 1, 10))))

    def _alive(self) -> None:
        if self.dead is not None:
            raise EngineError(f"{self.server.url} serves nothing: {self.dead}", dead=True)

    # --- requests ---------------------------------------------------------------------------------------------------
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """See `Engine`. Raises EngineError: details `refused=True` for a request that this server will never serve,
        `dead=True` if it is gone, or answered as another than it was."""
        ids = await self._ids(prompt)
        self._check_logprobs(sampling)
        copies = sampling.n if sampling.temperature == 0.0 else 1
        if copies > 1:  # vLLM refuses n > 1 where all answers are the same
            sampling = replace(sampling, n=1)

        def read(told: Any, version: int) -> list[Completion]:
            made = self._answers(told, sampling, ids)
            texts = [TextCutter(self.tokenizer, sampling.stop).add(a.ids, a.stop, last=True) for a in made]
            return [a.completion(ids, t, self._spans(a, len(a.ids), version)) for a, t in zip(made, texts, strict=True)]

        return await self._told(ids, sampling, read) * copies

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        """See `Engine`. The last item's `version_spans` are over the whole answer. Raises EngineError as `generate`."""
        sampling = replace(sampling, n=1)
        ids, spans = await self._ids(prompt), self._met().spans
        self._check_logprobs(sampling)
        cutter, count = TextCutter(self.tokenizer, sampling.stop), 0
        async with (
            self._going_out() as version,
            contextlib.aclosing(self.server.events(*self._asked(ids, sampling, stream=True))) as events,
        ):
            while True:
                try:
                    event = await self._or_death(anext(events))
                except StopAsyncIteration:
                    raise EngineError(f"{self.server.url} ended a stream without an end") from None
                self._answered = time.monotonic()
                for answer in self._answers(event, sampling, ids, whole=False):
                    count += len(answer.ids)
                    if count > sampling.max_tokens:
                        raise EngineError(f"{self.server.url} made more than {sampling.max_tokens} tokens")
                    text = cutter.add(answer.ids, answer.stop, last=bool(answer.finish_reason))
                    if not answer.finish_reason:
                        yield answer.completion(ids, text)
                        continue
                    if not spans:
                        await self._or_death(self._confirm())
                    made = answer.completion(ids, text, self._spans(answer, count, version))
                    self._failed = 0
                    yield made
                    return

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """See `Engine`. Another temperature than 1 fetches the whole distribution: refused above 2 million values."""
        ids = await self._ids(token_ids)
        size = len(self.tokenizer)  # type: ignore[arg-type]  # Hugging Face's have a length
        whole = whole_distribution(len(ids), size, temperature, _MAX_DISTRIBUTION)
        if len(ids) == 1:
            return []
        sampling = Sampling(temperature=0.0, max_tokens=1, logprobs=False)

        def read(told: Any, version: int) -> list[float]:
            for answer in self._answers(told, sampling, ids):
                self._spans(answer, len(answer.ids), version)
            return prompt_logprobs(told, ids, temperature, spans=self._met().spans, server=self._who())

        return await self._told(ids, sampling, read, of_prompt=-1 if whole else 0)

    async def _told(
        self, ids: list[int], sampling: Sampling, read: Callable[[Any, int], _T], of_prompt: int | None = None
    ) -> _T:
        """Return what `read` makes of the server's answer and the version that was served when it was asked."""
        async with self._going_out() as version:
            asked = self._asked(ids, sampling, prompt_logprobs=of_prompt)
            told = await self._or_death(self.server.tokens(*asked))
            if not self._met().spans:
                await self._or_death(self._confirm())
            found = read(told, version)
        self._answered, self._failed = time.monotonic(), 0
        return found

    def _asked(self, ids: list[int], sampling: Sampling, **more: Any) -> tuple[str, dict[str, Any], int]:
        """Return the path, the body and the most bytes of the answer of a request to the server."""
        facts, room = self._met(), (self.max_model_len or 0) - len(ids)
        asked = body(ids, sampling, spans=facts.spans, model=facts.model, room=room, **more)
        return route(facts.spans), asked, most_bytes(asked, self._vocabulary)

    def _answers(self, told: Any, sampling: Sampling, prompt: list[int], *, whole: bool = True) -> list[Answer]:
        return answers(
            told, sampling, spans=self._met().spans, vocabulary=self._vocabulary, whole=whole, server=self._who(),
            prompt=prompt,
        )

    def _who(self) -> str:
        version = self._met().version
        return f"{self.server.url} ({f'vLLM {version}' if version else 'without the /version of vLLM'})"

    @contextlib.asynccontextmanager
    async def _going_out(self) -> AsyncIterator[int]:
        """Wait for a change of weights that no request may be on its way in; give the version served."""
        await self._open.wait()
        self._alive()
        self._asking += 1
        try:
            yield self.model_version
        except ServerGone as e:
            try:
                await self._know()
            except EngineError as known:  # silence is for the watch to judge: it may be busy
                if unreached(known):
                    self._die(str(e))
            self._alive()
            if "status" in e.details:
                await self._try()
                await self._brake()
            raise EngineError(str(e)) from e  # it passed: it is this request's failure alone
        except EngineError as e:
            self._alive()
            if await self._try() and e.details.get("refused"):
                raise
            await self._brake()
            raise EngineError(str(e)) from e
        finally:
            self._asking -= 1

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        self._alive()
        remedy = f"start {self.server.url} with a larger --max-model-len"
        return await prompt_ids(self.tokenizer, prompt, self.max_model_len or 0, remedy)

    # --- answers ----------------------------------------------------------------------------------------------------
    def _spans(self, answer: Answer, count: int, version: int) -> tuple[tuple[int, int, int], ...]:
        """Return which versions made which tokens of a whole answer. Raises EngineError where that is not known.

        `version`: the one that all of it is of, where answers do not say.
        """
        if answer.finish_reason == "abort":
            raise EngineError(f"{self.server.url} aborted the request: somebody else paused it, or it ends")
        if not self._met().spans:
            return ((version, 0, count),) if count else ()
        strange = sorted({label for label, _, _ in answer.labels} - self._labels.keys())
        if strange:
            self._die(f"it answered with weights that this engine did not give it (labelled {strange[0]!r})")
            self._alive()
        ends = [0, *(end for _, _, end in answer.labels)]
        if ends != sorted(ends) or ends != [*(start for _, start, _ in answer.labels), count]:
            raise EngineError(f"{self._who()} does not say which weights made each of {count} tokens{OTHERS}")
        return tuple((self._labels[label], start, end) for label, start, end in answer.labels)

    def _check_logprobs(self, s: Sampling) -> None:
        """Refuse logprobs that the server would not compute as they are sampled."""
        plain = s.temperature in (0.0, 1.0) and s.top_p == 1.0 and s.top_k <= 0 and s.min_p == 0.0
        plain = plain and not (s.presence_penalty or s.frequency_penalty or s.json_schema or s.min_tokens)
        if s.logprobs and not self._processed and not (plain and s.repetition_penalty == 1.0):
            raise EngineError(
                f"{self.server.url} gives logprobs before temperature, top_p and the like, which are not those of the "
                "distribution that is sampled from: start it with --logprobs-mode processed_logprobs", refused=True,
            )

    async def _gives_processed_logprobs(self) -> bool:
        """Return True if the logprob of the only token that may be sampled is 0."""
        self._vocabulary = vocabulary(self._model, self.tokenizer)
        self._tried_with = [int(token) for token in self.tokenizer.encode("a")][-1:] or [0]
        [made] = await self.generate(self._tried_with, replace(_TRIED, top_k=1))
        return all(abs(value) < 1e-6 for value in made.logprobs or ())
