"""Arms of the families rivals and shapers: their twins by hand, planted runs, formulas against the
library's classes."""

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.report import (
    arm_figures,
    arm_tables,
    bases,
    choice_tables,
    exact_tables,
    front_tables,
    measured,
    panels,
    rival_tables,
    shaping_figures,
    shaping_tables,
    style,
    training_figures,
    verdict,
)
from sage_lib.report.verdict import AGREES, DISAGREES, MISSING, OPEN

UPDATES = ("clip_higher", "clip_cov", "kl_cov")
VARIED = (
    "entropy_bonus",
    "top_entropy_tokens",
    "entropy_advantage",
    "negative_samples",
    "negative_only",
    "pass_at_k",
)


@pytest.fixture(scope="module")
def countdown():
    return load_profile("countdown")


# --- which arm is compared with what --------------------------------------------------------------


def test_an_arms_twin_is_grpo_with_its_beta_and_its_updates(countdown):
    expected = {"grpo_updates": None, "reference_reset": "grpo"}
    expected |= dict.fromkeys(UPDATES, "grpo_updates")
    expected |= {f"{name}_beta0.0": "grpo_no_kl" for name in VARIED}
    expected |= {f"{name}_beta1.0": "grpo" for name in VARIED}
    guided = ("entropy_advantage", "negative_samples", "pass_at_k")
    expected |= {f"{name}_branch": "grpo" for name in guided}
    rivals = arm_tables.names(countdown, rival_tables.FAMILY)
    assert {key: arm_tables.twin(countdown, key) for key in rivals} == expected
    shapers = arm_tables.names(countdown, shaping_tables.FAMILY)
    assert {arm_tables.twin(countdown, key) for key in shapers} == {"grpo"}
    assert arm_tables.twin(countdown, "branch_strong") == "grpo"
    assert arm_tables.twin(countdown, "early_branch") == "early", "its own reference"
    assert rival_tables.guided(countdown) == [
        ("entropy_advantage_branch", "entropy_advantage_beta1.0"),
        ("negative_samples_branch", "negative_samples_beta1.0"),
        ("pass_at_k_branch", "pass_at_k_beta1.0"),
    ]


def test_a_setting_in_words(countdown):
    said = {key: arm_tables.setting(countdown, key) for key in ("grpo", "clip_higher", "kl_cov")}
    assert said["grpo"] == "beta 1"
    assert said["clip_higher"] == "beta 0; 4 updates a batch; epsilon_high 0.28"
    assert said["kl_cov"] == "beta 0; 4 updates a batch; kl_cov, share 0.02"
    assert arm_tables.setting(countdown, "reference_reset") == "beta 1; reset each 100 steps"


def test_every_rival_has_its_equation_and_source_and_is_asked_at_its_own_beta(countdown):
    keys = arm_tables.names(countdown, rival_tables.FAMILY)
    assert all(rival_tables.rival(key) is not None for key in keys)
    assert rival_tables.rival("grpo") is None and rival_tables.rival("mine_beta0.5") is None
    claims = [*rival_tables.claims(countdown), *rival_tables.orthogonality(countdown)]
    compared = [one for claim in claims for one in claim.comparisons]
    guided = {key for key, _ in rival_tables.guided(countdown)}
    plain = {"grpo_updates", *guided}
    assert {one.method for one in compared} == {*keys} - {"grpo_updates"}
    assert {one.method for claim in claims[: -len(guided)] for one in claim.comparisons} == {
        *keys
    } - plain
    for one in compared:
        betas = [front_tables.beta_of(countdown, key) for key in (one.method, one.against)]
        assert betas[0] == betas[1], one
    origins = rival_tables.origins(countdown).set_index("method")
    assert origins["values"].str.len().gt(0).all(), "every rival's values say whose they are"
    assert set(origins.index) == {key for key in keys if "_beta1" not in key} - guided
    assert "chosen" in origins.loc["kl_cov", "values"]
    for claim in shaping_tables.CLAIMS:
        for one in claim.comparisons:
            assert {one.method, one.against} <= {*countdown.methods}
            assert one.metric in {*verdict.MARGINS, *verdict.LOGGED}


# --- planted runs ---------------------------------------------------------------------------------


@pytest.fixture
def plant(monkeypatch, countdown):
    """Exact values and step logs of methods: (pass@1, pass@256, entropy) and their seeds."""

    def make(points, seeds=(3407, 3408, 3409, 3410), own_seeds=None):
        own_seeds = own_seeds or {}
        methods, found, logs = {}, {}, []
        for key, (first, last, entropy) in points.items():
            own = [None] if key == BASE else list(own_seeds.get(key, seeds))
            rng = np.random.default_rng(sum(map(ord, key)))
            noise = rng.normal(0, 0.001, (len(own), 30, 2))
            values = np.array([first, last]) + noise - noise.mean(axis=(0, 1))
            found[key] = exact_tables.Exact(key, values, noise[..., 0], ["both"] * 30, own)
            if key == BASE:
                continue
            method = countdown.methods[key]
            methods[key] = dataclasses.replace(method, seeds=tuple(own))
            steps = 40 if method.rl.get("max_steps") == 1200 else 10
            for seed in own:
                for step in range(1, steps + 1):
                    at_end = entropy + 1e-5 * (seed % 7) if step > 0.8 * steps else 9.0
                    row = {"method": key, "seed": seed, "step": step, "entropy": at_end}
                    row |= {"completions/mean_length": 31.0, "grad_norm": 0.1}
                    logs.append({**row, "reward": 0.4})
        monkeypatch.setattr(exact_tables, "by_method", lambda *a, **k: found)
        monkeypatch.setattr(exact_tables, "evaluated", lambda profile: set(found))
        monkeypatch.setattr(measured, "training", lambda profile: pd.DataFrame(logs))
        return dataclasses.replace(countdown, methods=methods)

    return make


GRPO = {
    BASE: (0.30, 0.86, 0.0),
    "grpo": (0.32, 0.84, 0.045),
    "grpo_no_kl": (0.34, 0.78, 0.040),
}


def test_one_seed_decides_nothing_and_four_do(plant):
    points = {**GRPO, "ppl_positive": (0.34, 0.86, 0.060)}
    many = plant(points)
    outcomes = verdict.claims(many, shaping_tables.CLAIMS).set_index("claim")["outcome"]
    raised = ["PPL shaping beats GRPO", "PPL shaping, pass@k", "entropy stays higher, PPL"]
    assert set(outcomes[raised]) == {AGREES}
    assert outcomes["either bonus raises entropy"] == MISSING
    assert outcomes["longer responses"] == OPEN, "lengths cannot differ here"
    one = plant(points, own_seeds={"ppl_positive": (3407,)})
    table = arm_tables.comparisons(one, shaping_tables.CLAIMS)
    asked = table[(table["method"] == "ppl_positive") & (table["against"] == "grpo")]
    assert set(asked["outcome"]) == {OPEN} and set(asked["seeds"]) == {1}
    over = dict(zip(asked["metric"], asked["interval over"], strict=True))
    assert over["pass@1"] == "problems alone: 1 seed" and over["entropy"] == "none: 1 seed"
    rows = arm_tables.table(one, shaping_tables.FAMILY).set_index("method")
    assert rows.loc["ppl_positive", "interval over"] == "problems alone: 1 seed"
    assert rows.loc["ppl_negative", "interval over"] == "not run"
    assert ": GRPO + PPL. " in arm_tables.few_seeds(one, ["grpo", "ppl_positive"])
    assert arm_tables.few_seeds(many, ["grpo", "ppl_positive"]) == ""


def test_a_logged_metric_is_that_of_the_last_fifth_with_the_t_interval_of_pairs(plant, monkeypatch):
    profile = plant({**GRPO, "position_plus": (0.32, 0.84, 0.050)})
    found = arm_tables.differences(profile, [("position_plus", "grpo")]).set_index("metric")
    assert found.loc["entropy", "difference"] == pytest.approx(0.005), "not the 9.0 before"
    rng = np.random.default_rng(0)
    noisy = measured.training(profile)
    noisy["entropy"] += rng.normal(0, 0.01, len(noisy))
    monkeypatch.setattr(measured, "training", lambda profile: noisy)
    found = arm_tables.differences(profile, [("position_plus", "grpo")]).set_index("metric")
    ends = noisy[noisy["step"] > 8].groupby(["method", "seed"])["entropy"].mean()
    test = stats.ttest_rel(ends["position_plus"], ends["grpo"]).confidence_interval(0.95)
    assert tuple(found.loc["entropy", ["low", "high"]]) == pytest.approx(tuple(test))


def test_a_method_that_was_not_run_has_a_row_too(plant):
    profile = plant({**GRPO, "grpo_updates": (0.3, 0.8, 0.04)})
    rows = rival_tables.table(profile).set_index("method")
    assert rows.loc["grpo_updates", "seeds"] == 4
    assert rows.loc["clip_higher", "seeds"] == 0 and rows.loc["clip_higher", "source"]


def test_rivals_that_fell_below_their_base_are_shown_run_by_run(monkeypatch):
    """Of both bases, each beside its own; with GRPO at their beta, and not with another."""
    profile = load_profile("countdown", "published")
    [second] = bases.others(profile)
    planted = {
        profile.name: {
            ("base", "sft"): (0.30, 0.86),
            ("negative_samples_beta0.0", "negative_samples_beta0.0-s3407"): (0.31, 0.20),
            ("grpo_no_kl", "grpo_no_kl-s3407"): (0.20, 0.20),
            ("negative_samples_beta0.0", "negative_samples_beta0.0-s3408"): (0.0, 0.0),
            ("pass_at_k_beta0.0", "pass_at_k_beta0.0-s3407"): (0.29, 0.90),
            ("clip_higher", "clip_higher-s3407"): (0.31, 0.90),
            ("pass_at_k_beta1.0", "pass_at_k_beta1.0-s3407"): (0.31, 0.80),
            ("grpo", "grpo-s3407"): (0.1, 0.1),
        },
        second.name: {
            ("base", "sft"): (0.20, 0.10),
            ("negative_samples_beta0.0", "negative_samples_beta0.0-s3410"): (0.21, 0.20),
            ("pass_at_k_beta0.0", "pass_at_k_beta0.0-s3410"): (0.1, 0.05),
        },
    }

    def exact(one):
        return pd.DataFrame(
            [
                {"method": method, "run": run, "dataset": name, "pass@1": few, "pass@256": many}
                for (method, run), (few, many) in planted[one.name].items()
                for name in ("both", "Avg")
            ]
        )

    monkeypatch.setattr(exact_tables, "exact", exact)
    found = rival_tables.fallen(profile, [second])
    key, other = "negative_samples_beta0.0", "pass_at_k_beta0.0"
    assert [tuple(row) for row in found[["base", "run", "ended"]].to_numpy()] == [
        ("first base", "sft", ""),
        ("first base", "grpo_no_kl-s3407", "below"),
        ("first base", f"{key}-s3407", ""),
        ("first base", f"{key}-s3408", "below"),
        ("first base", f"{other}-s3407", ""),
        ("second base", "sft", ""),
        ("second base", f"{key}-s3410", "above"),
        ("second base", f"{other}-s3410", "below"),
    ]
    ended = list(found["collapsed"])
    assert ended[3].startswith("collapsed at step 231")
    assert not any(one for one in ended if one != ended[3])
    assert rival_tables.fallen_takeaway(profile, found).splitlines() == [
        f"{whose} above their base at pass@1 and pass@256"
        for whose in (
            "GRPO w/o KL: of 1 run 1 below and 0",
            "W-REINFORCE, beta 0.0: of 3 runs 1 below and 1",
            "Pass@4 training, beta 0.0: of 2 runs 1 below and 0",
        )
    ]
    assert "no rival" in rival_tables.fallen_takeaway(profile, found[:1])
    assert set(rival_tables.fallen(profile)["base"]) == {"first base"}


def test_differences_are_to_the_twin_and_drawn_with_their_seeds(plant):
    profile = plant(
        {**GRPO, "pass_at_k_beta0.0": (0.36, 0.80, 0.05), "pass_at_k_beta1.0": (0.33, 0.85, 0.05)},
        own_seeds={"pass_at_k_beta1.0": (3407,)},
    )
    pairs = arm_tables.twins(profile, rival_tables.FAMILY)
    assert pairs == [("pass_at_k_beta0.0", "grpo_no_kl"), ("pass_at_k_beta1.0", "grpo")]
    found = arm_tables.differences(profile, pairs).set_index(["method", "metric"])["difference"]
    assert found["pass_at_k_beta0.0", "pass@256"] == pytest.approx(0.02)
    assert found["pass_at_k_beta1.0", "pass@256"] == pytest.approx(0.01, abs=1e-3)
    drawn = arm_figures.differences(profile, arm_tables.differences(profile, pairs))
    labels = [text.get_text() for text in drawn.axes[0].get_yticklabels()]
    assert labels[0].endswith("(4 seeds)") and labels[1].endswith("(1 seed)")
    assert "of one seed over problems alone" in style.described(drawn)
    drawn = arm_figures.differences(profile, arm_tables.differences(profile, []))
    assert "none of these arms was run" in drawn.axes[0].texts[0].get_text()
    plt.close("all")


def test_what_was_not_run_is_named(plant):
    some = plant({**GRPO, "ppl_positive": (0.3, 0.8, 0.04)})
    assert "1 of the 6 methods" in arm_tables.missing(some, shaping_tables.FAMILY)
    assert "GRPO + position, early tokens;" in arm_tables.missing(some, shaping_tables.FAMILY)
    none = arm_tables.missing(plant(GRPO), rival_tables.FAMILY)
    assert "0 of the 20 methods" in none and "Not yet" not in none
    assert "no methods of the family" in arm_tables.missing(load_profile("smoke"), "rivals")
    narrow = arm_tables.narrowed(some, shaping_tables.FAMILY)
    assert list(narrow.methods) == ["grpo", "grpo_no_kl", "ppl_positive"]
    assert narrow.reference == "grpo"


def test_curves_are_drawn_of_the_seeds_that_all_have(plant):
    profile = plant(
        {**GRPO, "ppl_positive": (0.3, 0.8, 0.04)}, own_seeds={"ppl_positive": (3408, 3409)}
    )
    same = arm_tables.at_common_seeds(profile, ["grpo", "ppl_positive"])
    assert [same.seeds_of(key) for key in same.methods] == [(3408, 3409)] * 2
    assert same.seeds == (3408, 3409)
    apart = plant({**GRPO, "ppl_positive": (0.3, 0.8, 0.04)}, own_seeds={"ppl_positive": (1,)})
    assert arm_tables.at_common_seeds(apart, ["grpo", "ppl_positive"]) == apart


def test_the_best_rivals_are_at_a_beta_where_a_guide_acts_and_have_seeds(plant):
    keys = ["entropy_bonus_beta1.0", "reference_reset", "pass_at_k_beta1.0", "pass_at_k_beta0.0"]
    keys += ["negative_only_beta1.0", "pass_at_k_branch"]
    profile = plant({**GRPO, **dict.fromkeys(keys, (0.33, 0.85, 0.04))})
    outside = pd.DataFrame({"method": keys, "excess": [0.1, 0.3, 0.2, 0.9, 0.8, 0.7]})
    outside["seeds"] = [4, 4, 4, 4, 1, 4]
    assert rival_tables.best(profile, outside) == ["reference_reset", "pass_at_k_beta1.0"]
    lines = "\n".join(rival_tables.combined(profile, outside))
    assert "Pass@4 training, beta 1.0; with a guide it is Pass@4 training + Branch" in lines
    assert "GRPO + reference reset; with a guide it is not in the profile yet" in lines
    few = rival_tables.combined(profile, outside.assign(seeds=1))
    assert "to be chosen when 3 seeds" in few[1] and len(few) == 2


def test_takeaways_say_what_the_tables_say(plant):
    profile = plant({**GRPO, "ppl_positive": (0.30, 0.86, 0.060)})
    claims = verdict.claims(profile, shaping_tables.CLAIMS)
    table = arm_tables.table(profile, shaping_tables.FAMILY)
    lines = "\n".join(shaping_tables.takeaways(profile, table, claims))
    assert "GRPO + PPL (4 seeds): pass@1 0.300, pass@256 0.860" in lines
    assert f"{DISAGREES}: PPL shaping beats GRPO" in lines
    profile = plant({**GRPO, "negative_only_beta1.0": (0.33, 0.85, 0.04)})
    outside = front_tables.outside(profile)
    said = verdict.claims(profile, rival_tables.claims(profile))
    guide = verdict.claims(profile, rival_tables.orthogonality(profile))
    lines = "\n".join(rival_tables.takeaways(profile, outside, said, guide))
    assert "what its source says, agrees, 1 method: NSR, beta 1.0" in lines
    assert "orthogonal to SAGE, not run, 3 methods" in lines


# --- formulas, lengths, reported numbers, looks ---------------------------------------------------


def test_the_drawn_bonus_is_that_of_the_library():
    import torch

    from sage_lib.algorithm.advantages import BatchTokens, PositionBonus

    zero, ones = torch.zeros(1, 21), torch.ones(1, 21)
    for direction, shift in shaping_figures.RAMPS:
        batch = BatchTokens(ones, zero, zero, zero, ones.long(), 0.0, torch.Generator())
        shaper = PositionBonus(gamma=1.0, direction=direction, shift=shift)
        found = shaper.shape(batch).advantages[0] - 1
        expected = shaping_figures.bonus(np.linspace(0, 1, 21), direction, shift)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert len(shaping_figures.weights().axes) == 2
    plt.close("all")


def test_a_valid_completions_length_follows_from_its_digits(countdown):
    data = tuple(dataclasses.replace(one, rows=8) for one in countdown.evaluation.data)
    evaluation = dataclasses.replace(countdown.evaluation, data=data)
    small = dataclasses.replace(countdown, evaluation=evaluation)
    table = shaping_tables.lengths(small)
    for row in table.to_dict("records"):
        n = row["digits"]
        steps, commas, answer = 5 * (n - 1), n - 2, n + (n - 1) + 2 * (n - 2)
        words = 4 + 1 + steps + commas + answer  # four markers, the way's letter
        assert row["shortest"] == row["longest"] == words
    assert table["problems"].sum() > 8


def test_words_are_tokens_of_countdowns_vocabulary():
    from sage_lib.policy import tiny_qwen
    from sage_lib.tasks.prompts import answer_turn

    text = answer_turn(" L 2 + 5 = 7 , 7 - 3 = 4 ", " ( 2 + 5 ) - 3 ")
    tokens = tiny_qwen.tokenizer(99, 96)(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == 23, "as the table has it for three digits"


def test_reported_gains_by_hand():
    found = shaping_tables.as_reported()
    assert found.loc[("GRPO+PPL", "avg@8"), "Qwen2.5-Math-7B"] == pytest.approx(54.21 - 51.64)
    assert found.loc[("GRPO+POSITION", "maj@8"), "Qwen2.5-7B"] == pytest.approx(49.82 - 47.38)
    assert found.loc[("GRPO+LOCATION", "pass@k"), "Qwen2.5-Math-7B"] == pytest.approx(57.67 - 56.44)
    assert len(found) == 6


def test_arms_of_a_figure_look_different_and_others_as_before(countdown):
    for family in (rival_tables.FAMILY, shaping_tables.FAMILY):
        keys = ["grpo", "grpo_no_kl", *arm_tables.names(countdown, family)]
        looks = {(style.look(key)["color"], style.look(key)["marker"]) for key in keys}
        assert len(looks) == len(keys)
    mine = style.look("rft_noise")
    assert (mine["color"], mine["marker"]) not in {
        (style.look(key)["color"], style.look(key)["marker"]) for key in style._SHIPPED
    }
    assert set(style._OF_THE_GRID) <= set(countdown.methods)


def test_chosen_training_curves_stand_in_one_row(plant, countdown):
    profile = plant({**GRPO, "ppl_positive": (0.3, 0.8, 0.04)})
    columns = ("reward", "entropy", "completions/mean_length")
    drawn = training_figures.training_curves(profile, ["grpo", "ppl_positive"], *columns)
    assert [axis.get_ylabel() for axis in drawn.axes] == [
        training_figures.PANELS[column] for column in columns
    ]
    assert all(len(axis.lines) == 2 for axis in drawn.axes)
    plt.close("all")


# --- how a learning rate was chosen ---------------------------------------------------------------


def test_a_learning_rate_is_chosen_among_runs_that_differ_in_it_alone(countdown):
    updates = choice_tables.candidates(countdown, "choice_updates")
    kept = {key for key in updates.values() if not key.startswith("choice_")}
    assert kept == {"grpo_updates"} and len(updates) == 4 and list(updates) == sorted(updates)
    assert choice_tables.candidates(countdown, "choice")[1e-3] == "grpo_front_beta0.05"
    for key in UPDATES:
        assert (
            countdown.methods[key].rl["learning_rate"]
            == countdown.methods["grpo_updates"].rl["learning_rate"]
        ), "no rival has another rate than its control"


def test_rates_are_compared_at_the_seeds_that_all_of_them_have(plant, monkeypatch):
    keys = ["grpo_front_beta0.05", "choice_learning_rate0.0003", "choice_learning_rate0.002"]
    seeds = {keys[0]: (3407, 3408, 3409)} | dict.fromkeys(keys[1:], (3407, 3408))
    alone = plant(dict.fromkeys(keys, (0.3, 0.8, 0.04)), own_seeds=seeds)
    rewards = {keys[0]: (0.5, 0.6, 9.0), keys[1]: (0.7, 0.1), keys[2]: (0.2, 0.2)}
    logs = [
        {"method": key, "seed": 3407 + place, "step": step, "reward": value}
        for key, values in rewards.items()
        for place, value in enumerate(values)
        for step in (9, 10)
    ]
    asked = []
    points = front_tables.points

    def at(profile, *rest):
        asked.append({key: profile.seeds_of(key) for key in profile.methods})
        found = points(profile, *rest)
        return found.assign(seeds=2)

    monkeypatch.setattr(front_tables, "points", at)
    monkeypatch.setattr(
        measured,
        "training",
        lambda profile: pd.DataFrame(
            [row for row in logs if row["seed"] in profile.seeds_of(row["method"])]
        ),
    )
    table = choice_tables.table(alone, "choice").set_index("learning rate")
    assert asked == [dict.fromkeys(keys, (3407, 3408))], "the third seed of one is left out"
    assert table["reward"].to_dict() == pytest.approx({3e-4: 0.4, 1e-3: 0.55, 2e-3: 0.2})
    assert list(table.index[table["chosen"] == "chosen"]) == [1e-3]
    said = choice_tables.takeaway(table.reset_index())
    assert "reward at 0.001" in said and "0.001 was taken" in said


def test_a_row_far_off_is_a_number_at_the_edge_and_does_not_squeeze_the_others():
    rows = pd.DataFrame({"mean": [0.01, -0.02, 0.015, -0.8], "low": [0.0, -0.03, 0.01, -0.9]})
    rows["high"] = 2 * rows["mean"] - rows["low"]
    axis = plt.figure().add_subplot()
    assert panels.keep_near(axis, rows, ("mean", "low", "high")) == 1
    low, high = axis.get_xlim()
    assert -0.04 < low < -0.03 and 0.02 < high < 0.03, "all others fill the panel"
    assert [text.get_text() for text in axis.texts] == ["-0.8 [-0.9, -0.7]"]
    wide = pd.DataFrame({"mean": [-0.06], "low": [-0.5], "high": [0.4]})
    axis = plt.figure().add_subplot()
    assert panels.keep_near(axis, pd.concat([rows, rows[:3], wide]), ("mean", "low", "high")) == 2
    said = [text.get_text() for text in axis.texts]
    assert said == ["-0.8 [-0.9, -0.7]", "-0.06 [-0.5, +0.4]"]  # its bar alone reaches far
    out = pd.DataFrame({"mean": [0.01], "low": [0.0], "high": [0.5]})
    named = pd.concat([rows, rows[:3], out]).assign(method="grpo")
    axis = plt.figure().add_subplot()
    panels.keep_near(axis, named, ("mean", "low", "high"))
    [arrow] = axis.lines
    assert (arrow.get_marker(), arrow.get_xydata().tolist()) == (">", [[axis.get_xlim()[1], 7]])
    assert panels.at_the_edge(axis, [0.0, np.nan, 0.9], 0.3, "x {}") == 1
    assert axis.texts[-1].get_text() == "x +0.9" and axis.texts[-1].xy[1] == 2.3
    unknown = pd.DataFrame({"mean": [0.0], "low": [np.nan], "high": [np.nan]})
    axis = plt.figure().add_subplot()
    panels.keep_near(axis, pd.concat([rows, unknown]), ("mean", "low", "high"))
    assert axis.get_xlim() == (low, high), "a row without an interval changes nothing"
    axis = plt.figure().add_subplot()
    assert panels.keep_near(axis, rows[:3], ("mean", "low", "high")) == 0 and not axis.texts
    plt.close("all")


def test_a_line_far_above_the_others_leaves_its_panel():
    _, axis = plt.subplots()
    for height in (0.04, 0.05, 0.05, 0.06, 2.5):
        axis.plot([0, 1], [0.03, height])
    assert panels.keep_lines_near(axis)
    low, high = axis.get_ylim()
    assert 0.02 < low < 0.03 and 0.06 < high < 0.07
    _, axis = plt.subplots()
    axis.plot([0, 1], [0.03, 0.05])
    assert not panels.keep_lines_near(axis)
    plt.close("all")


def test_runs_of_other_lengths_stand_beside_each_other_by_their_share(plant):
    own = {"max_steps": 600}
    profile = plant({**GRPO, "ppl_positive": (0.3, 0.8, 0.04)})
    assert "RL step" in {axis.get_xlabel() for axis in _curves(profile)}
    longer = dataclasses.replace(profile.methods["ppl_positive"], rl=own)
    profile = dataclasses.replace(profile, methods={**profile.methods, "ppl_positive": longer})
    assert {axis.get_xlabel() for axis in _curves(profile)} == {"share of the run"}
    plt.close("all")


def _curves(profile):
    drawn = training_figures.training_curves(profile, ["grpo", "ppl_positive"], "reward")
    return [axis for axis in drawn.axes if axis.axison]
