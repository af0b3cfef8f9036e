"""Systems that benchmarks run for a while, and the batches that these play."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trinity_es
from trinity_es.client.teardown import end_system
from trinity_es.system import lifecycle

TINY: dict[str, Any] = {"max_model_len": 256, "gpu_memory_utilization": 0.3}
"""Section `explorer.rollout_model` for vLLM with a tiny model."""
READY_SECONDS = 300.0
"""Time limit for runners to be ready; a hundred runners took more than a minute on two slow cores."""


def explore_config(
    folder: str | Path, places: int | str, rollout: dict[str, Any], *, explorer: dict[str, Any] | None = None,
    **sections: Any,
) -> trinity_es.Config:
    """Return a config of mode `explore`. `rollout`: section `explorer.rollout_model`; `explorer`: more of its keys."""
    explorer = {"max_concurrency": places, "rollout_model": rollout, **(explorer or {})}
    return trinity_es.Config.from_dict({"mode": "explore", "explorer": explorer, **sections}, folder=folder)


@contextmanager
def running(config: trinity_es.Config) -> Iterator[trinity_es.RolloutClient]:
    """Run a system for this block. Yields a client when its runners are ready."""
    lifecycle.start(config)
    try:
        with trinity_es.connect(config) as client:
            client.wait_ready(READY_SECONDS)
            yield client
    finally:
        end_system(config)


def play_batch(
    client: trinity_es.RolloutClient, batch: int, tasks: Sequence[trinity_es.Task], timeout: float = 600.0
) -> tuple[float, dict[str, Any]]:
    """Play a train batch. Return the seconds from submit to the end of finalize, and the result."""
    started = time.perf_counter()
    client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
    result = client.finalize_train_batch(batch, timeout=timeout)
    return time.perf_counter() - started, result


def token_rate(client: trinity_es.RolloutClient, batch: int, tasks: Sequence[trinity_es.Task], tokens: int) -> float:
    """Play a train batch whose answers have `tokens` tokens in all, and return tokens per second."""
    seconds, _ = play_batch(client, batch, tasks)
    found = sum(r.response_tokens for t in client.batch(batch).tasks for r in t.done.values())
    assert found == tokens, (found, tokens)
    return tokens / seconds
