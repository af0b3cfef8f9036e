"""Load of an external server, from the gauges in its `/metrics`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable

from trinity_es.actors.engines.http.vllm_api import VLLMServer
from trinity_es.actors.engines.interface import EngineLoad
from trinity_es.events.errors import EngineError

__all__ = ["parse_load", "report_load"]

_log = logging.getLogger(__name__)

LOAD_SECONDS = 2.0
"""Timeout of a request for the load. A server that answers it late may still be fine."""
_RUNNING = "vllm:num_requests_running", "sglang:num_running_reqs"
_WAITING = "vllm:num_requests_waiting", "sglang:num_queue_reqs"
_FILL = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"
"""Names of each gauge in releases of vLLM and in SGLang; the first that a server has counts."""
_PREFIXES = tuple(name + end for names in (_RUNNING, _WAITING, _FILL) for name in names for end in ("{", " "))


def parse_load(text: str) -> EngineLoad | None:
    """Return the load of all engines of a server from its Prometheus text; None if a gauge is missing.

    Servers do not report how many requests they can run at most, so a server with waiting requests counts as full.
    `recomputed` is 0, since servers count no recomputed tokens.
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
        running=running, waiting=waiting, recomputed=0, kv_share=min(1.0, sum(values[2]) / len(values[2])),
        most_running=max(running, 1) if waiting else sys.maxsize,
    )


async def report_load(server: VLLMServer, report: Callable[[EngineLoad], None]) -> bool:
    """Read a server's load and report it, if it answers. Return False, and log a warning, if the gauges are missing."""
    try:
        text = await server.metrics(LOAD_SECONDS)
    except EngineError:
        return True
    load = parse_load(text)
    if load is None:
        _log.warning("%s/metrics lacks the gauges of its load, so max_concurrency: auto keeps its number of places",
                     server.url)
        return False
    if load.running:  # otherwise it is idle, or paused
        report(load)
    return True
