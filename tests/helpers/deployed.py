"""A run for the files of `deploy/` to start: a folder with a config, and `trinity-es` as a command."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

import trinity_es
from trinity_es.events import vocabulary as ev

STEPS = 4


def made_run(folder: Path) -> str:
    """Prepare a run in a folder, long enough for slow hosts to join. Return the folder of commands for PATH."""
    (folder / "tasks.jsonl").write_text("".join('{"prompt": "1 + 1", "response": "2"}\n' for _ in range(16)))
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "mode": "explore", "total_steps": STEPS,
        "explorer": {"max_concurrency": 2, "rollout_model": {
            "engine_type": "scripted", "script": {"response": "2", "latency_seconds": 1.5}}},
        "buffer": {"batch_size": 4, "explorer_input": {"tasksets": [
            {"name": "sums", "path": "tasks.jsonl", "workflow": "math_workflow", "repeat_times": 4,
             "format": {"prompt_key": "prompt", "response_key": "response"}}]}},
        "trainer": {"class": None}, "synchronizer": {"sync_style": "fully_async", "max_inflight_batches": 4},
    }))
    commands = folder / "bin"
    commands.mkdir()
    # Each host gets its own folder for temporary files, as on separate machines.
    (commands / "trinity-es").write_text(
        f'#!/bin/sh\nTMPDIR="{folder}/tmp-$1-${{SLURMD_NODENAME:-$HOSTNAME}}" && mkdir -p "$TMPDIR" && export TMPDIR\n'
        f'exec {sys.executable} -m trinity_es "$@"\n'
    )
    (commands / "trinity-es").chmod(0o755)
    return str(commands)


def has_ended(url: str) -> set[str]:
    """Check that the run ended completely, and return the hosts that finished tasks."""
    with trinity_es.open_log(url) as log:
        assert [b.state for b in log.batches()] == ["finalized"] * STEPS
        assert log.verify() == []
        return {r.event.host for r in log.read(types=["HostJoined"]) if isinstance(r.event, ev.HostJoined)}
