"""Profiles: every shipped one resolves and names its sources; they extend each other; and every way
to get one wrong is told in one sentence."""

import dataclasses
import json
import re

import pytest
from ruamel.yaml import YAML

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import problems
from sage_lib.experiment.profile import digest, load_profile, profile_names
from sage_lib.pipeline import plan
from sage_lib.report import reported

#: Endings of settings that need no source: bookkeeping, and what has no counterpart in the paper.
PLUMBING = (
    *("logging_steps", "save_steps", "save_total_limit", "fp16", "seed", "max_steps", "delta"),
    *("people", "label", "family", "None", "gradient_accumulation_steps", "data_seed"),
    "steps_per_generation",
)


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_resolve_and_their_keys_are_known_to_trl_and_peft(name):
    import torch  # noqa: F401  # so that it is asked in this process

    profile = load_profile(name)
    plan.check_settings(profile)
    needed = {"loss_type", "beta", "use_bias_correction_kl", "epsilon", "epsilon_high"}
    needed |= {"temperature", "min_p", "top_p", "top_k", "scale_rewards", "bf16", "seed"}
    assert needed <= set(profile.rl), "nothing that matters is left to a library's default"
    assert profile.rl["use_bias_correction_kl"] is False, "every reproduction uses the paper's k3"


def stated_values(here):
    """The values in a cell of the column `here`: dotted key of a profile -> its value as YAML.

    Parts are separated by "; "; a part that is not "key = value" is a remark.
    """
    parts = [re.fullmatch(r"([a-z]\w*(?:\.\w+)*) = (.+)", part) for part in here.split("; ")]
    return {found[1]: found[2] for found in parts if found}


#: Values of the paper profile without a line in fidelity.csv: see PLUMBING.
UNCOMPARED = ("name", "description", "reported", "model.architecture.", "compute.")


def test_every_value_of_the_paper_profile_is_that_of_the_fidelity_table():
    values = load_profile("paper_all").flat()
    stated = {}
    for line in reported.fidelity().itertuples():
        for key, text in stated_values(line.here).items():
            assert key in values, f"{line.setting}: the profile paper_all has no {key}"
            assert YAML(typ="safe").load(text) == values[key], f"{line.setting}: {key}"
            stated[key] = line
    left = [key for key in values if key not in stated and not key.startswith(UNCOMPARED)]
    puzzles = [key for key in left if re.match(r"evaluation\.data\.([3-9]|10)\.", key)]
    off = [key for key in left if values[key] is None]
    unsaid = set(left) - set(puzzles) - set(off)
    assert [key for key in sorted(unsaid) if not key.endswith(PLUMBING)] == []


def test_inherited_values_keep_their_source_and_replaced_ones_lose_it():
    smoke = load_profile("smoke")
    assert smoke.sources["rl.min_p"] == "Table 8: min-p 0.01", "from paper_all, through laptop"
    assert smoke.rl["min_p"] == 0.01
    assert smoke.sources["rl.learning_rate"].startswith("a rank-8 adapter")
    assert smoke.rl["bf16"] is False and not smoke.sources["rl.bf16"], "paper's is of another value"
    on_one_line = load_profile("smollm_paper").sources
    assert on_one_line["sft.max_steps"].startswith("pass@1") and "sft" not in on_one_line


#: 100,000 values in 50 uses of anchors, and 1,024 methods.
BOMB = "{a: &b0 1, "
BOMB += ", ".join(f"c{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 10)}]" for n in range(1, 6)) + "}"
VARIED = ", ".join(f"rl.a{n}: [1, 2, 3, 4]" for n in range(5))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("seedz: [3407]", "mine: seedz is unknown; did you mean seeds?"),
        ("beta: 0.2", r"mine: beta is unknown; did you mean rl.beta\?"),
        ("learning_rate: 0.1", "did you mean sft.learning_rate or rl.learning_rate?"),
        ("sources: {}", r"mine: sources is unknown; choose one of extends, train.*compute$"),
        ("extend: study", r"mine: extend is unknown; did you mean extends\?"),
        ("train: grpo", "mine: train is a list of methods, not 'grpo'"),
        ("evaluation: {sampels: 3}", "mine: evaluation.sampels is unknown; .* evaluation.samples?"),
        ("seeds: [3407", "not valid YAML"),
        ("seeds: " + 500 * "[" + 500 * "]", "not valid YAML: maximum recursion depth"),
        ("seeds: ['3407']", "mine: seeds.0: .*valid integer, not '3407'"),
        ("seeds: [3407, 3407]", "each once"),
        ("evaluation: {samples: 16}", "^mine: evaluation: pass@32 needs"),
        ("evaluation: {top_p: .nan}", "evaluation.top_p: .*nan"),
        ("evaluation: {ks: [2, 1, 4]}", "start at 1 and grow"),
        ("evaluation: {methods: [grpoo]}", "evaluation.methods.grpoo is unknown; did you mean"),
        ("rl: {learning_rate: -1}", "rl.learning_rate: .*greater than or equal to 0, not -1"),
        ("rl: {beta: null}", "rl.beta: .*number, not None"),
        ("rl: {use_bias_correction_kl: true}", "rl.use_bias_correction_kl: .*False, not True"),
        ("methods: {mine: {label: M, guide: {name: branhc}}}", "'branhc'; did you mean branch"),
        ("methods: {mine: {label: M, guide: 3}}", "mine.guide: there is no guide 3; choose"),
        ("methods: {mine: {label: M, guide: branch, rl: {beta: 0.0}}}", "needs beta > 0"),
        ("methods: {mine: {label: M, guide: token, kl_form: forward_kl}}", "takes no guide"),
        ("methods: {mine: {label: M, kl_form: k4}}", "k4.*k3, k3_corrected"),
        ("methods: {mine: {label: M, advantage: ppl}}", "mine.advantage: .*no advantage 'ppl'"),
        ("methods: {mine: {rl: {beta: 0.1}}}", "^mine: methods.mine.label: field required$"),
        ("methods: {mine: {label: M, family: a/b}}", "key and family are letters"),
        ("methods: {mine: {label: M, vary: 3}}", "vary is as"),
        ("methods: {mine: {label: M, vary: {rl.beta: []}}}", "vary is as"),
        (
            "methods: {m: {label: M, guide: branch, vary: {guide.threshold: [0.8, 1.2]}}}",
            "m: vary sets guide.threshold, and guide is 'branch': give its settings",
        ),
        ("train: [{grpo: {}}]", "train"),
        ("methods: {m: {label: M, guide: success}}", "m.guide: success reads a policy"),
        ("model: {dtype: bfloat16}\nrl_lora: null", "bfloat16 loses small steps of all weights"),
        (
            "methods: {m: {label: M, guide: {name: random, scale: {high: 0.1, lo: 0.2}}}}",
            "m.guide.scale.lo is unknown",
        ),
        ("methods: {base: {label: B}}", "no key is 'base'"),
        ("methods: {m: {label: M, rft: {select: x}}}", "methods.m.rft"),
        (
            "methods: {m: {label: M, guide: branch, rl: {temperature: 0.5}}}",
            "draws with a temperature of its own",
        ),
        ("methods: [grpo]", "methods must be a section of named sections, not"),
        ("guide_defaults: {brunch: {low: 1}}", "guide_defaults.brunch is unknown; .*branch"),
        ("rl_data: {name: cuontdown, rows: 3}", "cuontdown.*countdown"),
        ("rl_data: {digts: 4}", "digts.*fewest"),
        ("model: {architecture: null}", "tiny_qwen is made from"),
        ("sft_data: null", "sft needs the section sft_data"),
        ("extends: study\nmethods: {rft: {rft: {demonstrations: {}}}}", "are changes of sft_data"),
        ("extends: study\nmethods: {more_sft: {rft: {noise: 0.1}}}", "more_sft: .* none is wrong"),
        ("extends: study\nmethods: {rft: {reward: random}}", "rft: .* is accuracy or valid"),
        ("extends: study\nmethods: {rft: {guide: branch}}", "rft, it takes no rl, guide"),
        ("extends: nowhere", "there is no profile 'nowhere'"),
        ('extends: "a\\0.yaml"', "is not the path of a profile"),
        ("extends: ~nobody-here/a.yaml", "is not the path of a profile"),
        ("model: {1: 2}", "model must be a section of named settings"),
        (f"seeds: [{'9' * 5000}]", "not valid YAML: Exceeds the limit"),
        ("description: 2020-99-99", "not valid YAML: month"),
        (f"guide_defaults: {{token: {BOMB}}}", "not valid YAML: anchors are used 50 times"),
        (f"methods: {{m: {{label: M, vary: {{{VARIED}}}}}}}", "m: vary makes 1,024 methods"),
        (f"methods: {{{'m' * 101}: {{label: M}}}}", "key and family are letters"),
        ("compute: {threads: 100000}", "compute.threads: .*less than or equal to 1024"),
    ],
)
def test_a_wrong_profile_gets_one_clear_sentence(variant, lines, words):
    extends = None if lines.startswith("extends") else "smoke"
    with pytest.raises(SageError, match=words) as caught:
        load_profile(variant(lines, extends=extends))
    assert "\n" not in str(caught.value)


def test_a_profile_is_called_as_its_file_and_not_as_a_shipped_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: yours\nextends: smoke\n")
    (tmp_path / "smoke.yaml").write_text("name: smoke\nextends: laptop\n")
    for name in ("mine", "smoke"):
        with pytest.raises(SageError, match="is called as its file, and not as one that comes"):
            load_profile(tmp_path / f"{name}.yaml")


@pytest.mark.parametrize("name", [".", "..", ".mine", "-mine", "data", "grids", "my own"])
def test_a_profile_whose_folder_would_be_another_one_is_refused(variant, name):
    with pytest.raises(SageError, match=r"name is of letters.*rename the file"):
        load_profile(variant(name=name))


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a/../b", "..", "a//b", "", "a b"])
@pytest.mark.parametrize("key", ["sft_data", "model"])
def test_a_revision_stays_in_its_folder(revision, key):
    with pytest.raises(SageError, match=rf"{key}\.revision"):
        load_profile(f"smoke+{key}.revision={json.dumps(revision)}")
    for good in ("main", "v1.0-rc", "refs/pr/1", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"):
        load_profile(f"smoke+{key}.revision={json.dumps(good)}")


def test_an_empty_variable_is_as_none(monkeypatch):
    for name in ("SAGE_BUILD", "SAGE_RESULTS"):
        monkeypatch.setenv(name, "")
    assert paths.build("mine") == paths.ROOT / "build" / "mine"
    assert paths.results() == paths.ROOT / "results"


def test_every_folder_that_is_built_for_no_profile_is_reserved():
    """The folders are read from the source: a new one is found here."""
    found = set()
    for path in [*paths.ROOT.glob("sage_lib/**/*.py"), *paths.ROOT.glob("tools/*.py")]:
        found |= set(re.findall(r"paths\.build\(\"([\w-]+)\"\)", path.read_text()))
    assert found and found <= set(paths.SHARED)


def test_profiles_extend_each_other_from_folder_to_folder(variant, tmp_path):
    variant("rl: {beta: 0.3}", name="below")
    path = variant("rl: {epsilon: 0.1}", name="above", extends="below.yaml")
    above = load_profile(path)
    assert (above.rl["beta"], above.rl["epsilon"], above.name) == (0.3, 0.1, "above")
    variant("", name="below", extends="above.yaml")
    with pytest.raises(SageError, match="extends itself"):
        load_profile(path)


def test_a_setting_can_be_changed_without_a_file():
    changed = load_profile("smoke+rl.beta=0.2+seeds=[1, 2]")
    assert (changed.rl["beta"], changed.seeds) == (0.2, (1, 2))
    assert changed.name == "smoke+rl.beta=0.2+seeds=_1,2_~c553", "a folder of its own"
    many = [load_profile(f"smoke+seeds={[*range(200, end)]}").name for end in (500, 501)]
    assert many[0] != many[1] and all(len(name) < 100 for name in many), "a disk takes 255 letters"
    many = [f"smoke{'+sft.max_steps=20' * 11}+rl.beta={beta}" for beta in (0.2, 0.3)]
    first, second = (load_profile(spec).name for spec in many)
    assert first != second and len(first) < 170
    one, two = (load_profile(f"smoke+model.revision={name}").name for name in ("a/b", "a_b"))
    assert one != two and "/" not in one
    assert load_profile(changed.spec) == changed
    assert changed.sources["rl.beta"] == "set on the command line"
    for spec, words in (
        ("smoke+rll.beta=0.2", "smoke: rll is unknown; did you mean rl"),
        ("smoke+evaluation.sampels=3", "did you mean evaluation.samples"),
        ("smoke+rl.beta=[", "not a value"),
    ):
        with pytest.raises(SageError, match=words):
            load_profile(spec)


def test_vary_makes_a_method_of_every_combination(variant):
    varied = "{rl.beta: [0.1, 1], reward: [random]}"
    lines = f"methods: {{a: {{label: A, rl: {{epsilon: 0.1}}, vary: {varied}}}}}"
    methods = load_profile(variant(lines)).methods
    found = {key: method for key, method in methods.items() if key.startswith("a_")}
    assert list(found) == ["a_beta0.1_rewardrandom", "a_beta1_rewardrandom"]
    first = found["a_beta0.1_rewardrandom"]
    assert first.rl == {"epsilon": 0.1, "beta": 0.1}
    assert (first.label, first.reward) == ("A, beta 0.1, reward random", "random")


def data_of(name):
    profile = load_profile(name)
    return digest([profile.sft_data, profile.rl_data, list(profile.evaluation.data)])


DATA = {name: load_profile(name).evaluation.data for name in profile_names()}
COUNTDOWN = [name for name, sets in DATA.items() if {data.name for data in sets} == {"countdown"}]
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


def test_what_a_calibration_used_judges_nothing_later():
    """Problems that are skipped are those of the calibration; its runs do not count either."""
    calibration, main = map(load_profile, ("operating_point_calibration", "operating_point"))
    for before, data in zip(calibration.evaluation.data, main.evaluation.data, strict=True):
        whole = dataclasses.replace(data, skipped=None, rows=before.rows + data.rows)
        assert problems.load(whole) == problems.load(before) + problems.load(data)
    second = load_profile("operating_point_second")
    seeds = [*calibration.seeds, *main.seeds, *second.seeds]
    assert len(set(seeds)) == len(seeds) == 4 + 30


def test_a_setting_that_trl_or_peft_does_not_have_is_refused():
    import torch  # noqa: F401  # so that it is asked in this process

    for change, words in (
        ("rl.temprature=1.0", r"rl.temprature is unknown; did you mean rl.temperature\?"),
        ("rl_lora={rr: 4}", r"rl_lora.rr is unknown"),
        ("rl.kl_coef=0.1", "rl.kl_coef is unknown; GRPOConfig has no setting of this name$"),
        ("rl.epsilon=high", r"rl.epsilon: .*number, not 'high'"),
        ("rl_lora.target_modules=[1]", r"rl_lora.target_modules"),
    ):
        with pytest.raises(SageError, match=words) as caught:
            plan.check_settings(load_profile(f"smoke+{change}"))
        assert "\n" not in str(caught.value)


def test_what_is_held_out_follows_the_training_set_in_one_process():
    """Three digits can draw none of the problems of five: nothing then has to be held out."""
    profile = load_profile("smoke")
    tasks = [dataclasses.replace(profile.rl_data.task, fewest=n, most=n) for n in (3, 5)]
    training_sets = [dataclasses.replace(profile.rl_data, task=task) for task in tasks]
    held = [problems.held_out(profile, data) for data in training_sets]
    digits = [{len(question.split()) - 3 for question in one} for one in held]
    assert digits == [{3}, {5}]


def test_held_out_questions_are_held_out_of_a_training_file(variant, tmp_path):
    questions = [p.question for p in problems.evaluation_problems(load_profile("smoke"))][:5]
    rows = [*questions, "reach 1 from 1 1"]
    (tmp_path / "own.csv").write_text("q,a\n" + "".join(f"{row},1\n" for row in rows))
    lines = "rl_data: {name: file, rows: 9, path: own.csv, question: q, gold: a}"
    profile = load_profile(variant(lines))
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
    assert str(tmp_path) not in str(profile.raw), "no path of this machine in records"


def test_a_method_key_with_a_dash_can_be_changed(variant):
    path = variant("methods: {my-method: {label: A}}")
    assert load_profile(f"{path}+methods.my-method.label=B").methods["my-method"].label == "B"


def test_a_training_is_a_method_with_the_sections_that_it_changes():
    changes = "+rl_lora={r: 4}+methods.grpo.lora=false+methods.grpo.rl={max_steps: 5, beta: 0.3}"
    profile = load_profile(f"smoke{changes}+methods.grpo_token.rl={{}}")
    whole, adapted = profile.training("grpo", 7), profile.training("grpo_token", 8)
    assert (whole.method.label, whole.lora, adapted.lora) == ("GRPO", None, {"r": 4})
    assert whole.rl == {**profile.rl, "max_steps": 5, "beta": 0.3, "seed": 7}
    assert adapted.rl == {**profile.rl, "seed": 8}


def test_the_former_key_of_the_form_of_the_kl_works_with_a_warning():
    with pytest.warns(FutureWarning, match="methods.grpo: anchor is called kl_form"):
        former = load_profile("smoke+methods.grpo.anchor=sequence")
    assert former.methods == load_profile("smoke+methods.grpo.kl_form=sequence").methods
    with pytest.raises(SageError, match="give kl_form alone"):
        load_profile("smoke+methods.grpo.anchor=k3+methods.grpo.kl_form=k3")


def test_the_policy_of_a_guide_inside_another_is_a_prerequisite():
    guide = "{name: shuffled, inner: {name: success, policy: rft}}"
    profile = load_profile(f"guides+methods.success.guide={guide}")
    assert profile.methods["success"].policies == ["rft"]
