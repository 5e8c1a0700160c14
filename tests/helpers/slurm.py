"""A Slurm of its own on this machine: munged, slurmctld and two slurmd, which run as two nodes n1 and n2.

Needs root and the packages munge, slurmctld, slurmd and slurm-client; nothing of the system's own Slurm is used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.helpers.running import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scontrol", "squeue", "scancel")
FOLDERS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing() -> str:
    """Return what a Slurm lacks on this machine, or ""."""
    if os.getuid() != 0:
        return "a Slurm for tests needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=FOLDERS) is None]
    return f"needs {', '.join(lacking)} (make system; munge, slurmctld, slurmd, slurm-client)" if lacking else ""


class Slurm:
    """Two nodes with two cores each; a context manager."""

    def __init__(self) -> None:
        # a short path that all may pass through: munged insists on it
        self.folder = Path(tempfile.mkdtemp(prefix="psctl-slurm-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": FOLDERS}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in ("state", "n1", "n2"):
            (self.folder / name).mkdir()
        key, door = self.folder / "munge.key", self.folder / "munge.sock"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        ports = _free_ports(3)
        (self.folder / "slurm.conf").write_text(_CONF.format(
            folder=self.folder, host=socket.gethostname().partition(".")[0], ports=ports, door=door,
        ))  # fmt: skip
        (self.folder / "topology.conf").write_text(_TOPOLOGY)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={door}", *files)
        until(door.exists, name="munged")
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        until(lambda: self.run("sinfo", "-h", "-o", "%T %D", check=False).stdout.split() == ["idle", "2"], name="nodes")

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.{len(self._daemons)}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    list(words),
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of Slurm."""
        return subprocess.run(
            list(words), env={**os.environ, **self.env}, check=check, capture_output=True, text=True, timeout=60
        )

    def allocate(self, nodes: int = 2, *more: str) -> dict[str, str]:
        """Make an allocation without a shell; return the variables that salloc sets."""
        said = self.run("salloc", "--no-shell", f"--nodes={nodes}", *more).stderr
        number = said.partition("Granted job allocation ")[2].split()[0]
        nodelist = self.run("squeue", "-h", "-j", number, "-o", "%N").stdout.strip()
        return {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": nodelist}

    def steps(self, number: str) -> Sequence[str]:
        """Return the steps of an allocation that run."""
        return self.run("squeue", "-h", "-s", "-j", number, "-o", "%i").stdout.split()

    def close(self) -> None:
        """End all jobs and the daemons, and remove everything."""
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root", check=False)
            until(lambda: not self.run("squeue", "-h", check=False).stdout.strip(), 20, name="jobs are left")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_CONF = """\
ClusterName=psctl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={door}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=2
MinJobAge=300
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_TOPOLOGY = """\
SwitchName=rack1 Nodes=n1
SwitchName=rack2 Nodes=n2
SwitchName=top Switches=rack[1-2]
"""


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
