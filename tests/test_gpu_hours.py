"""GPU hours on paper: worked out by hand, and changed by every assumption in its direction."""

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import cli, gpu_hours, needs, plan

#: A round number of everything: 1e9 operations a parameter cost one second for 1e9 parameters.
ROUND = [
    "generation=1000",
    "vllm=2000",
    "teraflops=2",
    "utilisation=0.5",
    "tokens=900",
    "prompt=100",
]
BILLION = 10**9


@pytest.fixture
def paper(monkeypatch):
    """All methods and data, of a model of a billion parameters."""
    monkeypatch.setattr(needs, "parameters", lambda *given: (BILLION, 0))
    return load_profile("paper_all")


def hours(profile, *assume):
    made = gpu_hours.table(profile, gpu_hours.assumed([*ROUND, "rounds=2", *assume]))
    return made.set_index("method")


def test_hours_are_those_worked_out_by_hand(paper):
    """64 completions a step, 1,000 steps. Drawn at 900 tokens each, trained at 1,000: forward,
    forward again (checkpointing), backward of activations alone (LoRA), 2 operations each, at 1e12
    a second."""
    found = hours(paper)
    drawn, a_pass = 64_000 * 0.9 / 3600, 64_000 * 1000 * 2 * 1e9 / 1e12 / 3600
    assert found.loc["GRPO w/o KL", "training"] == pytest.approx(drawn + 3 * a_pass)
    assert found.loc["GRPO", "training"] == pytest.approx(drawn + 4 * a_pass), "the reference"
    assert found.loc["GRPO + Branch", "training"] == pytest.approx(drawn + 4 * a_pass)
    assert found.loc["GRPO, replayed", "in all"] == pytest.approx(3 * (drawn + 4 * a_pass))
    assert found.loc["DAPO (no KL)", "training"] == pytest.approx(2 * drawn + 3 * a_pass)
    # 20,000 rows twice, of half of 2,048 tokens.
    learned = 40_000 * 1024 * 6 * 1e9 / 1e12 / 3600
    assert found.loc["Base Model", "training"] == pytest.approx(learned)
    # 60 + 40 + 134 + 272 + 7 x 20 problems; 256 samples drawn, 16 scored by two models.
    asked = 646 * (256 * 0.9 + 16 * 1000 * 2 * 2 * 1e9 / 1e12) / 3600
    evaluated = found.drop(index="GRPO, replayed")
    assert evaluated["evaluation"].to_numpy() == pytest.approx(asked)
    faster = hours(load_profile("paper_all+evaluation.engine=vllm"))
    assert faster.loc["GRPO", "evaluation"] == pytest.approx(asked - 646 * 256 * 0.45 / 3600)
    assert found.loc["GRPO", "in all"] == pytest.approx(3 * (drawn + 4 * a_pass + asked))
    assert found.loc["GRPO", "runs"] == 3 and found.loc["Base Model", "runs"] == 1
    assert (found["in all"] == found["fast"]).all() and (found["in all"] == found["slow"]).all()


def test_the_range_holds_the_plan_and_every_assumption_counts(paper):
    found = gpu_hours.table(paper, gpu_hours.ASSUMED)
    assert (found["fast"] < found["in all"]).all() and (found["in all"] < found["slow"]).all()
    before = hours(paper)["in all"].sum()
    for name, one in gpu_hours.ASSUMED.items():
        ask = load_profile("paper_losses") if name == "vllm" else paper
        fast, slow = (hours(ask, f"{name}={end}")["in all"].sum() for end in (one.fast, one.slow))
        assert fast < slow, name
    assert hours(load_profile("paper_all+evaluation.samples=512"))["in all"].sum() > before


def test_an_adapter_and_checkpointing_save_what_they_save(paper):
    whole = load_profile("paper_all+rl_lora=null+rl.gradient_checkpointing=false")
    assert gpu_hours._operations(adapter=True, again=True) == 6
    assert gpu_hours._operations(adapter=False, again=False) == 6, "the known 6 N"
    assert hours(whole).loc["GRPO", "training"] == pytest.approx(
        hours(paper).loc["GRPO", "training"]
    )


@pytest.mark.parametrize("change", ["speed=3", "generation", "generation=fast", "tokens=-1"])
def test_an_assumption_that_is_none_is_refused(change):
    with pytest.raises(SageError, match=f"--assume {change}: (choose one of|a number above 0)"):
        gpu_hours.assumed([change])


def test_the_dry_run_says_hours_and_assumptions_of_what_needs_a_gpu_alone(capsys, monkeypatch):
    monkeypatch.setattr(plan, "data_sets", lambda profile: plan.planned_runs(profile).head(0))
    cli.main(["dry-run", "--profile", "paper", "--assume", "generation=3000"])
    printed = capsys.readouterr().out
    assert "GPU HOURS, on paper: nothing was timed" in printed
    [line] = [line for line in printed.splitlines() if line.startswith("generation ")]
    assert line.split()[1] == "3000" and line.endswith("set on the command line")
    assert all(f"\n{name} " in printed for name in gpu_hours.ASSUMED)
    cli.main(["dry-run", "--profile", "smoke"])
    assert "GPU HOURS" not in capsys.readouterr().out
