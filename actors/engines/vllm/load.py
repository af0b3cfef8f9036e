"""What vLLM's scheduler tells of each of its steps: how many requests run and wait, and how full its KV cache is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_es.actors.engines.interface import EngineLoad

__all__ = ["with_load"]


def with_load(llm_class: Any, arguments: Any, tell: Callable[[EngineLoad], None]) -> Any:
    """Return an AsyncLLM of these AsyncEngineArgs that tells its load after each step.

    vLLM gathers the scheduler's figures only together with many of its own, of each token and request, and sets all of
    them up for Prometheus. Where nobody asked for those (`disable_log_stats`), the scheduler's alone are kept.
    """
    llm = llm_class.from_engine_args(arguments, stat_loggers=[lambda config, index: _LoadTeller(config, tell)])
    if arguments.disable_log_stats:
        llm.log_stats = llm.output_processor.log_stats = False  # read when the first request comes
        llm.logger_manager.stat_loggers = llm.logger_manager.stat_loggers[:1]
    return llm


class _LoadTeller:
    """A stat logger of vLLM that hands on the scheduler's figures."""

    def __init__(self, config: Any, tell: Callable[[EngineLoad], None]) -> None:
        self._tell, self._most_running = tell, config.scheduler_config.max_num_seqs

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Take the figures of one step; None: what came is of no step."""
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            self._tell(EngineLoad(
                running=scheduler_stats.num_running_reqs, waiting=scheduler_stats.num_waiting_reqs,
                again=cache.preempted_queries - cache.preempted_hits,
                kv_share=scheduler_stats.kv_cache_usage, most_running=self._most_running,
            ))

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        pass
