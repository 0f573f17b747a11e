"""Two processes over gloo, through the shipped accelerate configuration, against one process on the
same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from sage_lib.algorithm.guides import GuideInputs, RandomGuide
from sage_lib.paths import ROOT

METHODS = ("branch", "dapo", "sequence", "forward_kl", "random")
CONFIGURATIONS = ROOT / "configs" / "accelerate"


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    script = str(ROOT / "tests" / "distributed_run.py")
    cache = {"UNSLOTH_COMPILE_LOCATION": str(folder / "cache")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **cache}
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGURATIONS / "cpu_gloo.yaml"),
        "--main_process_port",
        "0",
    ]
    for words in (
        [sys.executable, script, str(tiny_model), str(folder / "one"), "16"],
        [*launch, script, str(tiny_model), str(folder / "two"), "8"],
    ):
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=400, env=environment, cwd=folder
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return {
        (name, method, rank): json.loads((folder / f"{name}.{method}.{rank}").read_text())
        for method in METHODS
        for name, rank in (("one", 0), ("two", 0), ("two", 1))
    }


@pytest.mark.parametrize("method", ["branch", "dapo", "sequence", "forward_kl"])
def test_two_processes_follow_the_trajectory_of_one(runs, method):
    one, two = runs["one", method, 0], runs["two", method, 0]
    assert (one["processes"], two["processes"]) == (1, 2) and len(one["log"]) == 4
    assert torch.allclose(torch.tensor(one["weights"]), torch.tensor(two["weights"]), atol=2e-5)
    moved = torch.tensor(one["weights"]) - torch.tensor(runs["one", "random", 0]["weights"])
    assert moved.abs().max() > 1e-4, "the comparison can tell two methods apart"
    for a, b in zip(one["log"], two["log"], strict=True):
        guided = [key for key in ("guide/mean", "guide/max", "guide/acting") if key in a]
        for key in ("reward", "kl", "kl_ref", "entropy", *guided):
            assert a[key] == pytest.approx(b[key], abs=2e-4), f"{key} is a mean over both processes"


def test_both_processes_end_with_the_same_weights_and_their_own_noise(runs):
    first, second = runs["two", "random", 0], runs["two", "random", 1]
    assert first["weights"] == second["weights"]
    assert first["noise"] != second["noise"]
    for rank, run in enumerate((first, second)):  # and it is what the seed and the rank say
        q = torch.tensor(run["noise"][0])
        shape = torch.zeros_like(q)
        inputs = GuideInputs(
            entropies=shape,
            logps=shape,
            mask=torch.ones_like(q),
            progress=0.0,
            generator=torch.Generator().manual_seed(5 * 1009 + rank),
            ids=shape.long(),
        )
        assert torch.equal(q, RandomGuide()(inputs))


@pytest.mark.parametrize("path", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations_are_ones_that_accelerate_reads(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    written = YAML(typ="safe").load(path.read_text())
    assert load_config_from_file(str(path)).num_processes == written["num_processes"]
