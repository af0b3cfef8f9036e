"""Regeneration of a recorded run with the same prompt, sampling, seed and weights, and comparison of the tokens.

`regenerate` starts an engine in this process with the recorded config, loads the recorded weights and repeats the
requests. The log and the payload store hold the config, the path of the weights, and each experience's token ids,
`info["sampling"]` and `info["version_spans"]`. Nothing is written to the log.

A turn is a span of generated tokens: the answer of an experience, or one of the assistant's turns if an experience is a
whole conversation (`info["turn_sampling"]` has their samplings if they differ). Each turn is generated from the
recorded tokens before it, so a different turn does not affect the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from trinity_es.actors.config.models import RolloutModelConfig
from trinity_es.actors.engines.interface import Completion, Engine, Sampling
from trinity_es.actors.engines.sampling_checks import with_options
from trinity_es.actors.plugin_lookup import add_import_folders, resolve
from trinity_es.actors.runner.adapters import serve_adapters
from trinity_es.audit.rollout_reader import written_experiences
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, PayloadNotFound, WeightNotFound
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId, local_time
from trinity_es.projections.history.attempts import RunRow, fold_timeline
from trinity_es.projections.reading.log_reader import Log

__all__ = [
    "Regeneration", "Rollout", "Turn", "compare", "find_rollout", "make_regeneration", "play_turns", "regenerate",
]

LATER_CHANGE_SECONDS = 5.0
"""A change of a version's files is ignored within this time after its publication."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """Span of generated tokens in an experience, as recorded and as regenerated."""

    experience: str
    """`eid.uid` of the experience."""
    start: int
    """Index of the turn's first token in the experience."""
    recorded: list[int]
    regenerated: list[int]
    sampling: dict[str, Any]
    first_difference: int | None = None
    """Index in this turn of the first token that differs or is missing in one sequence; None if both are equal."""
    agreement: float = 1.0
    """Number of equal tokens, divided by the length of the longer sequence."""
    logprob_tokens: int = 0
    """Number of tokens whose logprobs are compared: those before the first difference."""
    logprob_max: float | None = None
    """Largest difference of logprobs, in nats."""
    logprob_mean: float | None = None


@dataclass(slots=True, kw_only=True)
class Rollout:
    """Recorded run of a task."""

    row: RunRow
    experiences: list[Experience]
    engine_version: str
    """Empty if not recorded."""
    host: str
    config: dict[str, Any]
    rollout_args: dict[str, Any]
    version: int
    """Version of the weights that generated the first token; `regenerate` loads this version."""
    weights: str
    """Path of these weights; empty for the original model."""
    published_at: float | None
    adapters: dict[tuple[str, int], ev.AdapterPublished] = field(default_factory=dict)
    """LoRA adapters that generated tokens of the run, by (name, version)."""


@dataclass(slots=True, kw_only=True)
class Regeneration:
    """Comparison of a recorded run with newly generated tokens."""

    rollout: Rollout
    turns: list[Turn]
    engine_version: str
    model: str
    weights: str
    """Path of the loaded weights: of the published version, or of the model."""
    why: list[str] = field(default_factory=list)
    """Possible reasons for a difference, one sentence each."""

    @property
    def equal(self) -> bool:
        return all(turn.first_difference is None for turn in self.turns)


def find_rollout(log: Log, batch_id: BatchId, task: int, run: int) -> Rollout:
    """Read a run of a task from the log and its payload store. Raises BatchNotFound, DataError, PayloadNotFound."""
    state = log.current(batch_id)
    if state is None:
        raise BatchNotFound(f"there is no batch {batch_id!r} in {log.url}: `trinity-es batches` lists all batches")
    if not 0 <= task < len(state.tasks) or not 0 <= run < state.tasks[task].total_runs:
        has_task = 0 <= task < len(state.tasks)
        range_text = f"runs 0 to {state.tasks[task].total_runs - 1} of task {task}" if has_task else (
            f"tasks 0 to {len(state.tasks) - 1}")
        raise DataError(f"batch {batch_id!r} has no task {task}, run {run}: it has {range_text}")
    row = fold_timeline(log.events(batch_id)).row(task, run)
    if row is None or row.outcome != "finished":
        reason = state.tasks[task].failed.get(run) or state.dropped.get(task) or "it has not ended"
        raise DataError(f"run {run} of task {task} in batch {batch_id!r} left no tokens to compare ({reason[:300]}): "
                        "choose a finished run (`trinity-es show` lists them)")
    if row.payload is None:
        raise DataError(f"task {task} of batch {batch_id!r} is an eval, whose tokens are not kept: choose a train "
                        "batch")
    try:
        with closing(log.payloads()) as payloads:
            experiences = written_experiences(payloads, row)
    except PayloadNotFound as e:
        if not log.was_freed(batch_id):
            raise
        raise PayloadNotFound(f"the experiences of batch {batch_id!r} were freed: store.retention keeps those of the "
                              "newest steps only. Choose a newer batch") from e
    config = log.config(row.finish_position)[1]
    if "explorer" not in config:
        raise DataError(f"{log.url} holds no config of the run, so its engine is unknown: only a run that was "
                        "started with a config can be regenerated")
    version = min((_first_version(e) for e in experiences), default=row.model_version or 0)
    weights, published_at = _published_weights(log, version)
    engine_version, host = _engine_of_run(log, row)
    return Rollout(
        row=row, experiences=experiences, engine_version=engine_version, host=host, config=config,
        rollout_args=log.task(batch_id, task).get("rollout_args") or {}, version=version, weights=weights,
        published_at=published_at, adapters=_published_adapters(log, experiences),
    )


def _published_adapters(log: Log, experiences: Sequence[Experience]) -> dict[tuple[str, int], ev.AdapterPublished]:
    """Return all published versions of the adapters that generated tokens of these experiences, by (name, version)."""
    adapters = {}
    for name in {name for e in experiences for name, *_ in e.adapter_spans}:
        for recorded in log.read(stream=ev.AdapterPublished.stream_of(name), types=["AdapterPublished"]):
            event = cast(ev.AdapterPublished, recorded.event)
            adapters[name, event.version] = event
    return adapters


def _first_version(experience: Experience) -> int:
    spans = experience.info.get("version_spans") or []
    return int(spans[0][0] if spans else experience.info.get("model_version", 0))


def _published_weights(log: Log, version: int) -> tuple[str, float | None]:
    """Return (path, time) of a version's last publication, if possible of one whose path exists; ("", None) without."""
    publications = [r for r in log.read(stream="weights", types=["WeightsPublished"])
                    if isinstance(r.event, ev.WeightsPublished) and r.event.version == version]
    existing = [r for r in publications if Path(r.event.path).exists()]  # type: ignore[attr-defined]  # see above
    last = (existing or publications)[-1:]
    return (last[0].event.path, last[0].recorded_at) if last else ("", None)  # type: ignore[attr-defined]  # as above


def _engine_of_run(log: Log, row: RunRow) -> tuple[str, str]:
    """Return (engine version, host) of the runner process that played a run; "" for each that is unknown."""
    version, host = "", ""
    for recorded in log.read(stream=f"runner/{row.runner}", types=["RunnerStarted", "RunnerReady"]):
        event = recorded.event
        if isinstance(event, ev.RunnerStarted) and event.incarnation == row.incarnation:
            host = event.host
        if isinstance(event, ev.RunnerReady) and event.incarnation == row.incarnation:
            version = event.engine_version
    return version, host


# --- generating -----------------------------------------------------------------------------------------------------
def regenerate(rollout: Rollout, *, model: str | None = None, weights: str | None = None) -> Regeneration:
    """Start an engine in this process, generate the run's tokens again, compare them, and stop the engine.

    `model`, `weights`: current paths of the model and the published weights, if they were moved. Raises ConfigError,
    EngineError or SyncError if the engine fails, WeightNotFound if the weights are gone, and DataError if no model
    generated the run's tokens.
    """
    config = _engine_settings(rollout)
    engine_config = config.engine_config(initial_version=0 if weights or rollout.weights else rollout.version)
    if model is not None:
        engine_config = replace(engine_config, model_path=model)
    path = weights or rollout.weights
    if path and not Path(path).exists():
        raise WeightNotFound(
            f"version {rollout.version} of the weights is no longer at {path}: give its current path with --weights",
            path=path,
        )
    _turn_spans(rollout)  # raises DataError before the engine starts, which is slow
    if rollout.config.get("code_path"):
        add_import_folders(rollout.config["code_path"], first=False)  # the engine class may be the user's
    engine: Engine = resolve(config.engine_class, {}, "engine")(engine_config)

    async def play() -> list[Turn]:
        try:
            await engine.start()
            if path:
                await engine.load_weights(rollout.version, path)
            return await play_turns(engine, rollout)
        finally:
            await engine.stop()

    return make_regeneration(rollout, engine, asyncio.run(play()), model=engine_config.model_path,
                        weights=path or engine_config.model_path)


def _engine_settings(rollout: Rollout) -> RolloutModelConfig:
    return RolloutModelConfig.model_validate(rollout.config["explorer"]["rollout_model"])


def _turn_spans(rollout: Rollout) -> list[tuple[Experience, int, int]]:
    """Return (experience, start, stop) of each turn. Raises DataError if the model generated no token."""
    spans = [(e, start, stop) for e in rollout.experiences for start, stop in _generated_spans(e)]
    if not spans or not any("sampling" in e.info or "version_spans" in e.info or e.messages for e, _, _ in spans):
        raise DataError(
            f"no token of run {rollout.row.run} of task {rollout.row.task} is known to come from the rollout model: "
            "its workflow called no model, or made the experiences itself. Choose a run of another workflow")
    return spans


def _generated_spans(experience: Experience) -> list[tuple[int, int]]:
    """Return (start, stop) of each span of generated tokens in the experience."""
    first, size = experience.prompt_length, int(experience.tokens.size)
    if experience.action_mask is None or bool(experience.action_mask.all()):
        return [(first, size)] if size > first else []
    mask = [False, *(bool(m) for m in experience.action_mask), False]
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    return [(first + begin - 1, first + end - 1) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


async def play_turns(engine: Engine, rollout: Rollout) -> list[Turn]:
    """Regenerate and compare each turn, on an engine that serves the run's weights. Raises DataError, EngineError."""
    config, turns = _engine_settings(rollout), []
    for experience, start, stop in _turn_spans(rollout):
        sampling, answer_index = _sampling(experience, config, rollout, start, stop)
        sampling = replace(sampling, adapter=await _load_adapter(engine, rollout, experience, start))
        answers = await engine.generate([int(t) for t in experience.tokens[:start]], sampling)
        turns.append(compare(experience, start, stop, answers[min(answer_index, len(answers) - 1)], sampling))
    return turns


async def _load_adapter(engine: Engine, rollout: Rollout, experience: Experience, start: int) -> str:
    """Load the adapter that generated the token at `start` and return its name; "" if there was none."""
    at = start - experience.prompt_length
    for name, version, first, stop in experience.adapter_spans:
        if first <= at < stop:
            published = rollout.adapters[name, version]
            if getattr(engine, "adapters", {}).get(name) != version:
                await serve_adapters(engine, [], lambda _, e: str(e))  # an older version loads only after removal
            load = await serve_adapters(engine, [published], lambda _, e: str(e))
            if load.errors:
                raise WeightNotFound(f"version {version} of adapter {name!r} can't be loaded: "
                                     f"{load.errors[0][2]}", path=published.path)
            return str(name)
    return ""


def make_regeneration(rollout: Rollout, engine: Engine, turns: list[Turn], *, model: str, weights: str) -> Regeneration:
    """Return the compared turns of a run together with possible reasons for differences."""
    result = Regeneration(rollout=rollout, turns=turns, engine_version=str(getattr(engine, "version", "")),
                          model=model, weights=weights)
    result.why = _possible_reasons(result)
    return result


def _sampling(
    experience: Experience, config: RolloutModelConfig, rollout: Rollout, start: int, stop: int
) -> tuple[Sampling, int]:
    """Return a turn's sampling, and the index of its answer among the `n` answers of its request.

    The sampling is the recorded one. If none is recorded, it follows from config and task, and the index is 0.
    """
    recorded: Mapping[str, Any] | None = experience.info.get("sampling")
    turn_samplings, stretches = experience.info.get("turn_sampling") or (), _generated_spans(experience)
    if len(turn_samplings) == len(stretches):
        recorded = turn_samplings[stretches.index((start, stop))]
    if recorded is not None:
        settings = {k: v for k, v in recorded.items() if k != "choice"}
        return with_options(Sampling(), settings, DataError, "the recorded sampling"), int(recorded.get("choice", 0))
    args = {**config.rollout_args(), **rollout.rollout_args, "n": 1, "max_tokens": stop - start}
    if args.get("seed") is not None:
        args["seed"] += rollout.row.run
    return with_options(Sampling(), args, DataError, "rollout_args"), 0


def compare(experience: Experience, start: int, stop: int, answer: Completion, sampling: Sampling) -> Turn:
    """Compare a new answer with the recorded `experience.tokens[start:stop]`."""
    recorded, tokens = [int(t) for t in experience.tokens[start:stop]], list(answer.token_ids)
    equal_flags = [a == b for a, b in zip(recorded, tokens, strict=False)]
    first_difference = None if len(recorded) == len(tokens) else len(equal_flags)
    if False in equal_flags:
        first_difference = equal_flags.index(False)
    turn = Turn(
        experience=experience.eid.uid, start=start, recorded=recorded, regenerated=tokens,
        sampling=asdict(sampling), first_difference=first_difference,
        agreement=sum(equal_flags) / max(len(recorded), len(tokens), 1),
    )
    if experience.logprobs is not None and answer.logprobs is not None:
        offset = start - experience.prompt_length
        count = len(equal_flags) if first_difference is None else first_difference
        old = [float(x) for x in experience.logprobs[offset : offset + count]]
        new = np.asarray(answer.logprobs[:count], dtype=np.float32)  # recorded logprobs are float32
        diffs = [abs(a - float(b)) for a, b in zip(old, new, strict=True)]
        if diffs:
            turn.logprob_tokens, turn.logprob_max, turn.logprob_mean = len(diffs), max(diffs), sum(diffs) / len(diffs)
    return turn


# --- why they may differ --------------------------------------------------------------------------------------------
def _possible_reasons(result: Regeneration) -> list[str]:
    """Return possible reasons for different tokens, a sentence each."""
    rollout, experiences, reasons = result.rollout, result.rollout.experiences, list[str]()
    spans = [span for e in experiences for span in e.info.get("version_spans") or []]
    if len({version for version, _, _ in spans}) > 1:
        tokens = ", ".join(f"{start} to {stop - 1} by {version}" for version, start, stop in spans)
        reasons.append(f"the weights changed while it was generated: tokens {tokens}; here all are by "
                       f"{rollout.version}")
    elif not spans and any(e.info.get("model_version_drift") for e in experiences):
        reasons.append("the weights changed while it ran, and which of its tokens are older is not recorded")
    if any("sampling" not in e.info for e in experiences):
        reasons.append("how it was sampled is not recorded: this used the sampling of config and task, but its "
                       "workflow may have used another")
    other_options = sorted({name for e in experiences for name in e.info.get("further_sampling", ())})
    if other_options:
        reasons.append(f"its client also set {', '.join(other_options)}, which is not repeated here")
    if any(t.sampling["temperature"] > 0 and t.sampling["seed"] is None for t in result.turns):
        reasons.append("it was sampled without a seed: at a temperature above 0 each generation is a new draw "
                       "(rollout_args.seed makes it repeatable)")
    if any("sampling" not in e.info and e.messages and len(_generated_spans(e)) > 1 for e in experiences):
        reasons.append("it is a conversation: each turn is generated from the recorded tokens before it, which the "
                       "chat template may have rendered differently at the time; its logprobs come from one pass over "
                       "the whole, not from its sampling")
    if not rollout.engine_version:
        reasons.append("which version of the engine made it is not recorded")
    elif result.engine_version != rollout.engine_version:
        reasons.append(f"another engine: {rollout.engine_version} made it, {result.engine_version} generated it "
                       "again")
    if changed_weights := _changed_weights(result):
        reasons.append(changed_weights)
    if _engine_settings(rollout).engine_type != "scripted":
        reasons.append("an engine computes concurrent requests in one batch, and these were other requests: sums of "
                       "floating-point numbers differ in their last digits, and a near tie goes the other way")
    return reasons


def _changed_weights(result: Regeneration) -> str | None:
    """Return a reason if the weights' files changed after their publication. The log has their path, but no hash."""
    folder, since = Path(result.weights), result.rollout.published_at or result.rollout.row.finished_at
    if not result.weights or not folder.is_dir():
        return None
    newest = max((f.stat().st_mtime for f in folder.glob("*.safetensors")), default=0.0)
    if newest <= since + LATER_CHANGE_SECONDS:
        return None
    return f"the files in {folder} were written at {local_time(newest)}, after it was made: they may be other weights"
