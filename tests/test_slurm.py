"""Grids on a SLURM of one node (make test-slurm): a job that is stopped for its time, is cancelled,
or whose node has its daemon killed ends as an undisturbed one. So do two grids at once."""

import json
import subprocess
import sys

import pytest
import slurm_node
from test_many_kills import made
from test_pipeline import TINY

from sage_lib.files import read_lines
from sage_lib.pipeline import jobs

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        bool(slurm_node.missing()), reason=f"not installed: {', '.join(slurm_node.missing())}"
    ),
]
#: Steps of SFT: a minute of work on a slow machine.
STEPS = 1000


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    made = slurm_node.Node(tmp_path_factory.mktemp("slurm"))
    yield made
    made.end()


class Grid:
    """A grid of one profile in a folder of its own: the base, of so many steps."""

    def __init__(self, node, folder, steps=STEPS):
        self.node, self.folder = node, folder
        folder.mkdir(exist_ok=True)
        longer = TINY.replace("sft: {max_steps: 6", f"sft: {{max_steps: {steps}, save_steps: 20")
        longer = longer.replace("sft_data: {rows: 64}", f"sft_data: {{rows: {8 * STEPS}}}")
        longer = longer.replace("name: tiny", "name: killed")
        (folder / "killed.yaml").write_text(longer)
        block = {"name": "base", "about": "", "profile": "killed.yaml"}
        (folder / "own.yaml").write_text(str({"name": "own", "about": "", "blocks": [block]}))
        self.sft = folder / "build" / "killed" / "sft"
        own = {"SAGE_BUILD": str(folder / "build"), "SAGE_RESULTS": str(folder / "results")}
        self.environment = jobs.environment(threads=1) | node.environment | own

    def start(self, *more, executor="slurm"):
        words = [sys.executable, "-m", "sage_lib.pipeline.cli", "grid", "own.yaml", "--executor"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words += [executor, *more]
        return subprocess.Popen(words, cwd=self.folder, env=self.environment, **pipes)

    def steps(self):
        return [row["step"] for row in read_lines(self.sft / "steps.jsonl")]

    def saved(self):
        return list(self.sft.glob("checkpoints/checkpoint-*"))


def end_of(process):
    output = process.communicate(timeout=3000)[0]
    assert process.returncode == 0, output
    assert "sacct" not in output and "accounting" not in output
    return output


@pytest.fixture(scope="module")
def undisturbed(node, tmp_path_factory):
    grid = Grid(node, tmp_path_factory.mktemp("whole"))
    end_of(grid.start())
    return made(grid.folder)


def test_a_cancelled_job_ends_the_command_and_the_next_one_goes_on(node, undisturbed, tmp_path):
    grid = Grid(node, tmp_path)
    process = grid.start()
    node.wait(lambda: grid.saved() or process.poll() is not None)
    [(job, _)] = node.jobs()
    node.call("scancel", job)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1 and "failed" in output and "Bypassing" not in output
    end_of(grid.start())
    assert made(grid.folder) == undisturbed
    assert grid.steps() == list(range(10, STEPS + 1, 10))


def test_a_killed_daemon_of_the_node_loses_nothing(node, undisturbed, tmp_path):
    grid = Grid(node, tmp_path)
    process = grid.start()
    node.wait(lambda: grid.saved() or process.poll() is not None)
    node.kill_node()
    node.start_node()
    process.communicate(timeout=900)
    end_of(grid.start())  # keeps what is done, else goes on
    assert made(grid.folder) == undisturbed


def test_two_grids_at_once_share_the_work(node, undisturbed, tmp_path):
    grid = Grid(node, tmp_path)
    both = [grid.start(), grid.start()]
    for process in both:
        end_of(process)
    assert made(grid.folder) == undisturbed and not node.jobs()
    assert grid.steps() == list(range(10, STEPS + 1, 10))


def test_a_job_that_is_stopped_for_its_time_is_queued_again(node, tmp_path):
    """SLURM warns it 90 seconds before the end of its six minutes, and its work takes eight."""
    pace = Grid(node, tmp_path / "pace")
    end_of(pace.start(executor="processes"))
    record = pace.folder / "results" / "measured" / "killed" / "sft" / "record.json"
    steps = int(480 * STEPS / json.loads(record.read_text())["seconds"]) // 20 * 20
    grid = Grid(node, tmp_path / "slurm", steps)
    end_of(grid.start("--hours", "0.1"))
    whole = Grid(node, tmp_path / "whole", steps)
    end_of(whole.start(executor="processes"))
    assert made(grid.folder) == made(whole.folder)
    assert grid.steps() == list(range(10, steps + 1, 10))
    logs = "".join(path.read_text() for path in (grid.folder / "build" / "grids").glob("*_log.err"))
    assert "timed-out" in logs or "requeued" in logs.lower(), logs[-2000:]
