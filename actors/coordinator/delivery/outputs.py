"""Outputs: what train batches delivered is also written elsewhere (`buffer.pipeline.outputs`), once and whole.

A thread for each output follows the log: every train batch that was finalized, and every `process_experiences`, in the
order of the log. An output is given the experiences under a key that names the batch and its submission, so whoever
writes the same again, after a crash or beside a coordinator that was thought dead, writes the same bytes to the same
place. What was written is an event (OutputWritten); at a start each output goes on behind its last one. So a kill -9 at
any moment leaves either nothing of a batch or all of it, and what is missing is written at the next start.

An output that fails never holds up a batch: it was finalized before, and the trainer gets it from the payload store.
The output says so in the log (OutputFailed) and tries again, after pauses that grow, until it can go on; what retention
would free meanwhile is kept for it. Payloads that are gone all the same are given up, which is in the log too.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.plugins import build
from trinity_es.events import vocabulary as ev
from trinity_es.events.atomic_file import whole_file
from trinity_es.events.errors import ConfigError, CorruptPayload, LogError, PayloadNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.experience_table import ParquetTable, json_lines, require_parquet, row_of
from trinity_es.events.private_files import make_private_folder
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.values import batch_stream

__all__ = ["OUTPUTS", "JsonlOutput", "Output", "Outputs", "ParquetOutput", "build_outputs"]

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds before an output that failed is tried again: doubled from the first to the longest."""
_TYPES = ("BatchFinalized", "ExperiencesProcessed")
_LOG = logging.getLogger("trinity_es.outputs")


class Output(Protocol):
    """Where experiences are written. Built once with the `args` of its config, then called from a thread of its own."""

    def write(self, key: str, experiences: list[Experience]) -> None:
        """Hold all of these under `key`, durably when it returns; what it raises has it tried again.

        `key` is usable as a file's name. It may come again with the same experiences (after a crash): then nothing must
        be there twice, so let the key be the name of what you write.
        """


# --- as rows --------------------------------------------------------------------------------------------------------
class _Folder:
    """A file for each batch in one folder, named by its key: there whole, or not at all."""

    suffix: ClassVar[str]

    def __init__(self, path: str) -> None:
        """`path`: the folder, by default `outputs/<name>` in the run's folder."""
        self.folder = Path(path)
        self._made = False

    def write(self, key: str, experiences: list[Experience]) -> None:
        data = self.encode(experiences)
        if not self._made:
            make_private_folder(self.folder)
            for left in self.folder.glob(".unfinished-*"):  # of a process that was killed
                left.unlink(missing_ok=True)
            self._made = True
        # Of mode 0644, for other tools, where the folder lets them in.
        with whole_file(self.folder / f"{key}{self.suffix}", durable=True, mode=0o644) as file:
            file.write(data)

    def encode(self, experiences: list[Experience]) -> bytes:
        raise NotImplementedError


class JsonlOutput(_Folder):
    """`jsonl`: a line for each experience."""

    suffix = ".jsonl"

    def encode(self, experiences: list[Experience]) -> bytes:
        return json_lines(map(row_of, experiences))


class ParquetOutput(_Folder):
    """`parquet`: a row for each experience. Needs pyarrow (the extra `parquet`). `compression` as pyarrow knows it."""

    suffix = ".parquet"

    def __init__(self, path: str, compression: str = "zstd") -> None:
        require_parquet()  # said when the config is read
        super().__init__(path)
        self._compression = compression

    def encode(self, experiences: list[Experience]) -> bytes:
        sink = io.BytesIO()
        table = ParquetTable(sink, self._compression)
        table.write([row_of(e) for e in experiences])
        table.close()
        return sink.getvalue()


OUTPUTS: dict[str, Callable[..., Output]] = {"jsonl": JsonlOutput, "parquet": ParquetOutput}
"""Outputs by the name that a config gives; your own is named "module:Class" there."""


def build_outputs(entries: Iterable[Mapping[str, Any]], run_dir: str) -> dict[str, Output]:
    """Return the outputs of a config, by the names that the log has for them.

    A second one of the same name is `<name>_2`. Raises ConfigError for a name that is not found, arguments that do not
    fit and a class without `write`.
    """
    outputs: dict[str, Output] = {}
    seen: Counter[str] = Counter()
    for entry in entries:
        name, args = entry["name"], dict(entry.get("args") or {})
        label = name.rpartition(":")[2]
        seen[label] += 1
        if seen[label] > 1:
            label = f"{label}_{seen[label]}"
        if name in OUTPUTS:
            args["path"] = str(Path(run_dir) / args.get("path", f"outputs/{label}"))
        output = build("output", name, args, OUTPUTS, "a class with write(key, experiences)")
        if not callable(getattr(output, "write", None)):
            raise ConfigError(f"output {name} has no method write(key, experiences)", output=name)
        outputs[label] = output
    return outputs


# --- following the log ----------------------------------------------------------------------------------------------
class Outputs:
    """All outputs of the coordinator that made it."""

    def __init__(
        self, outputs: Mapping[str, Output], live: LiveState, payloads: PayloadStore,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`post` runs a callable in the actor's loop, where `live` is; the threads themselves only read its log."""
        self._followers = [_Follower(name, output, live, payloads, post) for name, output in outputs.items()]

    def wake(self) -> None:
        """Something may be left to write."""
        for follower in self._followers:
            follower.wake()

    def busy(self) -> bool:
        """Return True if one is writing now; one that waits until it tries again is not."""
        return any(f.busy() for f in self._followers)

    def position(self) -> float:
        """Up to here in the log everything is written; infinite where there is no output. For any thread."""
        return min((f.done for f in self._followers), default=float("inf"))

    def status(self) -> list[dict[str, Any]]:
        """Return each output's name, how far in the log it is, and what keeps it from going on (or null)."""
        return [{"output": f.name, "position": f.done, "error": f.error} for f in self._followers]


class _Follower:
    """One output's thread."""

    def __init__(
        self, name: str, output: Output, live: LiveState, payloads: PayloadStore,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.name, self._output, self._live, self._payloads, self._post = name, output, live, payloads, post
        self._log: EventLog = live.log
        self.done = 0
        """Up to this position in the log it has written all there is to write."""
        self.error: str | None = None
        self._due, self._working = threading.Event(), False
        threading.Thread(target=self._run, name=f"output-{name}", daemon=True).start()

    def wake(self) -> None:
        self._due.set()

    def busy(self) -> bool:
        return self._working or (self._due.is_set() and self.error is None)

    def _run(self) -> None:
        begun, pause = False, FIRST_PAUSE
        while True:
            self._due.wait(None if self.error is None else pause)
            self._working = True
            self._due.clear()
            try:
                if not begun:
                    self.done, begun = self._last_written(), True
                self._catch_up()
                self.error, pause = None, FIRST_PAUSE
            except Exception as e:  # the log is away, or the output is: everything is tried again
                told, pause = f"{type(e).__name__}: {e}", min(2 * pause, LONGEST_PAUSE)
                if told != self.error:
                    _LOG.warning("output %s can't go on, trying again: %s", self.name, told)
                self.error = told
            self._working = False
            if self.error is not None:  # a batch that is finalized meanwhile is no reason to hurry
                self._due.clear()

    def _last_written(self) -> int:
        done = 0
        for recorded in self._log.read(stream=ev.OutputWritten.stream_of(self.name)):
            match recorded.event:
                case ev.OutputWritten() as event:
                    done = max(done, event.position)
                case ev.OutputFailed() as event if not event.retry:
                    done = max(done, event.position)
        return done

    def _catch_up(self) -> None:
        until = self._log.head().position
        for recorded in self._log.read(types=_TYPES, after=self.done, until=until):
            self._write(recorded)
            self.done = recorded.position
        self.done = max(self.done, until)

    def _write(self, recorded: Recorded) -> None:
        found = self._found(recorded)
        if found is None:
            return
        key, refs = found
        about = (self.name, key, recorded.position)
        try:
            experiences = read_experiences(self._payloads, list(refs))
            self._output.write(key, experiences)
        except (PayloadNotFound, CorruptPayload) as e:  # it won't get better
            _LOG.warning("output %s goes without %s: %s", self.name, key, e)
            self._record(_failed(*about, e, retry=False))
        except Exception as e:
            if self.error != f"{type(e).__name__}: {e}":  # said once, not at every try
                self._record(_failed(*about, e, retry=True))
            raise
        else:
            self._record(ev.OutputWritten(
                output=self.name, key=key, position=recorded.position, experiences=len(experiences)
            ))

    def _found(self, recorded: Recorded) -> tuple[str, Sequence[ev.PayloadRef]] | None:
        """Return the key and what is to be written under it; None for an eval."""
        event = recorded.event
        if isinstance(event, ev.ExperiencesProcessed):
            return f"processed-{quote(event.request, safe='') or recorded.position}", event.experiences
        assert isinstance(event, ev.BatchFinalized)
        if event.result["batch_type"] != "train":
            return None
        batch_id, submission = event.result["batch_id"], ""
        submitted = self._log.read(stream=batch_stream(batch_id), types=["BatchSubmitted"], until=recorded.position)
        for earlier in submitted:
            assert isinstance(earlier.event, ev.BatchSubmitted)
            submission = earlier.event.submission
        name = f"{batch_id:06d}" if isinstance(batch_id, int) else quote(batch_id, safe="")
        if len(name) > 150:  # a file's name has at most 255 bytes
            name = hashlib.sha256(name.encode()).hexdigest()
        return f"step-{name}-{quote(submission, safe='') or recorded.position}", event.experiences

    def _record(self, event: ev.Event) -> None:
        """Have the actor's loop record it, and wait until it is durable. Raises LogError where it is not."""
        recorded: Future[bool] = Future()

        def record() -> None:
            try:
                self._live.record(event)
            except LogError as e:  # its version could not be read: nothing was written
                _LOG.warning("%s was not recorded: %s", type(event).__name__, e)
                recorded.set_result(False)
                return
            self._live.then(lambda: recorded.set_result(True))
            self._live.turn.failed.append(lambda error: recorded.set_result(False))

        self._post(record)
        if not recorded.result():
            raise LogError(f"{type(event).__name__} of output {self.name} could not be recorded")


def _failed(output: str, key: str, position: int, error: Exception, *, retry: bool) -> ev.OutputFailed:
    """Return the error's text as the log can hold it."""
    told = f"{type(error).__name__}: {error}"[:2000].encode(errors="replace").decode()
    return ev.OutputFailed(output=output, key=key, position=position, error=told, retry=retry)
