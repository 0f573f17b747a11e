"""Runs: their folders follow from their names without a hash, and each is made again only when what
made it has changed."""

import functools
import hashlib
import json
import subprocess

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment import problems, records, runs
from sage_lib.experiment.profile import digest, load_profile
from sage_lib.experiment.settings import Data
from sage_lib.files import write_json
from sage_lib.pipeline import stages
from sage_lib.tasks.task import Task

pytestmark = pytest.mark.usefixtures("work_folder")


@pytest.fixture
def variant(tmp_path):
    """A profile of one's own that extends smoke, of other evaluation data."""

    def write(data, name="mine", extends="smoke"):
        given = {"name": name, "extends": extends, "evaluation": {"data": data}}
        write_json(tmp_path / f"{name}.yaml", given)  # JSON is YAML
        return tmp_path / f"{name}.yaml"

    return write


@pytest.mark.parametrize("name", ["smoke", "study", "paper"])
def test_listing_runs_hashes_nothing_and_generates_no_problem(name, tmp_path, monkeypatch):
    def refuse(*given, **more):
        raise AssertionError("an address needs no identity")

    monkeypatch.setattr(hashlib, "sha256", refuse)
    monkeypatch.setattr(Task, "problems", refuse)
    profile = load_profile(name)
    [first, *_], evaluated = runs.rl_runs(profile), runs.evaluations(profile)
    every = runs.every_run(profile)
    assert first.build == tmp_path / f"build/{name}/rl/grpo-s3407"
    assert first.measured == tmp_path / f"measured/{name}/rl/grpo-s3407"
    assert (first.place, runs.sft_run(profile).place) == ("rl/grpo-s3407", "sft")
    methods = ("base", *profile.evaluated)
    policies = [run for run in runs.policy_runs(profile) if run.method in methods]
    assert [run.policy for run in evaluated] == policies
    assert len({run.build for run in every}) == len(every)
    assert all(run.weights == "" and not run.done() and not run.is_prepared() for run in every)
    paths = [path for run in every for path in (run.record, run.model, run.samples, run.live_steps)]
    assert not any(path.exists() for path in [*paths, *(run.lock for run in every)])
    with pytest.raises(AssertionError, match="needs no identity"):
        _ = first.fingerprint


def test_digests_do_not_see_spelling():
    assert digest({"a": 1, "b": [0]}) == digest({"b": (0.0,), "a": 1.0})
    assert digest({"a": True}) != digest({"a": 1}) != digest({"a": "1"})
    data = load_profile("smoke").evaluation.data[0]
    assert digest(data) == digest(Data(data.name, data.rows, data.task, data.seed))


def fingerprints(spec):
    profile = load_profile(spec)
    base = runs.sft_run(profile)
    rl = {run.method: run.fingerprint for run in runs.rl_runs(profile)}
    evaluation = runs.evaluation_run(base)
    return base.fingerprint, rl, (evaluation.build_fingerprint, evaluation.fingerprint)


def test_what_is_evaluated_retrains_nothing(variant):
    """What the audit found: an out-of-distribution set, or a default retrained SFT and RL."""
    whole = load_profile("smoke").raw["evaluation"]["data"]
    puzzles = {"name": "knights_knaves", "rows": 2, "people": 2, "ood": True}
    three = {**whole[3], "seed": 7}
    more = [{**whole[0], "revision": None}, *whole[1:], puzzles, three]
    sft, rl, sampled = fingerprints("smoke")
    other = fingerprints(variant(more))
    assert other[:2] == (sft, rl) and other[2] != sampled
    assert fingerprints("smoke+sft.warmup_steps=30.0")[0] == sft


@pytest.mark.parametrize("ood", [False, True])
def test_a_run_evaluated_as_it_trains_depends_on_what_it_is_evaluated_on(variant, ood):
    """On one set more, whose words no training has: nothing of it has to be held out."""
    data = load_profile("smoke").raw["evaluation"]["data"]
    more = [*data, {**data[3], "seed": 7, "ood": ood}]
    sft, rl, _ = fingerprints("smoke")
    other = fingerprints(variant(more))
    assert other[0] == sft
    assert {method for method in rl if other[1][method] != rl[method]} == (set() if ood else {*rl})


def test_a_file_of_ones_own_retrains_nothing_unless_training_meets_its_questions(variant, tmp_path):
    """Of generated text one cannot tell by its look whether a stream holds it."""
    below = load_profile("smollm+evaluation.data=[{name: gsm_symbolic, rows: 2, seed: 9}]")
    met = problems.rl_problems(below)[3].question
    before = runs.sft_run(below).fingerprint, runs.rl_run(below, "grpo", 3407).fingerprint
    after = []
    for name, question in (("other", "What is 1 + 1?"), ("same", met)):
        line = json.dumps({"question": question, "answer": "2"})
        (tmp_path / f"{name}.jsonl").write_text(line + "\n")
        own = {"name": "file", "rows": 1, "path": str(tmp_path / f"{name}.jsonl"), "ood": True}
        whole = [{"name": "gsm_symbolic", "rows": 2, "seed": 9}, own]
        profile = load_profile(variant(whole, name, "smollm"))
        assert question not in {p.question for p in problems.rl_problems(profile)}
        sft, rl = runs.sft_run(profile), runs.rl_run(profile, "grpo", 3407)
        after.append((sft.fingerprint, rl.fingerprint))
    assert after[0] == before and after[1][1] != before[1]


def test_a_held_out_problem_that_training_could_draw_retrains(variant):
    whole = load_profile("smoke").raw["evaluation"]["data"]
    more = [*whole, {**whole[0], "seed": 99}]
    assert fingerprints(variant(more))[0] != fingerprints("smoke")[0]


def test_a_guide_made_from_entropies_depends_on_how_they_were_measured():
    profile = load_profile("smoke")
    methods = profile.methods.items()
    guided = {key for key, method in methods if "threshold_quantile" in str(method.guide)}
    assert {"grpo_branch", "shuffled_branch"} <= guided and "grpo_token" not in guided
    _, before, _ = fingerprints("smoke")
    run = runs.entropy_run(profile)
    write_json(run.measured / "entropy.json", {"quantiles": {"0.9": 0.3, "0.999": 2.0}})
    _, after, _ = fingerprints("smoke")
    assert {m for m in before if before[m] != after[m]} == guided


@functools.cache
def stages_of(spec):
    """Fingerprint of everything that a profile makes, by name."""
    profile = load_profile(spec)
    base, plain = runs.sft_run(profile), runs.rl_run(profile, "grpo", 3407)
    samples, of_plain = runs.evaluation_run(base), runs.evaluation_run(plain)
    made = {"sft": base, "grpo": plain, "scores": samples, "grpo scores": of_plain}
    made |= {m: runs.rl_run(profile, f"grpo_{m}", 3407) for m in ("branch", "no_kl", "token")}
    for stage in ("entropies", "trace", "optimum", "effects", "dynamics", "replay", "impact"):
        made[stage] = runs.STAGES[stage].runs(profile)[0]
    drawn = {"samples": samples.build_fingerprint, "grpo samples": of_plain.build_fingerprint}
    return {name: run.fingerprint for name, run in made.items()} | drawn


OF_GRPO = {"grpo", "trace", "grpo samples", "grpo scores", "dynamics", "replay", "impact"}
OF_RL = {*OF_GRPO, "branch", "no_kl", "token"}
OF_ROLLOUTS = {*OF_RL, "entropies", "effects"}
OF_SAMPLES = {"samples", "scores", "grpo samples", "grpo scores"}
ALL = {*OF_ROLLOUTS, *OF_SAMPLES, "sft", "optimum"}
#: Change of smoke -> what is made again, and nothing else.
MADE_AGAIN = {
    "model.seed=1": ALL,
    "sft.learning_rate=1.0e-3": ALL,
    "sft_data.rows=100": ALL,
    "sft_data.rare_share=0.1": ALL,
    "sft_lora={r: 4}": ALL,
    "rl.learning_rate=1.0e-4": OF_RL,
    "methods.grpo.rl={max_steps: 5}": OF_GRPO,
    "rl.beta=0.1": OF_RL - {"no_kl"},
    "rl.loss_type=bnpo": OF_RL,
    "rl.temperature=0.9": OF_ROLLOUTS,
    "rl.min_p=0.1": OF_ROLLOUTS,
    "rl.max_completion_length=40": OF_ROLLOUTS,
    "rl_data.rows=10": OF_ROLLOUTS,
    "methods.grpo.reward=random": OF_GRPO,
    "methods.grpo.dynamic_sampling=2": OF_GRPO,
    "methods.grpo.advantage=position": OF_GRPO,
    "methods.grpo.reference_reset=50": OF_GRPO,
    "methods.grpo.kl_form=k3_corrected": OF_GRPO,
    "methods.grpo.lora=false": OF_GRPO,
    "methods.grpo_no_kl.kl_form=sequence": set(),
    "methods.grpo.label=X": set(),
    "guide_defaults.branch.high=1.3": {"branch", "trace", "effects", "optimum"},
    "guide_defaults.random.high=1.3": {"trace", "optimum"},
    "methods.grpo_token.guide.weight=rank": {"token", "optimum"},
    "evaluation.listed=3": {"optimum"},
    "evaluation.ks=[1, 2]": set(),
    "evaluation.seed=12": OF_SAMPLES,
    "evaluation.temperature=0.5": OF_SAMPLES,
    "evaluation.sampled=4": OF_SAMPLES | {"trace"},
    "evaluation.every=2": OF_RL,
    "evaluation.scored=4": {"scores", "grpo scores"},
    "evaluation.traced=4": {"entropies", "trace"},
    "evaluation.batch_size=7": set(),
    "exploration.prompts=4": {"dynamics", "impact"},
    "exploration.replaced=4": {"impact"},
    "sft.save_steps=9": set(),
    "rl.save_steps=9": set(),
}


@pytest.mark.parametrize("change", MADE_AGAIN)
def test_each_setting_makes_again_what_depends_on_it_and_nothing_else(change):
    before, after = stages_of("smoke"), stages_of(f"smoke+{change}")
    assert {name for name in before if before[name] != after[name]} == MADE_AGAIN[change]


def test_old_entropies_are_not_taken_without_a_word():
    """What a review found: they lay on disk, measured with other settings, and RL took them."""
    profile = load_profile("smoke")
    write_json(runs.entropy_run(profile).measured / "entropy.json", {"quantiles": {}})
    with pytest.raises(SageError, match="were not measured with the settings of profile smoke"):
        runs.require_entropies(profile, profile.methods["grpo_branch"].guide)
    runs.require_entropies(profile, profile.methods["grpo_token"].guide)


def test_a_profile_takes_the_base_of_the_one_that_it_extends(tmp_path):
    base = runs.sft_run(load_profile("smoke"))
    base.prepare()
    base.model.mkdir()
    (tmp_path / "mine.yaml").write_text("name: mine\nextends: smoke\nevaluation: {top_p: 0.7}\n")
    mine = load_profile(tmp_path / "mine.yaml")
    assert runs.sft_run(mine).made_below() is None, "not done"
    base.finish(records.Record("sft", "smoke", base.fingerprint, 1, {}), weights="w")
    made = runs.sft_run(mine).made_below()
    assert (made.build, made.measured) == (base.build, base.measured)
    policy, theirs = (runs.rl_runs(profile)[0] for profile in (mine, load_profile("smoke")))
    assert policy.fingerprint == theirs.fingerprint, "also before the base is taken"
    longer = load_profile(f"{mine.spec}+sft.max_steps=3")
    assert runs.sft_run(longer).made_below() is None


def test_a_method_waits_for_the_policy_that_it_starts_from_or_reads_and_depends_on_it(tmp_path):
    """In the profile guides both are the policy of rft's first seed."""
    profile, other = load_profile("guides"), load_profile("guides+rft.prompts=100")
    rft = runs.rl_run(profile, "rft", 3407)
    reads, starts, neither = (
        runs.rl_run(profile, key, 3408) for key in ("success", "from_success", "reverse")
    )
    assert reads.earlier == starts.earlier == (rft,) and neither.earlier == ()
    assert starts.policy == rft and reads.policy == runs.sft_run(profile) == starts.base
    jobs = {job.key[2:]: job for job in stages.jobs_of(profile, ["sft", "entropies", "rl"])}
    for key in ("success", "from_success"):
        assert jobs["rft", 3407].key in jobs[key, 3408].needs
    assert jobs["rft", 3407].key not in jobs["reverse", 3408].needs
    for key, remade in {"success": True, "from_success": True, "reverse": False}.items():
        ours, theirs = (runs.rl_run(of, key, 3408).made_from for of in (profile, other))
        assert (ours != theirs) == remade
    with pytest.raises(SageError, match="policy of 'grpo', which is no method with rft"):
        load_profile("guides+methods.from_success.start=grpo")


def test_a_record_names_the_commit_whose_code_runs(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ("git", "-C", str(tmp_path), *who, *words)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--message", "first")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    records.revision.cache_clear()
    try:
        first = git("rev-parse", "--short=12", "HEAD")
        assert records.revision() == first
        git("commit", "--allow-empty", "--message", "second, while the process runs")
        assert records.revision() == first != git("rev-parse", "--short=12", "HEAD")
    finally:
        records.revision.cache_clear()
