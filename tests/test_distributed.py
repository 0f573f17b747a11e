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
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def one(tiny_model, folder):
    """What one process found, by method."""
    words = str(tiny_model), str(folder / "one"), "16", *METHODS
    forks.finish("distributed_run", *words, timeout=400)
    return {m: json.loads((folder / f"one.{m}.0").read_text()) for m in METHODS}


def launched(name, methods, tiny_model, folder, configuration, *more):
    """What each of two processes found, by method and rank."""
    words = ["--main_process_port", "0", "--config_file", str(CONFIGURATIONS / configuration)]
    script = [str(ROOT / "tests" / "distributed_run.py"), str(tiny_model), str(folder / name), "8"]
    words = ["-m", "accelerate.commands.launch", *words, *more, *script, *methods]
    cache = {"UNSLOTH_COMPILE_LOCATION": str(folder / "cache")}
    given = {"env": {**os.environ, "OMP_NUM_THREADS": "1", **cache}, "cwd": folder, "timeout": 400}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    keys = [(method, rank) for method in methods for rank in (0, 1)]
    return {key: json.loads((folder / "{}.{}.{}".format(name, *key)).read_text()) for key in keys}


@pytest.fixture(scope="module")
def two(tiny_model, folder):
    return launched("two", METHODS, tiny_model, folder, "cpu_gloo.yaml")


@pytest.fixture(scope="module")
def sharded(tiny_model, folder):
    smaller = ["--num_processes", "2", "--mixed_precision", "no"]
    return launched("sharded", SHARDED, tiny_model, folder, "fsdp.yaml", *smaller)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "random"])
def test_two_processes_follow_the_trajectory_of_one(one, two, method):
    alone, both = one[method], two[method, 0]
    assert (alone["processes"], both["processes"]) == (1, 2) and len(alone["log"]) == 4
    assert torch.allclose(torch.tensor(alone["weights"]), torch.tensor(both["weights"]), atol=2e-5)
    if method != "full":  # with other weights than an adapter's
        moved = torch.tensor(alone["weights"]) - torch.tensor(one["random"]["weights"])
        assert moved.abs().max() > 1e-4, "the comparison can tell two methods apart"
    for a, b in zip(alone["log"], both["log"], strict=True):
        guided = [key for key in ("guide/mean", "guide/max", "guide/acting") if key in a]
        for key in ("reward", "kl", "kl_ref", "entropy", *guided):
            assert a[key] == pytest.approx(b[key], abs=2e-4), f"{key} is a mean over both processes"


def test_both_processes_end_with_the_same_weights_and_their_own_noise(two):
    first, second = two["random", 0], two["random", 1]
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


def test_two_processes_resume_where_they_were(two):
    """accelerate calls their processor "cpu:0", which torch.load does not know."""
    for rank in (0, 1):
        run = two["branch", rank]
        assert run["resumed"] == run["weights"]


@pytest.mark.slow
def test_a_sharded_policy_starts_at_its_reference_and_follows_the_trajectory_of_one(one, sharded):
    """FSDP2 as fsdp.yaml has it, two processes instead of eight, in float32, on the
    processor."""
    alone, both = one["full"], sharded["full", 0]
    assert both["sharded"] and both["processes"] == 2 and both["error"] is None
    assert both["log"][0]["kl_ref"] < 1e-6
    assert len(both["log"]) == 4 and both["log"][-1]["kl_ref"] > 1e-3
    for a, b in zip(alone["log"], both["log"], strict=True):
        for key in ("reward", "kl", "kl_ref", "guide/mean"):
            assert a[key] == pytest.approx(b[key], abs=5e-4)
    assert torch.allclose(torch.tensor(alone["weights"]), torch.tensor(both["weights"]), atol=1e-4)


@pytest.mark.slow
def test_a_reference_that_one_process_alone_has_loaded_is_refused_with_the_remedy(sharded):
    for rank in (0, 1):
        error = sharded["ram_efficient", rank]["error"]
        assert "set fsdp_cpu_ram_efficient_loading to false" in error


@pytest.mark.parametrize("path", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations_are_ones_that_accelerate_reads(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    written = YAML(typ="safe").load(path.read_text())
    assert load_config_from_file(str(path)).num_processes == written["num_processes"]
