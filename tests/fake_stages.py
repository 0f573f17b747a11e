"""A worker whose runs only sleep and write: for tests of what starts them.

``FAKE`` in the environment is a JSON object: "seconds" a run takes (in "steps" logged steps),
"until" which file is there its last step waits, whether there is a "gpu", and by a run's name what
it does: "fail", "collapse", "crash". Every start and end is a line of calls.jsonl in the build
folder.
"""

import json
import os
import signal
import sys
import time
import types

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import append_line, read_lines
from sage_lib.pipeline import cli, jobs, plan, stages


def told():
    return json.loads(os.environ.get("FAKE", "{}"))


def note(profile, run, what):
    calls = paths.build(profile.name).parent / "calls.jsonl"
    place = {"profile": profile.name, "run": run.name, "pid": os.getpid()}
    append_line(calls, {"what": what, **place, "time": time.time()})


def work(inputs, run):
    """What every stage does here: steps that go on where they stopped, then what it makes."""
    profile = run.profile
    record = run.begin(0, {})
    done = len(read_lines(run.live_steps))
    note(profile, run, f"start at {done}")
    fake = told()
    fate, steps = fake.get(run.name, ""), fake.get("steps", 4)
    for step in range(done, steps):
        time.sleep(fake.get("seconds", 0.2) / steps)
        while step == steps - 1 and "until" in fake and not os.path.exists(fake["until"]):
            time.sleep(0.05)
        append_line(run.live_steps, {"step": step + 1})
    if fate == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "fail":
        raise SageError("the fake work was told to fail")
    (run.build / run.makes).mkdir(exist_ok=True)
    more = {"collapsed": {"step": steps, "reason": "told to"}} if fate == "collapse" else {}
    run.finish(record, weights="w", **more)
    note(profile, run, "end")


def fake():
    """Have this process do fake work. It has no use for torch, which takes seconds to import."""
    sys.modules["torch"] = types.SimpleNamespace(
        set_num_threads=lambda threads: None,
        cuda=types.SimpleNamespace(is_available=lambda: False),
        accelerator=types.SimpleNamespace(is_available=lambda: told().get("gpu", False)),
    )
    stages.work_of = lambda name: work
    plan.check_settings = lambda profile: None  # which imports the true torch


def start_worker():
    """In the place of jobs.start_worker."""
    fake()
    jobs.start_worker()


if __name__ == "__main__":
    fake()
    cli.main(["stage", *sys.argv[1:]])
