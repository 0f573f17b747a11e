"""A SLURM of one node on this machine, for tests: of Debian's slurmctld, slurmd, slurm-client and
munge, without a data base of accounts. All its files are in one folder."""

import os
import shutil
import socket
import subprocess
import time

#: What must be installed.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/d
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.log
SlurmctldPort={port}
SlurmdPort={next_port}
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=10
SlurmdTimeout=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Node:
    """Starts munged, slurmctld and slurmd, and ends them. Clients need :attr:`environment`."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("ctld", "d"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)  # munge refuses others
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        place = {"folder": folder, "user": user, "host": socket.gethostname().split(".")[0]}
        place |= {"port": 26817, "next_port": 26818, "cpus": os.cpu_count()}
        (folder / "slurm.conf").write_text(CONF.format(**place))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.processes = {}
        munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        munge |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        words = [f"--{key}={folder / name}" for key, name in munge.items()]
        self.start("munged", "--foreground", "--force", *words)
        self.wait(lambda: (folder / "munge.socket").exists())
        self.start("slurmctld", "-D")
        self.start_node()
        self.wait(lambda: "idle" in self.call("sinfo", "--noheader", "--format=%T"))

    def start(self, name, *words):
        with (self.folder / f"{name}.out").open("a") as output:
            more = {"stdout": output, "stderr": subprocess.STDOUT, "env": self.environment}
            self.processes[name] = subprocess.Popen([name, *words], **more)

    def start_node(self):
        self.start("slurmd", "-D", "-N", socket.gethostname().split(".")[0])

    def call(self, *words):
        """Output of a command; "" where it fails."""
        more = {"env": self.environment, "capture_output": True, "text": True}
        return subprocess.run(words, check=False, **more).stdout

    def jobs(self):
        """(id, state) of each job that has not ended."""
        printed = self.call("squeue", "--noheader", "-o", "%i %T")
        return [line.split() for line in printed.splitlines()]

    def wait(self, ready):
        end = time.monotonic() + 300
        while not ready():
            assert time.monotonic() < end, {p.name: p.read_text()[-2000:] for p in self.logs()}
            time.sleep(0.5)

    def logs(self):
        return [*self.folder.glob("*.out"), *self.folder.glob("*.log")]

    def kill_node(self):
        self.processes["slurmd"].kill()
        self.processes["slurmd"].wait()

    def end(self):
        self.call("scancel", "--state=RUNNING", "--state=PENDING", "--full", "--me")
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
