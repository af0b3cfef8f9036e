"""The lock of who trains on a run: one process has it, and it ends with that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.paths import ROOT
from tests.helpers.systems import scripted
from trinity_es.errors import AlreadyRunning
from trinity_es.system.run_lock import RunLock, hold

HOLD = """
import os, sys, time
from pathlib import Path
from tests.helpers.systems import scripted
from trinity_es.system.run_lock import hold

for _ in range(2):
    hold(scripted(Path(sys.argv[1])), "trainer")
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_a_process_holds_a_lock_once_and_until_it_is_killed_whatever_it_forked(tmp_path: Path) -> None:
    config = scripted(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    assert holder.stdout is not None
    try:
        child = int(holder.stdout.readline())
        with pytest.raises(AlreadyRunning, match=rf"a trainer runs on sqlite://\S+ already \(process {holder.pid} "):
            hold(config, "trainer")
        holder.kill()
        holder.wait()
        assert psutil.Process(child).is_running()
        RunLock(config, "trainer").release()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
