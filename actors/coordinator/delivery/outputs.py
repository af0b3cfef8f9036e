"""Outputs (`buffer.pipeline.outputs`): additional destinations for the experiences of train batches.

A thread per output follows the log: every finalized train batch and every `process_experiences`, in the log's order. It
writes the experiences under a key that names the batch and its submission, so a repeated write (after a crash, or by a
coordinator that was replaced) writes the same bytes under the same key. Each write is recorded (OutputWritten), and
after a start each output continues after its last one. So a kill -9 leaves all of a batch or nothing, and the next
start writes the rest.

An output that fails never delays a batch, which the trainer gets from the payload store. The output records the error
(OutputFailed) and retries after pauses that grow. Retention keeps the payloads until they are written. If payloads are
lost, the output skips them, and records that too.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.plugin_lookup import build, label_of
from trinity_es.events import vocabulary as ev
from trinity_es.events.atomic_file import whole_file
from trinity_es.events.errors import CorruptPayload, PayloadNotFound
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.experience_rows import ParquetTable, json_lines, require_parquet
from trinity_es.events.private_files import make_private_folder
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.store.payloads.experiences import read_columns
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.values import batch_stream

__all__ = ["OUTPUTS", "JsonlOutput", "Output", "Outputs", "ParquetOutput", "build_outputs"]

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""First and longest pause in seconds before a failed output is retried. Each pause is twice the previous one."""
_TYPES = ("BatchFinalized", "ExperiencesProcessed")
_LOG = logging.getLogger("trinity_es.outputs")


class Output(Protocol):
    """Destination of experiences, built once with the `args` of its config and called from a thread of its own."""

    def write(self, key: str, experiences: ExperienceColumns) -> None:
        """Store all experiences durably under `key`, which is usable as a file name. An exception causes a retry.

        `experiences` are columns; iterating gives each as an Experience. After a crash the same key and experiences may
        come again and must not be stored twice, so use the key as a name.
        """


# --- as rows --------------------------------------------------------------------------------------------------------
class _FolderOutput:
    """Output that writes a file per batch, named by its key, into a folder."""

    suffix: ClassVar[str]

    def __init__(self, path: str) -> None:
        """Write to the folder `path`, by default `outputs/<name>` in the run's folder."""
        self.folder = Path(path)
        self._folder_is_ready = False

    def write(self, key: str, experiences: ExperienceColumns) -> None:
        data = self.encode(experiences)
        if not self._folder_is_ready:
            make_private_folder(self.folder)
            for unfinished in self.folder.glob(".unfinished-*"):  # files of a process that was killed
                unfinished.unlink(missing_ok=True)
            self._folder_is_ready = True
        # Mode 0644 is for other tools, if the folder lets them in.
        with whole_file(self.folder / f"{key}{self.suffix}", durable=True, mode=0o644) as file:
            file.write(data)

    def encode(self, experiences: ExperienceColumns) -> bytes:
        raise NotImplementedError


class JsonlOutput(_FolderOutput):
    """`jsonl`: a line per experience."""

    suffix = ".jsonl"

    def encode(self, experiences: ExperienceColumns) -> bytes:
        return json_lines(experiences.table())


class ParquetOutput(_FolderOutput):
    """`parquet`: a row per experience. Needs pyarrow (the extra `parquet`); `compression` is pyarrow's."""

    suffix = ".parquet"

    def __init__(self, path: str, compression: str = "zstd") -> None:
        require_parquet()  # so that a missing package fails when the config is read
        super().__init__(path)
        self._compression = compression

    def encode(self, experiences: ExperienceColumns) -> bytes:
        sink = io.BytesIO()
        table = ParquetTable(sink, self._compression)
        table.write(experiences.table())
        table.close()
        return sink.getvalue()


OUTPUTS: dict[str, Callable[..., Output]] = {"jsonl": JsonlOutput, "parquet": ParquetOutput}
"""Outputs by their name in the config. A config may also name a user's own output, as "module:Class"."""


def build_outputs(entries: Iterable[Mapping[str, Any]], run_dir: str) -> dict[str, Output]:
    """Build the outputs of a config, and return them by their names in the log. A second output of the same name is
    `<name>_2`. Raises ConfigError for an unknown name, for wrong arguments, and for a class without `write`."""
    outputs: dict[str, Output] = {}
    for entry in entries:
        name, args = entry["name"], dict(entry.get("args") or {})
        label = label_of(name, outputs)
        if name in OUTPUTS:
            args["path"] = str(Path(run_dir) / args.get("path", f"outputs/{label}"))
        outputs[label] = build("output", name, args, OUTPUTS, "a class with write(key, experiences)", ["write"])
    return outputs


# --- following the log ----------------------------------------------------------------------------------------------
class Outputs:
    def __init__(
        self, outputs: Mapping[str, Output], live: LiveState, payloads: PayloadStore,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """Start a thread per output; `post` runs a callable in the actor's loop, which alone may change `live`."""
        self._followers = [_Follower(name, output, live, payloads, post) for name, output in outputs.items()]

    def wake(self) -> None:
        """Wake the threads of all outputs, which then write the new deliveries in the log."""
        for follower in self._followers:
            follower.wake()

    def is_busy(self) -> bool:
        """Return True if an output is writing now. An output that waits to retry is not busy."""
        return any(f.is_busy() for f in self._followers)

    def position(self) -> float:
        """Return the log position up to which all outputs have written; infinite without outputs. For any thread."""
        return min((f.position for f in self._followers), default=float("inf"))

    def status(self) -> list[dict[str, Any]]:
        """Return each output's name, position in the log, and error (or null)."""
        return [{"output": f.name, "position": f.position, "error": f.error} for f in self._followers]


class _Follower:
    """Thread that follows the log for one output."""

    def __init__(
        self, name: str, output: Output, live: LiveState, payloads: PayloadStore,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.name, self._output, self._live, self._payloads, self._post = name, output, live, payloads, post
        self._log: EventLog = live.log
        self.position = 0
        """Position in the log up to which the output has written everything."""
        self.error: str | None = None
        """Error of the last attempt, after which the thread pauses; None if it succeeded."""
        self._wake_up, self._is_working = threading.Event(), False
        threading.Thread(target=self._run, name=f"output-{name}", daemon=True).start()

    def wake(self) -> None:
        self._wake_up.set()

    def is_busy(self) -> bool:
        """Return True if the thread is writing, or is about to."""
        return self._is_working or (self._wake_up.is_set() and self.error is None)

    def _run(self) -> None:
        position_is_known, pause = False, FIRST_PAUSE
        while True:
            self._wake_up.wait(None if self.error is None else pause)
            self._is_working = True
            self._wake_up.clear()
            try:
                if not position_is_known:
                    self.position, position_is_known = self._last_written(), True
                self._catch_up()
                self.error, pause = None, FIRST_PAUSE
            except Exception as e:  # the log or the output fails: retry everything
                error, pause = f"{type(e).__name__}: {e}", min(2 * pause, LONGEST_PAUSE)
                if error != self.error:
                    _LOG.warning("output %s can't go on, trying again: %s", self.name, error)
                self.error = error
            self._is_working = False
            if self.error is not None:  # a batch finalized meanwhile does not shorten the pause
                self._wake_up.clear()

    def _last_written(self) -> int:
        """Return the position of the last delivery that this output wrote or skipped; 0 if there is none."""
        position = 0
        for recorded in self._log.read(stream=ev.OutputWritten.stream_of(self.name)):
            match recorded.event:
                case ev.OutputWritten() as event:
                    position = max(position, event.position)
                case ev.OutputFailed() as event if not event.retry:
                    position = max(position, event.position)
        return position

    def _catch_up(self) -> None:
        until = self._log.head().position
        for recorded in self._log.read(types=_TYPES, after=self.position, until=until):
            self._write(recorded)
            self.position = recorded.position
        self.position = max(self.position, until)

    def _write(self, recorded: Recorded) -> None:
        """Write a delivery and record that, or skip it if its payloads are lost. Raises the errors of the output."""
        delivery = self._delivery(recorded)
        if delivery is None:
            return
        key, refs = delivery
        try:
            experiences = read_columns(self._payloads, list(refs))
            self._output.write(key, experiences)
        except (PayloadNotFound, CorruptPayload) as e:  # a retry would fail too
            _LOG.warning("output %s skips %s: %s", self.name, key, e)
            self._record_failure(key, recorded.position, e, retry=False)
        except Exception as e:
            if self.error != f"{type(e).__name__}: {e}":  # record it once, not at every try
                self._record_failure(key, recorded.position, e, retry=True)
            raise
        else:
            written = ev.OutputWritten(
                output=self.name, key=key, position=recorded.position, experiences=len(experiences)
            )
            self._live.record_from_thread(written, self._post)

    def _delivery(self, recorded: Recorded) -> tuple[str, Sequence[ev.PayloadRef]] | None:
        """Return the key and the payloads of a delivery; None for an eval, which has none."""
        event = recorded.event
        if isinstance(event, ev.ExperiencesProcessed):
            return f"processed-{quote(event.request, safe='') or recorded.position}", event.experiences
        assert isinstance(event, ev.BatchFinalized)
        if event.result["batch_type"] != "train":
            return None
        batch_id, submission = event.result["batch_id"], ""
        submissions = self._log.read(stream=batch_stream(batch_id), types=["BatchSubmitted"], until=recorded.position)
        for submitted in submissions:  # the last one counts
            assert isinstance(submitted.event, ev.BatchSubmitted)
            submission = submitted.event.submission
        name = f"{batch_id:06d}" if isinstance(batch_id, int) else quote(batch_id, safe="")
        if len(name) > 150:  # a file's name has at most 255 bytes
            name = hashlib.sha256(name.encode()).hexdigest()
        return f"step-{name}-{quote(submission, safe='') or recorded.position}", event.experiences

    def _record_failure(self, key: str, position: int, error: Exception, *, retry: bool) -> None:
        text = f"{type(error).__name__}: {error}"[:2000].encode(errors="replace").decode()
        failed = ev.OutputFailed(output=self.name, key=key, position=position, error=text, retry=retry)
        self._live.record_from_thread(failed, self._post)
