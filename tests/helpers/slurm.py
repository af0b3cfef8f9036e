"""A Slurm cluster of two nodes on this machine, for the batch script of `deploy/`. Needs root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.servers import free_port
from trinity_es.testing import wait_until

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
SwitchType=switch/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
GresTypes=gpu
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs={cpus} RealMemory=500 Gres=gpu:8
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs={cpus} RealMemory=500 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def lacks() -> str:
    """Return what is missing to run Slurm on this machine; "" if nothing is."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here (Debian: slurmctld, slurmd, slurm-client, munge)"
    return "" if os.geteuid() == 0 else "only root can start a Slurm"


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm with two nodes of 8 fake GPUs during the block. Yield the environment for its commands."""
    folder.chmod(0o755)
    host = socket.gethostname()
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(64))
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, controller=free_port(), first=free_port(),
                                     second=free_port(), cpus=os.cpu_count()))
    for n in range(8):
        os.mknod(folder / f"gpu{n}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    env = {**os.environ, "SLURM_CONF": str(config)}
    munge = folder / "munge"
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket",
         f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
        ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host], ["slurmd", "-D", "-N", "localhost"],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            said = (folder / f"{command[0]}-{command[-1].lstrip('-')[:9].replace('/', '')}.said").open("wb")
            with said:
                started.append(subprocess.Popen(command, env=env, stdout=said, stderr=said))
            if command[0] == "munged":
                wait_until(lambda: (munge / "socket").exists(), "munged", 20)

        def idle() -> bool:
            shown = subprocess.run(["sinfo", "-h", "-o", "%t %D"], env=env, capture_output=True, text=True, check=False)
            return shown.stdout.split() == ["idle", "2"]

        wait_until(idle, "both nodes of Slurm", 60)
        yield env
    finally:
        subprocess.run(["scancel", "--signal=KILL", "--me"], env=env, capture_output=True, check=False)
        time.sleep(0.5)
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
