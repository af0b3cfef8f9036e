"""Load of an external server, from the gauges in its `/metrics`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable

from trinity_es.actors.engines.http.vllm_api import VLLMServer
from trinity_es.actors.engines.interface import EngineLoad
from trinity_es.events.errors import EngineError

__all__ = ["LoadReport", "load_in"]

_log = logging.getLogger(__name__)

LOAD_SECONDS = 2.0
"""Timeout of a look at the load. A server that is slow to tell it may still be fine."""
_RUNNING = "vllm:num_requests_running", "sglang:num_running_reqs"
_WAITING = "vllm:num_requests_waiting", "sglang:num_queue_reqs"
_FILL = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"
"""Names of a gauge, of vLLM's releases and of SGLang; the first that is there counts."""
_PREFIXES = tuple(name + end for names in (_RUNNING, _WAITING, _FILL) for name in names for end in ("{", " "))


def load_in(text: str) -> EngineLoad | None:
    """Return the load in Prometheus text, over all of a server's engines; None if one of the gauges is missing.

    Servers do not report how many requests they run at most, so one that lets requests wait counts as full. `again` is
    0, since they count no recomputed tokens.
    """
    from prometheus_client.parser import text_string_to_metric_families

    gauges: dict[str, list[float]] = {}
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_PREFIXES))
    try:
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                gauges.setdefault(sample.name, []).append(sample.value)
    except ValueError:  # no Prometheus text
        return None
    values = [next((gauges[name] for name in names if name in gauges), []) for names in (_RUNNING, _WAITING, _FILL)]
    if not all(values) or not all(0 <= value < math.inf for part in values for value in part):
        return None
    running, waiting = (int(sum(part)) for part in values[:2])
    return EngineLoad(
        running=running, waiting=waiting, again=0, kv_share=min(1.0, sum(values[2]) / len(values[2])),
        most_running=max(running, 1) if waiting else sys.maxsize,
    )


class LoadReport:
    """The load of one server, which `tell` gets at each look; without `tell` the server is not asked."""

    def __init__(self, server: VLLMServer, tell: Callable[[EngineLoad], None] | None) -> None:
        self._server, self._tell = server, tell

    async def look(self) -> None:
        """Ask the server once. If it has no such gauges, log that and ask no more. Silence says nothing."""
        if self._tell is None:
            return
        try:
            text = await self._server.metrics(LOAD_SECONDS)
        except EngineError:
            return
        load = load_in(text)
        if load is None:
            _log.warning("%s/metrics lacks the gauges of its load, so max_concurrency: auto keeps its number of places",
                         self._server.url)
            self._tell = None
        elif load.running:  # otherwise it is idle, or paused
            self._tell(load)
