"""Logs of rollouts by a real engine without an actor system, for tests that regenerate them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trinity_es
from tests.helpers.handmade import write
from trinity_es import Task
from trinity_es.actors.engines.interface import Engine
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events import vocabulary as ev
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream, task_to_dict


async def record(
    path: Path, engine: Engine, config: trinity_es.Config, tasks: list[Task], *, weights: str = "",
    engine_version: str | None = None, strip: tuple[str, ...] = (),
) -> None:
    """Run these tasks as batch 1 on a serving engine and write its log; `strip` names `Experience.info` keys to drop.
    """
    runner = WorkflowRunner(engine, defaults=config.explorer.rollout_model.rollout_args())
    units = [ev.Unit(task=i, run_id_base=0, runs=t.repeat_times or 1, attempt=1) for i, t in enumerate(tasks)]
    who: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[t.repeat_times or 1 for t in tasks],
                          tasks=[task_to_dict(t) for t in tasks]),
        ev.TasksDispatched(**who, units=units, model_version=engine.model_version),
    ]
    store = open_payloads(str(path), durability="process")
    for unit, task in zip(units, tasks, strict=True):
        task.task_id = unit.task
        done = await runner.execute(task, 1, range(unit.runs))
        assert not done.failures, done.failures
        for experience in done.experiences:
            experience.info = {k: v for k, v in experience.info.items() if k not in strip}
        digest = store.put(Experience.serialize_many(done.experiences))
        ref = ev.PayloadRef(digest=digest, first=0, count=len(done.experiences))
        events.append(ev.TaskFinished(
            **who, task=unit.task, run_id_base=0, attempt=1, runs=done.results, payload=ref,
            model_version=done.model_version, model_version_end=done.model_version_end, seconds=done.seconds,
        ))
    store.close()
    version = getattr(engine, "version", "") if engine_version is None else engine_version
    published = [ev.WeightsPublished(version=engine.model_version, path=weights)] if weights else []
    write(path, [
        ("system", [ev.SystemConfigured(config=config.masked())]),
        ("runner/runner-0", [
            ev.RunnerStarted(**who, pid=1, host="here", engine=config.explorer.rollout_model.engine_type),
            ev.RunnerReady(**who, places=8, model_version=engine.model_version, load_seconds=1.0,
                           engine_version=version),
        ]),
        *([("weights", list(published))] if published else []),
        (batch_stream(1), events),
    ])
