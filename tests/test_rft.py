"""Rejection-sampling fine-tuning: its rules and selections by hand, what it trains on, and a run
that is killed."""

import dataclasses
import random
import shutil
from collections import Counter
from types import SimpleNamespace

# First: Unsloth patches what is imported after it.
from sage_lib.training import rft
from sage_lib.training.rft import Candidate, prompts_of, select

# isort: split

import forks
import pandas as pd
import pytest
import torch

from sage_lib import files
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.problems import rl_problems, sft_rows
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.settings import Rft
from sage_lib.policy import loading, sampling
from sage_lib.tasks import countdown, filters, knights_knaves

#: Two rounds on a small model that learns enough of a small task to be right now and then.
TINY = """
name: tiny
extends: smoke
model:
  architecture:
    {hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4,
     num_key_value_heads: 4}
task_defaults: {countdown: {fewest: 2, most: 2, limit: 9}}
sft_data: {rows: 4800, distinct: 20, early_rare_share: 0.03}
sft: {max_steps: 100, per_device_train_batch_size: 48}
rl_data: {rows: 12, kinds: {both: 1.0, forward: 0.0, reverse: 0.0}}
rl: {max_steps: 8, per_device_train_batch_size: 16, max_completion_length: 24}
rft:
  rounds: 2
  prompts: 8
  samples: 8
  selected: 24
  sft: {max_steps: 6, per_device_train_batch_size: 8, save_steps: 2, logging_steps: 1}
methods:
  rft_entropy: {label: E, family: rft, rft: {select: entropy}}
train: [rft_entropy]
evaluation:
  methods: null
  every: 4
  data:
    - {name: countdown, rows: 4, seed: 1001, kinds: {both: 1.0}}
  samples: 8
  ks: [1, 8]
"""

TEXT = "L 4 + 2 = 6 <end_working_out> <SOLUTION> 4 + 2 </SOLUTION>"


def test_the_rules_of_the_report_by_hand():
    assert filters.refusal(TEXT) is None
    assert filters.refusal(TEXT.replace("</SOLUTION>", "")) == filters.NO_ANSWER
    assert filters.refusal("</SOLUTION> 4 <SOLUTION> 4") == filters.NO_ANSWER
    assert filters.refusal("so <SOLUTION> none </SOLUTION>") == filters.NO_DIGIT
    again = "4 + 2 " * 3 + "<SOLUTION> 6 </SOLUTION>"
    # 10 3-grams of 12 words: "4 + 2" stands there thrice, "+ 2 4" and "2 4 +" twice.
    grams = [tuple(again.split()[i : i + 3]) for i in range(10)]
    assert len(grams) == 10 and len(set(grams)) == 6
    assert filters.refusal(again) == filters.REDUNDANT, "0.4 is above 0.31"
    assert filters.refusal(again, limit=0.4) is None, "at the limit it stays"
    assert filters.ngram_redundancy(["a", "b"]) == 0
    # What follows the first answer is cut before it is judged.
    assert filters.up_to_first_answer(f"{TEXT} and <SOLUTION> 9 </SOLUTION>") == TEXT
    assert filters.up_to_first_answer("no answer") is None


SETTINGS = Rft(rounds=1, prompts=2, samples=4, selected=4, sft={"max_steps": 1})


def candidates():
    """Six correct ones with known means, and ten wrong ones that every score would prefer."""
    values = [(0.1, 1.5), (0.6, 1.0), (0.3, 1.9), (0.5, 1.2), (0.2, 1.8), (0.4, 1.1)]
    right = [Candidate(0, n, (n,), "", True, *row) for n, row in enumerate(values)]
    return right + [Candidate(1, n, (n,), "", False, 9.0, 9.0) for n in range(10)]


@pytest.mark.parametrize(
    ("name", "expected"), [("entropy", {1, 3, 5, 2}), ("branching", {2, 4, 0, 3})]
)
def test_a_selection_takes_the_best_of_the_correct_ones(name, expected):
    chosen = select(candidates(), dataclasses.replace(SETTINGS, select=name), random.Random(1))
    assert {one.number for one in chosen} == expected
    assert all(one.correct for one in chosen), "the wrong ones have better scores, and stay out"


def test_at_random_every_correct_one_has_its_chance_and_no_wrong_one():
    found = Counter()
    for seed in range(600):
        chosen = select(candidates(), SETTINGS, random.Random(seed))
        assert len(chosen) == 4 and all(one.correct for one in chosen)
        found.update(one.number for one in chosen)
    assert set(found) == set(range(6)), "4 of 6: 400 times each, 11.5 the standard deviation"
    assert all(abs(times - 400) < 60 for times in found.values())


def test_noise_is_its_share_of_what_is_selected_also_where_few_are_correct():
    noisy = dataclasses.replace(SETTINGS, selected=8, noise=0.25)
    chosen = select(candidates(), noisy, random.Random(0))
    assert sum(one.correct for one in chosen) == 6 and len(chosen) == 8
    few = [one for one in candidates() if not one.correct or one.number < 3]
    chosen = select(few, noisy, random.Random(0))
    assert sum(one.correct for one in chosen) == 3 and len(chosen) == 4


def test_equal_samples_are_drawn_and_equal_rows_learned_from_in_the_study():
    """12,800 completions by RL and by each rft; SFT draws none, and shows each row once."""
    study = load_profile("study")
    assert study.rl["max_steps"] * study.rl["per_device_train_batch_size"] == 12_800
    keys = [key for key, method in study.methods.items() if method.rft is not None]
    assert len(keys) == 7
    for key in keys:
        one = study.rft_of(key)
        assert one.drawn == (12_800 if study.methods[key].family == "rft" else 0)
        assert one.steps * one.sft["per_device_train_batch_size"] == 100 * 64
        if one.demonstrations:
            assert one.demonstrations["rows"] == one.rounds * one.selected == 100 * 64


def test_rounds_go_through_the_prompts_before_one_returns(profile):
    asked, rft = rl_problems(profile), profile.rft_of("rft_entropy")
    first, second = (prompts_of(asked, rft, 3407, number) for number in range(2))
    assert len(first) == len(second) == 8 and len(asked) == 12
    assert len({p.id for p in first}) == 8 and first[:4] != asked[:4]
    assert {p.id for p in (*first, *second)} == {p.id for p in asked}
    assert prompts_of(asked, rft, 3408, 0) != first
    with pytest.raises(SageError, match=r"lower rft\.prompts"):
        prompts_of(asked[:7], rft, 3407, 0)


def test_a_round_draws_as_rl_does_with_random_numbers_of_its_own(profile):
    own = load_profile(f"{profile.spec}+rl.temperature=0.9+rl.top_p=0.8+rl.top_k=7+rl.min_p=0.02")
    work = SimpleNamespace(profile=own, rft=own.rft_of("rft_entropy"), seed=3407)
    first, second = (rft.Rounds.sampling(work, number) for number in range(2))
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.9, 0.8, 7, 0.02)
    assert (first.max_new_tokens, first.samples) == (24, 8)
    assert len({3407, first.seed, second.seed}) == 3


# --- a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(module_folder):
    (module_folder / "tiny.yaml").write_text(TINY)
    return load_profile(module_folder / "tiny.yaml")


@pytest.fixture(scope="module")
def base(profile):
    forks.finish(*forks.stage(profile, "sft", "sft"))
    return runs.sft_run(profile)


@pytest.fixture(scope="module")
def whole(profile, base):
    """A run that nothing disturbs."""
    run = runs.rl_run(profile, "rft_entropy", 3407)
    forks.finish(*forks.stage(profile, "rl", run.name))
    return run


@pytest.mark.parametrize(
    ("draws", "learns"), [(False, [9]), pytest.param(True, [4, 9], marks=pytest.mark.slow)]
)
def test_a_run_killed_while_it_draws_and_while_it_learns_ends_at_the_very_same_weights(
    profile, base, whole, work_folder, draws, learns
):
    """From the same base, elsewhere. ``learns``: steps in the middle of a round's training."""
    shutil.copytree(base.build, work_folder / "build" / profile.name / "sft")
    shutil.copytree(base.measured, work_folder / "measured" / profile.name / "sft")
    run = runs.rl_run(profile, "rft_entropy", 3407)
    words = forks.stage(profile, "rl", run.name)
    if draws:
        forks.start(*words).kill_at((run.build / "round1" / "samples.jsonl").is_file)
    for step in learns:
        forks.start(*words).kill_at(lambda at=step: len(files.read_lines(run.live_steps)) >= at)
        assert not run.done()
    forks.finish(*words)
    killed = records.load(run.record)
    steps = files.read_lines(run.measured / "steps.jsonl")
    assert [row["step"] for row in steps] == list(range(1, 13)), "no step is lost or doubled"
    of_round = pd.DataFrame(steps[::6])[["reward", "entropy"]]
    exact = files.read_lines(run.measured / "exact.jsonl")
    assert [row["step"] for row in exact] == [0, 6, 12]
    assert killed["drawn"] == 2 * 8 * 8
    tables = [one.measured / "rounds.csv" for one in (run, whole)]
    first, second = (pd.read_csv(table).filter(regex="^(?!seconds)") for table in tables)
    pd.testing.assert_frame_equal(first, second)
    pd.testing.assert_frame_equal(first[["reward", "entropy"]], of_round)
    assert killed["weights"] == whole.weights != records.load(base.record)["weights"]


def test_all_weights_are_trained_on_from_round_to_round_and_prompts_are_not_learned(
    profile, base, tmp_path, monkeypatch
):
    """Settings that TRL reads otherwise: without them it would learn the prompts, too."""
    method = dataclasses.replace(profile.methods["rft_entropy"], lora=False)
    sft = {k: v for k, v in profile.sft.items() if k not in ("completion_only_loss", "max_length")}
    own = dataclasses.replace(profile, methods={"rft_entropy": method}, sft=sft)
    run = dataclasses.replace(runs.rl_run(profile, "rft_entropy", 3407), build=tmp_path / "run")
    work = rft.Rounds(own, run, own.rft_of("rft_entropy"), 3407)
    train_on, trainers = rft.train_on, []
    monkeypatch.setattr(
        rft, "train_on", lambda trainer, *more: (trainers.append(trainer), train_on(trainer, *more))
    )
    work.run_round(0, work.load_policy(0))
    learned = next(iter(trainers[0].get_train_dataloader()))
    prompt = len(loading.encode(work.tokenizer, rl_problems(profile)[0].question))
    assert (learned["labels"][:, : prompt - 2] == -100).all(), "prompts of two digits differ little"
    assert (learned["labels"] != -100).any()
    second = work.load_policy(1)
    after, before = (dict(m.named_parameters()) for m in (second, work.load_policy(0)))
    assert any((after[name] != before[name]).any() for name in after)
    for name, weight in trainers[0].model.named_parameters():
        assert (after[name] == weight).all(), name
    assert work.run_round(1, second)["drawn"] == 64
    seeds = [(trainer.args.seed, trainer.args.data_seed) for trainer in trainers]
    assert seeds == [(3407, 3407), (3408, 3408)]
    assert trainers[0].args.max_length == profile.model.max_seq_length


SHOWN = {"seed": 9, "rows": 48, "early_rare_share": None}


def test_demonstrations_are_the_rows_of_the_changed_data_each_once(profile, base):
    run, settings = runs.rl_run(profile, "rft_entropy", 3407), profile.rft_of("rft_entropy")
    settings = dataclasses.replace(settings, demonstrations=SHOWN)
    work = rft.Rounds(profile, run, settings, 3407)
    told = [work.demonstrations(number) for number in range(2)]
    change = "sft_data.early_rare_share=null+sft_data.seed=9+sft_data.rows=48"
    changed = sft_rows(load_profile(f"{profile.spec}+{change}"), lambda text: len(text.split()))
    assert [row for rows, _ in told for row in rows] == changed
    assert changed != sft_rows(profile, lambda text: len(text.split()))[:48]
    assert all(said["selected"] == 24 and said["drawn"] == 0 for _, said in told)
    few = rft.Rounds(profile, run, dataclasses.replace(settings, selected=25), 3407)
    with pytest.raises(SageError, match="asks for 50 demonstrations and sft_data has 48"):
        few.demonstrations(0)


def test_a_run_is_made_again_where_its_demonstrations_or_what_is_right_change(profile):
    def fingerprint(shown, reward="accuracy"):
        method = profile.methods["rft_entropy"]
        chosen = dataclasses.replace(method, rft={"demonstrations": shown}, reward=reward)
        own = dataclasses.replace(profile, methods={"rft_entropy": chosen})
        return runs.rl_run(own, "rft_entropy", 3407).fingerprint

    others = [None, SHOWN | {"seed": 8}, SHOWN | {"rows": 50}, SHOWN | {"aimless_share": 0.5}]
    found = {fingerprint(shown) for shown in (SHOWN, *others)} | {fingerprint(SHOWN, "valid")}
    assert len(found) == 6
    assert fingerprint(dict(reversed(SHOWN.items()))) == fingerprint(SHOWN)


def test_valid_work_is_asked_for_only_where_steps_are_checked(profile, base, monkeypatch):
    puzzles = knights_knaves.KnightsKnaves(people=2).problems(2, 1)
    monkeypatch.setattr(rft.problems, "rl_problems", lambda profile: puzzles)
    settings = profile.rft_of("rft_entropy")
    for reward in ("accuracy", "valid"):
        method = dataclasses.replace(profile.methods["rft_entropy"], reward=reward)
        own = dataclasses.replace(profile, methods={"rft_entropy": method})
        run = runs.rl_run(profile, "rft_entropy", 3407)
        if reward == "accuracy":
            rft.Rounds(own, run, settings, 3407)
            continue
        with pytest.raises(SageError, match="a task whose steps are checked"):
            rft.Rounds(own, run, settings, 3407)


@pytest.mark.parametrize(("reward", "right"), [("accuracy", 24), ("valid", 16)])
def test_a_planted_wrong_completion_is_never_learned_from(
    profile, base, tmp_path, monkeypatch, reward, right
):
    """Samples of which we know what is wrong: what reaches SFTTrainer's rows is read back."""
    method = dataclasses.replace(profile.methods["rft_entropy"], reward=reward)
    profile = dataclasses.replace(profile, methods={"rft_entropy": method})
    run = runs.rl_run(profile, "rft_entropy", 3407)
    settings = profile.rft_of("rft_entropy")
    work = rft.Rounds(profile, run, settings, 3407)
    model, tokenizer = loading.load(profile.model, base.model)
    asked = rl_problems(profile)

    def planted(paths, posed, samples):
        rows = []
        for problem in posed:
            _, working, answer = countdown.Countdown.completions(problem)[0]
            worked = f"{working} <end_working_out> <SOLUTION> {answer} </SOLUTION>"
            wrong = f"{working} <end_working_out> <SOLUTION> 9 - 9 - 9 </SOLUTION>"
            # The first answer counts: a right one that comes later saves nothing.
            late = f"{wrong} {worked}"
            unsound = f"L <end_working_out> <SOLUTION> {answer} </SOLUTION>"
            texts = [worked, wrong, late, worked + " 7 7", "no answer", unsound]
            texts += [wrong] * (samples - len(texts))
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            rows.append({"completions": texts, "ids": ids, "finished": [True] * samples})
        return rows

    monkeypatch.setattr(sampling, "sample", lambda *a, **k: None)
    monkeypatch.setattr(sampling, "collect", planted)
    learned, said = work.policy_samples(0, model)
    assert said["drawn"] == 64 and said["correct"] == said["eligible"] == right
    assert said["selected"] == right and said["wrong"] == 0 and said["no answer"] == 8
    starts, entropies, lengths = [row["completion_mask"].index(1) for row in learned], [], []
    for row, start in zip(learned, starts, strict=True):
        with torch.no_grad():
            pi = model(torch.tensor([row["input_ids"]])).logits[0, start - 1 : -1].softmax(-1)
        entropies.append(float(-(pi * pi.log()).sum(-1).mean()))
        lengths.append(len(pi))
    means = {f"{name} entropy": sum(entropies) / right for name in ("eligible", "selected")}
    means |= {f"{name} tokens": sum(lengths) / right for name in ("eligible", "selected")}
    # "worked" stands there twice, once with more behind its answer.
    counts = {"reward": right / 64, "distinct": right - 8}
    assert {k: said[k] for k in means | counts} == pytest.approx(means | counts, rel=1e-4)
    strict = dataclasses.replace(settings, redundancy=-0.1)  # refuses whatever has an answer
    samples = planted(None, asked[:8], 8)
    refused = rft.Rounds(profile, run, strict, 3407).candidates(model, asked[:8], samples)[1]
    assert refused == {"redundant": 8 * 7, "no answer": 8}
    for row in learned:
        ids = row["input_ids"][row["completion_mask"].index(1) :]
        assert ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert "9 - 9 - 9" not in text and text.endswith("</SOLUTION>"), text
        assert reward == "accuracy" or not text.startswith("L <")
        asked_for = tokenizer.decode(row["input_ids"][: row["completion_mask"].index(1)])
        assert any(problem.question in asked_for for problem in asked)
