"""The plan of a profile: memory, disk and GPU hours worked out by hand; what is asked before it
starts, and what is refused before the first hour."""

import dataclasses
import sys

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.pipeline import cli, plan, reproduce, stages

GPU = [name for name in profile_names() if load_profile(name).compute.requires_gpu]
#: A round number of everything: 1e9 operations a parameter cost one second for 1e9 parameters.
ROUND = ["generation=1000", "vllm=2000", "teraflops=2", "utilisation=0.5", "tokens=900"]
ROUND += ["prompt=100", "rounds=2"]
BILLION = 10**9


def test_memory_of_the_paper_model_is_that_of_its_published_size():
    total, adapter = plan.parameters(load_profile("paper").model.architecture, rank=8)
    assert total == 7_615_616_512  # Qwen2.5-7B's published checkpoint has this many parameters
    assert adapter == 20_185_088  # PEFT's count for rank 8 on all seven projections


def test_disk_is_that_of_adapters_where_they_are_kept():
    """7.6 billion weights of two bytes; an adapter of 20 million of four; a checkpoint of it with
    two bytes of state for each, three of them; 19 policies x 234 x 256 samples x 768 tokens."""

    def parts(profile):
        table = plan.needs(profile)
        return table[table["what"] == "disk"].set_index("part")["GB"]

    paper = load_profile("paper")
    weights, adapter = 7_615_616_512 * 2e-9, 20_185_088e-9
    assert parts(paper)["the base"] == pytest.approx(weights)
    assert parts(paper)["policies"] == pytest.approx(18 * 4 * adapter)
    assert parts(paper)["checkpoints of what runs"] == pytest.approx(3 * 6 * adapter)
    assert parts(paper)["samples"] == pytest.approx(19 * 234 * 256 * 768 * plan.OF_TOKEN / 1e9)
    assert plan.disk_gb(paper) == pytest.approx(parts(paper).sum())
    merged = load_profile("paper+compute.keep_adapter=false")
    assert parts(merged)["policies"] == pytest.approx(18 * weights)
    assert plan.disk_gb(load_profile("smoke")) == 0.2, "as its profile says"


@pytest.fixture
def paper(monkeypatch):
    """All methods and data, of a model of a billion parameters."""
    monkeypatch.setattr(plan, "parameters", lambda *given: (BILLION, 0))
    return load_profile("paper_all")


def hours(profile, *assume):
    """Hours of one run by stage and method."""
    made = plan.planned_runs(profile, None, plan.assumed(profile, [*ROUND, *assume]))
    ends = made[["value", "fast", "slow"]].div(made["runs"], axis=0)
    return made.assign(**ends).set_index(["stage", "method"])


def test_hours_are_those_worked_out_by_hand(paper):
    """64 completions a step, 1,000 steps. Drawn at 900 tokens each, trained at 1,000: forward,
    forward again (checkpointing), backward of activations alone (LoRA), 2 operations each, at 1e12
    a second."""
    found = hours(paper)
    drawn, a_pass = 64_000 * 0.9 / 3600, 64_000 * 1000 * 2 * 1e9 / 1e12 / 3600
    for key, expected in {
        ("rl", "GRPO w/o KL"): drawn + 3 * a_pass,
        ("rl", "GRPO"): drawn + 4 * a_pass,  # one of the reference
        ("rl", "GRPO + Branch"): drawn + 4 * a_pass,
        ("replay", "GRPO"): drawn + 4 * a_pass,
        ("rl", "DAPO (no KL)"): 2 * drawn + 3 * a_pass,
        # 20,000 rows twice, of half of 2,048 tokens.
        ("sft", "Base Model"): 40_000 * 1024 * 6 * 1e9 / 1e12 / 3600,
    }.items():
        assert found.loc[key, "value"] == pytest.approx(expected), key
    # 60 + 40 + 134 + 272 + 7 x 20 problems; 256 samples drawn, 16 scored by two models.
    asked = 646 * (256 * 0.9 + 16 * 1000 * 2 * 2 * 1e9 / 1e12) / 3600
    assert found.loc["evaluation"]["value"].to_numpy() == pytest.approx(asked)
    faster = hours(load_profile("paper_all+evaluation.engine=vllm"))
    expected = asked - 646 * 256 * 0.45 / 3600
    assert faster.loc[("evaluation", "GRPO"), "value"] == pytest.approx(expected)
    assert found.loc[("rl", "GRPO"), "runs"] == 3 and found.loc[("sft", "Base Model"), "runs"] == 1
    assert (found["value"] == found["fast"]).all() and (found["value"] == found["slow"]).all()


def test_rounds_of_rejection_sampling_take_the_hours_of_what_they_draw_and_learn(paper):
    """4 rounds, each of which draws 400 times 8 completions and trains 200 steps."""
    rft = {"rounds": 4, "prompts": 400, "samples": 8, "selected": 400, "sft": {"max_steps": 200}}
    method = dataclasses.replace(paper.methods["grpo"], rft=rft)
    profile = dataclasses.replace(paper, methods={"grpo": method})
    steps = plan._batch(profile.rft_of("grpo").sft) * 800
    again = profile.rft_of("grpo").sft["gradient_checkpointing"]
    trained = steps * 1000 * (6 if again else 4) * 1e9 / 1e12 / 3600
    expected = 4 * 400 * 8 * 0.9 / 3600 + trained
    assert hours(profile).loc[("rl", "GRPO"), "value"] == pytest.approx(expected)


def test_the_range_holds_the_plan_and_every_assumption_counts(paper):
    found = plan.planned_runs(paper, None, plan.assumed(paper))
    found = found[found["value"] > 0]
    assert (found["fast"] < found["value"]).all() and (found["value"] < found["slow"]).all()
    for name, (_, fast, slow, _) in plan.ASSUMED.items():
        ask = load_profile("paper_losses") if name == "vllm" else paper
        low, high = (hours(ask, f"{name}={end}")["value"].sum() for end in (fast, slow))
        assert low < high, name
    more = hours(load_profile("paper_all+evaluation.samples=512"))
    assert more["value"].sum() > hours(paper)["value"].sum()


@pytest.mark.parametrize("given", ["speed=3", "tokens=0", "tokens=[1, 2]", "tokens=a", "tokens"])
def test_an_assumption_that_is_none_is_refused(given):
    profile = load_profile("one_gpu")
    with pytest.raises(SageError, match=r"assumption \w+=.*: a number above 0"):
        plan.assumed(profile, [given])
    if "=" in given:
        with pytest.raises(SageError, match=r"assumption \w+=.*: a number above 0"):
            plan.assumed(load_profile(f"one_gpu+compute.assume.{given}"))


@pytest.mark.parametrize("name", [*GPU, "smoke"])
def test_a_dry_run_says_what_a_profile_asks_for(name, capsys, monkeypatch):
    monkeypatch.setattr(plan, "check_settings", lambda profile: None)
    cli.main(["dry-run", "--profile", name, "--assume", "generation=3000"])
    printed = capsys.readouterr().out
    assert "\nMEMORY OF RL AND DISK" in printed and "steps" in printed
    assert ("GPU hours (not timed)" in printed) == (name in GPU)
    if name in GPU:
        [line] = [line for line in printed.splitlines() if line.startswith("generation ")]
        assert line.split()[1] == "3e+03"
        assert all(f"\n{one} " in printed for one in plan.ASSUMED)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("sft: null\nsft_data: null", "the model as it comes"),
        ("sft: {max_steps: -1}", "2 epochs"),  # those of the profile paper
        ("sft: {max_steps: -1, num_train_epochs: 1}", "1 epochs"),
    ],
)
def test_a_dry_run_says_how_long_the_base_is_trained(variant, lines, shown):
    planned = plan.planned_runs(load_profile(variant(lines)))
    assert planned.set_index("stage").loc["sft", "size"] == shown


def test_a_dry_run_names_the_data_files_that_are_missing(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "check_settings", lambda profile: None)
    profile = load_profile(variant("rl_data: {name: file, path: mine.jsonl, rows: 3}"))
    told = plan.describe(profile)
    assert told.endswith(f"MISSING\nthere is no data file\n{tmp_path / 'mine.jsonl'}")
    (tmp_path / "mine.jsonl").touch()
    assert "MISSING" not in plan.describe(profile)


# --- asked before anything starts -----------------------------------------------------------------


@pytest.fixture
def machine(work_folder, monkeypatch):
    """A machine that could run them; what is started is noted, not done."""
    import torch

    started = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stages, "require_space", lambda *given: None)
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(plan, "check_settings", lambda profile: None)
    monkeypatch.setattr(stages, "run", lambda profile, *names: started.append(names))
    return started


RL = ["stage", "rl", "--profile", "paper"]


def test_without_a_terminal_nothing_starts_unless_it_is_said(machine, capsys):
    with pytest.raises(
        SystemExit, match=r"profile paper asks .* in 18 runs.* the same command with --yes"
    ):
        cli.main(RL)
    assert machine == []
    cli.main([*RL, "--yes"])
    assert machine[-1] == ("rl",)
    told = " ".join(capsys.readouterr().out.split())
    paper = load_profile("paper")
    planned = plan.planned_runs(paper, None, plan.assumed(paper)).set_index("stage")
    total = planned.loc["rl", "value"].sum()
    assert f"about {total:,.1f} GPU hours" in told and "31 GB of GPU memory" in told


def test_a_model_of_unknown_size_is_asked_for_without_its_memory(machine, capsys):
    cli.main([*RL, "--set", "model.architecture=null", "--yes"])
    told = " ".join(capsys.readouterr().out.split())
    assert "asks for a GPU in 18 runs: nobody can tell" in told
    assert plan.disk_gb(load_profile("paper+model.architecture=null+compute.disk_gb=null")) == 0


@pytest.mark.parametrize(("answer", "starts"), [("y", True), ("", False), ("no", False)])
def test_on_a_terminal_it_is_asked(machine, monkeypatch, answer, starts):
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda words: asked.append(words) or answer)
    if starts:
        cli.main(RL)
    else:
        with pytest.raises(SystemExit, match="nothing was started"):
            cli.main(RL)
    assert (("rl",) in machine) == starts
    assert len(asked) == 1 and asked[0].endswith("Start? [y/N] ")


def test_a_run_of_a_stage_asks_for_its_own_hours_and_a_laptops_profile_for_nothing(machine):
    with pytest.raises(SystemExit, match=r"paper asks for about 19.* GPU hours .* in 1 run,"):
        cli.main([*RL, "--run", "grpo-s3407"])
    smoke = load_profile("smoke")
    plan.before(smoke, stages.STAGES["rl"].runs(smoke), False)


def test_reproduce_asks_for_what_its_notebooks_need(machine):
    with pytest.raises(SageError, match=r"profile one_gpu asks for about 1\.\d GPU hours"):
        reproduce.reproduce(load_profile("one_gpu"))


# --- refused before the first hour ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "remedy"), [("vllm", "make vllm"), ("bitsandbytes", "make gpu")]
)
def test_a_missing_package_is_told_before_sft(package, remedy, monkeypatch):
    there = lambda name: None if name == package else name  # noqa: E731
    monkeypatch.setattr(plan.importlib.util, "find_spec", there)
    with pytest.raises(SageError, match=f"the package {package} is missing: {remedy}"):
        plan.check(load_profile("paper"), {"sft"})


def test_replay_under_unsloth_is_refused_before_sft(machine):
    with pytest.raises(SageError, match=r"replay watches every update.*compute.backend=trl"):
        plan.check(load_profile("paper+compute.backend=unsloth"), {"sft", "replay"})


def test_a_dry_run_refuses_what_the_trainer_would():
    with pytest.raises(SageError, match=r"64\) must be divisible by num_generations \(3\)"):
        plan.check_settings(load_profile("smoke+rl.num_generations=3"))


def test_a_dry_run_names_the_methods_of_the_profile_alone(variant, tmp_path, monkeypatch):
    """An adopter who trained two of smoke's methods read all of them."""
    lines = "methods: {rank: {label: Rank, guide: {name: token, weight: rank}}}"
    variant(f"train: [grpo, rank]\n{lines}")
    monkeypatch.chdir(tmp_path)
    table = plan.settings_table(load_profile("mine.yaml"))
    named = {key.split(".")[1] for key in table["setting"] if key.startswith("methods.")}
    assert named == {"grpo", "rank"} & named and "rank" in named
    alone = plan.settings_table(load_profile("smoke+train=[grpo_branch]"))["setting"]
    assert not any(key.startswith("methods.grpo.") for key in alone), "another name's beginning"
    study = load_profile("study")
    removed = [key for key, section in study.raw["methods"].items() if section is None]
    named = plan.settings_table(study)["setting"].str.extract(r"^methods\.([^.]+)")[0]
    assert removed and not named.isin(removed).any(), "null removes a method"
    both = plan.settings_table(load_profile("operating_point"))["setting"]
    assert any(key.startswith("methods.front.") for key in both), "varied methods have their key"


@pytest.mark.parametrize(
    ("save_steps", "total", "kept"), [(10, 2, 3), (10, None, 101), (0.5, None, 3), (0, None, 2)]
)
def test_disk_holds_the_checkpoints_that_trl_would_keep(save_steps, total, kept):
    """Of 1,000 steps, and the one that is being written."""
    changes = f"rl.save_steps={save_steps}+rl.save_total_limit={'null' if total is None else total}"

    def checkpoints(spec):
        table = plan.needs(load_profile(spec)).set_index("part")
        return table.loc["checkpoints of what runs", "GB"]

    one = checkpoints("paper+rl.save_steps=10+rl.save_total_limit=1") / 2
    assert checkpoints(f"paper+{changes}") == pytest.approx(kept * one)
