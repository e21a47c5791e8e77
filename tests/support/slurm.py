"""A Slurm cluster of one node on this machine: its own munged, slurmctld and slurmd, as the tests' user."""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT

DAEMONS = ("munged", "slurmctld", "slurmd")
PLACES = "/usr/sbin:/usr/local/sbin"
"""Where daemons are that are in no user's PATH."""
WAIT_S = 120.0

CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=70000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def missing() -> list[str]:
    """Return the programs that a cluster needs and this machine lacks."""
    names = [name for name in DAEMONS if shutil.which(name, path=PLACES) is None]
    return names + [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    environment: dict[str, str]

    def call(self, *command: str | Path) -> str:
        """Return what a command of Slurm's prints."""
        return subprocess.run(
            command, env=self.environment, check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    def submit(self, script: Path, output: Path, *options: str, **variables: str | Path) -> int:
        """Queue a batch script with these options and variables; return its number."""
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        given = [f"--export={exported}", f"--output={output}", *options]
        return int(self.call("sbatch", "--parsable", *given, script))

    def job(self, number: int | str) -> dict[str, str]:
        """Return what Slurm says of a job."""
        told = self.call("scontrol", "show", "job", str(number), "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def wait(self, number: int | str, **fields: str) -> dict[str, str]:
        """Return what Slurm says of a job once these fields have these values."""
        deadline = time.monotonic() + WAIT_S
        while fields.items() - (job := self.job(number)).items():
            assert time.monotonic() < deadline, job
            time.sleep(0.5)
        return job


@contextmanager
def one_node(folder: Path) -> Iterator[Cluster]:
    """Run a cluster whose files are below `folder`, with a GPU that is none."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
    text = CONFIGURATION.format(host=host, user=getpass.getuser(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    options = {name: str(folder / "munge" / name) for name in ("socket", "pid-file", "log-file", "seed-file")}
    commands = {
        "munged": ["--foreground", "--force", f"--key-file={key}"]
        + [f"--{name}={path}" for name, path in options.items()],
        "slurmctld": ["-D", "-f", str(folder / "slurm.conf")],
        "slurmd": ["-D", "-f", str(folder / "slurm.conf"), "-N", host],
    }
    with ExitStack() as running:
        for name in DAEMONS:
            log = running.enter_context((folder / f"{name}.log").open("wb"))
            program = str(shutil.which(name, path=PLACES))
            child = subprocess.Popen(
                [program, *commands[name]], env=environment, stdin=DEVNULL, stdout=log, stderr=STDOUT
            )
            running.callback(child.wait)
            running.callback(child.terminate)
        cluster = Cluster(environment)
        deadline = time.monotonic() + WAIT_S
        while not _is_idle(cluster):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)
        try:
            yield cluster
        finally:
            cluster.call("scancel", f"--user={getpass.getuser()}")
            while cluster.call("squeue", "--noheader"):
                time.sleep(0.5)


def _is_idle(cluster: Cluster) -> bool:
    asked = subprocess.run(
        ["sinfo", "--noheader", "--format=%t"],
        env=cluster.environment,
        check=False,
        capture_output=True,
        text=True,
    )
    return asked.stdout.strip() == "idle"
