"""Two processes over gloo, through the shipped accelerate configurations, against one process on
the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from ruamel.yaml import YAML

from sage_lib.algorithm.guides import GuideInputs, RandomGuide
from sage_lib.paths import ROOT

METHODS = ("branch", "dapo", "sequence", "forward_kl", "forward_kl_dapo", "random", "full")
#: What runs sharded: the second is what fsdp.yaml once said, and no method.
SHARDED = ("full", "ram_efficient")
CONFIGURATIONS = ROOT / "configs" / "accelerate"


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    script = str(ROOT / "tests" / "distributed_run.py")
    cache = {"UNSLOTH_COMPILE_LOCATION": str(folder / "cache")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **cache}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    gloo = [*launch, "--config_file", str(CONFIGURATIONS / "cpu_gloo.yaml")]
    smaller = ["--num_processes", "2", "--mixed_precision", "no"]
    fsdp = [*launch, "--config_file", str(CONFIGURATIONS / "fsdp.yaml"), *smaller]
    one = str(tiny_model), str(folder / "one"), "16", *METHODS
    forks.finish("distributed_run", *one, timeout=400)
    for words in (
        [*gloo, script, str(tiny_model), str(folder / "two"), "8", *METHODS],
        [*fsdp, script, str(tiny_model), str(folder / "sharded"), "8", *SHARDED],
    ):
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=400, env=environment, cwd=folder
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    made = [(name, m, rank) for m in METHODS for name, rank in (("one", 0), ("two", 0), ("two", 1))]
    made += [("sharded", m, rank) for m in SHARDED for rank in (0, 1)]
    return {key: json.loads((folder / "{}.{}.{}".format(*key)).read_text()) for key in made}


@pytest.mark.parametrize("method", [method for method in METHODS if method != "random"])
def test_two_processes_follow_the_trajectory_of_one(runs, method):
    one, two = runs["one", method, 0], runs["two", method, 0]
    assert (one["processes"], two["processes"]) == (1, 2) and len(one["log"]) == 4
    assert torch.allclose(torch.tensor(one["weights"]), torch.tensor(two["weights"]), atol=2e-5)
    if method != "full":  # with other weights than an adapter's
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


def test_two_processes_resume_where_they_were(runs):
    """accelerate calls their processor "cpu:0", which torch.load does not know."""
    for rank in (0, 1):
        run = runs["two", "branch", rank]
        assert run["resumed"] == run["weights"]


def test_a_sharded_policy_starts_at_its_reference_and_follows_the_trajectory_of_one(runs):
    """FSDP2 as fsdp.yaml has it, two processes instead of eight, in float32, on the
    processor."""
    one, sharded = runs["one", "full", 0], runs["sharded", "full", 0]
    assert sharded["sharded"] and sharded["processes"] == 2 and sharded["error"] is None
    assert sharded["log"][0]["kl_ref"] < 1e-6
    assert len(sharded["log"]) == 4 and sharded["log"][-1]["kl_ref"] > 1e-3
    for a, b in zip(one["log"], sharded["log"], strict=True):
        for key in ("reward", "kl", "kl_ref", "guide/mean"):
            assert a[key] == pytest.approx(b[key], abs=5e-4)
    assert torch.allclose(torch.tensor(one["weights"]), torch.tensor(sharded["weights"]), atol=1e-4)


def test_a_reference_that_one_process_alone_has_loaded_is_refused_with_the_remedy(runs):
    for rank in (0, 1):
        error = runs["sharded", "ram_efficient", rank]["error"]
        assert "set fsdp_cpu_ram_efficient_loading to false" in error


@pytest.mark.parametrize("path", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations_are_ones_that_accelerate_reads(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    written = YAML(typ="safe").load(path.read_text())
    assert load_config_from_file(str(path)).num_processes == written["num_processes"]
