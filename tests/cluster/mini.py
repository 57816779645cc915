"""A real Slurm of several nodes on this machine, all of it in one folder; nothing of it outlives its owner, however that ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.apt import install
from tests.tools import LIMIT, MARK, ROOT, Result, environment, free_ports, marked, until

DAEMONS = ("munged", "slurmctld", "slurmd")
PACKAGES = ("slurm-wlm", "slurm-client", "slurmd", "slurmctld", "munge")
AHEAD = 1000  # seconds by which the monotonic clock of n2 is ahead of the others', as on another machine

# One machine poses as many: no cgroups, no pinning, every daemon at the host name's own address, where slurmd listens.
CONF = """
ClusterName=mini
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SlurmdTimeout=60
SlurmctldTimeout=60
MessageTimeout=30
InactiveLimit=0
MinJobAge=300
KillWait=5
ReturnToService=2
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_hetjob_immediate,bf_hetjob_prio=min
TreeWidth=64
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=9
"""


def missing() -> str:
    """Why there can be no Slurm here, after apt was tried; "" if there can."""
    if os.geteuid():
        return "a Slurm of one's own needs root"
    try:
        socket.gethostbyname(_host())
    except OSError:
        return f"the host name {_host()} has no address; /etc/hosts should give it one"
    return install(_absent, *PACKAGES)


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _absent() -> list[str]:
    return [name for name in (*DAEMONS, "srun", "sbatch") if _place(name) is None]


def _place(name: str) -> str | None:
    """Where a program is; daemons are not on everybody's PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))


def reap(mark: str) -> None:
    """Wait until standard input ends, as it does when the owner is killed; then kill all that carries ``mark``."""
    sys.stdin.read()
    while left := marked(mark):
        for line in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


class MiniSlurm:
    """Nodes n1 … nN of ``cpus`` CPUs each, of which n2's clock is ``ahead`` seconds ahead. A context manager: idle nodes
    inside, nothing left outside but ``folder``."""

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 4) -> None:
        self.folder, self.cpus = folder, cpus
        self.nodes = [f"n{k + 1}" for k in range(nodes)]
        self.mark = uuid.uuid4().hex  # in the environment of all that runs in this cluster
        self.conf = folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen] = {}
        try:  # 0 where the kernel, or a container, has no time namespaces
            able = subprocess.run(["unshare", "--time", "--monotonic=1", "true"], capture_output=True).returncode == 0
        except OSError:
            able = False
        self.ahead = AHEAD if able else 0

    def __enter__(self) -> MiniSlurm:
        self.reaper = subprocess.Popen(
            [sys.executable, "-c", f"from tests.cluster.mini import reap; reap({self.mark!r})"],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._configure()
            key, pipe = self.folder / "munge.key", self.folder / "munge.socket"
            own = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
            self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={pipe}", *own)
            until(pipe.exists)
            self._start("slurmctld", "-D", "-c", "-f", self.conf)
            for node in self.nodes:
                self.start_node(node)
            self.rest()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "-u", "root", expect=None, limit=60)
        for _, daemon in sorted(self.daemons.items(), reverse=True):  # nodes first, munged last
            daemon.terminate()
            try:
                daemon.wait(timeout=30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.reaper.communicate(timeout=LIMIT)  # closes its input: steps that outlived their node

    def start_node(self, node: str) -> None:
        """Start (again) the daemon of a node, which is no longer down then (ReturnToService)."""
        clock = ["unshare", "--time", f"--monotonic={self.ahead}"] if node == "n2" and self.ahead else []
        self._start(f"slurmd-{node}", "-D", "-N", node, "-f", self.conf, program="slurmd", before=clock)

    def stop_node(self, node: str) -> None:
        """Kill the daemon of a node, and have Slurm notice at once; what it has started lives on."""
        daemon = self.daemons[f"slurmd-{node}"]
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def idle(self) -> list[str]:
        """Names of the idle nodes."""
        return self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", expect=None).stdout.split()

    def rest(self) -> None:
        """Wait until all nodes are idle: a job that has ended may still hold some, and the next would get others."""
        until(lambda: self.idle() == self.nodes)

    def run(self, *argv: object, cwd: Path | None = None, expect: int | None = 0, limit: float = LIMIT, **more: str):
        """Run a client of this Slurm to its end; ``more``: environment variables. Asserts the exit status unless None."""
        done = subprocess.run(
            [str(word) for word in argv],
            cwd=cwd or self.folder,
            env=self.variables(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        assert expect is None or done.returncode == expect, (argv, done.returncode, done.stderr, done.stdout[-2000:])
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *argv: object, cwd: Path) -> subprocess.Popen[str]:
        """Start a client, all of whose streams are pipes."""
        return subprocess.Popen(
            [str(word) for word in argv],
            cwd=cwd,
            env=self.variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a client: as of a tool, with the tools on PATH."""
        path = os.pathsep.join([os.path.dirname(sys.executable), str(ROOT / "bin"), os.environ["PATH"]])
        base = environment(SLURM_CONF=str(self.conf), PATH=path, OMP_NUM_THREADS="1")
        return base | {MARK: self.mark} | more

    def _start(self, name: str, *argv: object, program: str = "", before: Sequence[str] = ()) -> None:
        output = open(self.folder / f"{name}.out", "ab")
        with output:
            self.daemons[name] = subprocess.Popen(
                [*before, _place(program or name) or name, *map(str, argv)],
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for pytest, which stops them in order
            )

    def _configure(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        host = _host()
        address = socket.gethostbyname(host)
        first, *ports = free_ports(address, len(self.nodes) + 1)
        text = CONF.format(host=host, address=address, port=first, folder=self.folder)
        for node, port in zip(self.nodes, ports, strict=True):
            (self.folder / f"spool-{node}").mkdir()
            text += f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={port} "
            text += f"CPUs={self.cpus} RealMemory=2048\n"
        self.conf.write_text(text)
