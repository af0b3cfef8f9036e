"""A recorded rollout, generated again: the same prompt, sampling, seed and weights, and how far the tokens agree.

What it needs stands in the log and the payload store: token ids, `info["sampling"]` and `info["version_spans"]` of the
experience, the config of the system that made it, where its weights were published. It builds one engine of that
config, here, loads the weights and asks what was asked; the log is not written.

A turn is a stretch of tokens that the model made: the answer of an experience, or each of the assistant's turns in a
conversation that is one experience (`info["turn_sampling"]` where they were asked for differently). Each is generated
from the recorded tokens before it, so one that differs does not spoil the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from trinity_es.actors.config.schema import RolloutModelConfig
from trinity_es.actors.engines.interface import Completion, Engine, Sampling
from trinity_es.actors.engines.sampling import merged
from trinity_es.actors.plugins import look_in, resolve
from trinity_es.actors.runner.adapters import serve_adapters
from trinity_es.audit.rollouts import experiences_of
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, PayloadNotFound, WeightNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId, local_time
from trinity_es.projections.history.attempts import RunRow, tell
from trinity_es.projections.reading.log_reader import Log

__all__ = ["Regeneration", "Rollout", "Turn", "compare", "compared", "find_rollout", "played", "regenerate"]

WRITTEN_LATER_SECONDS = 5.0
"""How long after a version was published its files may change and still be taken for its weights."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """Tokens that the model made in a row, recorded and generated again."""

    experience: str
    """Its `eid.uid`."""
    start: int
    """The first of them, in the experience's tokens."""
    recorded: list[int]
    regenerated: list[int]
    sampling: dict[str, Any]
    first_difference: int | None = None
    """The first token, counted from 0 in this turn, at which they differ (or one of them ends); None: equal."""
    agreement: float = 1.0
    """Share of positions with the same token, of the longer one's."""
    logprob_tokens: int = 0
    """Tokens before the first difference whose logprobs both have."""
    logprob_max: float | None = None
    """Largest difference of their logprobs, nats."""
    logprob_mean: float | None = None


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What the log has of one run of a task."""

    batch_id: BatchId
    task: int
    run: int
    experiences: list[Experience]
    runner: str
    incarnation: int
    attempt: int
    at: float
    """When it was recorded, unix seconds."""
    engine_version: str
    """Empty where the log does not say."""
    host: str
    config: dict[str, Any]
    rollout_args: dict[str, Any]
    version: int
    """The weights that are loaded: those of its first token."""
    weights: str
    """Where they were published; empty: the model as it was given."""
    published_at: float | None
    adapters: dict[tuple[str, int], ev.AdapterPublished] = field(default_factory=dict)
    """The LoRA adapters that made tokens of it, by name and version."""


@dataclass(slots=True, kw_only=True)
class Regeneration:
    rollout: Rollout
    turns: list[Turn]
    engine_version: str
    model: str
    weights: str
    """What was loaded: the place of the published weights, or the model's."""
    why: list[str] = field(default_factory=list)
    """Why they may differ, a sentence each."""

    @property
    def equal(self) -> bool:
        return all(turn.first_difference is None for turn in self.turns)


def find_rollout(log: Log, batch_id: BatchId, task: int, run: int) -> Rollout:
    """Return what the log and the payload store have of it. Raises BatchNotFound, DataError, PayloadNotFound."""
    state = log.current(batch_id)
    if state is None:
        raise BatchNotFound(f"no batch {batch_id!r} in {log.url}")
    if not 0 <= task < len(state.tasks) or not 0 <= run < state.tasks[task].total_runs:
        of = f"tasks 0 to {len(state.tasks) - 1}" if not 0 <= task < len(state.tasks) else (
            f"runs 0 to {state.tasks[task].total_runs - 1} of task {task}")
        raise DataError(f"batch {batch_id!r} has no task {task}, run {run}: it has {of}")
    made = tell(log.events(batch_id)).row(task, run)
    if made is None or made.outcome != "finished":
        told = state.tasks[task].failed.get(run) or state.dropped.get(task) or "it has not ended"
        raise DataError(f"run {run} of task {task} in batch {batch_id!r} made nothing to compare: {told[:300]}")
    if made.payload is None:
        raise DataError(f"task {task} of batch {batch_id!r} is an eval: its tokens were not kept")
    try:
        with closing(log.payloads()) as payloads:
            experiences = experiences_of(payloads, made)
    except PayloadNotFound as e:
        if not log.was_freed(batch_id):
            raise
        raise PayloadNotFound(f"the experiences of batch {batch_id!r} were freed (store.retention)") from e
    config = log.config(made.finish_position)[1]
    if "explorer" not in config:
        raise DataError(f"{log.url} holds no config of the run: which engine made it is not known")
    version = min((_first_version(e) for e in experiences), default=made.model_version or 0)
    weights, published_at = _published(log, version)
    engine_version, host = _engine_of(log, made)
    return Rollout(
        batch_id=batch_id, task=task, run=run, experiences=experiences, runner=made.runner,
        incarnation=made.incarnation, attempt=made.attempt, at=made.finished_at, engine_version=engine_version,
        host=host, config=config, rollout_args=log.task(batch_id, task).get("rollout_args") or {}, version=version,
        weights=weights, published_at=published_at, adapters=_adapters(log, experiences),
    )


def _adapters(log: Log, experiences: Sequence[Experience]) -> dict[tuple[str, int], ev.AdapterPublished]:
    found = {}
    for name in {str(span[0]) for e in experiences for span in e.info.get("adapter_spans") or []}:
        for recorded in log.read(stream=ev.AdapterPublished.stream_of(name), types=["AdapterPublished"]):
            event = cast(ev.AdapterPublished, recorded.event)
            found[name, event.version] = event
    return found


def _first_version(experience: Experience) -> int:
    spans = experience.info.get("version_spans") or []
    return int(spans[0][0] if spans else experience.info.get("model_version", 0))


def _published(log: Log, version: int) -> tuple[str, float | None]:
    """Return where this version was published: the last place that is still there, or the last; "" where it never was.
    """
    places = [r for r in log.read(stream="weights", types=["WeightsPublished"])
              if isinstance(r.event, ev.WeightsPublished) and r.event.version == version]
    there = [r for r in places if Path(r.event.path).exists()]  # type: ignore[attr-defined]  # a WeightsPublished
    chosen = (there or places)[-1:]
    return (chosen[0].event.path, chosen[0].recorded_at) if chosen else ("", None)  # type: ignore[attr-defined]  # as above


def _engine_of(log: Log, made: RunRow) -> tuple[str, str]:
    """(engine version, host) of the life of the runner that made it."""
    version, host = "", ""
    for recorded in log.read(stream=f"runner/{made.runner}", types=["RunnerStarted", "RunnerReady"]):
        event = recorded.event
        if isinstance(event, ev.RunnerStarted) and event.incarnation == made.incarnation:
            host = event.host
        if isinstance(event, ev.RunnerReady) and event.incarnation == made.incarnation:
            version = event.engine_version
    return version, host


# --- generating -----------------------------------------------------------------------------------------------------
def regenerate(rollout: Rollout, *, model: str | None = None, weights: str | None = None) -> Regeneration:
    """Generate it again in an engine of its own, in this process and those that the engine starts; ends it.

    `model`, `weights`: where the model and the published weights lie now, if elsewhere. Raises ConfigError,
    EngineError, SyncError for an engine that can't do it, WeightNotFound where the weights are gone, DataError for a
    rollout whose tokens no model made.
    """
    config = _engine_settings(rollout)
    engine_config = config.engine_config(initial_version=0 if weights or rollout.weights else rollout.version)
    if model is not None:
        engine_config = replace(engine_config, model_path=model)
    place = weights or rollout.weights
    if place and not Path(place).exists():
        raise WeightNotFound(
            f"weights {rollout.version} were published at {place}, and are not there any more: say where they are with "
            "--weights", path=place,
        )
    _parts(rollout)
    if rollout.config.get("code_path"):
        look_in(rollout.config["code_path"], first=False)  # an engine class of the user's
    engine: Engine = resolve(config.engine_class, {}, "engine")(engine_config)

    async def generated() -> list[Turn]:
        try:
            await engine.start()
            if place:
                await engine.load_weights(rollout.version, place)
            return await played(engine, rollout)
        finally:
            await engine.stop()

    return compared(rollout, engine, asyncio.run(generated()), model=engine_config.model_path,
                    weights=place or engine_config.model_path)


def _engine_settings(rollout: Rollout) -> RolloutModelConfig:
    return RolloutModelConfig.model_validate(rollout.config["explorer"]["rollout_model"])


def _parts(rollout: Rollout) -> list[tuple[Experience, int, int]]:
    """Return what the model made: experiences and [start, stop) in their tokens. Raises DataError where it made
    nothing.
    """
    parts = [(e, start, stop) for e in rollout.experiences for start, stop in _stretches(e)]
    if not parts or not any("sampling" in e.info or "version_spans" in e.info or e.messages for e, _, _ in parts):
        raise DataError(
            f"nothing in run {rollout.run} of task {rollout.task} says that the rollout model made its tokens: its "
            "workflow asked no model, or made the experiences itself"
        )
    return parts


def _stretches(experience: Experience) -> list[tuple[int, int]]:
    """[start, stop) of what the model made, in the experience's tokens."""
    first, size = experience.prompt_length, int(experience.tokens.size)
    if experience.action_mask is None or bool(experience.action_mask.all()):
        return [(first, size)] if size > first else []
    mask = [False, *(bool(m) for m in experience.action_mask), False]
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    return [(first + a - 1, first + b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


async def played(engine: Engine, rollout: Rollout) -> list[Turn]:
    """Ask an engine that serves these weights what was asked, turn by turn. Raises DataError, EngineError."""
    config, turns = _engine_settings(rollout), []
    for experience, start, stop in _parts(rollout):
        sampling, choice = _sampling(experience, config, rollout, start, stop)
        sampling = replace(sampling, adapter=await _load_adapter(engine, rollout, experience, start))
        answers = await engine.generate([int(t) for t in experience.tokens[:start]], sampling)
        turns.append(compare(experience, start, stop, answers[min(choice, len(answers) - 1)], sampling))
    return turns


async def _load_adapter(engine: Engine, rollout: Rollout, experience: Experience, start: int) -> str:
    """Load the adapter that made the token at `start`, and return its name; "" where the model itself made it."""
    at = start - experience.prompt_length
    for name, version, first, stop in experience.info.get("adapter_spans") or []:
        if first <= at < stop:
            published = rollout.adapters[name, version]
            if getattr(engine, "adapters", {}).get(name) != version:
                await serve_adapters(engine, [], lambda _, e: str(e))  # or it would not go back to an earlier one
            done = await serve_adapters(engine, [published], lambda _, e: str(e))
            if done.errors:
                raise WeightNotFound(f"version {version} of adapter {name!r}: {done.errors[0][2]}", path=published.path)
            return str(name)
    return ""


def compared(rollout: Rollout, engine: Engine, turns: list[Turn], *, model: str, weights: str) -> Regeneration:
    """Return what came of it, and why it may differ."""
    again = Regeneration(rollout=rollout, turns=turns, engine_version=str(getattr(engine, "version", "")), model=model,
                  weights=weights)
    again.why = _why(again, _engine_settings(rollout), rollout.experiences)
    return again


def _sampling(
    experience: Experience, config: RolloutModelConfig, rollout: Rollout, start: int, stop: int
) -> tuple[Sampling, int]:
    """Return what was asked for, and which of the answers it was; where that is not known, what config and task say."""
    recorded: Mapping[str, Any] | None = experience.info.get("sampling")
    each, parts = experience.info.get("turn_sampling") or (), _stretches(experience)
    if len(each) == len(parts):
        recorded = each[parts.index((start, stop))]
    if recorded is not None:
        asked = {k: v for k, v in recorded.items() if k != "choice"}
        return merged(Sampling(), asked, DataError, "the recorded sampling"), int(recorded.get("choice", 0))
    args = {**config.rollout_args(), **rollout.rollout_args, "n": 1, "max_tokens": stop - start}
    if args.get("seed") is not None:
        args["seed"] += rollout.run
    return merged(Sampling(), args, DataError, "rollout_args"), 0


def compare(experience: Experience, start: int, stop: int, answer: Completion, sampling: Sampling) -> Turn:
    """Return how far an answer agrees with `experience.tokens[start:stop]`."""
    was, now = [int(t) for t in experience.tokens[start:stop]], list(answer.token_ids)
    same = [a == b for a, b in zip(was, now, strict=False)]
    first = same.index(False) if False in same else None if len(was) == len(now) else len(same)
    turn = Turn(
        experience=experience.eid.uid, start=start, recorded=was, regenerated=now, sampling=asdict(sampling),
        first_difference=first, agreement=sum(same) / max(len(was), len(now), 1),
    )
    if experience.logprobs is not None and answer.logprobs is not None:
        offset = start - experience.prompt_length
        told = [float(x) for x in experience.logprobs[offset : offset + len(was)]]
        count = len(same) if first is None else first
        again = np.asarray(answer.logprobs[:count], dtype=np.float32)  # as they are recorded
        off = [abs(a - float(b)) for a, b in zip(told[:count], again, strict=True)]
        if off:
            turn.logprob_tokens, turn.logprob_max, turn.logprob_mean = len(off), max(off), sum(off) / len(off)
    return turn


# --- why they may differ --------------------------------------------------------------------------------------------
def _why(again: Regeneration, config: RolloutModelConfig, experiences: Sequence[Experience]) -> list[str]:
    rollout, found = again.rollout, []
    spans = [span for e in experiences for span in e.info.get("version_spans") or []]
    if len({version for version, _, _ in spans}) > 1:
        told = ", ".join(f"{start} to {stop - 1} by {version}" for version, start, stop in spans)
        found.append(f"the weights changed while it was generated: tokens {told}; here all are by {rollout.version}")
    elif not spans and any(e.info.get("model_version_drift") for e in experiences):
        found.append("the weights changed while it ran, and which of its tokens are older is not recorded")
    if any("sampling" not in e.info for e in experiences):
        found.append("how it was sampled is not recorded: config and task were asked, its workflow may have asked "
                     "for something else")
    further = sorted({name for e in experiences for name in e.info.get("further_sampling", ())})
    if further:
        found.append(f"its client asked for {', '.join(further)} as well, which is not asked for again")
    if any(t.sampling["temperature"] > 0 and t.sampling["seed"] is None for t in again.turns):
        found.append("it was sampled without a seed: at a temperature above 0 every generation is another draw "
                     "(rollout_args.seed makes it repeatable)")
    if any("sampling" not in e.info and e.messages and len(_stretches(e)) > 1 for e in experiences):
        found.append("it is a conversation: each turn is generated from the recorded tokens before it, which a chat "
                     "template may have put together otherwise when it was asked; its logprobs are of one pass over "
                     "the whole, not of its sampling")
    if not rollout.engine_version:
        found.append("which version of the engine made it is not recorded")
    elif again.engine_version != rollout.engine_version:
        found.append(f"another engine: it was made by {rollout.engine_version}, and again by {again.engine_version}")
    later = _written_later(again)
    if later:
        found.append(later)
    if config.engine_type != "scripted":
        found.append("an engine computes what it is asked at the same time together, and that was other company: sums "
                     "of floating-point numbers differ in their last digits, and a near tie goes the other way")
    return found


def _written_later(again: Regeneration) -> str | None:
    """Return the log holds where weights lie, not what they are."""
    folder, since = Path(again.weights), again.rollout.published_at or again.rollout.at
    if not again.weights or not folder.is_dir():
        return None
    newest = max((f.stat().st_mtime for f in folder.glob("*.safetensors")), default=0.0)
    if newest <= since + WRITTEN_LATER_SECONDS:
        return None
    return (f"the files in {folder} were written at {local_time(newest)}, after it was "
            "made: they may be other weights")
