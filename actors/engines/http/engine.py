"""Engine over an external vLLM server, which it calls over HTTP and supervises. One `HTTPEngine` serves one server.

Promises beyond the `Engine` interface:
- **No answer of a restarted server counts.** The engine labels the server's weights at the first contact and with each
  new version. vLLM keeps the label in the process that holds the weights, so a restarted server has lost it. With
  `--enable-scale-out` each answer carries the labels of its tokens. Otherwise the engine checks the server's identity
  after each answer, before the answer counts.
- **Nothing is served from unknown weights.** A server that was started with `model_path`, and whose weights are not
  labelled, serves the initial version; into any other the initial version is loaded first.
- **A broken server takes no work from others.** After an answer that is an error or impossible (NaN, a token that the
  model does not have) the engine repeats the request of its first contact. If that fails too, the engine ends. A
  request is at fault only if vLLM itself says so (400, 413, 422) and the repeat is answered. After 429 and 503 the
  engine waits and retries first.
- If the server ends, restarts, or gets other weights from elsewhere, the engine ends, as with a local process: the
  runner ends, and the next one waits for the server and starts from the beginning.

Weights come from a path that the server reads, while it runs (`VLLM_SERVER_DEV_MODE=1`) or by the user's
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

from trinity_es.actors.engines.checkpoints import auto_tokenizer, reference_shapes, resolve_model, vocabulary_size
from trinity_es.actors.engines.http import vllm_requests
from trinity_es.actors.engines.http.server_load import report_load
from trinity_es.actors.engines.http.vllm_api import BUSY, BUSY_SECONDS, TOKEN_ROUTES, ServerGone, VLLMServer, is_refused
from trinity_es.actors.engines.http.vllm_requests import Answer, TextCutter
from trinity_es.actors.engines.http.weights import WATCH_SECONDS, ServerWeights
from trinity_es.actors.engines.interface import Completion, EngineConfig, EngineLoad, Sampling, Tokenizer
from trinity_es.actors.engines.long_text_tokenization import prompt_ids
from trinity_es.actors.engines.sampling_checks import needs_whole_distribution
from trinity_es.events.errors import ConfigError, EngineError

__all__ = ["HTTPEngine"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

SILENT_SECONDS = 30.0
"""How long a server may be silent, because it is busy, say, before it counts as gone."""
MAX_REFUSALS = 2
"""Number of refused connections in a row after which the server counts as gone."""
TEST_SECONDS = 30.0
"""Timeout of the test request to a server that failed another request."""
FAILURE_PAUSE_SECONDS = 0.1, 10.0
"""First and longest pause after failed requests in a row; it doubles. Fast failures must not attract more requests."""
_TEST_SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
"""Sampling of the test request, as simple as possible."""
STOP_SECONDS = 8.0
"""How long `stop` waits for a running change of weights: less than the guardian waits for `stop`."""
_PROBE = "Here are 12,345 of  them,\n\tça va? 好的 don't!"
"""Text that different tokenizers split differently."""
_NOT_STARTED = "it was not started"
_MAX_DISTRIBUTION = 2_000_000
"""Maximum (tokens x vocabulary) that `logprobs` fetches at a temperature other than 1: 100 MB of JSON."""


class HTTPEngine(ServerWeights):
    """`Engine` over an external vLLM server. `config.options`: `url`, and keys of explorer.rollout_model.servers."""

    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None:
        options = config.options
        if not options.get("url"):
            raise ConfigError("options['url'] is missing: give the URL of the server to an engine of type http")
        key_variable = options.get("key_variable", "")
        key = os.environ.get(key_variable, "")
        super().__init__(config, VLLMServer(options["url"], key=key, key_variable=key_variable))
        self.version = self.runs_wait = ""
        self.dead: str | None = _NOT_STARTED
        self._logprobs_are_processed = True
        """True if the server's logprobs are those of the sampled distribution, whatever the sampling settings."""
        self._watch_task: asyncio.Task[None] | None = None
        self._test_task: asyncio.Task[bool] | None = None
        self._check_lock = asyncio.Lock()
        self._begun_checks = self._newest_success = 0
        """Number of the newest identity check of `_confirm_identity`, and of the newest successful one."""
        self._last_answer_at = 0.0
        """Monotonic time of the last answer or stream event."""
        self.on_load: Callable[[EngineLoad], None] | None = None
        self._failure_count = 0  # number of failed requests since the last complete answer

    # --- life -------------------------------------------------------------------------------------------------------
    @staticmethod
    def load_tokenizer(config: EngineConfig) -> Tokenizer:
        """Return the tokenizer of the config's model, if possible without importing torch."""
        from transformers import PreTrainedTokenizerFast  # AutoTokenizer imports torch: five seconds, and memory

        model = resolve_model(config.model_path)
        try:
            return PreTrainedTokenizerFast.from_pretrained(model)  # type: ignore[no-any-return]
        except Exception:  # it may raise anything for a model without tokenizer.json
            return auto_tokenizer(model)

    async def _check_tokenizer(self) -> None:
        """Check that `tokenizer` agrees with the server on a probe; if not, try another class. Raises EngineError."""
        ids = await self.server.tokenize(_PROBE)
        if ids is None or ids == list(self.tokenizer.encode(_PROBE)):
            return
        self.tokenizer = await asyncio.to_thread(auto_tokenizer, self._model)
        if ids != list(self.tokenizer.encode(_PROBE)):
            raise EngineError(
                f"{self.server.url} has another tokenizer than {self._model}: set explorer.rollout_model.model_path "
                "to the folder or hub id that the server was started with"
            )

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of prompt and response together; None before the first contact with the server."""
        longest = None if self._facts is None else self._facts.max_model_len
        return longest and min(longest, self.config.max_model_len or longest)

    async def start(self) -> None:
        """Wait for the server, and have it serve the initial version. Raises ConfigError or EngineError."""
        try:
            tokenizer_task = asyncio.create_task(asyncio.to_thread(self.load_tokenizer, self.config))
            self._shapes, self._has_tied_head = await asyncio.to_thread(reference_shapes, self._model)
            self.tokenizer = await tokenizer_task
            while not await self._connect():  # an external server may go away at any time
                await asyncio.sleep(WATCH_SECONDS)
            self._watch_task = asyncio.create_task(self._watch())
        except BaseException:
            await self.stop()
            raise

    async def _connect(self) -> bool:
        """Wait for the server, have it serve its first weights, and test it. Return False if it went away meanwhile."""
        await self._wait_until_reachable()
        try:
            await self._check_tokenizer()
            await self._read_facts()
            await self._first_weights()
            self.dead = None
            self._gate.set()
            await self._first_test()
        except EngineError as e:
            if not isinstance(e, ServerGone) and not e.details.get("dead"):
                raise  # the server answers, but can't be used
            if str(e) != self.waits_for:
                _log.warning("connecting to %s failed: %s", self.server.url, e)
            self.waits_for = str(e)
            self.dead, self._label = _NOT_STARTED, None
            self._died.clear()
            self._gate.clear()
            return False
        return True

    async def _first_test(self) -> None:
        """Make the test request and send it once; meanwhile update `waits_for`. Raises EngineError, ServerGone."""
        self._vocabulary = vocabulary_size(self._model, self.tokenizer)
        self._test_prompt = [int(token) for token in self.tokenizer.encode("a")][-1:] or [0]
        test = asyncio.create_task(self._gives_processed_logprobs())
        try:
            while not (await asyncio.wait({test}, timeout=WATCH_SECONDS))[0]:
                if problem := await self.server.unhealthy():
                    raise ServerGone(problem)
                await self._update_waits()
            self._logprobs_are_processed, self.waits_for = test.result(), ""
        finally:
            test.cancel()

    async def stop(self) -> None:
        """Disconnect from the server; wait up to STOP_SECONDS for a running change of weights."""
        if self._changes and self.dead is None:
            await asyncio.wait(self._changes, timeout=STOP_SECONDS)
        self._die("it was stopped")
        for task in filter(None, (self._watch_task, self._test_task)):
            task.cancel()
        await self.server.close()

    def _die(self, reason: str) -> None:
        """Mark the engine dead: waiting requests, and all later ones, raise EngineError with this reason."""
        if self.dead in (None, _NOT_STARTED):  # the first reason counts
            self.dead = reason
        self._gate.set()
        self._died.set()

    # --- supervision ------------------------------------------------------------------------------------------------
    async def _watch(self) -> None:
        """Check the server every WATCH_SECONDS. End the engine if the server ended or its identity changed."""
        heard_at, refusals, report = time.monotonic(), 0, self.on_load
        while self.dead is None:
            await asyncio.sleep(WATCH_SECONDS)
            problem: Exception | None = None
            try:
                if defect := await self.server.unhealthy():
                    problem = EngineError(defect, dead=True)
                await self._check_identity()  # does nothing while the weights change
                await self._update_waits()
                if report is not None and not await report_load(self.server, report):
                    report = None
            except Exception as e:
                problem = problem or e
            if problem is None or self._is_restarting:  # `_restart` watches a restart
                heard_at, refusals = time.monotonic(), 0
            elif isinstance(problem, ServerGone):
                refusals += is_refused(problem)
                if refusals >= MAX_REFUSALS or time.monotonic() - heard_at > SILENT_SECONDS:
                    self._die(str(problem))
            elif isinstance(problem, EngineError) and problem.details.get("dead"):
                self._die(str(problem))
            else:
                _log.warning("%s: %s", self.server.url, problem)

    async def _update_waits(self) -> None:
        """Update `waits_for` and `runs_wait`. The pause of this engine's own change of weights does not count."""
        url, may_pause = self.server.url, self._server_facts().loads_weights and not self._is_changing
        # `_is_changing` again, since a change may have begun meanwhile
        is_paused = may_pause and await self.server.reports_pause() and not self._is_changing
        end_of_pause = f"the end of a pause of {url} (by a POST /pause there): POST {url}/resume ends it"
        self.runs_wait = f"its requests wait for {end_of_pause}" if is_paused else ""
        if not self._is_restarting:
            unanswered = "" if self._is_changing else self.server.unanswered(self._last_answer_at)
            self.waits_for = end_of_pause if is_paused else unanswered

    async def _check_identity(self) -> None:
        """End the engine if the server restarted or has weights that this engine did not load."""
        label = self._label
        if self._is_changing:
            return
        if label is not None:
            server_label = await self.server.label()
            # Meanwhile this engine may have begun a change of weights, with another label.
            if server_label != label and label == self._label and not self._is_changing:
                self._die(f"it restarted, or something else changed its weights (they are labelled {server_label!r})")
            return
        started = await self.server.start_time()
        if started != self._process_start and not self._is_changing:
            self._die(f"it restarted (its process was started at {started or '?'}, not {self._process_start})")

    async def _confirm_identity(self) -> None:
        """Check the server's identity after an answer. Waiting requests share one check that began after their call."""
        earlier_checks = self._begun_checks
        async with self._check_lock:
            if self._newest_success <= earlier_checks:  # no check that began after this answer has succeeded
                self._begun_checks = number = self._begun_checks + 1
                await self._check_identity()
                self._newest_success = number
        self._require_alive()

    async def _test_server(self) -> bool:
        """Test a server that failed a request. Return True if it works, False if open. Raises EngineError if dead."""
        if self._watch_task is None:  # during `start`, whose caller gets the failure
            return True
        if self._test_task is None or self._test_task.done():
            self._test_task = asyncio.create_task(self._run_test())
        conclusive = await asyncio.shield(self._test_task)
        self._require_alive()
        return conclusive

    async def _run_test(self) -> bool:
        """Send the test request again, and end the engine if it fails. Return False if the server was only busy."""
        begun_at = time.monotonic()
        path, body, max_bytes = self._request(self._test_prompt, _TEST_SAMPLING)
        try:
            response = await self.server.ask("POST", path, body, seconds=TEST_SECONDS, max_bytes=max_bytes)
            self._parse(response, _TEST_SAMPLING, self._test_prompt)
            await self._check_identity()
        except EngineError as e:
            status = e.details.get("status")
            if isinstance(e, ServerGone) and status is None:  # `_watch` decides about a silent server
                return False
            works = self._last_answer_at > begun_at - sum(BUSY_SECONDS) or self.server.has_request_since(begun_at)
            if status in BUSY and (works or await self.server.reports_pause()):
                return False
            self._die(f"it fails a request that it answered at first: {e}")
        return True

    async def _pause_after_failure(self) -> None:
        self._failure_count += 1
        first, longest = FAILURE_PAUSE_SECONDS
        await self._unless_dead(asyncio.sleep(min(longest, first * 2.0 ** min(self._failure_count - 1, 10))))

    def _require_alive(self) -> None:
        if self.dead is not None:
            raise EngineError(f"the engine of {self.server.url} is dead: {self.dead}", dead=True)

    # --- requests ---------------------------------------------------------------------------------------------------
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """Return `sampling.n` completions. Raises EngineError with the details `refused` or `dead`, like VLLMEngine."""
        ids = await self._prompt_ids(prompt)
        self._check_logprobs(sampling)
        copies = sampling.n if sampling.temperature == 0.0 else 1  # vLLM refuses n > 1 at temperature 0
        if copies > 1:
            sampling = replace(sampling, n=1)

        def read(response: Any, version: int) -> list[Completion]:
            parsed = self._parse(response, sampling, ids)
            texts = [TextCutter(self.tokenizer, sampling.stop).add(a.ids, a.stop, last=True) for a in parsed]
            return [answer.completion(ids, text, self._version_spans(answer, len(answer.ids), version))
                    for answer, text in zip(parsed, texts, strict=True)]

        return await self._send(ids, sampling, read) * copies

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        sampling = replace(sampling, n=1)
        ids = await self._prompt_ids(prompt)
        self._check_logprobs(sampling)
        cutter, count = TextCutter(self.tokenizer, sampling.stop), 0
        async with (
            self._request_slot() as version,
            contextlib.aclosing(self.server.events(*self._request(ids, sampling, stream=True))) as events,
        ):
            while True:
                try:
                    event = await self._unless_dead(anext(events))
                except StopAsyncIteration:
                    raise EngineError(f"{self.server.url} broke off an answer: see the server's log") from None
                self._last_answer_at = time.monotonic()
                for answer in self._parse(event, sampling, ids, whole=False):
                    count += len(answer.ids)
                    if count > sampling.max_tokens:
                        raise EngineError(
                            f"{self.server.url} generated more than max_tokens ({sampling.max_tokens}): check that it "
                            "is a vLLM server")
                    text = cutter.add(answer.ids, answer.stop, last=bool(answer.finish_reason))
                    if not answer.finish_reason:
                        yield answer.completion(ids, text)
                        continue
                    if not self._server_facts().labels_tokens:
                        await self._unless_dead(self._confirm_identity())
                    spans = self._version_spans(answer, count, version)
                    self._failure_count = 0
                    yield answer.completion(ids, text, spans)
                    return

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return the logprob of each of `token_ids[1:]`. Temperatures other than 1 are limited to 2 million values."""
        ids = await self._prompt_ids(token_ids)
        token_count = len(self.tokenizer)  # type: ignore[arg-type]  # Hugging Face's have a length
        needs_all = needs_whole_distribution(len(ids), token_count, temperature, _MAX_DISTRIBUTION)
        if len(ids) == 1:
            return []
        sampling = Sampling(temperature=0.0, max_tokens=1, logprobs=False)

        def read(response: Any, version: int) -> list[float]:
            for answer in self._parse(response, sampling, ids):
                self._version_spans(answer, len(answer.ids), version)
            return vllm_requests.prompt_logprobs(
                response, ids, temperature, spans=self._server_facts().labels_tokens, server=self._server_name()
            )

        return await self._send(ids, sampling, read, of_prompt=-1 if needs_all else 0)

    async def _send(
        self, ids: list[int], sampling: Sampling, read: Callable[[Any, int], _T], of_prompt: int | None = None
    ) -> _T:
        """Send a request and return `read(response, version)`. `version` is the one served when the request began."""
        async with self._request_slot() as version:
            request = self._request(ids, sampling, prompt_logprobs=of_prompt)
            response = await self._unless_dead(self.server.tokens(*request))
            if not self._server_facts().labels_tokens:
                await self._unless_dead(self._confirm_identity())
            result = read(response, version)
        self._last_answer_at, self._failure_count = time.monotonic(), 0
        return result

    def _request(self, ids: list[int], sampling: Sampling, **more: Any) -> tuple[str, dict[str, Any], int]:
        """Return path and JSON of a request, and the maximum bytes of its answer. `more`: as for `request_body`."""
        facts, room = self._server_facts(), (self.max_model_len or 0) - len(ids)
        spans = facts.labels_tokens
        body = vllm_requests.request_body(ids, sampling, spans=spans, model=facts.model, room=room, **more)
        return TOKEN_ROUTES[0 if spans else 1], body, vllm_requests.max_answer_bytes(body, self._vocabulary)

    def _parse(self, response: Any, sampling: Sampling, prompt: list[int], *, whole: bool = True) -> list[Answer]:
        return vllm_requests.parse_answers(
            response, sampling, spans=self._server_facts().labels_tokens, vocabulary=self._vocabulary, whole=whole,
            server=self._server_name(), prompt=prompt,
        )

    def _server_name(self) -> str:
        version = self._server_facts().version
        return f"{self.server.url} ({f'vLLM {version}' if version else 'without the /version of vLLM'})"

    @contextlib.asynccontextmanager
    async def _request_slot(self) -> AsyncIterator[int]:
        """Wait until requests may begin, and count one as open. The context's value is the model version served.

        If the request fails, end the engine if its server is gone or broken, else pause. Raises EngineError.
        """
        await self._gate.wait()
        self._require_alive()
        self._open_requests += 1
        try:
            yield self.model_version
        except ServerGone as e:
            try:
                await self._check_identity()
            except EngineError as failure:  # `_watch` decides about a silent server, which may be busy
                if is_refused(failure):
                    self._die(str(e))
            self._require_alive()
            if "status" in e.details:
                await self._test_server()
                await self._pause_after_failure()
            raise EngineError(str(e)) from e  # the server works, and only this request failed
        except EngineError as e:
            self._require_alive()
            if await self._test_server() and e.details.get("refused"):
                raise
            await self._pause_after_failure()
            raise EngineError(str(e)) from e
        finally:
            self._open_requests -= 1

    async def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        self._require_alive()
        remedy = f"start {self.server.url} with a larger --max-model-len"
        return await prompt_ids(self.tokenizer, prompt, self.max_model_len or 0, remedy)

    # --- answers ----------------------------------------------------------------------------------------------------
    def _version_spans(self, answer: Answer, count: int, version: int) -> tuple[tuple[int, int, int], ...]:
        """Return which weights generated which tokens, as `(version, start, end)`; without labels `version` did all."""
        if answer.finish_reason == "abort":
            raise EngineError(f"{self.server.url} aborted the request: it is ending, or another client paused it")
        if not self._server_facts().labels_tokens:
            return ((version, 0, count),) if count else ()
        foreign_labels = sorted({label for label, _, _ in answer.labels} - self._labels.keys())
        if foreign_labels:
            self._die(f"it answered with weights that this engine did not give it (labelled {foreign_labels[0]!r})")
            self._require_alive()
        ends = [0, *(end for _, _, end in answer.labels)]
        starts = [*(start for _, start, _ in answer.labels), count]
        if ends != sorted(ends) or ends != starts:  # each span begins where the one before it ends
            raise EngineError(f"{self._server_name()} did not report which weights version generated each of {count} "
                              f"tokens{vllm_requests.VERSION_HINT}")
        return tuple((self._labels[label], start, end) for label, start, end in answer.labels)

    def _check_logprobs(self, s: Sampling) -> None:
        """Raise EngineError if the server's logprobs for this sampling would be those of another distribution."""
        if s.logprobs and not self._logprobs_are_processed and not vllm_requests.is_plain(s):
            raise EngineError(
                f"{self.server.url} returns logprobs from before temperature and top_p, not those of the sampled "
                "distribution: start the server with --logprobs-mode processed_logprobs", refused=True,
            )

    async def _gives_processed_logprobs(self) -> bool:
        """Return True if the server's logprobs are those after sampling settings: with top_k 1 they are 0."""
        [completion] = await self.generate(self._test_prompt, replace(_TEST_SAMPLING, top_k=1))
        return all(abs(value) < 1e-6 for value in completion.logprobs or ())
