"""A profile is data: code that it names, and what sends data away, need its user's consent."""

import io
import sys

import pytest

from sage_lib import consent
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import cli, plan, stages
from sage_lib.tasks import judging
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import make_task


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    """Nobody has consented, and nobody is at the terminal."""
    monkeypatch.setenv(consent.VARIABLE, "")
    monkeypatch.setattr(consent, "_agreed", False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(plan, "check_settings", lambda profile: None)  # which imports TRL


@pytest.fixture
def profile(work_folder, monkeypatch):
    """Path of a profile whose judge writes a file as it is imported and when it is called."""
    mark = str(work_folder / "ran")
    (work_folder / "of_a_stranger.py").write_text(
        f"open({mark!r}, 'a')\ndef judge(*pair): return True\n"
    )
    (work_folder / "d.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    data = "{name: file, path: d.jsonl, judge: 'of_a_stranger:judge', rows: 1}"
    path = work_folder / "theirs.yaml"
    path.write_text(f"name: theirs\nextends: smoke\ntrain: []\nevaluation: {{data: [{data}]}}\n")
    monkeypatch.syspath_prepend(str(work_folder))
    return path


def test_code_that_a_profile_names_is_not_even_imported_without_consent(profile):
    task = load_profile(profile).evaluation.data[0].task
    with pytest.raises(SageError, match=r"of_a_stranger:judge, which is code.*--yes.*SAGE_TRUST="):
        task.problems(1, 0)
    assert not (profile.parent / "ran").exists()
    timed = make_task("file", {"path": "d.jsonl", "judge": "timeit:repeat"}, {}, profile.parent)
    with pytest.raises(SageError, match="timeit:repeat"):
        timed.problems(1, 0)


def test_every_command_that_would_run_it_asks_first(profile):
    for words in (["reproduce"], ["stage", "evaluation"], ["guide-gain"]):
        with pytest.raises(SystemExit, match="asks for of_a_stranger:judge"):
            cli.main([*words, "--profile", str(profile)])
    loaded = load_profile(profile)
    with pytest.raises(SageError, match="asks for of_a_stranger:judge"):
        stages.make(loaded, runs.sft_run(loaded))
    assert not (profile.parent / "ran").exists()


def test_consent_is_given_once_by_each_of_its_ways(profile, monkeypatch):
    task = load_profile(profile).evaluation.data[0].task
    typed = io.StringIO("y\n")
    typed.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", typed)
    problems = task.problems(1, 0)
    assert judging.judge(problems, [answer_turn("so", "3")], None) == [True]
    consent.require_all(load_profile(profile).raw)  # of which no word is left to read
    monkeypatch.setenv(consent.VARIABLE, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    consent.agree(True)
    consent.require_all(load_profile(profile).raw)
    assert consent.os.environ[consent.VARIABLE] == "of_a_stranger:judge", "what is started has it"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("rl.push_to_hub=true", "rl.push_to_hub"),
        ("sft.hub_model_id=a/b", "sft.hub_model_id"),
        ("rl.report_to=wandb", "rl.report_to"),
        ("rl.trust_remote_code=true", "rl.trust_remote_code"),
        ("rl.vllm_server_host=example.org", "rl.vllm_server_host"),
        ("rl.generation_kwargs={custom_generate: a/b}", "rl.generation_kwargs.custom_generate"),
        ("rl_lora={megatron_core: antigravity}", "rl_lora.megatron_core"),
        ("evaluation.vllm={trust_remote_code: true}", "evaluation.vllm.trust_remote_code"),
        ("evaluation.vllm={worker_cls: a.B}", "evaluation.vllm.worker_cls"),
        ("methods.grpo.rl={hub_token: x}", "methods.grpo.rl.hub_token"),
        ("rl.deepspeed={wandb: {enabled: true}}", "rl.deepspeed"),
        (
            "methods.mine={label: M, vary: {rl.push_to_hub: [true]}}",
            "methods.mine.vary.rl.push_to_hub",
        ),
    ],
)
def test_settings_that_run_or_send_something_are_denied_without_consent(change, name):
    profile = load_profile(f"smoke+{change}")
    assert [key for key, _ in consent.requests(profile.raw)] == [name]
    with pytest.raises(SageError, match=rf"asks for {name}, which"):
        plan.before(profile, [], yes=False)
    with pytest.raises(SageError, match=rf"asks for {name}, which"):
        stages.make(profile, runs.sft_run(profile))


def test_a_name_consents_to_no_other_and_is_no_command_to_a_terminal(capsys):
    consent.agree(True)
    consent.require("evaluation.vllm.\x1b[8ma,os:system", "may name code")
    assert consent.os.environ[consent.VARIABLE] == "evaluation.vllm.\\x1b[8ma;os:system"
    assert "\x1b" not in capsys.readouterr().err
    consent.require("rl.push_to_hub", "sends data to a server")
    names = "evaluation.vllm.\\x1b[8ma;os:system,rl.push_to_hub"
    assert consent.os.environ[consent.VARIABLE] == names, "the first consent stays"


def test_no_profile_of_the_companion_asks_for_anything():
    from sage_lib.experiment.profile import profile_names

    for name in profile_names():
        assert not list(consent.requests(load_profile(name).raw)), name
    plain = load_profile("smoke+rl.report_to=none+rl.push_to_hub=false")
    assert not list(consent.requests(plain.raw))


def test_a_dry_run_shows_what_would_be_asked(profile, capsys):
    cli.main(["dry-run", "--profile", str(profile)])
    assert "of_a_stranger:judge" in capsys.readouterr().out.partition("CONSENT")[2]
    assert not (profile.parent / "ran").exists()


def test_what_others_wrote_is_no_command_to_a_terminal():
    said = str(SageError("a\x1b[2J\x9b\u202e\ud800 \u00e9 \u4e2d"))
    assert said == r"a\x1b[2J\x9b\u202e\ud800 " + "\u00e9 \u4e2d"


def test_no_answer_is_no(monkeypatch):
    closed = io.StringIO()
    closed.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", closed)
    assert not consent.answered("Start? ")
