"""README.md and the pages in docs: their blocks run, their commands are read by the programs that
they name, their links lead somewhere, and the README's generated parts are as they should be.

Python blocks run. Commands that train or install do not: make plans them (--dry-run), the
companion's own are read by its command line, which is stopped before it works, and what they name
(profiles, runs, notebooks, files) must be there.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
import types

import pandas as pd
import pytest
from ruamel.yaml import YAML

import sage_lib
from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.grid import load_grid
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import (
    bench,
    cli,
    compare,
    grid,
    notebooks,
    online,
    plan,
    publish,
    readme,
    reproduce,
    stages,
)
from sage_lib.report import growth_figures, measured

ROOT = paths.ROOT
PAGES = {
    path.name: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
}
#: As for PAGES, and the page for who changes the project, whose blocks have a test of their own.
LINKED = {"README.md": ".", "CONTRIBUTING.md": "."} | {
    name: "docs" for name in PAGES if name != "README.md"
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language):
    """(page, block) of every block of a language."""
    return [
        (page, found[1])
        for page, text in PAGES.items()
        for found in BLOCK.findall(text)
        if found[0] == language
    ]


def prose(text):
    return BLOCK.sub("", text)


# --- Python -------------------------------------------------------------------------------------


def python_block(name):
    """The one block that uses a name."""
    (block,) = [block for _, block in blocks("python") if re.search(rf"\b{name}\b", block)]
    return block


def test_every_block_is_of_a_kind_that_is_tried():
    kinds = {kind for text in PAGES.values() for kind, _ in BLOCK.findall(text)}
    assert kinds == {"", "python", "yaml"}
    assert len(blocks("python")) == 5, "each has its test below"


def test_the_trainer_of_the_readme_trains(tiny_model, tmp_path, monkeypatch):
    """On a tiny model and on a CPU, for one step; otherwise as it stands."""
    GRPOConfig = sage_lib.GRPOConfig  # and with it Unsloth, before transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    def small(**given):
        return GRPOConfig(
            **given, output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4,
            num_generations=4, max_completion_length=8, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip

    monkeypatch.setitem(vars(sage_lib), "GRPOConfig", small)
    rows = [{"prompt": "reach 2 from 1 1", "answer": "2"}] * 4
    names = {
        "model": AutoModelForCausalLM.from_pretrained(tiny_model),
        "train_dataset": Dataset.from_list(rows),
    }
    exec(python_block("train_dataset"), names)
    (log,) = names["trainer"].state.log_history
    assert math.isfinite(log["train_loss"]) and log["kl_ref"] == 0
    assert log["guide/max"] == pytest.approx(1.4), "it reached the loss, up to its clamp"
    assert names["trainer"].guide == sage_lib.BranchGuide(1.2, 0.3)
    assert names["trainer"].anchor.name == "k3" and names["trainer"].args.beta == 0.05
    trained = {
        name for name, value in names["trainer"].model.named_parameters() if value.requires_grad
    }
    assert trained and all("lora_" in name for name in trained)


def test_the_script_of_the_page_trains(tmp_path):
    """As it stands, in a folder and a process of its own."""
    (tmp_path / "mine.py").write_text(python_block("tiny_qwen"))
    words = [sys.executable, "mine.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(1.4)


def test_the_guide_of_the_page_is_one():
    import torch

    from sage_lib.algorithm.guides import check_guide, try_guide

    names = {"__name__": "page"}
    exec(python_block("OnUncertainTokens"), names)
    guide = names["OnUncertainTokens"](threshold=1.0)
    check_guide(guide)
    try_guide(guide)
    signal, mask = torch.tensor([[0.4, 1.4, 2.0]]), torch.tensor([[1, 1, 0]])
    inputs = sage_lib.GuideInputs(signal, -signal, mask, 0.0, torch.Generator(), mask)
    assert torch.equal(guide(inputs), torch.tensor([[1.0, 1.2, 1.0]]))


def test_the_tree_of_the_page_is_tilted():
    names = {}
    exec(python_block("tilted"), names)
    reference, reward, q = (names[key].tolist() for key in ("reference", "reward", "q"))
    weights = [p * g * math.exp(r / 0.1) for p, g, r in zip(reference, q, reward, strict=True)]
    expected = [weight / sum(weights) for weight in weights]
    assert names["policy"].tolist() == pytest.approx(expected, abs=1e-7)


def test_the_metrics_of_the_page_are_right():
    names = {}
    exec(python_block("last_answer"), names)
    assert names["answers"] == ["4", "1/2", None]
    assert [verdict.correct for verdict in names["verdicts"]] == [True, True, False]
    expected = [1 - math.comb(256 - c, 16) / math.comb(256, 16) for c in (3, 40)]
    assert names["chances"] == pytest.approx(expected)
    assert 0 <= names["low"] < sum(expected) / 2 < names["high"] <= 1


def test_what_a_page_says_of_a_guides_inputs_is_all_there_is():
    (words,) = re.findall(r"A guide is called with.*?noise", PAGES["own_code.md"], re.DOTALL)
    fields = {field.name for field in dataclasses.fields(sage_lib.GuideInputs)}
    assert set(re.findall(r"`(\w+)`", words)) == {"GuideInputs", *fields}


def resolve(module, name):
    """An imported name of sage_lib: an attribute, or a module of its own."""
    owner = importlib.import_module(module)
    return (
        getattr(owner, name)
        if hasattr(owner, name)
        else importlib.import_module(f"{module}.{name}")
    )


def test_every_name_that_a_page_says_sage_lib_has_is_there():
    """In prose too: `sage_lib.theory`, `sage_lib/tasks/public_sets.py`."""
    for text in PAGES.values():
        for dotted in re.findall(r"`(sage_lib(?:\.\w+)+)`", text):
            module, _, name = dotted.rpartition(".")
            assert resolve(module, name)
        for place in re.findall(r"`((?:sage_lib|data|tests|configs|docs)/[\w./-]+)`", text):
            assert (ROOT / place).exists(), place


def test_the_arguments_that_a_page_names_are_the_trainers():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", PAGES["own_code.md"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {
        name
        for name, parameter in inspect.signature(sage_lib.SageTrainer.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert named == own


def test_the_times_that_a_page_names_are_those_of_the_benchmarks():
    words = " ".join(PAGES["own_code.md"].split())
    of = pd.read_csv(paths.BENCHMARKS / "trainer.csv").set_index("trainer")
    branch, ratio = of.loc["Branch"], of["ratio"]
    low, high, steps = branch[["ratio 10 %", "ratio 90 %", "steps"]]
    assert (
        f"A Branch step takes {branch['ratio']:.2f} of a stock one (median of {steps:.0f} "
        f"paired steps, 95 % interval {branch['low']:.3f} to {branch['high']:.3f}; 80 % of the "
        f"steps lie within {low:.2f} and {high:.2f}), Random {ratio['Random']:.2f}, "
        f"Token {ratio['Token']:.2f}, the exact forward KL {ratio['exact forward KL']:.2f}:"
    ) in words
    assert f"stock's bit for bit, takes {ratio['SageTrainer, no guide']:.2f} there" in words
    others = [
        "position advantage",
        "entropy advantage",
        "W-REINFORCE",
        "pass@4 training",
        "Clip-Cov",
    ]
    least, most = of.loc[others, "ratio"].agg(["min", "max"])
    assert f"takes {of.loc['perplexity advantage', 'ratio']:.2f}" in words
    assert f"the other advantages {least:.2f} to {most:.2f}." in words
    merged, trimmed = ratio["adapter merged"], ratio["adapter merged, padding trimmed"]
    assert f"takes {merged:.2f} of a stock one, with `trim_padding`, too, {trimmed:.2f}." in words
    faster = pd.read_csv(paths.BENCHMARKS / "verifier.csv").set_index("answers")
    whole, formulas = faster.loc[["whole numbers", "formulas"], "times faster"].round().astype(int)
    assert f"{whole} times (whole numbers) and {formulas} times (formulas) faster" in words
    assert f"{faster.loc['measured', 'times faster']:.0f}" == "2", "about that of two processes"


def test_what_a_page_says_of_large_vocabularies_is_measured():
    words = " ".join(PAGES["own_code.md"].split())
    of = pd.read_csv(paths.BENCHMARKS / "vocabulary.csv")
    large = of[(of["tokens"] == 2048) & (of["vocabulary"] == 152_064)].set_index("trainer")
    branch, forward, stock = (
        large.loc[n] for n in ("Branch", "exact forward KL", "stock GRPOTrainer")
    )
    assert (
        f"a Branch step takes {branch['whole ratio']:.2f} of a stock one (95 % interval "
        f"{branch['whole low']:.2f} to {branch['whole high']:.2f}, "
        f"{branch['steps']:.0f} paired steps) and {branch['peak ratio']:.2f} of its memory, "
        f"one of the exact forward KL "
        f"{forward['whole ratio']:.2f} ({forward['whole low']:.2f} to "
        f"{forward['whole high']:.2f}) and {forward['peak ratio']:.2f}; without generation, which "
        f"is the same in all of them, {branch['ratio']:.2f} and {forward['ratio']:.2f} of the time"
    ) in words
    most = of.loc[of["trainer"] == "exact forward KL", "peak ratio"].max()
    assert f"the forward KL takes up to {most:.2f} of stock's memory" in words
    assert f"stock holds {stock['peak MB']:,.0f} MB" in words


def test_the_table_of_growth_is_measured():
    table = measured.benchmark("growth")
    powers = growth_figures.last_powers(table)
    for curve, group in table.groupby("curve", sort=False):
        of = powers.loc[curve]
        memory = "" if math.isnan(of["memory power"]) else f"{of['memory power']:.2f}"
        far = "all of it" if of["linear"] == of["largest"] else f"{of['linear']:,.0f}"
        cells = [
            curve,
            f"{group['size'].iloc[0]:,} to {of['largest']:,.0f}",
            f"{group['CPU seconds'].iloc[-1]:.3g}",
            f"{of['power']:.2f}",
            memory,
            far,
        ]
        assert f"| {' | '.join(cells)} |".replace("  ", " ") in PAGES["scaling.md"].replace(
            "  ", " "
        )


# --- commands -----------------------------------------------------------------------------------


def commands():
    """(page, command) of every command in a block, and of those that prose names in full."""
    found = []
    for page, text in PAGES.items():
        for kind, block in BLOCK.findall(text):
            if not kind:
                found += [(page, line.partition("#")[0].strip()) for line in block.splitlines()]
        inline = re.findall(r"`((?:make|sage-companion|python)\s[^`]+)`", prose(text))
        found += [(page, " ".join(command.split())) for command in inline]
    return sorted({(page, command) for page, command in found if command})


class Stopped(Exception):
    """A command line was read; what it would do is not done."""


def read(argv, monkeypatch):
    """What the companion's command line makes of a command, which is then not carried out."""

    def stop(options):
        raise Stopped(options)

    for module in (bench, compare, grid, plan, publish, reproduce, stages):
        monkeypatch.setattr(module, "do", stop)
    with pytest.raises(Stopped) as stopped:
        cli.main(argv)
    return stopped.value.args[0]


def require_named(options):
    """Profiles, runs, notebooks and grids that a command names are there."""
    given = vars(options)
    if given["command"] == "grid" and given["grid"] != "NAME":
        load_grid(given["grid"])
    if "profile" not in given or given["profile"] == "NAME":
        return
    profile = stages.given_profile(options)
    for number in given.get("only") or []:
        assert any(notebook.number == number for notebook in notebooks.found())
    if given.get("run"):
        known = {run.name for run in stages.STAGES[given["stage"]].runs(profile)}
        assert given["run"] in known


def write_profiles(folder):
    """The profiles that the pages write down, and the file that they name."""
    (folder / "my_problems.csv").write_text("problem,answer\n1 + 1?,2\n")
    found = []
    for _, block in blocks("yaml"):
        if block.startswith("name: "):
            name = block.removeprefix("name: ").split()[0]
            (folder / f"{name}.yaml").write_text(block)
            found.append(folder / f"{name}.yaml")
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_is_one(page, command, tmp_path, monkeypatch):
    program, *words = shlex.split(command)
    if program == "make":
        done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr
    elif program == "sage-companion":
        write_profiles(tmp_path)
        monkeypatch.chdir(tmp_path)
        require_named(read(words, monkeypatch))
    elif program == "python":
        option, module, *_ = words
        source = inspect.getsource(importlib.import_module(module))
        assert option == "-m" and 'if __name__ == "__main__":' in source
    elif program == "accelerate":
        require_launched(words)
    else:
        assert command in OTHERS, f"{page}: nobody can tell whether this works: {command}"
        assert OTHERS[command]()


def require_launched(words):
    """accelerate reads its part, and the stages theirs."""
    from accelerate.commands.accelerate_cli import get_config_parser  # noqa: F401  (installed)
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    options = launch_command_parser().parse_args(words[1:])
    assert (ROOT / options.config_file).is_file()
    if options.module:
        assert options.training_script == "sage_lib.pipeline.stages"
        parser = argparse.ArgumentParser()
        stages.add_arguments(parser)
        given = parser.parse_args(options.training_script_args)
        known = {run.name for run in stages.STAGES[given.stage].runs(load_profile(given.profile))}
        assert given.run in known


def conda_file():
    return YAML(typ="safe").load((ROOT / "environment.yml").read_text())


#: Commands of other programs -> what can be said of them without running them.
OTHERS = {
    "conda env create -f environment.yml": lambda: (ROOT / "environment.yml").is_file(),
    "conda activate sage-companion": lambda: conda_file()["name"] == "sage-companion",
    "pip install --no-deps -e .": lambda: (ROOT / "pyproject.toml").is_file(),
}


@pytest.mark.parametrize(
    "command",
    [
        "reproduce --profiles smoke",
        "stage evaluat --profile smoke",
        "stage rl --profile smoke --run grpo-s1",
        "reproduce --only 99",
        "dry-run --profile smok",
        "grid countdwn",
    ],
)
def test_a_fault_in_a_command_is_noticed(command, monkeypatch):
    with pytest.raises((SystemExit, SageError, AssertionError, pytest.fail.Exception)):
        require_named(read(command.split(), monkeypatch))


def test_the_targets_of_the_makefile_that_prose_names_are_there():
    phony = (ROOT / "Makefile").read_text().partition(".PHONY:")[2].split("\n\n")[0]
    targets = set(phony.replace("\\", "").split())
    for text in PAGES.values():
        assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets


def test_the_stages_are_named_in_their_order():
    words = " ".join(PAGES["running.md"].split())
    assert "in this order: " + ", ".join(f"`{name}`" for name in stages.STAGES) + "." in words


# --- YAML ---------------------------------------------------------------------------------------


def test_the_profiles_of_the_pages_load(tmp_path):
    files = write_profiles(tmp_path)
    assert {file.stem for file in files} == {"mine", "base_only"}
    for file in files:
        assert load_profile(file).evaluation.data[-1].name == "file"


@pytest.mark.parametrize(
    "block", [block for _, block in blocks("yaml") if not block.startswith("name: ")]
)
def test_a_section_of_a_profile_can_be_added_to_one(tmp_path, block):
    (tmp_path / "added.yaml").write_text(f"name: added\nextends: paper\n{block}")
    profile = load_profile(tmp_path / "added.yaml")
    if "rl:" in block:
        from trl import GRPOConfig

        ours = set(YAML(typ="safe").load(block)["rl"])
        assert ours <= set(inspect.signature(GRPOConfig.__init__).parameters)
        assert profile.rl["use_vllm"]
    else:
        assert profile.evaluation.engine == "vllm"


def test_the_page_of_profiles_has_every_profile_and_every_name():
    from sage_lib.algorithm.advantages import ADVANTAGES
    from sage_lib.algorithm.anchors import ANCHORS
    from sage_lib.algorithm.guides import GUIDES
    from sage_lib.tasks.table import TASKS

    text = PAGES["profiles.md"]
    listed = set(re.findall(r"`(\w+)`", text))
    assert {*GUIDES, *ANCHORS, *ADVANTAGES, *TASKS} <= listed
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    profiles = {path.stem for path in paths.PROFILES.glob("*.yaml")}
    assert {name for row in rows for name in re.findall(r"\w+", row)} == profiles


# --- links, length, repetition ------------------------------------------------------------------


@pytest.mark.parametrize("page", LINKED)
def test_every_link_and_picture_of_a_page_is_there(page):
    folder = ROOT / LINKED[page]
    text = prose((folder / page).read_text())
    for place in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text):
        assert (folder / place).exists(), f"{page}: {place}"


def test_the_readme_is_one_screen():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 110
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120
    assert too_long(PAGES["README.md"]) == []


def too_long(text):
    """Sentences of more than 25 words, as a reader sees them; of a generated table none."""
    shown = re.sub(r"<!--.*?-->|!\[[^\]]*\]", "", re.sub(r"\]\([^)]*\)", "]", prose(text)))
    lines = "\n".join(line for line in shown.split("\n") if not line.startswith(("|", "#")))
    parts = re.split(r"(?<=[.?!:;])\s|\n\n|\n- ", lines)
    return [part for part in parts if len(part.split()) > 25]


def test_a_sentence_of_26_words_is_too_long():
    words = "word " * 24
    assert too_long(f"{words}end. Other") == [] and len(too_long(f"{words}one end. Other")) == 1


def sentences(text):
    """Sentences of eight words or more, links as their words."""
    plain = re.sub(r"\]\([^)]*\)", "]", prose(text))
    parts = re.split(r"(?<=[.:;|])\s|\n\n|\n- ", plain)
    return {" ".join(part.split()) for part in parts if len(part.split()) >= 8}


def repeated(texts):
    """Sentences that stand on more than one page."""
    found, again = set(), set()
    for text in texts:
        own = sentences(text)
        again |= found & own
        found |= own
    return again


def test_nothing_is_said_twice():
    assert repeated([*PAGES.values(), (ROOT / "CONTRIBUTING.md").read_text()]) == set()
    same = "One sentence with more than eight words in it, [linked](x.md)."
    assert repeated([f"A. {same} B.", f"{same.replace('x.md', 'y.md')}\n\nC"]) != set()


# --- the README's generated parts ---------------------------------------------------------------


def test_the_readme_says_what_the_published_files_say():
    text = PAGES["README.md"]
    assert readme.with_parts(text) == text, "python -m sage_lib.pipeline.readme"


def test_a_readme_without_a_place_for_a_part_is_refused(monkeypatch):
    for part in ("table", "result"):
        monkeypatch.setattr(readme, part, lambda: "|a|")
    with pytest.raises(SageError, match="<!-- notebooks: begin -->"):
        readme.with_parts("<!-- badges: begin -->\n<!-- badges: end -->\n")


def test_the_tables_of_the_pages_in_docs_are_as_generated():
    for name, made in readme.tables().items():
        page = PAGES[name]
        assert online.filled(page, made, ROOT / name) == page, "python -m sage_lib.pipeline.readme"


def table_of(page, part):
    """The cells of a generated table, a list a row, and the line below it."""
    lines = page.split(f"<!-- {part}: begin -->\n")[1].split(f"<!-- {part}: end -->")[0].split("\n")
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    return rows[2:], lines[-2]


def test_the_page_on_reliability_says_what_was_counted():
    """Read from the page and from the files by other code than made it."""
    page = PAGES["reliability.md"]
    for part in ("kills", "faults"):
        counted = pd.read_csv(paths.BENCHMARKS / f"fire_{part}.csv")
        rows, below = table_of(page, part)
        assert [row[0] for row in rows] == list(counted.iloc[:, 0])
        assert (
            sum(row[-2:].count("yes") for row in rows)
            == counted[["resumed", "identical"]].sum().sum()
        )
        assert json.loads((paths.BENCHMARKS / f"fire_{part}.json").read_text())["revision"] in below
    for part, columns in (
        ("files", ["tried", "taken", "refused", "traceback"]),
        ("profiles", ["tried", "taken", "refused", "traceback", "silent"]),
        ("answers", ["answers", "credited"]),
    ):
        counted = pd.read_csv(paths.BENCHMARKS / f"fire_{part}.csv")[columns].to_numpy().tolist()
        rows, _ = table_of(page, part)
        assert [[int(cell) for cell in row[-len(columns) :]] for row in rows] == counted


def test_every_data_file_has_its_checksum():
    listed = {line.split("  ")[1] for line in readme.SUMS.read_text().splitlines()}
    there = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "data").rglob("*") if path.is_file()
    }
    assert there - listed == {"data/SHA256SUMS"} and listed <= there, "run the command above"
    check = ["sha256sum", "--check", "--quiet", "data/SHA256SUMS"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, f"{done.stdout}python -m sage_lib.pipeline.readme"


def test_a_changed_data_file_is_noticed(tmp_path):
    (tmp_path / "data" / "reported").mkdir(parents=True)
    file = tmp_path / "data" / "reported" / "a.csv"
    file.write_text("0.9\n")
    (tmp_path / "data" / "SHA256SUMS").write_text(readme.sums(tmp_path))
    check = ["sha256sum", "--check", "--quiet", "data/SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path).returncode == 0
    file.write_text("0.8\n")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_minutes_are_those_of_the_runs_that_a_notebook_adds(monkeypatch):
    """Planted: 05 asks for what 04 made as well; of 06's runs one is missing; 07 only reads."""
    asked = {
        "04": ("sft",),
        "05": ("sft", "rl"),
        "06": ("rl", "trace"),
        "07": (),
        "08": ("evaluate",),
    }
    entries = [types.SimpleNamespace(name=name, path=name) for name in asked]
    monkeypatch.setattr(notebooks, "found", lambda: entries)
    monkeypatch.setattr(notebooks, "stages", asked.get)
    rows = [("sft", 90.0), ("rl", 600.0), ("rl", 1200.0), ("trace", 120.0), ("trace", math.nan)]
    rows += [("evaluate", 20.0)]
    frame = pd.DataFrame(rows, columns=["stage", "seconds"])
    monkeypatch.setattr(plan, "measured_times", lambda profile: frame)
    assert readme.minutes(None) == {
        "04": "2", "05": "30", "06": "2 (1 of 2 runs)", "08": "under 1"
    }  # fmt: skip


def test_every_stage_is_counted_with_one_notebook():
    asked = {name for entry in notebooks.found() for name in notebooks.stages(entry.path)}
    assert asked == set(stages.STAGES)


def test_the_citation_names_people_and_one_version():
    given = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text())
    papers = [given["preferred-citation"], *given["references"]]
    assert all({"family-names", "given-names"} <= set(who) for p in papers for who in p["authors"])
    assert given["version"] == sage_lib.__version__
