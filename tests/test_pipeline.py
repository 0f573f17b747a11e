"""The stages end to end on a model of a few thousand parameters: LoRA SFT that is merged, RL that
is killed, samples; and a base alone, without any training."""

import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import forks
import pandas as pd
import pytest

from sage_lib import files
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import load_profile
from sage_lib.paths import ROOT
from sage_lib.training import callbacks

#: Smoke, two orders of magnitude down. An untrained policy earns nothing, and a run of equal
#: rewards collapses after 50 steps: 16 steps stay below that.
TINY = """
name: tiny
extends: smoke
model:
  architecture:
    {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
     num_key_value_heads: 2}
sft_data: {rows: 64}
sft: {max_steps: 6, per_device_train_batch_size: 8}
sft_lora: {r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj]}
rl_data: {rows: 64}
rl: {max_steps: 16, per_device_train_batch_size: 16, max_completion_length: 12, save_steps: 5}
methods:
  grpo: {rl: {max_steps: 60}}
  killed: {label: K, guide: {name: random}, reward: random, dynamic_sampling: 2}
guide_defaults:
  branch: {threshold: 1.0, ratio: 0.2, threshold_quantile: null, clamp_quantile: null}
evaluation:
  data:
    - {name: countdown, rows: 2, seed: 1001, kinds: {both: 1.0}}
    - {name: countdown, rows: 2, seed: 1002, kinds: {forward: 1.0}}
    - {name: countdown, rows: 2, seed: 1003, kinds: {reverse: 1.0}}
    - {name: countdown, rows: 2, seed: 1004, kinds: {both: 1.0}, fewest: 6, most: 6, ood: true}
  samples: 8
  ks: [1, 8]
  batch_size: 16
  max_new_tokens: 12
exploration: {prompts: 6, completions: 4, replaced: 2, continuations: 4}
"""
#: The first columns of counts.csv.
COLUMNS = ["dataset", "problem", "n", "c", "truncated"]


@pytest.fixture(scope="module")
def tiny(module_folder):
    (module_folder / "tiny.yaml").write_text(TINY)
    return load_profile(module_folder / "tiny.yaml")


def finish(profile, stage, run):
    forks.finish(*forks.stage(profile, stage, run))


@pytest.fixture(scope="module")
def base(tiny):
    finish(tiny, "sft", "sft")
    return runs.sft_run(tiny)


def test_sft_merges_its_adapter_and_records_what_it_did(tiny, base):
    assert base.done() and not list(base.model.glob("adapter*")), "a plain model"
    record = records.load(base.record)
    assert record["rows"] == 64 and record["seconds"] > 0
    assert record["settings"]["sft.max_steps"] == 6
    assert not [key for key in record["settings"] if key.startswith("methods.")]


def test_entropies_are_a_stage_of_their_own(tiny, base):
    finish(tiny, "entropies", "entropies")
    run = runs.entropy_run(tiny)
    assert run.done() and runs.entropies(tiny)["tokens"] > 0


def test_a_variant_takes_the_base_that_its_change_does_not_touch(tiny, base):
    cooler = load_profile(f"{tiny.spec}+rl.temperature=0.9+seeds=[3407]")
    own = runs.sft_run(cooler)
    finish(cooler, "sft", "sft")
    assert own.done() and own.weights == base.weights
    made = [run.model / "model.safetensors" for run in (own, base)]
    assert made[0].samefile(made[1]) and not (own.build / "checkpoints").exists(), "none trained"
    assert records.load(own.record) == records.load(base.record)
    longer = load_profile(f"{tiny.spec}+rl.temperature=0.9+sft.max_steps=3")
    unmade = load_profile(f"{longer.spec}+rl.beta=0.5")
    for other in (longer, tiny, unmade):
        assert runs.sft_run(other).made_below() is None


def test_a_killed_run_ends_at_the_very_same_weights(tiny, base, tmp_path):
    """Noise of a guide, coins for rewards, fresh prompts of dynamic sampling, optimiser, schedule,
    reference: all survive kill -9."""
    run = runs.rl_run(tiny, "killed", 3407)
    process = forks.start(*forks.stage(tiny, "rl", run.name))
    process.kill_at(lambda: len(files.read_lines(run.live_steps)) >= 8)
    assert not run.done()
    finish(tiny, "rl", run.name)
    killed = records.load(run.record)
    steps = [row["step"] for row in files.read_lines(run.measured / "steps.jsonl")]
    assert steps == list(range(1, 17)), "no step is lost or doubled"
    with pytest.MonkeyPatch.context() as patch:  # from the same base, undisturbed, elsewhere
        copy_base(tiny, base, tmp_path)
        patch.setenv("SAGE_RESULTS", str(tmp_path))
        patch.setenv("SAGE_BUILD", str(tmp_path / "build"))
        finish(tiny, "rl", run.name)
        whole = records.load(runs.rl_run(tiny, "killed", 3407).record)
    assert killed["reference"] == whole["reference"] == base.weights
    assert killed["weights"] == whole["weights"] != base.weights


def copy_base(profile, base, folder):
    shutil.copytree(base.build, folder / "build" / profile.name / "sft")
    shutil.copytree(base.measured, folder / "measured" / profile.name / "sft")


@pytest.fixture(scope="module")
def policy(tiny, base):
    """The run of GRPO."""
    run = runs.rl_run(tiny, "grpo", 3407)
    finish(tiny, "rl", run.name)
    return run


def test_a_run_of_equal_rewards_collapses_and_its_policy_is_evaluated(tiny, policy):
    """At the 50th of its 60 steps; the record says so."""
    reason = "every group of the last 50 steps earned one and the same reward"
    record = records.load(policy.record)
    assert policy.done() and record["collapsed"] == {"step": 50, "reason": reason}
    assert records.collapse(policy.record) == f"collapsed at step 50: {reason}"
    steps = [row["step"] for row in files.read_lines(policy.measured / "steps.jsonl")]
    assert steps == list(range(1, 51)) and tiny.steps_of("grpo") == 60
    finish(tiny, "evaluation", f"eval-{policy.name}")
    assert runs.evaluation_run(policy).done()


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    for step, whole in ((4, True), (8, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            mark = tmp_path / f"checkpoint-{step}" / callbacks.WHOLE
            mark.write_text('{"files": {}, "logs": {}}')
    assert callbacks.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    assert callbacks.last_checkpoint(tmp_path / "none") is None


def test_a_checkpoint_that_lost_the_end_of_a_file_or_of_a_log_is_passed_over(tmp_path):
    folder, log = tmp_path / "checkpoints", tmp_path / "steps.jsonl"
    log.write_text("two")
    for step in (8, 12):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / "model").write_text("two")
        state = SimpleNamespace(global_step=step)
        callbacks.StepLog(log).on_save(SimpleNamespace(output_dir=folder), state, None)
    older, newest = (folder / f"checkpoint-{step}" for step in (8, 12))
    log.write_text("four")  # a log goes on after its checkpoint
    assert callbacks.last_checkpoint(folder) == str(newest), "by number, not by letter"
    (newest / "model").write_text("tw")
    assert callbacks.last_checkpoint(folder) == str(older)
    log.write_text("tw")
    assert callbacks.last_checkpoint(folder) is None


def test_a_resumed_training_counts_tokens_on_and_at_its_last_step_trains_nothing(tmp_path):
    place, resumed = tmp_path / "checkpoint-3", []
    place.mkdir()
    rows = [{"num_tokens": 30.0}, {"num_tokens": 70.0}, {"loss": 1.0}]
    files.write_json(place / "trainer_state.json", {"log_history": rows})
    log, state = callbacks.StepLog(tmp_path / "steps.jsonl"), SimpleNamespace(global_step=3)
    log.on_save(SimpleNamespace(output_dir=tmp_path), state, None)

    def train(resume_from_checkpoint):
        resumed.append(resume_from_checkpoint)
        for last in (4, 3):
            log.on_epoch_begin(None, SimpleNamespace(global_step=3, max_steps=last), None)
        pytest.fail("a step beyond the last")

    trainer = SimpleNamespace(_total_train_tokens=0, train=train)
    trainer.add_callback = trainer.remove_callback = lambda callback: None
    callbacks.train_on(trainer, tmp_path)
    assert resumed == [str(place)] and trainer._total_train_tokens == 70


def test_traces_agree_with_the_guides_formulas_and_with_themselves(tiny, policy):
    finish(tiny, "trace", "trace")
    run = runs.STAGES["trace"].runs(tiny)[0]
    assert run.done()
    shown, measured = (
        json.loads((run.measured / f"{name}.json").read_text()) for name in ("traces", "signals")
    )
    for token in shown["tokens"]:  # eq. 11, by hand
        q = min(1.4, 1 + 0.2 * max(0.0, token["entropy"] - 1.0))
        assert token["branch"] == pytest.approx(q, abs=1e-6) and 0.6 <= token["random"] <= 1.4
        assert token["pi"] == pytest.approx(math.exp(-token["surprisal"]), rel=1e-5)
    rows = files.read_lines(run.samples)
    assert len(rows) == 6 * 8
    assert measured["entropy"]["tokens"] == sum(len(r["tokens"]) for r in rows)
    highest = max(t["entropy"] for r in rows for t in r["tokens"])
    assert max(t["entropy"] for t in shown["tokens"]) == pytest.approx(highest)
    assert 0 < measured["kept_mass"]["lowest"] <= measured["kept_mass"]["mean"] <= 1


def test_a_replay_ends_at_the_weights_of_its_run_and_watches_every_update(tiny, policy):
    [run] = runs.STAGES["replay"].runs(tiny)
    finish(tiny, "replay", run.name)
    assert records.load(run.record)["reproduced"] is True
    log, first = (pd.DataFrame(files.read_lines(r.live_steps)) for r in (run, policy))
    assert log["reward"].equals(first["reward"]) and log["entropy"].equals(first["entropy"])
    table = pd.read_csv(run.measured / "moves.csv")
    assert sorted(set(table["step"])) == [10, 20, 30, 40, 50], "it collapses there, as its run did"
    every = table[table["by"] == "all"]
    # 16 completions an update, whose lengths TRL logs
    lengths = (16 * log["completions/mean_length"]).groupby(-(-log["step"] // 10)).sum()
    assert every.groupby("step")["tokens"].sum().tolist() == pytest.approx(lengths.tolist())
    entropy = (every["before"] * every["tokens"]).sum() / every["tokens"].sum()
    by_tokens = (log["entropy"] * log["completions/mean_length"]).sum()
    assert entropy == pytest.approx(by_tokens / log["completions/mean_length"].sum(), rel=1e-4)
    assert (table["shift"] >= table["rise"].abs() - 1e-6).all()
    still = every[every["sign"] == "even"]
    assert (still["gradient"] == 0).all() and len(still), "an untrained policy earns nothing"


def test_base_and_policy_are_read_on_the_same_tokens(tiny, policy):
    [run] = runs.STAGES["dynamics"].runs(tiny)
    finish(tiny, "dynamics", run.name)
    table, prompts = (pd.read_csv(run.measured / f"{n}.csv") for n in ("tokens", "prompts"))
    totals = table.groupby(["source", "by"])["tokens"].sum().unstack()
    assert (totals.nunique(axis=1) == 1).all(), "every grouping holds every token"
    assert (prompts.groupby("source").size() == tiny.exploration.prompts).all()
    assert (prompts["completions"] == tiny.exploration.completions).all()
    top = table[table["by"] == "all"]
    fifths = table[table["by"] == "perplexity"].groupby(["source", "group"])["tokens"].sum()
    assert fifths.max() <= 5 * 12, "a fifth of 6 x 4 completions"
    fallen = (top["fallen"] * top["tokens"]).groupby(top["source"]).sum()
    assert fallen.tolist() == pytest.approx((0.2 * totals["all"]).tolist(), abs=1)


def test_replaced_tokens_are_kept_one_by_one_and_a_kill_loses_none(tiny, policy):
    [run] = runs.STAGES["impact"].runs(tiny)
    finish(tiny, "impact", run.name)
    whole, lines = (run.measured / "impact.csv").read_text(), run.samples.read_text()
    rows = lines.splitlines(keepends=True)
    groups = pd.read_csv(run.measured / "impact.csv").groupby("perplexity_group")
    assert (groups["perplexity"].max()["low"]) <= groups["perplexity"].min()["high"]
    assert 8 <= len(rows) <= 2 * 4 * tiny.exploration.replaced
    run.samples.write_text("".join(rows[:5]) + rows[5][:30])
    run.record.unlink()
    finish(tiny, "impact", run.name)
    assert run.samples.read_text() == lines
    assert (run.measured / "impact.csv").read_text() == whole


@pytest.fixture(scope="module")
def evaluated(tiny, base):
    finish(tiny, "evaluation", "eval-sft")
    return runs.evaluation_run(base)


def test_evaluation_counts_every_sample_and_goes_on_after_a_kill(tiny, evaluated):
    run = evaluated
    table = pd.read_csv(run.measured / "counts.csv")
    assert len(table) == 8 and (table["n"] == 8).all()
    assert list(table.columns) == [*COLUMNS, "rare", "valid_common", "valid_rare"]
    whole = run.samples.read_text()
    kept = (run.measured / "samples.jsonl.gz").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 64
    # as a kill in the middle of a write leaves it
    run.samples.write_text("".join(lines[:19]) + lines[19][:40])
    run.record.unlink()
    finish(tiny, "evaluation", "eval-sft")
    assert run.samples.read_text() == whole
    assert (run.measured / "samples.jsonl.gz").read_bytes() == kept


def test_scoring_other_samples_draws_none_again(tiny, base, evaluated):
    """Drawing and reading are steps of their own: more scores from the very same file."""
    run = evaluated
    before, scores = run.samples.stat().st_mtime_ns, pd.read_csv(run.measured / "scores.csv")
    fewer = tiny.spec.replace("tiny.yaml", "tiny.yaml+evaluation.scored=3")
    other = load_profile(fewer)
    shutil.copytree(base.build, runs.sft_run(other).build)
    shutil.copytree(base.measured, runs.sft_run(other).measured)
    again = runs.evaluation_run(runs.sft_run(other))
    shutil.copytree(run.build, again.build)
    assert not again.done()
    finish(other, "evaluation", "eval-sft")
    assert again.samples.read_text() == run.samples.read_text()
    assert not list(again.build.parent.glob("*.old*")), "the samples were kept"
    assert run.samples.stat().st_mtime_ns == before
    found = pd.read_csv(again.measured / "scores.csv")
    assert len(scores) == 64 and len(found) == 24
    assert found.merge(scores, how="left", indicator=True)["_merge"].eq("both").all()


@pytest.mark.slow
def test_two_processes_evaluate_to_the_same_samples(tiny, base, evaluated, tmp_path):
    run = evaluated
    kept = (run.measured / "samples.jsonl.gz").read_bytes()
    copy_base(tiny, base, tmp_path)
    configuration = str(ROOT / "configs" / "accelerate" / "cpu_gloo.yaml")
    words = ["--config_file", configuration, "--main_process_port", "0"]
    stage = ["-m", "sage_lib.pipeline.stages", "evaluation", "--run", "eval-sft"]
    words = ["-m", "accelerate.commands.launch", *words, *stage, "--profile", tiny.spec]
    own = {**os.environ, "SAGE_BUILD": str(tmp_path / "build"), "SAGE_RESULTS": str(tmp_path)}
    forks.output_of([sys.executable, *words], env=own)
    evaluation = tmp_path / "measured" / tiny.name / "evaluation" / "sft"
    assert (evaluation / "samples.jsonl.gz").read_bytes() == kept
    folder = tmp_path / "build" / tiny.name / "evaluation" / "sft"
    drawn = [len(files.read_lines(path)) for path in folder.glob("samples*.jsonl")]
    assert sorted(drawn) == [32, 32], "each process drew its share and nothing twice"


OWN = """
name: own
description: a file of questions, asked of a model as it comes
model:
  {name: tiny_qwen, max_seq_length: 64, seed: 1, largest_number: 20, dtype: float32,
   architecture: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
                  num_attention_heads: 2, num_key_value_heads: 2}}
seeds: [1]
evaluation:
  data: [{name: file, rows: 2, path: mine.csv, question: q, gold: a}]
  samples: 4
  ks: [1, 4]
  temperature: 1.0
  top_p: 1.0
  top_k: 0
  min_p: 0.0
  max_new_tokens: 4
  batch_size: 8
  seed: 1
"""


def test_a_base_alone_is_evaluated_without_sft_on_a_data_set_of_ones_own(work_folder):
    """A profile that extends nothing and trains nothing; golds that are whole numbers in a CSV."""
    (work_folder / "own.yaml").write_text(OWN)
    (work_folder / "mine.csv").write_text("q,a\nreach 3 from 1 2,3\nreach 4 from 2 2,4\n")
    profile = load_profile(work_folder / "own.yaml")
    assert (profile.baseline, profile.evaluated) == ("base", ())
    finish(profile, "sft", "sft")
    finish(profile, "evaluation", "eval-sft")
    [run] = runs.evaluations(profile)
    assert (run.method, run.seed) == ("base", None) and run.done()
    table = pd.read_csv(run.measured / "counts.csv")
    assert list(table.columns) == COLUMNS and table["n"].tolist() == [4, 4]
    assert not (run.measured / "support.csv").exists()
