"""What the profiles of the paper ask, grade and are shown beside: before anybody pays for a run."""

import re

import nbformat
import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import results as results_module
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.pipeline import plan
from sage_lib.policy import loading
from sage_lib.report import page, passk, reported
from sage_lib.tasks import prompts
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier

PAPER = [name for name in profile_names() if name.startswith("paper")]
#: The turns of Qwen's chat models; DeepSeek's differ in their tokens alone.
OWN = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = "so 9<end_working_out><SOLUTION>9</SOLUTION>"
BOXED = r"First 4. So the answer is \boxed{9}."


@pytest.fixture
def tokenizer():
    fast = Tokenizer(models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", chat_template=OWN)


@pytest.fixture(scope="module")
def verifier():
    of_module = Verifier()
    yield of_module
    of_module.close()


@pytest.mark.parametrize("name", PAPER)
def test_a_model_without_sft_keeps_its_own_template_and_no_other_does(name, tokenizer):
    profile = load_profile(name)
    with_prompt = loading.with_prompt(tokenizer, profile.model)
    prompt = with_prompt.apply_chat_template(
        prompts.messages("What is 4 + 5?"), add_generation_prompt=True, tokenize=False
    )
    assert prompts.SYSTEM_PROMPT in prompt and "What is 4 + 5?" in prompt
    if profile.sft:
        assert prompt.endswith("What is 4 + 5?<start_working_out>") and "im_start" not in prompt
    else:
        assert prompt.startswith("<|im_start|>system\nYou are given a problem.")
        assert prompt.endswith("4 + 5?<|im_end|>\n<|im_start|>assistant\n")


def test_a_model_without_a_template_is_refused_where_it_is_to_keep_its_own(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(SageError, match=r"has no chat template: set model\.template to paper"):
        loading.with_prompt(tokenizer, load_profile("paper_full").model)


@pytest.mark.parametrize("name", PAPER)
def test_a_right_answer_is_graded_right_in_each_form_that_the_model_writes(name, verifier):
    profile = load_profile(name)
    texts = [MARKED, BOXED, BOXED + MARKED, MARKED.replace("9<", r"\boxed{9}<"), "9", MARKED[:9]]
    problem = Problem("1", "amc23", "What is 4 + 5?", "9", "amc23")
    graded = judge([problem] * len(texts), texts, verifier, profile.model.answer)
    assert graded == [True, not profile.sft, True, True, False, False]
    wrong = [MARKED.replace(">9<", ">4<"), BOXED.replace("9", "4"), MARKED + r" \boxed{4}"]
    graded = judge([problem] * 3, wrong, verifier, profile.model.answer)
    assert graded == [False, False, bool(profile.sft)], "the last answer counts"


@pytest.mark.parametrize("name", PAPER)
def test_the_reported_table_is_of_the_profiles_own_model(name):
    """Tables 4 and 9 have other bases than Table 1; Figures 6 and 7 and Table 2 print no pass@k."""
    base = {"sage_table1": 0.227, "sage_table3": 0.227, "sage_table4": 0.429, "sage_table9": 0.135}
    expected = {"paper_all": 1, "paper": 1, "paper_distilled": 4, "paper_losses": 3, "paper_ood": 9}
    table = load_profile(name).reported
    assert table == (f"sage_table{expected[name]}" if name in expected else None)
    means = reported.means(table)
    assert (
        means.empty if table is None else means.loc["Base Model", "paper's pass@1"] == base[table]
    )


@pytest.mark.parametrize("name", PAPER)
def test_a_dry_run_shows_what_is_asked_and_how_it_is_graded(name, monkeypatch):
    monkeypatch.setattr(plan, "check_settings", lambda profile: None)
    printed = plan.describe(load_profile(name))
    section = printed.partition("\nASKED AND GRADED\n")[2].partition("\n\n")[0]
    assert "prompt, first line  You are given a problem." in section
    template, read = ("QUESTION<start_working_out>", "between the last <SOLUTION>")
    if not load_profile(name).sft:
        template, read = "QUESTION", r"in the last \boxed{...} or <SOLUTION>"
    assert f"{template}\n" in section and read in section
    assert "temperature 0.3, top-p 1.0, min-p 0.01, top-k off" in section


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Runs a notebook's code cells on planted counts: (number, profile, how many) -> its tables."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    shown = []
    monkeypatch.setattr(page, "_display", shown.append)

    def run(number, profile, how_many=None):
        results = results_module.Results(load_profile(profile), own=True)
        results.counts = planted(results.profile)
        results.runs = results.counts.drop_duplicates(["method", "seed"]).assign(stage="evaluation")
        monkeypatch.setattr(results_module, "load_results", lambda *named, **options: results)
        [path] = paths.NOTEBOOKS.glob(f"{number}_*.ipynb")
        code = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
        space = {}
        for source in code[:how_many]:
            exec(source, space)
        return space, [
            re.sub("<[^>]+>|&nbsp;", " ", s.to_html()) for s in shown if hasattr(s, "to_html")
        ]

    return run


def planted(profile):
    """Counts of six problems of each data set, in which no two sets are alike."""
    rows = []
    for method in ("base", *profile.methods):
        for seed in [None] if method == "base" else profile.seeds:
            for place, data in enumerate(profile.evaluation.data):
                for problem in range(6):
                    c = (place + problem) % 7 * profile.evaluation.samples // 16
                    row = (f"{method}-{seed}", method, seed, data.label, problem)
                    rows.append((*row, profile.evaluation.samples, c))
    columns = ["run", "method", "seed", "dataset", "problem", "n", "c"]
    return pd.DataFrame(rows, columns=columns).astype({"seed": "Int64"})


def test_notebook_8_shows_table_4_beside_the_distilled_model(cells, capsys):
    _, tables = cells("08", "paper_distilled", 5)
    text = "\n".join(tables)
    assert "0.429" in text and "0.708" not in text and "0.230 ± 0.036" in text
    assert "amc23" in text, "our data sets apart"
    _, tables = cells("08", "paper_full", 5)
    assert "no pass@k of this model" in capsys.readouterr().out
    assert "paper's" not in "\n".join(tables[-2:])


def test_notebook_9_averages_no_two_data_sets(cells):
    space, tables = cells("09", "paper_ood")
    assert list(space["curves"]) == ["minerva", *(f"knights_knaves_{n}" for n in range(2, 9))]
    counts = planted(load_profile("paper_ood"))
    for name, curve in space["curves"].items():
        of_base = counts[(counts["dataset"] == name) & (counts["method"] == "base")]
        level = curve[(curve["method"] == "base") & (curve["k"] == 1)]["mean"].item()
        assert level == pytest.approx((of_base["c"] / of_base["n"]).mean())
    assert any("0.135" in table and "0.477" in table for table in tables), "Table 9"


def test_values_apart_by_data_set_are_those_of_its_problems():
    counts = planted(load_profile("paper_ood"))
    counts = counts.assign(share=counts["c"] / counts["n"])
    apart = passk.by_data_set(passk.Values.by_method(counts, ["share"]))
    for (name, method), rows in counts.groupby(["dataset", "method"]):
        found = apart[name][method]
        assert set(found.sets) == {name}
        assert np.mean(found.values) == pytest.approx(rows["share"].mean())
