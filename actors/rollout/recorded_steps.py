"""Recorded steps of a run: calls with effects outside of it, such as a payment, a tool call or reading a clock.

A step's value is recorded in the run's journal. If the attempt is lost, the next one gets the recorded value, and the
function is not called again. An unfinished step may have had its effect, so then the run starts over
(`without_open_steps`), unless the workflow says that the step is idempotent. Without a journal the function is called
and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from random import Random
from typing import Any

from trinity_es.actors.rollout.leases import call_async, run_without_loop, running_loop
from trinity_es.actors.rollout.result import classify
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.events.errors import WorkflowError, error_from_dict, error_to_dict
from trinity_es.events.journal import KeptStep, fingerprint
from trinity_es.events.json_values import NotPlain, plain

__all__ = ["RunSteps"]


class RunSteps:
    """Recorded steps and random numbers of one run. `loop`: event loop on which the journal is used."""

    def __init__(self, journal: RunJournal | None = None, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._journal, self._loop = journal, loop
        self.seed = ""
        """Seed of `random`, the same at each attempt."""
        self.possibly_delivered = [] if journal is None else journal.kept.possibly_delivered

    @cached_property
    def random(self) -> Random:
        return Random(self.seed)

    async def step_async(self, name: str, fn: Callable[..., Any], args: Sequence[Any], idempotent: bool) -> Any:
        return await self._run(name, fn, args, idempotent, sync=False)

    def step(self, name: str, fn: Callable[..., Any], args: Sequence[Any], idempotent: bool) -> Any:
        """Return a step's recorded value. If there is none, call `fn(*args)` and record the value.

        Raises WorkflowError in a thread with a running event loop.
        """
        if running_loop() is not None:
            raise WorkflowError(f"the blocking {'now()' if fn is time.time else f'step {name!r}'} would stop this "
                                "thread's event loop: await step_async or now_async")
        return run_without_loop(self._run(name, fn, args, idempotent, sync=True))

    async def now_async(self) -> float:
        return float(await self.step_async("now", time.time, (), idempotent=True))

    def now(self) -> float:
        return float(self.step("now", time.time, (), idempotent=True))

    async def record(self, method: str, *args: Any) -> Any:
        """Call a method of the journal and return its result; None without a journal."""
        return None if self._journal is None else await getattr(self._journal, method)(*args)

    def _record_future(self, method: str, *args: Any) -> Future[Any]:
        """Call `record` on the journal's loop and return its future result."""
        if self._journal is not None:
            assert self._loop is not None  # a run with a journal is in a runner
            return asyncio.run_coroutine_threadsafe(self.record(method, *args), self._loop)
        no_record: Future[Any] = Future()
        no_record.set_result(None)
        return no_record

    async def _run(self, name: str, fn: Callable[..., Any], args: Sequence[Any], idempotent: bool, sync: bool) -> Any:
        """Return the step's value. If `sync`, this coroutine waits for no event loop (see `run_without_loop`)."""

        async def record(method: str, *args: Any) -> Any:
            future = self._record_future(method, *args)
            return future.result() if sync else await asyncio.wrap_future(future)

        if not callable(fn):
            raise WorkflowError(f"step {name!r} needs a function, and got {fn!r:.80}: give the function and its "
                                "arguments, not the result of a call")
        key = f"{name} {fingerprint(_plain_json(f'the arguments of step {name!r}', args))}"
        number, step = await record("begin_step", key, idempotent) or (0, None)
        if step is not None:
            return _recorded_value(step)
        try:
            value = _plain_json(f"the value of step {name!r}", fn(*args) if sync else await call_async(fn, *args))
        except Exception as e:
            if classify(e)[0] == "infra":  # not recorded, since the next attempt may not fail
                raise
            error = _as_json(e)
            await record("end_step", key, number, None, error)
            recorded_error = error_from_dict(error)
            if type(recorded_error) is type(e):
                raise
            raise recorded_error from e  # what the next attempt will get
        await record("end_step", key, number, value, None)
        return value


def _recorded_value(step: KeptStep) -> Any:
    if step.error is not None:
        raise error_from_dict(step.error)
    return step.value


def _plain_json(what: str, value: Any) -> Any:
    """Return a value as plain JSON. Raises WorkflowError if that is not possible; `what` names the value there."""
    try:
        return plain(value)
    except NotPlain as e:
        path = "".join(reversed(e.path))
        raise WorkflowError(f"{what} must be plain JSON, but {path or 'the value'} {e.problem}") from None


def _as_json(error: Exception) -> dict[str, Any]:
    """Return an error as plain JSON; without its details if they can't be written as JSON."""
    data = error_to_dict(error)
    try:
        return dict(plain(data))
    except NotPlain:
        return {**data, "message": ascii(data["message"]), "details": {}}
