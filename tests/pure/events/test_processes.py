"""A process is named by its pid and its start, in which no clock has a part."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from trinity_es.events import processes
from trinity_es.events.processes import is_visible_here, process_lives, process_start_time


def test_a_process_has_one_name_for_life_and_another_process_another() -> None:
    mine = process_start_time(os.getpid())
    assert mine
    assert mine == process_start_time(os.getpid())
    assert process_lives(os.getpid(), mine)
    assert not process_lives(os.getpid(), "1" + mine)
    assert not process_lives(os.getpid(), None)
    assert is_visible_here(mine)


def test_a_process_that_has_ended_has_no_start_also_as_a_zombie() -> None:
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while process_start_time(child.pid) is not None:
        assert time.monotonic() < deadline, "waited for the end of a child"
    assert child.poll() == 0
    assert process_start_time(child.pid) is None


def test_the_name_of_a_program_may_hold_anything(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o700)
    child = subprocess.Popen([program, "60"])
    try:
        assert process_lives(child.pid, process_start_time(child.pid))
        assert process_start_time(child.pid) != process_start_time(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_a_process_of_another_boot_has_ended_and_one_of_another_namespace_is_not_seen(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = process_start_time(os.getpid())
    boot, _, space = processes._boot_and_namespace().partition("/")
    monkeypatch.setattr(processes, "_boot_and_namespace", lambda: f"{boot}/1")
    assert is_visible_here(mine) is None
    assert not process_lives(os.getpid(), mine)
    monkeypatch.setattr(processes, "_boot_and_namespace", lambda: f"0000/{space}")
    assert is_visible_here(mine) is False
