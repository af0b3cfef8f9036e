"""Decisions about publishing weights and about the results of loading them. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_es.actors.messages import WeightsLoadResult
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.runner import RunnerLife, RunnerState, Weights

__all__ = ["apply_load_result", "publish"]


def publish(current: Weights, new: Weights, serving_runners: Sequence[str], *, again: bool = False) -> list[ev.Event]:
    """Return the event that publishes new weights; none if the same version and path are current already.

    A version that no runner could load may be published again with another path. A version in memory may be published
    again as a checkpoint: the same weights are on a disk now, so no runner loads them again. `again` means that the
    version was lost and written again. `serving_runners` are the ready runners that already serve the version. Raises
    SyncError for an older version, and for a version that is served from another path.
    """
    if new.version < current.version:
        raise SyncError(f"weights version {new.version} is older than the current one, {current.version}: give the "
                        "weights a higher version")
    if not again and (new.version, new.path) == (current.version, current.path):
        return []
    is_saved_copy = new.method == "checkpoint" and current.in_memory_only
    if new.version == current.version and serving_runners and not (is_saved_copy or again):
        raise SyncError(
            f"weights version {new.version} is served already by {', '.join(serving_runners)}, from "
            f"{current.path or 'the model as it was given'}: give {new.path} a new version"
        )
    return [ev.WeightsPublished(version=new.version, path=new.path, method=new.method)]


def apply_load_result(
    life: RunnerLife, result: WeightsLoadResult, current: Weights, *, path_gone: bool
) -> list[ev.Event]:
    """Return the events that record a runner's result of loading weights.

    A runner that could not load goes on with its old weights if it served before. A new runner fails, since no runner
    is better than wrong weights. It retries every few seconds, and the same error is recorded once. `path_gone` means
    that the path of the current weights no longer exists.
    """
    name, incarnation = life.name, life.incarnation
    if result.error is None:
        return [ev.WeightsLoaded(
            runner=name, incarnation=incarnation, version=result.version, seconds=result.seconds
        )]
    failed = ev.WeightsFailed(runner=name, incarnation=incarnation, version=result.version, error=result.error)
    is_recorded = life.refused == (result.version, result.error)
    if is_recorded and (life.was_current or life.state is RunnerState.FAILED):
        return []
    if life.was_current:
        return [failed]
    reason = f"it could not load weights {result.version}: {result.error}"
    if current.in_memory_only and path_gone:
        reason += (
            "; they were in shared memory, which a restart of the machine empties: publish them again "
            "(sync_weights, or `trinity-es resume` where an explorer trains)"
        )
    return [failed, ev.RunnerFailed(runner=name, incarnation=incarnation, reason=reason)]
