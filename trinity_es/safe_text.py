"""Values and events as text that is safe to print in a terminal or put on a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, split_error
from trinity_es.events.values import BatchId, batch_stream, local_time
from trinity_es.projections.event_texts import counted, kept_text, missing_text

if TYPE_CHECKING:
    from trinity_es.events.store.log import Recorded
    from trinity_es.projections.reading.log_reader import Log

__all__ = [
    "batch_named", "clock", "cut", "devices", "does", "error_line", "event_document", "event_line", "harmless_json",
    "name_of", "place_of", "plain", "shown", "sparkline", "summary",
]


_INVISIBLE = re.compile("[\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")


class _Printable(dict[int, str]):
    """Table for `str.translate`, filled on demand: a printable character stays, any other becomes its escape."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if character.isprintable() else "⏎" if character == "\n" else repr(character)[1:-1]
        return self[code]


_PRINTABLE, _PRINTABLE_LINES = _Printable(), _Printable({9: "\t", 10: "\n"})


def plain(text: object, width: int | None = None, *, lines: bool = False) -> str:
    """Return the text as one line of printable characters, at most `width` long; `lines` keeps line breaks and tabs.

    Only the first `width` characters are processed, so a long text costs no more than a short one.
    """
    full_text = str(text)
    line = full_text[:width].translate(_PRINTABLE_LINES if lines else _PRINTABLE)
    if width is None or max(len(line), len(full_text)) <= width:
        return line
    return line[: width - 1] + "…"


def error_line(text: object, width: int) -> str:
    """Return an error's text as one printable line; a traceback is cut to its message and last frame."""
    message, frame = split_error(str(text))
    frame = plain(f" {frame}" if frame else "", 100)
    return plain(message, max(1, width - len(frame))) + frame


def harmless_json(document: bytes) -> bytes:
    """Return the JSON with escapes for characters that a terminal may obey or hide: DEL, C1 controls, bidi marks."""
    if document.isascii():
        return document.replace(b"\x7f", b"\\u007f")
    return _INVISIBLE.sub(lambda m: f"\\u{ord(m[0]):04x}", document.decode(errors="replace")).encode()


def name_of(batch_id: BatchId) -> str:
    """Return a batch id as commands take it: 12 for the number 12, '12' with its quotes for the text "12"."""
    return plain(batch_stream(batch_id).removeprefix("batch/"))


def batch_named(log: Log, name: str) -> BatchId | None:
    """Return the id of the batch that a user typed or `name_of` wrote; None if there is no such batch.

    3 is the number if there is a batch 3, else the text. '3' and 003 are always the text.
    """
    candidates: list[BatchId] = [name]
    # A number: no leading zeros, and at most 19 digits, since larger ones are no batch ids.
    if name.removeprefix("-").isdecimal() and name.isascii() and len(name) < 20 and str(int(name)) == name:
        candidates.insert(0, int(name))
    if len(name) > 2 and name[0] == name[-1] == "'":
        candidates.append(name[1:-1])
    for candidate in candidates:
        with suppress(BatchNotFound, DataError):
            log.events(candidate)
            return candidate
    return None


def clock(seconds: float, *, date: bool = False) -> str:
    """Return the local time of day with UTC offset, to the millisecond; with `date`, date and time to the second."""
    return local_time(seconds, sep=" ") if date else local_time(seconds, "milliseconds").partition("T")[2]


def does(runner: Mapping[str, Any]) -> str:
    """Return in words what a runner is doing, from its row in a system's status."""
    waits = runner.get("waits_for")
    if runner["state"] == "started":
        return f"waits to start its engine: {waits}" if waits else "loading engine…"
    if runner["state"] == "ready" and runner.get("loading") is not None:
        since = f" since {clock(runner['loading_since'], date=True)[11:]}" if runner.get("loading_since") else ""
        return f"loading weights version {runner['loading']}{since}" + (f", waits for {waits}" if waits else "")
    return str(runner["state"]) or "not heard of yet"


def devices(places: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {device if count != 1 else device.removesuffix('s')}"
                     for device, count in sorted(places.items(), reverse=True) if count)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return the values as a curve of at most `width` block characters, scaled from minimum to maximum."""
    if not values:
        return ""
    group_size = max(1, -(-len(values) // width))  # rounded up
    groups = [values[i : i + group_size] for i in range(0, len(values), group_size)]
    means = [sum(group) / len(group) for group in groups]
    lowest, highest = min(means), max(means)
    if lowest == highest:
        return "▄" * len(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - lowest) / (highest - lowest))] for mean in means)


def event_line(recorded: Recorded) -> str:
    """Return an event as a line of columns: position, time, stream, type, summary."""
    return (
        f"{recorded.position:>7}  {clock(recorded.recorded_at)}  {plain(recorded.stream, 20):<20}  "
        f"{recorded.type:<19}  {error_line(summary(recorded.event), 150)}"
    ).rstrip()


def place_of(recorded: Recorded) -> dict[str, Any]:
    """Return the position, time, stream and type of an event as plain JSON."""
    return {"position": recorded.position, "recorded_at": recorded.recorded_at, "stream": recorded.stream,
            "type": recorded.type}


def event_document(recorded: Recorded) -> bytes:
    """Return an event as one line of JSON: position, stream and version, type, fields as stored, and hash."""
    return harmless_json(orjson.dumps({
        "position": recorded.position, "recorded_at": recorded.recorded_at, "stream": recorded.stream,
        "version": recorded.version, "type": recorded.type, "schema_version": recorded.schema_version,
        "data": orjson.Fragment(recorded.data), "metadata": recorded.metadata, "hash": recorded.hash.hex(),
    }))


def summary(event: ev.Event) -> str:
    """Return the main content of an event as one line; "" for types without a summary."""
    match event:
        case ev.SystemConfigured():
            return f"project {event.config.get('project')}, name {event.config.get('name')}"
        case ev.CoordinatorStarted():
            opened = f", took over {len(event.open_batches)} open batches" if event.open_batches else ""
            return f"epoch {event.epoch}, pid {event.pid} on {event.host}{opened}"
        case ev.WritingResumed():
            return f"the log could not be written for {event.seconds:.1f} s: {event.error}"
        case ev.RewindAccepted():
            why = f": {event.reason}" if event.reason else ""
            return (f"positions {event.first} to {event.last} are given up, the log goes on after {event.kept}; by "
                    f"{event.by}{why}")
        case ev.RunnerStarted():
            return f"{event.runner} #{event.incarnation}, pid {event.pid} on {event.host}, loads {event.engine}"
        case ev.RunnerReady():
            return (f"{event.runner} #{event.incarnation} serves version {event.model_version}, {event.places} places, "
                    f"loaded in {event.load_seconds:.1f} s")
        case ev.ConcurrencyChanged():
            return (f"{event.runner} #{event.incarnation} has {event.places} places; KV cache {event.kv_share:.0%} "
                    f"taken, {event.waiting} requests waiting")
        case ev.LeaseTaken():
            return (f"{event.lease} of {event.provider}, batch {event.batch_id} task {event.unit.task} run {event.run} "
                    f"attempt {event.unit.attempt} on {event.runner} #{event.incarnation}")
        case ev.LeaseHeld():
            return f"{event.lease} is {event.handle}"
        case ev.LeaseRenewed():
            return f"{event.lease}, until {clock(event.expires)}"
        case ev.LeaseOrphaned():
            return f"{event.lease}: {event.reason}"
        case ev.LeaseReleaseFailed():
            return f"{event.lease}, try {event.tries}: {event.error}"
        case ev.LeaseReleased():
            return f"{event.lease}, by its {event.by}" if event.by == "owner" else f"{event.lease}, by the coordinator"
        case ev.RunnerFailed() | ev.RunnerLost():
            return f"{event.runner} #{event.incarnation}: {event.reason}"
        case ev.RunnerQuarantined():
            return (f"{event.runner} #{event.incarnation} ended {event.deaths} times in {event.period_seconds:.0f} s: "
                    f"{event.reason}")
        case ev.RunnerRetired():
            return f"{event.runner} #{event.incarnation}"
        case ev.ServerAdded():
            return f"{event.url} is served by {event.runner}, by {event.by}"
        case ev.ServerRemoved():
            return f"{event.url} of {event.runner} was taken away, by {event.by}"
        case ev.HostJoined():
            has = devices(event.places)
            return f"{event.host} #{event.epoch} from {event.address}, pid {event.pid}" + (f", {has}" if has else "")
        case ev.HostDraining():
            return f"{event.host} #{event.epoch} gets no more units: {event.reason}"
        case ev.HostLost() | ev.HostLeft():
            return f"{event.host} #{event.epoch}: {event.reason}"
        case ev.WeightsPublished():
            return f"version {event.version} at {event.path}"
        case ev.WeightsLoaded():
            return f"{event.runner} serves version {event.version} after {event.seconds:.2f} s"
        case ev.WeightsFailed():
            return f"{event.runner} did not load version {event.version}: {event.error}"
        case ev.AdapterPublished():
            return (f"adapter {event.adapter} version {event.version}, rank {event.rank}, {event.size:,} bytes at "
                    f"{event.path}")
        case ev.AdapterRemoved():
            return f"adapter {event.adapter}, last of version {event.version}"
        case ev.AdapterLoaded():
            return (f"{event.runner} serves version {event.version} of adapter {event.adapter} after "
                    f"{event.seconds:.2f} s")
        case ev.AdapterFailed():
            return f"{event.runner} did not load version {event.version} of adapter {event.adapter}: {event.error}"
        case ev.TasksetAdvanced():
            return f"{event.taskset} read to {event.offset} of epoch {event.epoch + 1} for batch {event.batch_id}"
        case ev.TasksetResolved():
            s = event.source
            source = " ".join(part for part in (s.path, s.subset, s.split, s.args) if part)
            return f"{s.taskset} is {source} at {s.revision}, {s.rows} rows"
        case ev.BatchSubmitted():
            tasks, runs = counted(len(event.repeat_times), "task"), counted(sum(event.repeat_times), "run")
            return f"{event.batch_type} batch of {tasks}, {runs}"
        case ev.TasksAdded():
            return f"{counted(len(event.repeat_times), 'more task')}, {counted(sum(event.repeat_times), 'run')}"
        case ev.ResultsTaken():
            return f"results of {counted(len(event.tasks), 'task')}"
        case ev.PaceMeasured():
            limit = f"attempts may take {event.timeout:.2f} s" if event.timeout else "max_timeout applies"
            mean = event.seconds / event.attempts
            return f"after {event.steps} steps: {mean:.2f} s per attempt (mean of {event.attempts}), {limit}"
        case ev.TasksDispatched():
            units = counted(len(event.units), "unit")
            return f"{units} to {event.runner} #{event.incarnation}, version {event.model_version}"
        case ev.RunsFinished():
            rewards = [r.metrics["reward"] for r in event.runs if "reward" in r.metrics]
            reward = f", reward {sum(rewards) / len(rewards):z.3f}" if rewards else ""
            runs = f"{counted(len(event.runs), 'run')} on {event.runner} in {event.seconds:.2f} s"
            return f"task {event.task}: {runs}{reward}, version {event.model_version_end}"
        case ev.AttemptFailed():
            decision = "again" if event.retry else "given up"
            return (f"task {event.task} attempt {event.attempt} on {event.runner}, {event.kind}, {decision}: "
                    f"{event.message}")
        case ev.AttemptKept():
            return f"task {event.task} goes on from {kept_text(event)}"
        case ev.RecoveryDecided():
            units = f" {counted(len(event.units), 'unit')}" if event.units else ""
            return f"{event.decision}{units}: {event.reason}"
        case ev.StallDetected():
            return f"waiting on {event.waiting_on}, nothing moved since {clock(event.since)}"
        case ev.TaskDropped():
            return f"{counted(len(event.tasks), 'task')}: {event.reason}"
        case ev.TaskReopened():
            return f"task {event.task} is run again: {event.reason}"
        case ev.FinalizeFailed():
            return event.error
        case ev.GroupsMissing():
            return missing_text(event)
        case ev.BatchFinalized():
            return f"{counted(event.selected, 'experience')} delivered, {event.dropped:,} filtered out"
        case ev.ExperiencesProcessed():
            return f"{counted(event.selected, 'experience')}, {event.dropped:,} filtered out"
        case ev.AnswersRecorded():
            tokens = sum(a.response_tokens for a in event.answers)
            return f"{counted(len(event.answers), 'answer')}, {counted(tokens, 'token')}"
        case ev.AnswersRewarded():
            task = f" of task {event.task}" if event.task is not None else ""
            return f"{counted(len(event.messages), 'answer')}{task}, reward {event.reward:.4g}"
        case ev.AnswersDelivered():
            return f"{counted(len(event.messages), 'answer')} to the pipeline"
        case ev.ExperiencesRedelivered():
            return f"{counted(len(event.batches), 'batch')} again, to a trainer back at step {event.step}"
        case ev.PayloadsFreed():
            batches = counted(len(event.batches), "batch")
            return f"{counted(event.payloads, 'payload')} of {batches}, {counted(event.bytes, 'byte')}"
        case ev.BatchPaused() | ev.BatchAborted():
            return event.reason
        case ev.BatchTrained():
            metrics = ", ".join(f"{k} {v:.4g}" for k, v in sorted(event.metrics.items()))
            return f"step {event.step}" + (f": {metrics}" if metrics else "")
    return ""


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: object) -> str:
    """Return the text with control and bidi characters as escapes (ESC as `\\x1b`); line breaks and tabs stay."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], str(text))


def cut(text: object, length: int) -> tuple[str, int]:
    """Return the first `length` characters, escaped by `shown`, and the number of characters left out."""
    full_text = str(text)
    return shown(full_text[:length]), max(0, len(full_text) - length)
