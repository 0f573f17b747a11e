"""Profiles: every shipped one resolves and names its sources; every way to get one wrong is told in one sentence."""

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.paths import PROFILES
from sage_lib.pipeline import plan


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_resolve_and_their_keys_are_known_to_trl_and_peft(name):
    from sage_lib.training.callbacks import check_sections

    profile = load_profile(name)
    check_sections(profile)
    needed = {
        "loss_type",
        "beta",
        "use_bias_correction_kl",
        "epsilon",
        "epsilon_high",
        "temperature",
        "min_p",
        "top_p",
        "top_k",
        "scale_rewards",
        "bf16",
        "seed",
    }
    assert needed <= set(profile.rl), "nothing that matters is left to a library's default"
    assert profile.rl["use_bias_correction_kl"] is False, "every reproduction uses the paper's k3"


def test_paper_profile_is_tables_7_and_8():
    p = load_profile("paper")
    assert (
        p.sft_lora["r"],
        p.sft["num_train_epochs"],
        p.sft["per_device_train_batch_size"],
        p.sft["warmup_steps"],
    ) == (8, 2, 1, 5)
    assert (
        p.rl["max_steps"],
        p.rl["num_generations"],
        p.rl["temperature"],
        p.rl["min_p"],
        p.rl["epsilon"],
    ) == (1000, 8, 1.0, 0.01, 0.2)
    assert (p.guide.threshold, p.guide.ratio, p.seeds[0], p.rl_data.rows) == (1.2, 0.3, 3407, 2000)
    assert p.rl["per_device_train_batch_size"] * p.rl["gradient_accumulation_steps"] == 64


def test_every_value_of_the_paper_profile_that_is_not_off_names_its_source():
    table = plan.settings_table(load_profile("paper"))
    bare = table[
        (table["source"] == "")
        & ~table["setting"].str.startswith(
            ("name", "description", "compute.", "sft_lora", "rl_lora")
        )
    ]
    plumbing = (
        "logging_steps",
        "save_steps",
        "save_total_limit",
        "fp16",
        "seed",
        "max_steps",
        "delta",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "quantile",
        "task",
        "kinds",
        "rare_share",
        "people",
        "longest",
        "digits",
        "optional",
        "ood",
        "None",
        "data_seed",
    )
    assert [s for s in bare["setting"] if not s.endswith(plumbing)] == []


def test_memory_of_the_paper_model_is_that_of_its_published_size():
    total, adapter = plan.parameters(load_profile("paper").model.architecture, rank=8)
    assert total == 7_615_616_512  # Qwen2.5-7B's published checkpoint has this many parameters
    assert adapter == 20_185_088 // 1  # PEFT's count for rank 8 on all seven projections


@pytest.fixture
def edited(tmp_path):
    def edit(old, new):
        path = tmp_path / "smoke.yaml"
        text = (PROFILES / "smoke.yaml").read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return path

    return edit


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  digits: 4", "  digts: 4", "unknown key 'digts'"),
        ("  digits: 4\n", "", "'digits' is missing"),
        ("  digits: 4", "  digits: four", "digits must be int"),
        ("seeds: [3407]", "seeds: ['3407']", "seeds are whole numbers"),
        ("seeds: [3407]", "seeds: [3407, 3407]", "each once"),
        ("  samples: 32 ", "  samples: 16 ", "pass@32 needs"),
        ("ks: [1, 2, 4,", "ks: [2, 1, 4,", "start at 1 and grow"),
        ("ks: [1, 2, 4,", "ks: [2, 4,", "start at 1 and grow"),
        ("name: smoke", "name: smoker", "set name: "),
        (
            "{label: GRPO + Branch, guide: branch}",
            "{label: GRPO + Branch, guide: branch, rl: {beta: 0.0}}",
            "needs beta > 0",
        ),
        ("anchor: forward_kl", "anchor: k4", "no anchor 'k4'"),
        ("reward: random", "reward: luck", "no reward 'luck'"),
        ("[grpo, grpo_no_kl,", "[grpoo, grpo_no_kl,", "names 'grpoo', which is not among"),
        ("  threshold: null", "  threshold: 1.2", "either threshold and ratio"),
        ("seeds: [3407]", "seeds: [3407", "not valid YAML"),
        ("seeds: [3407]", "seedz: [3407]", "unknown key 'seedz'"),
    ],
)
def test_a_wrong_profile_gets_one_clear_sentence(edited, old, new, words):
    with pytest.raises(SageError, match=words) as caught:
        load_profile(edited(old, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [n for n in profile_names() if load_profile(n).task])
def test_the_embedded_profiles_data_can_be_made(name):
    profile = load_profile(name)
    assert len(problems.rl_items(profile)) == profile.rl_data.rows
    assert len(problems.sft_rows(profile, len)) == profile.sft_data.rows
    held_out = {i.id for i in problems.evaluation_items(profile)}
    assert len(held_out) == sum(d.rows for d in profile.evaluation.data) and not held_out & {
        i.id for i in problems.rl_items(profile)
    }


def test_unknown_profile_names_the_choices():
    with pytest.raises(SageError, match="choose one of laptop, paper, smoke"):
        load_profile("smoek")


def test_a_setting_unknown_to_trl_is_refused(edited):
    from sage_lib.training.callbacks import check_sections

    with pytest.raises(SageError, match="GRPOConfig .* no setting 'temprature'"):
        check_sections(
            load_profile(edited("  temperature: 1.0           # Table 8", "  temprature: 1.0"))
        )


def test_fingerprints_change_with_what_made_a_stage_and_with_nothing_else(edited):
    smoke = load_profile("smoke")
    other = load_profile(edited("  samples: 32 ", "  samples: 512 "))
    assert runs.sft_run(other).fingerprint == runs.sft_run(smoke).fingerprint
    assert (
        runs.evaluation_run(other, runs.sft_run(other)).fingerprint
        != runs.evaluation_run(smoke, runs.sft_run(smoke)).fingerprint
    )
    other = load_profile(edited("rare_share: 0.03", "rare_share: 0.05"))
    assert all(
        a.fingerprint != b.fingerprint
        for (_, _, a), (_, _, b) in zip(runs.rl_runs(other), runs.rl_runs(smoke), strict=True)
    )
    guided = load_profile(edited("threshold_quantile: 0.90", "threshold_quantile: 0.95"))
    changed = {
        m
        for (m, _, a), (_, _, b) in zip(runs.rl_runs(guided), runs.rl_runs(smoke), strict=True)
        if a.fingerprint != b.fingerprint
    }
    assert changed == {m for m, chosen in smoke.methods.items() if chosen.guide}
