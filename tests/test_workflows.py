"""What runs elsewhere with rights of the repository: actions are pinned, code of packages runs
without rights to write, and packages are built from what has hashes."""

import re

import pytest
from ruamel.yaml import YAML

from sage_lib.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_a_commit_and_a_job_that_runs_code_may_write_nothing(path):
    workflow = YAML(typ="safe").load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in actions)
        runs_code = any("run" in step for step in job["steps"])
        assert not (runs_code and "permissions" in job)
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_what_is_built_here_is_built_with_what_has_hashes():
    lines = (ROOT / "Makefile").read_text().splitlines()
    locked = [line for line in lines if "--requirement requirements.lock" in line]
    assert locked and all("--no-build-isolation" in line for line in locked)
    lock = (ROOT / "requirements.lock").read_text()
    for name in ("setuptools", "wheel"):
        assert re.search(rf"(?m)^{name}==\S+ \\\n    --hash=sha256:", lock)
    [command] = [line for line in lines if line.startswith("\t@sed -nE '/^(setuptools|wheel)==/")]
    assert "$(VENV)/build.lock" in command
