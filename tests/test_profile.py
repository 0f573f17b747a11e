"""Profiles: every shipped one resolves and names its sources; they extend each other; every way to
get one wrong is told in one sentence; and a stage is made again only when what made it has
changed."""

import json
import re

import pytest
from ruamel.yaml import YAML

from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import digest, load_profile, profile_names
from sage_lib.files import write_json
from sage_lib.pipeline import needs, plan
from sage_lib.report import reported
from sage_lib.tasks.table import TASKS

#: Endings of settings that need no source: bookkeeping, and what has no counterpart in the paper.
PLUMBING = (
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "fp16",
    "seed",
    "max_steps",
    "delta",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "people",
    "label",
    "family",
    "None",
    "data_seed",
)


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_resolve_and_their_keys_are_known_to_trl_and_peft(name):
    from sage_lib.training.callbacks import check_sections

    profile = load_profile(name)
    check_sections(profile)
    needed = {"loss_type", "beta", "use_bias_correction_kl", "epsilon", "epsilon_high"}
    needed |= {"temperature", "min_p", "top_p", "top_k", "scale_rewards", "bf16", "seed"}
    assert needed <= set(profile.rl), "nothing that matters is left to a library's default"
    assert profile.rl["use_bias_correction_kl"] is False, "every reproduction uses the paper's k3"


def test_paper_profile_is_tables_7_and_8():
    p = load_profile("paper")
    assert (p.sft_lora["r"], p.sft["num_train_epochs"], p.sft["warmup_steps"]) == (8, 2, 5)
    assert p.sft["per_device_train_batch_size"] == 1
    assert (p.rl["max_steps"], p.rl["num_generations"], p.rl["temperature"]) == (1000, 8, 1.0)
    assert (p.rl["min_p"], p.rl["epsilon"], p.seeds[0], p.rl_data.rows) == (0.01, 0.2, 3407, 2000)
    branch = p.methods["grpo_branch"].guide
    assert (branch["threshold"], branch["ratio"], branch["low"], branch["high"]) == (
        1.2,
        0.3,
        0.6,
        1.4,
    )
    assert p.rl["per_device_train_batch_size"] * p.rl["gradient_accumulation_steps"] == 64


#: Places as they are written beside values and in fidelity.csv.
PLACE = re.compile(
    r"\b(?:Table|Section|Figure|eq\.) \d+(?:\.\d+)*|\bAppendix [A-Z](?:\.\d+)?", re.ASCII
)
#: Values of the paper profile without a line in fidelity.csv: see PLUMBING.
UNCOMPARED = ("name", "description", "model.architecture.", "compute.")


def test_every_value_of_the_paper_profile_is_that_of_the_fidelity_table():
    values = load_profile("paper_all").flat()
    stated = {}
    for line in reported.fidelity().itertuples():
        for key, text in reported.stated_values(line.here).items():
            assert key in values, f"{line.setting}: the profile paper_all has no {key}"
            assert YAML(typ="safe").load(text) == values[key], f"{line.setting}: {key}"
            stated[key] = line
    left = [key for key in values if key not in stated and not key.startswith(UNCOMPARED)]
    puzzles = [key for key in left if re.match(r"evaluation\.data\.([3-9]|10)\.", key)]
    off = [key for key in left if values[key] is None]
    unsaid = set(left) - set(puzzles) - set(off)
    assert [key for key in sorted(unsaid) if not key.endswith(PLUMBING)] == []


def test_a_comment_above_a_section_is_not_that_of_the_line_before(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nextends: smoke\nrl:\n  beta: 0.2  # mine\n  save_steps: 7\n\n"
        "# What follows is about seeds.\nseeds: [1]\n"
    )
    beside = plan.settings_table(load_profile(tmp_path / "mine.yaml")).set_index("setting")[
        "source"
    ]
    assert beside["rl.beta"] == "mine"
    assert "seeds" not in beside["rl.save_steps"]


def test_what_stands_beside_a_value_of_the_paper_profile_agrees_with_the_fidelity_table():
    """An edit of a comment in paper_all.yaml, or of a line of the table, fails without the
    other."""
    beside = plan.settings_table(load_profile("paper_all")).set_index("setting")["source"]
    told = {}
    for line in reported.fidelity().itertuples():
        followed = line.why.split(":")[0]
        for key in reported.stated_values(line.here):
            comment, where = beside[key], f"{line.setting}: {key}: {beside[key]}"
            if followed in ("both", "paper"):
                assert set(PLACE.findall(comment)) & set(PLACE.findall(line.paper)), where
            if followed == "code" or (followed == "paper" and line.code != reported.NOTHING):
                assert "the authors' code" in comment, where
            if followed == "neither":
                assert "neither" in comment, where
            assert comment.startswith("chosen") == (followed == "chosen"), where
            told.setdefault(comment, set()).update(PLACE.findall(" ".join(line[1:])))
    for comment, places in told.items():
        assert set(PLACE.findall(comment)) <= places, comment
    chosen = beside[beside.str.startswith("chosen") & ~beside.index.str.endswith(PLUMBING)]
    assert set(chosen) <= set(told), "chosen stands only where the table says so"


def test_inherited_values_keep_their_source_and_replaced_ones_lose_it():
    smoke = load_profile("smoke")
    assert smoke.sources["rl.min_p"] == "Table 8: min-p 0.01", "from paper_all, through laptop"
    assert smoke.rl["min_p"] == 0.01
    assert smoke.sources["rl.learning_rate"].startswith("a rank-8 adapter")
    assert smoke.rl["bf16"] is False and not smoke.sources["rl.bf16"], "paper's is of another value"


def test_memory_of_the_paper_model_is_that_of_its_published_size():
    total, adapter = needs.parameters(load_profile("paper").model.architecture, rank=8)
    assert total == 7_615_616_512  # Qwen2.5-7B's published checkpoint has this many parameters
    assert adapter == 20_185_088  # PEFT's count for rank 8 on all seven projections


@pytest.fixture
def variant(tmp_path):
    """A profile of one's own that extends smoke: (name, lines of YAML) -> what load_profile
    takes."""

    def write(lines, name="mine", extends="smoke"):
        path = tmp_path / f"{name}.yaml"
        below = f"extends: {extends}\n" if extends else ""
        path.write_text(f"name: {name}\n{below}{lines}\n")
        return path

    return write


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("seedz: [3407]", "unknown key 'seedz'"),
        ("seeds: [3407", "not valid YAML"),
        ("seeds: " + 2000 * "[", "not valid YAML: maximum recursion depth"),
        ("seeds: ['3407']", "seeds are whole numbers"),
        ("seeds: [3407, 3407]", "each once"),
        ("seeds: 3407", "seeds must be a list, not 3407"),
        ("evaluation: {ks: 32}", "evaluation: ks must be a list, not 32"),
        ("evaluation: {samples: 16}", "pass@32 needs"),
        ("evaluation: {samples: many}", "samples must be a whole number, not 'many'"),
        ("rl: {learning_rate: -1}", "rl.learning_rate must be 0 or more, not -1"),
        ("sft: {learning_rate: -0.1}", "sft.learning_rate must be 0 or more, not -0.1"),
        ("evaluation: {ks: [2, 1, 4]}", "start at 1 and grow"),
        ("evaluation: {ks: []}", "start at 1 and grow"),
        ("evaluation: {data: []}", "names no data set"),
        ("evaluation: {methods: [grpoo]}", "names 'grpoo', which is not among"),
        ("train: [grpoo]", "train names 'grpoo', which is not among"),
        ("rl: {beta: null}", "method grpo: beta is a number, not None"),
        ("rl: {beta: high}", "beta is a number, not 'high'"),
        ("rl: 5", "rl must be a section, not 5"),
        ("methods: {mine: {label: M, guide: {name: branhc}}}", "branhc.*branch, random, token"),
        ("methods: {mine: {label: M, guide: {name: token, wait: 1}}}", "wait.*weight"),
        ("methods: {mine: {label: M, guide: {name: token, weight: rnak}}}", "rnak"),
        ("methods: {mine: {label: M, guide: {name: branch, threshold: 1.0}}}", "threshold"),
        ("methods: {mine: {label: M, guide: branch, rl: {beta: 0.0}}}", "needs beta > 0"),
        ("methods: {mine: {label: M, anchor: k4}}", "k4.*k3, k3_corrected"),
        ("methods: {mine: {label: M, reward: luck}}", "no reward 'luck'"),
        ("methods: {mine: {label: M, advantage: ppl}}", "mine.advantage: .*no advantage 'ppl'"),
        ("methods: {mine: {label: M, advantage: {name: entropy, k: 4}}}", "no parameter 'k'"),
        (
            "methods: {mine: {label: M, advantage: {name: entropy, alpha: -1}}}",
            "alpha of 0 or more",
        ),
        ("methods: {mine: {label: M, advantage: 3}}", "advantage must be a section or null, not 3"),
        ("methods: {mine: {label: M, reference_reset: -1}}", "counts steps, 0 or more, not -1"),
        ("methods: {mine: {label: M, reference_reset: 5, lora: false}}", "rl.sync_ref_model"),
        ("methods: {mine: {label: M, reference_reset: 5, rl: {beta: 0.0}}}", "beta > 0 and an"),
        ("methods: {mine: {rl: {beta: 0.1}}}", "the key 'label' is missing"),
        ("methods: {mine: {label: M, family: a/b}}", "letters, digits.*a/b"),
        ("methods: {base: {label: B}}", "no method may be called 'base'"),
        ("guide_defaults: {brunch: {low: 1}}", "names 'brunch': choose among branch, random"),
        ("task_defaults: {cuontdown: {limit: 1}}", "names 'cuontdown': choose among countdown"),
        ("guide_defaults: {branch: x}", "guide_defaults.branch must be a section"),
        ("task_defaults: {countdown: 3}", "task_defaults.countdown must be a section"),
        ("rl: {max_steps: x}", "rl.max_steps is a whole number of 1 or more, not 'x'"),
        ("compute: {parallel: 0}", "compute.parallel must be 1 or more"),
        ("evaluation: {traced: -3}", "evaluation.traced must be 1 or more"),
        (
            "methods: {m: {label: M, guide: branch, rl: {temperature: 0.5}}}",
            "draws with a temperature of its own",
        ),
        ("methods: [grpo]", "methods must be a section, not"),
        ("rl_data: {name: cuontdown, rows: 3}", "cuontdown.*countdown"),
        ("rl_data: {digts: 4}", "digts.*fewest"),
        ("rl_data: {most: four}", "most.*whole number.*four"),
        ("model: {architecture: null}", "tiny_qwen is made from"),
        ("sft_data: null", "sft needs the section sft_data"),
        ("extends: [smoke]", "extends names one profile"),
    ],
)
def test_a_wrong_profile_gets_one_clear_sentence(variant, lines, words):
    extends = None if lines.startswith("extends") else "smoke"
    with pytest.raises(SageError, match=words) as caught:
        load_profile(variant(lines, extends=extends))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["beta", "max_steps", "temperature", "min_p", "optim"])
def test_a_missing_setting_that_the_companion_reads_is_named(variant, tmp_path, key):
    whole = load_profile("smoke").settings
    lines = {**whole, "name": "whole", "rl": {k: v for k, v in whole["rl"].items() if k != key}}
    path = tmp_path / "whole.yaml"
    write_json(path, lines)  # JSON is YAML
    with pytest.raises(SageError, match=f"the section rl lacks the key '{key}'"):
        load_profile(path)


def test_a_profile_is_called_as_its_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: yours\nextends: smoke\n")
    with pytest.raises(SageError, match="set name: mine"):
        load_profile(tmp_path / "mine.yaml")


def test_profiles_extend_each_other_from_folder_to_folder(variant, tmp_path):
    variant("rl: {beta: 0.3}", name="below")
    path = variant("rl: {epsilon: 0.1}", name="above", extends="below.yaml")
    above = load_profile(path)
    assert (above.rl["beta"], above.rl["epsilon"], above.name) == (0.3, 0.1, "above")
    variant("", name="below", extends="above.yaml")
    with pytest.raises(SageError, match="extends itself"):
        load_profile(path)


def test_a_section_that_changes_its_name_replaces_the_one_below(variant, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"q": "1 + 1?", "a": "2"}\n')
    lines = "rl_data: {name: file, rows: 1, path: own.jsonl, question: q, gold: a}"
    profile = load_profile(variant(lines))
    assert [p.question for p in problems.rl_problems(profile)] == ["1 + 1?"]


def test_a_setting_can_be_changed_without_a_file():
    changed = load_profile("smoke+rl.beta=0.2+seeds=[1, 2]")
    assert (changed.rl["beta"], changed.seeds) == (0.2, (1, 2))
    assert changed.name == "smoke+rl.beta=0.2+seeds=_1,2_~c553", "a folder of its own"
    many = [load_profile(f"smoke+seeds={[*range(200, end)]}").name for end in (500, 501)]
    assert many[0] != many[1] and all(len(name) < 100 for name in many), "a disk takes 255 letters"
    assert load_profile(changed.spec) == changed
    assert changed.sources["rl.beta"] == "set on the command line"
    for spec, words in (
        ("smoke+rll.beta=0.2", "no section 'rll'"),
        ("smoke+evaluation.sampels=3", "unknown key 'sampels'"),
        ("smoke+rl.beta=[", "not a value"),
    ):
        with pytest.raises(SageError, match=words):
            load_profile(spec)


def data_of(name):
    profile = load_profile(name)
    return digest([profile.sft_data, profile.rl_data, list(profile.evaluation.data)])


COUNTDOWN = [n for n in profile_names() if load_profile(n).tasks == {"countdown"}]
#: Of profiles with the same data one.
OTHER_DATA = {data_of(name): name for name in COUNTDOWN}.values()


@pytest.mark.parametrize("name", OTHER_DATA)
def test_training_data_can_be_made_and_hold_no_held_out_problem(name):
    profile = load_profile(name)
    asked = problems.rl_problems(profile)
    assert len(asked) == profile.rl_data.rows
    rows = problems.sft_rows(profile, len)
    assert len(rows) == profile.sft_data.rows
    held_out = {p.question for p in problems.evaluation_problems(profile)}
    assert len(held_out) == sum(d.rows for d in profile.evaluation.data)
    assert not held_out & {p.question for p in asked}
    assert not held_out & {row["prompt"][-1]["content"] for row in rows}


def test_unknown_profile_names_the_choices():
    with pytest.raises(
        SageError, match=r"choose one of countdown, .*, laptop, one_gpu, paper, .*, smoke"
    ):
        load_profile("smoek")


def test_a_setting_unknown_to_trl_is_refused():
    from sage_lib.training.callbacks import check_sections

    with pytest.raises(SageError, match=r"rl.temprature: GRPOConfig .* mean rl.temperature"):
        check_sections(load_profile("smoke+rl.temprature=1.0"))


def test_digests_do_not_see_spelling():
    assert digest({"a": 1, "b": [0]}) == digest({"b": (0.0,), "a": 1.0})
    assert digest({"a": True}) != digest({"a": 1}) != digest({"a": "1"})
    data = load_profile("smoke").evaluation.data[0]
    assert digest(data) == digest(
        type(data)(data.name, data.rows, data.seed, settings=data.settings)
    )


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))


def fingerprints(spec):
    profile = load_profile(spec)
    base = runs.sft_run(profile)
    rl = {method: run.fingerprint for method, _, run in runs.rl_runs(profile)}
    evaluation = runs.evaluation_run(profile, base)
    return base.fingerprint, rl, (evaluation.stamp, evaluation.fingerprint)


def test_what_is_evaluated_retrains_nothing(kept, variant):
    """What the audit found: an out-of-distribution set, optional, or a default retrained SFT and
    RL."""
    whole = load_profile("smoke").settings["evaluation"]["data"]
    puzzles = {"name": "knights_knaves", "rows": 2, "people": 2, "ood": True}
    three = {**whole[3], "seed": 7}
    more = [{**whole[0], "optional": True, "revision": None}, *whole[1:], puzzles, three]
    sft, rl, sampled = fingerprints("smoke")
    other = fingerprints(
        variant(f"evaluation: {{data: {more!r}}}".replace("True", "true").replace("None", "null"))
    )
    assert other[:2] == (sft, rl) and other[2] != sampled
    assert fingerprints("smoke+sft.save_steps=7+rl.save_steps=2")[:2] == (sft, rl)
    assert fingerprints("smoke+sft.warmup_steps=30.0")[0] == sft


@pytest.mark.parametrize("ood", [False, True])
def test_a_run_evaluated_as_it_trains_depends_on_what_it_is_evaluated_on(kept, variant, ood):
    """On one set more, whose words no training has: nothing of it has to be held out."""
    data = load_profile("smoke").settings["evaluation"]["data"]
    more = [*data, {**data[3], "seed": 7, "ood": ood}]
    sft, rl, _ = fingerprints("smoke")
    other = fingerprints(variant(f"evaluation: {{data: {json.dumps(more)}}}"))
    assert other[0] == sft
    assert {method for method in rl if other[1][method] != rl[method]} == (set() if ood else {*rl})


def test_a_file_of_ones_own_retrains_nothing_unless_training_meets_its_questions(kept, tmp_path):
    """Of generated text one cannot tell by its look whether a stream holds it."""
    below = load_profile("smollm+evaluation.data=[{name: gsm_symbolic, rows: 2, seed: 9}]")
    met = problems.rl_problems(below)[3].question
    before = runs.sft_run(below).fingerprint, runs.rl_run(below, "grpo", 3407).fingerprint
    after = []
    for name, question in (("other", "What is 1 + 1?"), ("same", met)):
        write_json(tmp_path / f"{name}.jsonl", {"question": question, "answer": "2"})
        text = (tmp_path / f"{name}.jsonl").read_text().replace("\n", "") + "\n"
        (tmp_path / f"{name}.jsonl").write_text(text)
        own = {"name": "file", "rows": 1, "path": str(tmp_path / f"{name}.jsonl"), "ood": True}
        whole = [{"name": "gsm_symbolic", "rows": 2, "seed": 9}, own]
        path = tmp_path / f"{name}.yaml"
        data = {"name": name, "extends": "smollm", "evaluation": {"data": whole}}
        write_json(path, data)
        profile = load_profile(path)
        assert question not in {p.question for p in problems.rl_problems(profile)}
        sft, rl = runs.sft_run(profile), runs.rl_run(profile, "grpo", 3407)
        after.append((sft.fingerprint, rl.fingerprint))
    assert after[0] == before and after[1][1] != before[1]


def test_a_held_out_problem_that_training_could_draw_retrains(kept, variant):
    whole = load_profile("smoke").settings["evaluation"]["data"]
    more = [*whole, {**whole[0], "seed": 99}]
    path = variant(f"evaluation: {{data: {more!r}}}".replace("True", "true"))
    assert fingerprints(path)[0] != fingerprints("smoke")[0]


def test_how_samples_are_read_draws_none_again(kept):
    sampled = fingerprints("smoke")[2]
    assert fingerprints("smoke+evaluation.resamples=50+evaluation.ks=[1, 2]")[2] == sampled
    scored = fingerprints("smoke+evaluation.scored=4")[2]
    assert scored[0] == sampled[0] and scored[1] != sampled[1]
    assert fingerprints("smoke+evaluation.temperature=0.5")[2][0] != sampled[0]


def test_a_guide_made_from_entropies_depends_on_how_they_were_measured(kept):
    """What the audit found: another RL temperature, and RL went on with the old threshold."""
    profile = load_profile("smoke")
    guided = {
        m for m, chosen in profile.methods.items() if "threshold_quantile" in str(chosen.guide)
    }
    assert {"grpo_branch", "shuffled_branch"} <= guided and "grpo_token" not in guided
    _, before, _ = fingerprints("smoke")
    run = runs.entropy_run(profile)
    write_json(run.measured / "entropy.json", {"quantiles": {"0.9": 0.3, "0.999": 2.0}})
    _, after, _ = fingerprints("smoke")
    assert {m for m in before if before[m] != after[m]} == guided
    warmer = load_profile("smoke+rl.temperature=0.7")
    assert runs.entropy_run(warmer).fingerprint != run.fingerprint
    assert runs.sft_run(warmer).fingerprint == runs.sft_run(profile).fingerprint


def test_a_change_of_one_method_retrains_that_method(kept):
    _, before, _ = fingerprints("smoke")
    _, after, _ = fingerprints("smoke+methods.grpo_token.guide.weight=rank")
    assert {m for m in before if before[m] != after[m]} == {"grpo_token"}
    _, after, _ = fingerprints("smoke+guide_defaults.branch.threshold_quantile=0.95")
    assert "grpo" not in {m for m in before if before[m] != after[m]}


def test_every_task_of_the_table_can_stand_in_a_profile(variant):
    with pytest.raises(SageError) as caught:
        load_profile(variant("rl_data: {name: nothing, rows: 1}"))
    assert all(name in str(caught.value) for name in TASKS)


def stages_of(spec):
    """Fingerprint of everything that a profile makes, by name."""
    profile = load_profile(spec)
    base, plain = runs.sft_run(profile), runs.rl_run(profile, "grpo", 3407)
    samples, of_plain = runs.evaluation_run(profile, base), runs.evaluation_run(profile, plain)
    return {
        "sft": base.fingerprint,
        "entropies": runs.entropy_run(profile).fingerprint,
        "grpo": plain.fingerprint,
        "branch": runs.rl_run(profile, "grpo_branch", 3407).fingerprint,
        "no_kl": runs.rl_run(profile, "grpo_no_kl", 3407).fingerprint,
        "trace": runs.trace_run(profile).fingerprint,
        "effects": runs.effects_run(profile).fingerprint,
        "dynamics": runs.dynamics_runs(profile)[0].fingerprint,
        "replay": runs.replay_runs(profile)[0].fingerprint,
        "impact": runs.impact_runs(profile)[0].fingerprint,
        "samples": samples.stamp,
        "scores": samples.fingerprint,
        "grpo samples": of_plain.stamp,
        "grpo scores": of_plain.fingerprint,
    }


OF_GRPO = {"grpo", "trace", "grpo samples", "grpo scores", "dynamics", "replay", "impact"}
OF_RL = {*OF_GRPO, "branch", "no_kl"}
OF_ROLLOUTS = {*OF_RL, "entropies", "effects"}
OF_SAMPLES = {"samples", "scores", "grpo samples", "grpo scores"}
ALL = {*OF_ROLLOUTS, *OF_SAMPLES, "sft"}
#: Change of smoke -> what is made again, and nothing else.
MADE_AGAIN = {
    "model.seed=1": ALL,
    "model.architecture.hidden_size=64": ALL,
    "sft.learning_rate=1.0e-3": ALL,
    "sft.max_steps=10": ALL,
    "sft_data.rows=100": ALL,
    "sft_data.seed=9": ALL,
    "sft_data.rare_share=0.1": ALL,
    "sft_data.early_rare_share=0.4": ALL,
    "sft_data.distinct=9": ALL,
    "sft_lora={r: 4}": ALL,
    "rl.learning_rate=1.0e-4": OF_RL,
    "rl.weight_decay=0.1": OF_RL,
    "methods.grpo.rl={max_steps: 5}": OF_GRPO,
    "rl.beta=0.1": OF_RL - {"no_kl"},
    "rl.loss_type=bnpo": OF_RL,
    "rl_lora={r: 2}": OF_RL,
    "rl.temperature=0.9": OF_ROLLOUTS,
    "rl.min_p=0.1": OF_ROLLOUTS,
    "rl.top_k=5": OF_ROLLOUTS,
    "rl.max_completion_length=40": OF_ROLLOUTS,
    "rl_data.rows=10": OF_ROLLOUTS,
    "rl_data.seed=3": OF_ROLLOUTS,
    "methods.grpo.reward=random": OF_GRPO,
    "methods.grpo.dynamic_sampling=2": OF_GRPO,
    "methods.grpo.advantage=entropy": OF_GRPO,
    "methods.grpo.advantage={name: pass_at_k, k: 2}": OF_GRPO,
    "methods.grpo.advantage=null": set(),
    "methods.grpo.reference_reset=50": OF_GRPO,
    "methods.grpo.anchor=k3_corrected": OF_GRPO,
    "methods.grpo.lora=false": OF_GRPO,
    "methods.grpo.rl={epsilon: 0.1}": OF_GRPO,
    "methods.grpo_no_kl.anchor=sequence": set(),
    "methods.grpo.label=X": set(),
    "methods.grpo.family=x": set(),
    "guide_defaults.branch.high=1.3": {"branch", "trace", "effects"},
    "guide_defaults.random.high=1.3": {"trace"},
    "evaluation.seed=12": OF_SAMPLES,
    "evaluation.temperature=0.5": OF_SAMPLES,
    "evaluation.top_p=0.9": OF_SAMPLES,
    "evaluation.top_k=5": OF_SAMPLES,
    "evaluation.min_p=0.1": OF_SAMPLES,
    "evaluation.samples=64": OF_SAMPLES,
    "evaluation.max_new_tokens=40": OF_SAMPLES,
    "evaluation.sampled=4": OF_SAMPLES | {"trace"},
    "evaluation.every=2": OF_RL,
    "evaluation.scored=4": {"scores", "grpo scores"},
    "evaluation.traced=4": {"entropies", "trace"},
    "evaluation.batch_size=7": set(),
    "evaluation.resamples=9": set(),
    "evaluation.ks=[1]": set(),
    "evaluation.methods=[grpo]": set(),
    "exploration.prompts=4": {"dynamics", "impact"},
    "exploration.replaced=4": {"impact"},
    "exploration.seeds=1": set(),
    "compute.parallel=1": set(),
    "sft.save_steps=9": set(),
    "rl.save_total_limit=9": set(),
    "description=x": set(),
}


@pytest.mark.parametrize("change", MADE_AGAIN)
def test_each_setting_makes_again_what_depends_on_it_and_nothing_else(kept, change):
    before, after = stages_of("smoke"), stages_of(f"smoke+{change}")
    assert {name for name in before if before[name] != after[name]} == MADE_AGAIN[change]


def test_old_entropies_are_not_taken_without_a_word(kept):
    """What a review found: they lay on disk, measured with other settings, and RL took them."""
    profile = load_profile("smoke")
    write_json(runs.entropy_run(profile).measured / "entropy.json", {"quantiles": {}})
    with pytest.raises(SageError, match="were not measured with the settings of profile smoke"):
        runs.require_entropies(profile, profile.methods["grpo_branch"].guide)
    runs.require_entropies(profile, profile.methods["grpo_token"].guide)


def test_held_out_questions_are_held_out_of_a_training_file(tmp_path, kept):
    questions = [p.question for p in problems.evaluation_problems(load_profile("smoke"))][:5]
    rows = [*questions, "reach 1 from 1 1"]
    (tmp_path / "own.csv").write_text("q,a\n" + "".join(f"{row},1\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nextends: smoke\n"
        "rl_data: {name: file, rows: 9, path: own.csv, question: q, gold: a}\n"
    )
    profile = load_profile(tmp_path / "mine.yaml")
    assert [p.question for p in problems.rl_problems(profile)] == ["reach 1 from 1 1"]


def test_an_inherited_path_is_below_the_folder_of_the_profile_that_names_it(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "d.csv").write_text(f"question,answer\n{folder}?,1\n")
    line = "evaluation: {data: [{name: file, rows: 1, path: d.csv}]}"
    (tmp_path / "a" / "own.yaml").write_text(f"name: own\nextends: smoke\n{line}\n")
    (tmp_path / "b" / "child.yaml").write_text("name: child\nextends: ../a/own.yaml\n")
    profile = load_profile(tmp_path / "b" / "child.yaml")
    assert [p.question for p in problems.evaluation_problems(profile)] == ["a?"]
    assert str(tmp_path) not in str(profile.settings), "no path of this machine in records"


def test_variants_that_look_alike_have_folders_of_their_own():
    one, two = (load_profile(f"smoke+model.revision={name}") for name in ("a/b", "a_b"))
    assert one.name != two.name and "/" not in one.name


def test_a_file_called_as_a_shipped_profile_is_refused(tmp_path):
    (tmp_path / "smoke.yaml").write_text("name: smoke\nextends: laptop\n")
    with pytest.raises(SageError, match="whose results it would overwrite"):
        load_profile(tmp_path / "smoke.yaml")


def test_a_method_key_with_a_dash_can_be_changed(variant):
    path = variant("methods: {my-method: {label: A}}")
    assert load_profile(f"{path}+methods.my-method.label=B").methods["my-method"].label == "B"


def test_a_replaced_section_on_the_command_line_has_no_old_sources():
    profile = load_profile("smoke+rl_data={name: countdown, rows: 5, seed: 9}")
    shown = plan.settings_table(profile).set_index("setting")["source"]
    assert shown["rl_data.rows"] == "set on the command line"
    narrow = load_profile("smoke+model.architecture.hidden_size=64")
    shown = plan.settings_table(narrow).set_index("setting")["source"]
    assert shown["model.architecture.hidden_size"] == "set on the command line"
