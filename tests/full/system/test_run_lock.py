"""The lock of who trains on a run: one process has it, and it ends with that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers.handmade import cli
from tests.helpers.paths import ROOT
from tests.helpers.systems import scripted
from trinity_es.errors import AlreadyRunning
from trinity_es.system.run_lock import RunLock, hold, holders, killed

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
    sys.stdin.readline()
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "in order"])
def test_a_process_holds_a_lock_once_and_until_it_ends_whatever_it_forked(tmp_path: Path, how: str) -> None:
    config = scripted(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        start_new_session=True)
    assert holder.stdin is not None
    try:
        child = int(holder.stdout.readline())
        assert (killed(config), holders(config)) == ({}, {"trainer": holder.pid})
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
        down = cli("down", tmp_path / "config.yaml")
        assert f"its `trinity-es run` (pid {holder.pid}) is still there" in down.stdout
        with pytest.raises(AlreadyRunning, match=rf"a trainer runs on sqlite://\S+ already \(process {holder.pid} "):
            hold(config, "trainer")
        if how == "killed":
            holder.kill()
        else:
            holder.stdin.close()
        holder.wait()
        assert holders(config) == {}
        assert psutil.Process(child).is_running()
        assert killed(config) == ({"trainer": holder.pid} if how == "killed" else {})
        RunLock(config, "trainer").release()
        assert killed(config) == {}
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
