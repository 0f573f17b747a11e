"""The profiles that need a GPU: they are the paper's tables, and each runs to its end with a tiny
model in the real one's place."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
from safetensors.torch import load_file

from sage_lib.errors import SageError
from sage_lib.experiment import problems, records, runs
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.files import read_lines
from sage_lib.pipeline import stages
from sage_lib.tasks import public_sets
from sage_lib.tasks.problem import Problem

ROOT = Path(__file__).parent
GPU = [name for name in profile_names() if load_profile(name).compute.requires_gpu]
#: One without SFT, one of all weights, one with both adapters, which together have every path.
QUICK = ("one_gpu", "paper_distilled", "paper_full")


def test_the_profiles_are_the_papers_tables():
    """Rows of its tables, which data/reported has, are the methods that a profile trains."""
    from sage_lib.report import reported

    def labels(name):
        profile = load_profile(name)
        return ["Base Model", *(method.label for method in profile.methods.values())]

    for name, table in {"paper": "sage_table1", "paper_losses": "sage_table3"}.items():
        assert labels(name) == list(dict.fromkeys(reported.read_table(table)["row"]))
    assert labels("paper_distilled") == ["Base Model", "GRPO", "GRPO + Branch"]
    cells = {
        (m.guide["threshold"], m.guide["ratio"])
        for m in load_profile("paper_grid").methods.values()
    }
    assert cells == {(t, r) for t in (0.8, 1.2, 2.0) for r in (0.1, 0.3, 0.5)}
    assert load_profile("paper_patterns").evaluation.max_new_tokens + 512 == 4096
    distilled, paper = load_profile("paper_distilled"), load_profile("paper")
    assert distilled.model.max_seq_length == 8192 and not distilled.sft
    assert paper.model.max_seq_length - paper.rl["max_completion_length"] == 512


def test_what_a_profile_takes_from_paper_is_what_it_would_make_itself():
    """By their settings alone, since no base is here; under other names too."""
    paper = {run.fingerprint for run in runs.policy_runs(load_profile("paper"))}
    for name in ("paper_ood", "paper_patterns", "paper_perplexity"):
        assert {run.fingerprint for run in runs.policy_runs(load_profile(name))} <= paper, name
    grid = runs.policy_runs(load_profile("paper_grid"))
    shared = [run.method for run in grid if run.fingerprint in paper]
    assert shared == ["base", *["setting_threshold1.2_ratio0.3"] * 3]
    losses = runs.policy_runs(load_profile("paper_losses"))
    assert [run.method for run in losses if run.fingerprint in paper] == ["base"]


def test_the_two_problems_of_appendix_j_are_taken_by_their_ids(monkeypatch):
    data = load_profile("paper_perplexity").evaluation.data[0]
    ids = [*data.task.only, "another"]
    there = [Problem(name, "aime", f"question {name}", "1", "aime") for name in ids]
    monkeypatch.setattr(public_sets, "load", lambda *given: there)
    assert [problem.id for problem in problems.load(data)] == ids[:2]
    monkeypatch.setattr(public_sets, "load", lambda *given: there[1:])
    with pytest.raises(SageError, match=r"aime has no problem 'benchmarks/aime2024.jsonl/61'"):
        problems.load(data)


@pytest.fixture(scope="module")
def folder(module_folder):
    with contextlib.chdir(module_folder):
        yield module_folder


def to_the_end(name, folder):
    forks.finish(str(ROOT / "whole_run.py"), name)
    return load_profile(folder / f"{name}-stand-in.yaml")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in GPU]
)
def test_a_profile_runs_to_its_end(name, folder):
    """Same stages, same methods, two steps; and a policy is kept as the profile says."""
    real, profile = load_profile(name), to_the_end(name, folder)
    assert list(profile.methods) == list(real.methods) and bool(profile.sft) == bool(real.sft)
    for stage in stages.STAGES.values():
        assert len(stage.runs(profile)) == len({(r.name, r.method) for r in stage.runs(profile)})
        assert all(run.done() for run in stage.runs(profile)), stage.name
    for run in runs.rl_runs(profile):
        assert len(read_lines(run.measured / "steps.jsonl")) == 2
        lora = real.methods[run.method].lora and real.rl_lora is not None
        assert (run.model / "adapter_config.json").is_file() == lora
        assert (run.model / "model.safetensors").is_file() != lora
        assert records.load(run.record)["prompts"] == 64


def test_a_kept_adapter_is_the_merged_model(folder):
    """The same run once more with whole models kept: what is read of an adapter and its base has
    the very weights that were saved; and both are moved together."""
    from sage_lib.policy import loading

    profile = to_the_end("one_gpu", folder)
    whole = load_profile(f"{profile.spec}+compute.keep_adapter=false")
    base = runs.sft_run(whole)
    forks.finish(*forks.stage(whole, "sft", "sft"))
    assert base.weights == runs.sft_run(profile).weights
    run = runs.rl_run(whole, "grpo_branch", 3407)
    kept = runs.rl_run(profile, "grpo_branch", 3407)
    (kept.build / "done").rename(kept.build / "aside")  # or it would be taken
    forks.finish(*forks.stage(whole, "rl", run.name))
    (kept.build / "aside").rename(kept.build / "done")
    saved = load_file(run.model / "model.safetensors")
    size = sum(file.stat().st_size for file in kept.model.glob("*.safetensors"))
    moved = folder / "moved"
    for place in ("sft", f"rl/{kept.name}"):
        (moved / place).parent.mkdir(parents=True, exist_ok=True)
        (runs.paths.build(profile.name) / place).rename(moved / place)
    model, _ = loading.load(profile.model, moved / f"rl/{kept.name}" / "model")
    for place in ("sft", f"rl/{kept.name}"):
        (moved / place).rename(runs.paths.build(profile.name) / place)
    loaded = {name: value for name, value in model.state_dict().items() if name in saved}
    assert set(loaded) == set(saved)
    assert all((loaded[name] == value).all() for name, value in saved.items())
    assert size < sum(file.stat().st_size for file in run.model.glob("*.safetensors"))


def test_vllm_has_a_gpu_for_itself(folder, monkeypatch):
    """A module in vLLM's place, which draws two tokens: the model is loaded after it was shut
    down, to score these; and it reads the base with the adapter that the run kept."""
    from sage_lib.evaluation import evaluate

    profile = load_profile(f"{to_the_end('one_gpu', folder).spec}+evaluation.engine=vllm")
    for stage, run in (("sft", "sft"), ("rl", "grpo-s3407")):
        forks.finish(*forks.stage(profile, stage, run))
    policy, told = runs.rl_run(profile, "grpo", 3407), []
    load = evaluate.loading.load
    monkeypatch.setattr(
        evaluate.loading, "load", lambda *given: told.append("loaded") or load(*given)
    )

    class LLM:
        def __init__(self, model, **keywords):
            told.append(model)
            shut_down = SimpleNamespace(shutdown=lambda: told.append("shut down"))
            self.llm_engine = SimpleNamespace(engine_core=shut_down)

        def generate(self, requests, parameters, use_tqdm, lora_request):
            told.append(lora_request)
            one = SimpleNamespace(token_ids=(5, 6), finish_reason="length")
            return [SimpleNamespace(outputs=[one]) for _ in requests]

    request = SimpleNamespace(LoRARequest=lambda *given: given)
    vllm = SimpleNamespace(LLM=LLM, SamplingParams=lambda **keywords: keywords)
    for name, module in {"vllm": vllm, "vllm.lora": request, "vllm.lora.request": request}.items():
        monkeypatch.setitem(sys.modules, name, module)
    run = runs.evaluation_run(policy)
    run.prepare()
    evaluate.evaluate_policy(profile, run)
    base = str(runs.sft_run(profile).model)
    assert told == [base, ("policy", 1, str(policy.model)), "shut down", "loaded", "loaded"]
    assert run.done() and len(read_lines(run.samples)) == 2 * 4


def test_prompts_over_the_limit_are_left_out_and_counted(folder, capsys):
    """Of 8 prompts one is longer than the 40 tokens left beside a completion of 24."""
    profile = to_the_end("one_gpu", folder)
    lines = [{"question": f"reach {n} from 1 2 3", "gold": str(n)} for n in range(1, 9)]
    lines[3]["question"] += " + 1" * 30
    (folder / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = "{name: file, path: mine.jsonl, question: question, gold: gold, rows: 100}"
    file = folder / "long.yaml"
    file.write_text(f"name: long\nextends: {profile.name}.yaml\nrl_data: {data}\n")
    mine = load_profile(file)
    for stage, run in (("sft", "sft"), ("rl", "grpo-s3407")):
        forks.finish(*forks.stage(mine, stage, run))
    run = runs.rl_run(mine, "grpo", 3407)
    record = records.load(run.record)
    assert (record["prompts"], record["too_long"]) == (7, 1)
    short = load_profile(f"{file}+rl.max_completion_length=60")
    from sage_lib.training import rl

    _, tokenizer = rl.loading.load(mine.model, run.model)
    with pytest.raises(SageError, match=r"no prompt of .* has at most 4 tokens"):
        rl.within_limit(short, short.rl, tokenizer)


#: The chat templates that stand for those of Qwen and of DeepSeek's distilled models.
CHATML = "{% for t in messages %}<|im_start|>{{ t.role }}\n{{ t.content }}<|im_end|>\n{% endfor %}"
CHATML += "<|im_start|>assistant\n"
DISTILLED = "{{ messages[0].content }}<|User|>{{ messages[1].content }}<|Assistant|><think>\n"
#: Profile -> the printed table of its rows, and the template of its model, if it keeps that.
SHOWN = {
    "paper": ("sage_table1", None),
    "paper_all": ("sage_table1", None),
    "paper_distilled": ("sage_table4", DISTILLED),
    "paper_full": (None, CHATML),
    "paper_full_3b": (None, CHATML),
    "paper_grid": (None, None),
    "paper_losses": ("sage_table3", None),
    "paper_ood": ("sage_table9", None),
    "paper_patterns": (None, None),
    "paper_perplexity": (None, None),
}


def test_every_profile_of_the_paper_is_listed():
    assert {name for name in profile_names() if name.startswith("paper")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_asked_and_graded_and_shown_beside(name, tiny_model, verifier):
    """One prompt, one right answer in each form that the model writes, and the printed table."""
    from sage_lib.pipeline import plan
    from sage_lib.policy import loading, tiny_qwen
    from sage_lib.tasks import prompts
    from sage_lib.tasks.judging import judge

    profile, (table, template) = load_profile(name), SHOWN[name]
    assert profile.reported == table
    tokenizer = tiny_qwen.load_tokenizer(tiny_model)
    tokenizer.chat_template = template or "another template"
    turns = prompts.messages("1 + 1?")
    tokenizer = loading.with_prompt(tokenizer, profile.model.prompt)
    options = {"tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(turns, **options)
    listed = plan.asked_and_graded(profile).set_index("what")["how"]
    if template is None:
        end = tokenizer.eos_token
        assert prompt == f"{prompts.SYSTEM_PROMPT}{end}1 + 1?{prompts.WORK_START}"
        assert listed["prompt"].startswith(
            prompt.replace(end, "<END>").replace("1 + 1?", "QUESTION")
        )
    else:
        assert prompt.endswith(("<|im_start|>assistant", "<|Assistant|><think>"))
        assert prompts.SYSTEM_PROMPT in prompt and profile.model.name in listed["prompt"]
    assert "top_p 1.0, min_p 0.01" in listed["evaluation draws by"], "as in training: Appendix F"
    problem = Problem("1", "some", "1 + 1?", "2", "aime")
    forms = ["so <SOLUTION>2</SOLUTION>", r"</think> It is \boxed{2}.", "The answer is 2."]
    forms.append(r"<SOLUTION>3</SOLUTION> \boxed{2}")
    right = judge([problem] * len(forms), forms, verifier, profile.model.boxed)
    assert right == [True, template is not None, False, False]


def test_a_tokenizer_without_a_template_is_refused(tiny_model):
    from sage_lib.policy import loading, tiny_qwen

    tokenizer = tiny_qwen.load_tokenizer(tiny_model)
    tokenizer.chat_template = None
    with pytest.raises(SageError, match="has no chat template"):
        loading.with_prompt(tokenizer, "system")
