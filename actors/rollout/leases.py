"""Leases: sandboxes and sessions that a run holds open outside of the system, recorded in the log.

A `Lease` is a context manager for workflows. On entry the run reports a lease under a key that it chose, and waits
until the report is in the log. Only then the provider (`actors/lease_providers.py`) creates the sandbox, in the
workflow's own process. On exit the provider releases it. If a run or its runner ends without releasing it, the
coordinator has it released (`actors/coordinator/fleet/lease_tracker.py`). But if the run's next attempt continues from
a journal, and the provider has `attach`, that attempt takes over the sandbox. Without a `recorder` nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar, cast

import orjson

from trinity_es.actors.lease_providers import build_provider, recordable_json
from trinity_es.events.errors import StartupError, WorkflowError

__all__ = ["Lease", "LeaseRecorder", "RunLeases", "call_async", "run_without_loop", "running_loop"]

RENEWALS = 3
"""Number of renewals within a lease's time to live."""
MIN_TTL_SECONDS = 5.0
"""Minimum time to live, since each renewal is an event in the log."""
CANCEL_SECONDS = 1.0
"""How long a cancelled async `create` may take to end."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class LeaseRecorder(Protocol):
    """Recorder of lease changes, callable from any thread.

    The future of a `taken` change resolves when the log has it. Its result is the handle of an earlier attempt's
    resource to take over, or None.
    """

    def report(self, *, lease: str, what: Any, run: int, **more: Any) -> Future[Any]: ...


class RunLeases:
    """Leases of one run. They report their changes to the recorder until the run ends."""

    def __init__(self, recorder: LeaseRecorder | None = None, run: int = 0) -> None:
        self._recorder, self._run = recorder, run
        self._open_keys: set[str] = set()
        self._is_over = False
        self._numbers: Counter[bytes] = Counter()

    def next_number(self, provider: str, args: Mapping[str, Any]) -> int:
        """Return how many leases with this provider and these arguments the run took before, and count one more."""
        key = orjson.dumps([provider, args], option=orjson.OPT_SORT_KEYS)
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def report(self, lease: str, what: str, **more: Any) -> Future[Any]:
        """Report a change of the lease with this key: taken, held, renewed, released or left.

        The future of `taken` resolves when the log has it, with the handle of a resource to take over, or None. Other
        futures resolve at once. Raises WorkflowError for `taken` after the end of the run.
        """
        if what == "taken" and self._is_over:
            raise WorkflowError("the run is over and can't take a lease: take leases only while the workflow runs")
        if self._recorder is not None and (what == "taken" or lease in self._open_keys):
            if what in ("released", "left"):
                self._open_keys.discard(lease)
            else:
                self._open_keys.add(lease)
            when_recorded = self._recorder.report(lease=lease, what=what, run=self._run, **more)
            if what == "taken":
                return when_recorded
        done: Future[None] = Future()
        done.set_result(None)
        return done

    async def report_and_wait(self, lease: str, what: str, more: Mapping[str, Any]) -> Any:
        return await asyncio.wrap_future(self.report(lease, what, **more))

    def close(self) -> None:
        """End the run, and report its open leases as left, so that the coordinator has them released."""
        self._is_over = True
        for lease in list(self._open_keys):
            self.report(lease, "left", reason="its run ended without releasing it")


class Lease:
    """Context manager for one lease: `async with`, or `with` in a sync workflow.

    Inside, it has `key`, `handle`, `provider` (the instance), and `attached`: True if it took over the resource of a
    lost attempt. Errors of `create` are raised on entry. An error of `release` is not raised, since the coordinator
    tries again.
    """

    def __init__(
        self, leases: RunLeases, provider: str, args: Mapping[str, Any] | None = None, *, ttl: float = 3600.0,
        creation_timeout: float = 60.0,
    ) -> None:
        """Raise WorkflowError if an argument can't be recorded or a duration is out of range."""
        if not (ttl >= MIN_TTL_SECONDS and 0.0 < creation_timeout <= ttl):
            raise WorkflowError(f"a lease has ttl {ttl} and creation_timeout {creation_timeout}: ttl must be at least "
                                f"{MIN_TTL_SECONDS:g} s, and creation_timeout above 0 and at most ttl")
        self._leases, self._provider_path = leases, provider
        self._args = self._recordable("the arguments of a lease's provider", dict(args or {}))
        self.ttl, self.creation_timeout = float(ttl), float(creation_timeout)
        self.key = _new_key()
        self.provider: Any = None
        self.handle: Any = None
        self.attached = False
        self._number = 0
        self._deadline = 0.0
        """Deadline for the provider's `create`, in monotonic seconds."""
        self._accept_lock = threading.Lock()
        self._is_given_up = False
        """True once the wait for `create` has ended without a result; a late result is released."""
        self._stop_renewing: Callable[[], object] = lambda: None
        self._loop: _OwnLoop | None = None
        self._is_sync = False
        """True in a sync workflow, where nothing may wait for an event loop."""

    @staticmethod
    def _recordable(what: str, value: Any) -> Any:
        """Return a value as plain JSON. Raises WorkflowError if that is not possible; `what` names the value there."""
        try:
            return recordable_json(what, value)
        except ValueError as e:
            raise WorkflowError(str(e)) from None

    def _take(self) -> Future[Any]:
        """Report the lease as taken, and start the time limit for its creation."""
        self._deadline = time.monotonic() + self.creation_timeout
        return self._leases.report(
            self.key, "taken", provider=self._provider_path, args=self._args, ttl=self.ttl,
            creation_timeout=self.creation_timeout, attachable=hasattr(self.provider, "attach"), number=self._number,
        )

    def _late_error(self) -> StartupError:
        return StartupError(f"{self._provider_path} made nothing within {self.creation_timeout:g} s (creation_timeout)")

    def _accept(self, handle: Any) -> Future[None] | None:
        """Keep the handle from `create`, and report the lease as held. Return None if it came too late."""
        with self._accept_lock:
            if self._is_given_up or time.monotonic() >= self._deadline:
                return None
            self.handle = self._recordable(f"the handle of lease provider {self._provider_path}", handle)
            return self._leases.report(self.key, "held", handle=self.handle)

    def _create(self) -> Any:
        """Call `create` in this thread; accept its result or release a late one. Return an async one's awaitable."""
        handle = self.provider.create(self.key, self.ttl)
        if inspect.isawaitable(handle):
            return handle
        report = self._accept(handle)
        if report is None:
            with self._log_failure("came too late, and could not be released"):
                _call_here(self.provider.release, self.key, handle)
            raise self._late_error()
        report.result()
        return None

    async def _finish(self, creation: Awaitable[Any]) -> None:
        """Await an async `create` and accept its result, or release it if it came too late."""
        handle = await creation
        report = self._accept(handle)
        if report is None:
            with self._log_failure("came too late, and could not be released"):
                await call_async(self.provider.release, self.key, handle)
            raise self._late_error()
        await asyncio.wrap_future(report)

    async def _await_creation(self, creation: Coroutine[Any, Any, None]) -> None:
        """Wait for the creation until its deadline. At the deadline, or if the caller is cancelled, cancel it."""
        task = asyncio.ensure_future(creation)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio logs it as unretrieved
        try:
            await asyncio.wait({task}, timeout=self._deadline - time.monotonic())
        finally:
            if not task.done():
                with self._accept_lock:
                    self._is_given_up = True
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if self._is_given_up:
            raise self._late_error()
        task.result()

    @contextlib.contextmanager
    def _log_failure(self, problem: str) -> Iterator[None]:
        """Suppress exceptions within this context, and log them as this problem of the lease."""
        try:
            yield
        except Exception as e:
            _log.warning("lease %s of %s %s: %r", self.key, self._provider_path, problem, e)

    async def _leave_to_coordinator(self, reason: str, error: BaseException) -> None:
        """Report the lease as left, so that the coordinator has it released, and wait for the report's end.

        Without the wait, a worker process that ends now could lose the report.
        """
        _log.warning("lease %s of %s %s: %r", self.key, self._provider_path, reason, error)
        with contextlib.suppress(WorkflowError):  # the run is over, and `RunLeases.close` has reported it
            reason = f"it {reason}: {type(error).__name__}: {error}"
            await self._wait_for(self._leases.report(self.key, "left", reason=reason))

    # --- for both kinds of workflows; in a sync one nothing here waits for a loop: see `run_without_loop` -----------
    async def _enter(self) -> Self:
        """Take the lease, create its resource and start renewing it; if that fails, leave it to the coordinator."""
        self.provider = await self._call(build_provider, self._provider_path, self._args)
        self._number = self._leases.next_number(self._provider_path, self._args)
        try:
            earlier_handle = await self._wait_for(self._take())
            if earlier_handle is not None and not await self._attach(earlier_handle):
                self.key = _new_key()
                await self._wait_for(self._take())
            if not self.attached:
                if time.monotonic() >= self._deadline:  # after it the coordinator would not look for the resource
                    raise self._late_error()
                await self._create_resource()
        except BaseException as e:
            await self._leave_to_coordinator("could not be made", e)
            raise
        if hasattr(self.provider, "renew"):
            renewals = self._renew()
            renewal = self._own_loop().start(renewals) if self._is_sync else asyncio.create_task(renewals)
            self._stop_renewing = renewal.cancel
        return self

    async def _exit(self) -> None:
        """Release the lease. If that fails, leave it to the coordinator."""
        self._stop_renewing()
        try:
            await self._call(self.provider.release, self.key, self.handle)
        except BaseException as e:
            await self._leave_to_coordinator("could not be released by its run", e)
            if not isinstance(e, Exception):
                raise
        else:
            await self._wait_for(self._leases.report(self.key, "released"))

    async def _attach(self, handle: Any) -> bool:
        """Take over the resource of a lost attempt. If that fails, leave it to the coordinator and return False."""
        args = self.key, handle, self.ttl
        try:
            if self._is_sync:
                attaching = self.provider.attach(*args)
                if inspect.isawaitable(attaching):
                    self._on_own_loop(asyncio.wait_for(attaching, self.creation_timeout))
            else:
                await asyncio.wait_for(call_async(self.provider.attach, *args), self.creation_timeout)
        except Exception as e:
            await self._leave_to_coordinator("could not take over the resource of a lost attempt", e)
            return False
        self.handle, self.attached = handle, True
        await self._wait_for(self._leases.report(self.key, "held", handle=handle))
        return True

    async def _wait_for(self, report: Future[Any]) -> Any:
        """Wait for a report's future and return its result; in a sync workflow, block."""
        return report.result() if self._is_sync else await asyncio.wrap_future(report)

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a provider's method and return its result. In a sync workflow, async methods run on the lease's loop."""
        if not self._is_sync:
            return await call_async(call, *args)
        result = call(*args)
        return self._on_own_loop(result) if inspect.isawaitable(result) else result

    async def _create_resource(self) -> None:
        """Have the provider create the resource, and report it as held. Raises StartupError if it takes too long."""
        if not self._is_sync:
            await self._await_creation(self._create_async())
            return
        creation = self._create()
        if creation is not None:
            self._on_own_loop(self._await_creation(self._finish(creation)))

    async def _create_async(self) -> None:
        """Call `create` on this loop, or in a thread if it is not async, and accept its result."""
        if inspect.iscoroutinefunction(self.provider.create):
            creation = self.provider.create(self.key, self.ttl)
        else:
            creation = await asyncio.to_thread(self._create)
        if creation is not None:
            await self._finish(creation)

    async def _renew(self) -> None:
        """Renew the lease until cancelled, RENEWALS times in its time to live."""
        while True:
            await asyncio.sleep(self.ttl / RENEWALS)
            with self._log_failure("could not be renewed, and is tried again"):
                await call_async(self.provider.renew, self.key, self.handle, self.ttl)
                self._leases.report(self.key, "renewed", ttl=self.ttl)

    # --- in an async workflow ---------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        return await self._enter()

    async def __aexit__(self, *_: object) -> None:
        await self._exit()

    # --- in a sync workflow -----------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        """Take the lease. Raises WorkflowError if an event loop runs in this thread."""
        if running_loop() is not None:
            raise WorkflowError("a lease taken by `with` would block the event loop: use `async with`")
        self._is_sync = True
        try:
            return run_without_loop(self._enter())
        except BaseException:
            self._close_loop()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            run_without_loop(self._exit())
        finally:
            self._close_loop()

    def _on_own_loop(self, awaitable: Awaitable[Any]) -> Any:
        return self._own_loop().start(_awaited(awaitable)).result()  # if interrupted, `_close_loop` cancels it

    def _own_loop(self) -> _OwnLoop:
        """Return the lease's own event loop, in a thread that the first call starts."""
        if self._loop is None or not self._loop.thread.is_alive():  # a fork by the workflow lacks this thread
            self._loop = _OwnLoop()
        return self._loop

    def _close_loop(self) -> None:
        if self._loop is not None and self._loop.thread.is_alive():
            self._loop.close()
        self._loop = None


def _new_key() -> str:
    return f"es-{uuid.uuid4().hex}"


class _OwnLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel the remaining tasks and end the thread. A task that does not end in time is abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(2 * CANCEL_SECONDS)

    def _run(self) -> None:
        """Run the loop in this thread until `close` stops it, then cancel its tasks."""
        is_stopped = False
        while not is_stopped:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by a task, whose caller gets it too
                self._loop.run_forever()
                is_stopped = True
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
        self._loop.close()


def run_without_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never waits, and return its result. It may start an event loop, since none runs here."""
    try:
        coroutine.send(None)
    except StopIteration as e:
        return cast(_T, e.value)
    name = getattr(coroutine, "__qualname__", "a coroutine")
    raise RuntimeError(f"{name} had to wait, but no event loop runs here: await it in a coroutine instead")


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _awaited(value: Any) -> Any:
    return await value


def _call_here(call: Callable[..., Any], *args: Any) -> None:
    """Call a provider's method in this thread; for an async one start an event loop."""
    result = call(*args)
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def call_async(call: Callable[..., Any], *args: Any) -> Any:
    """Call a provider's method and return its result: an async method on this loop, another in a thread."""
    if inspect.iscoroutinefunction(call):
        return await call(*args)
    result = await asyncio.to_thread(call, *args)
    return await result if inspect.isawaitable(result) else result
