"""What submitit asks SLURM about its jobs: of squeue, since sacct needs a data base of accounts."""

from submitit.slurm.slurm import SlurmInfoWatcher

#: Of a job that squeue no longer lists: it ended minutes ago.
GONE = "GONE"
#: Hours that a job must have. SLURM warns it 90 seconds before its end, and it takes a minute or
#: more to start: with less it would be queued again and again, and do nothing.
LEAST_HOURS = 0.1


class Watcher(SlurmInfoWatcher):
    """Reads the states of all jobs of this user at once."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        return ["squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%N"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return job -> its columns JobID, State and NodeList, of what squeue prints."""
        text = string if isinstance(string, str) else string.decode()
        states = super().read_info(f"JobID|State|NodeList\n{text}") if text.strip() else {}
        gone = {job: {"JobID": job, "State": GONE} for job in self._registered}
        return {**gone, **states}


def watcher() -> Watcher:
    """Return a watcher that looks every minute, and more often at first."""
    return Watcher(delay_s=60)
