"""A Slurm cluster of this machine alone, for a test: its daemons, its settings and its key lie in one folder.

Debian's packages `slurm-wlm` and `munge` are needed, and root.
"""

import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

from launch.local import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "scontrol", "squeue", "srun")

# More slots than cores; a job that is requeued may begin after five seconds, not after the usual two minutes.
CONFIGURATION = """\
ClusterName=here
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in PROGRAMS if not find(name)]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install -y slurm-wlm munge"
    return "" if os.getuid() == 0 else "Slurm's daemons are started as root only"


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextlib.contextmanager
def cluster(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Starts the daemons and stops them; the variables with which Slurm's commands find them."""
    host = socket.gethostname().partition(".")[0]
    ports = dict(controller=free_port(), daemon=free_port())
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=folder, **ports))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)  # munged refuses a folder that others can write
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    files |= {"seed-file": "munge.seed"}
    munge = [find("munged"), "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    daemons = []
    try:
        for command in (munge, [find("slurmctld"), "-D", "-i"], [find("slurmd"), "-D", "-N", host]):
            with open(folder / f"{pathlib.Path(command[0]).name}.out", "w") as out:
                daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
            time.sleep(0.5)
        _wait_until_idle(env, folder)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()


def _wait_until_idle(env: dict[str, str], folder: pathlib.Path) -> None:
    for _ in range(60):
        done = subprocess.run(["sinfo", "--noheader", "--format=%T"], env=env, capture_output=True, text=True)
        if done.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in folder.glob("*.log"))
    raise RuntimeError(f"the cluster did not come up: {done.stdout} {done.stderr}\n{logs}")


def submit(script: pathlib.Path, env: dict[str, str], folder: pathlib.Path) -> str:
    """The number of the job."""
    done = subprocess.run(["sbatch", script], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return re.search(r"\d+", done.stdout)[0]


def state(job: str, env: dict[str, str]) -> dict[str, str]:
    """What `scontrol show job` says of a job, by field."""
    done = subprocess.run(["scontrol", "show", "job", job], env=env, capture_output=True, text=True, timeout=60)
    return dict(field.split("=", 1) for field in done.stdout.split() if "=" in field)
