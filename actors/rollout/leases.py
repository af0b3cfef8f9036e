"""What a run holds open outside of the system, a sandbox or a session, as a lease in the log.

A `Lease` is a context manager of a workflow's. Entering it, the run tells that it takes a lease under a key that it
chose, waits until that is in the log, and only then has the provider (`actors/lease_providers.py`) make the thing, in
the workflow's own process. Leaving it, the run has the provider release it. Whatever keeps it from that, the run's end
tells (`RunLeases.close`), or the runner's: the coordinator then has it released
(`actors/coordinator/fleet/lease_fleet.py`).

Without a system (`recorder` is None) nothing is recorded, and all else is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar, cast

from trinity_es.actors.lease_providers import build_provider, recordable
from trinity_es.events.errors import StartupError, WorkflowError

__all__ = ["Lease", "LeaseRecorder", "RunLeases", "driven", "running_loop"]

RENEWALS = 3
"""How often a lease is renewed within its time to live."""
SHORTEST_TTL = 5.0
"""Minimum of seconds that a lease may live: renewals are events."""
CANCEL_SECONDS = 1.0
"""How long an async `create` may take to end once it was cancelled."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class LeaseRecorder(Protocol):
    """Takes what runs tell of their leases, from any thread; the future is done when it is in the log."""

    def report(self, *, lease: str, what: Any, run: int, **more: Any) -> Future[None]: ...


class RunLeases:
    """The leases of one run: what its workflow tells of them goes to the recorder, until the run is over."""

    def __init__(self, recorder: LeaseRecorder | None = None, run: int = 0) -> None:
        self._recorder, self._run = recorder, run
        self._open: set[str] = set()
        self._over = False

    def report(self, lease: str, what: str, **more: Any) -> Future[None]:
        """Tell; of a lease that is taken the future is done when that is in the log, of all else at once.

        Raises WorkflowError for one that is taken when the run is over.
        """
        done: Future[None] = Future()
        if what == "taken" and self._over:
            raise WorkflowError("the run is over: it can take no lease")
        if self._recorder is not None and (what == "taken" or lease in self._open):
            (self._open.discard if what in ("released", "left") else self._open.add)(lease)
            recorded = self._recorder.report(lease=lease, what=what, run=self._run, **more)
            if what == "taken":
                return recorded
        done.set_result(None)
        return done

    async def told(self, lease: str, what: str, more: Mapping[str, Any]) -> None:
        """`report`, for a worker process, which waits for the answer."""
        await asyncio.wrap_future(self.report(lease, what, **more))

    def close(self) -> None:
        """End the run: what it did not release is left to the coordinator."""
        self._over = True
        for lease in list(self._open):
            self.report(lease, "left", reason="its run ended without releasing it")


class Lease:
    """One lease of a workflow's: `async with`, or `with` in a sync workflow.

    `key`, `handle` and `provider`, the live instance, are there within. What `create` raises comes out of entering. An
    error of `release` fails nothing: the coordinator tries again.
    """

    def __init__(
        self, leases: RunLeases, provider: str, args: Mapping[str, Any] | None = None, *, ttl: float = 3600.0,
        creation_timeout: float = 60.0,
    ) -> None:
        """Raise WorkflowError for what can't be recorded."""
        if not (ttl >= SHORTEST_TTL and 0.0 < creation_timeout <= ttl):
            raise WorkflowError(f"a lease has ttl {ttl} and creation_timeout {creation_timeout}: ttl is at least "
                                f"{SHORTEST_TTL:g} s, and creation_timeout more than 0 and at most that")
        self._leases, self._path = leases, provider
        self._args = self._recordable("the arguments of a lease's provider", dict(args or {}))
        self.ttl, self.creation_timeout = float(ttl), float(creation_timeout)
        self.key = f"es-{uuid.uuid4().hex}"
        self.provider: Any = None
        self.handle: Any = None
        self._until = 0.0
        """When nothing may come of making it any more, monotonic seconds."""
        self._deciding = threading.Lock()
        self._given_up = False
        """Nobody waits for it to be made: what comes of that is released."""
        self._renewing: Callable[[], object] = lambda: None
        self._loop: _OwnLoop | None = None
        self._sync = False

    @staticmethod
    def _recordable(what: str, value: Any) -> Any:
        try:
            return recordable(what, value)
        except ValueError as e:
            raise WorkflowError(str(e)) from None

    def _take(self) -> Future[None]:
        self._until = time.monotonic() + self.creation_timeout
        return self._leases.report(
            self.key, "taken", provider=self._path, args=self._args, ttl=self.ttl,
            creation_timeout=self.creation_timeout,
        )

    def _late(self) -> StartupError:
        return StartupError(f"{self._path} made nothing within {self.creation_timeout:g} s (creation_timeout)")

    def _accepted(self, handle: Any) -> Future[None] | None:
        """Take what was made, and tell it; None where it came too late, or nobody waits for it any more."""
        with self._deciding:
            if self._given_up or time.monotonic() >= self._until:
                return None
            self.handle = self._recordable(f"the handle of lease provider {self._path}", handle)
            return self._leases.report(self.key, "held", handle=self.handle)

    def _create(self) -> Any:
        """Have it made in this thread; an async `create` returns what `_finished` waits for, another one None.

        Nothing stops it here. What it makes too late it releases itself.
        """
        made = self.provider.create(self.key, self.ttl)
        if inspect.isawaitable(made):
            return made
        told = self._accepted(made)
        if told is None:
            with self._logged("came too late, and could not be released"):
                _called_here(self.provider.release, self.key, made)
            raise self._late()
        told.result()
        return None

    async def _finished(self, making: Awaitable[Any]) -> None:
        made = await making
        told = self._accepted(made)
        if told is None:
            with self._logged("came too late, and could not be released"):
                await _called_async(self.provider.release, self.key, made)
            raise self._late()
        await asyncio.wrap_future(told)

    async def _in_time(self, making: Coroutine[Any, Any, None]) -> None:
        """Wait until it is made, or its time is over. Then, and when this is cancelled, it is given up."""
        task = asyncio.ensure_future(making)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio says that nobody looked
        try:
            await asyncio.wait({task}, timeout=self._until - time.monotonic())
        finally:
            if not task.done():
                with self._deciding:
                    self._given_up = True
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if self._given_up:
            raise self._late()
        task.result()

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            _log.warning("lease %s of %s %s: %r", self.key, self._path, what, e)

    async def _leave(self, reason: str, error: BaseException) -> None:
        """Tell why, and wait for it: what a worker process told at last is not heard beside its end."""
        _log.warning("lease %s of %s %s: %r", self.key, self._path, reason, error)
        with contextlib.suppress(WorkflowError):  # the run is over: its end has told
            why = f"it {reason}: {type(error).__name__}: {error}"
            await self._recorded(self._leases.report(self.key, "left", reason=why))

    # --- what both kinds of workflows do; in a sync one nothing here waits for a loop: see `driven` -----------------
    async def _enter(self) -> Self:
        self.provider = await self._call(build_provider, self._path, self._args)  # it may import for long
        try:
            await self._recorded(self._take())
            if time.monotonic() >= self._until:  # nobody would look for what is made now
                raise self._late()
            await self._make()
        except BaseException as e:
            await self._leave("could not be made", e)
            raise
        if hasattr(self.provider, "renew"):
            renewing = self._renew()
            self._renewing = (self._own_loop().start(renewing) if self._sync else asyncio.create_task(renewing)).cancel
        return self

    async def _exit(self) -> None:
        self._renewing()
        try:
            await self._call(self.provider.release, self.key, self.handle)
        except BaseException as e:
            await self._leave("could not be released by its run", e)
            if not isinstance(e, Exception):
                raise
        else:
            await self._recorded(self._leases.report(self.key, "released"))

    async def _recorded(self, told: Future[None]) -> None:
        if self._sync:
            told.result()
        else:
            await asyncio.wrap_future(told)

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what the provider gives: called in this thread of a sync workflow, an async one on its own loop."""
        if not self._sync:
            return await _called_async(call, *args)
        found = call(*args)
        return self._on_own_loop(found) if inspect.isawaitable(found) else found

    async def _make(self) -> None:
        if self._sync:
            if (making := self._create()) is not None:
                self._on_own_loop(self._in_time(self._finished(making)))
        else:
            await self._in_time(self._create_async())

    async def _create_async(self) -> None:
        """Have it made, by an async `create` on this loop, by another one in a thread."""
        if inspect.iscoroutinefunction(self.provider.create):
            making = self.provider.create(self.key, self.ttl)
        else:
            making = await asyncio.to_thread(self._create)
        if making is not None:
            await self._finished(making)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.ttl / RENEWALS)
            with self._logged("could not be renewed, and is tried again"):
                await _called_async(self.provider.renew, self.key, self.handle, self.ttl)
                self._leases.report(self.key, "renewed", ttl=self.ttl)

    # --- in an async workflow ---------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        return await self._enter()

    async def __aexit__(self, *_: object) -> None:
        await self._exit()

    # --- in a sync workflow -----------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if running_loop() is not None:
            raise WorkflowError("a lease taken by `with` would stop the event loop that runs here: use `async with`")
        self._sync = True
        try:
            return driven(self._enter())
        except BaseException:
            self._close_loop()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            driven(self._exit())
        finally:
            self._close_loop()

    def _on_own_loop(self, awaitable: Awaitable[Any]) -> Any:
        """Return what comes of it, on one loop of this lease's own: that of all it made, and renews."""
        return self._own_loop().start(_awaited(awaitable)).result()  # interrupted, `_close_loop` cancels it

    def _own_loop(self) -> _OwnLoop:
        if self._loop is None or not self._loop.thread.is_alive():  # a process that the workflow forked has no thread
            self._loop = _OwnLoop()
        return self._loop

    def _close_loop(self) -> None:
        if self._loop is not None and self._loop.thread.is_alive():
            self._loop.close()
        self._loop = None


class _OwnLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is left and end the thread; what does not end in time is left behind."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(2 * CANCEL_SECONDS)

    def _run(self) -> None:
        running = True
        while running:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # a task's own, who waits for it gets it
                self._loop.run_forever()
                running = False
        rest = asyncio.all_tasks(self._loop)
        for task in rest:
            task.cancel()
        if rest:
            self._loop.run_until_complete(asyncio.wait(rest, timeout=CANCEL_SECONDS))
        self._loop.close()


def driven(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that never waits.

    No event loop runs meanwhile, so what it calls may run its own.
    """
    try:
        coroutine.send(None)
    except StopIteration as e:
        return cast(_T, e.value)
    raise RuntimeError("it waits for something")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _awaited(value: Any) -> Any:
    return await value


def _called_here(call: Callable[..., Any], *args: Any) -> None:
    """Call a method of a provider in a thread without a loop; an async one runs on a loop for it alone."""
    found = call(*args)
    if inspect.isawaitable(found):
        asyncio.run(_awaited(found))


async def _called_async(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a method of a provider gives: an async one on this loop, another one in a thread."""
    if inspect.iscoroutinefunction(call):
        return await call(*args)
    found = await asyncio.to_thread(call, *args)
    return await found if inspect.isawaitable(found) else found
