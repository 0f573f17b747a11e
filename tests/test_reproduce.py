"""The notebook runner: strict parameters, expected artefacts, failures that name notebook and
cell."""

import dataclasses
import json
import re
import subprocess
import sys

import nbformat
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import cli, known_settings, notebooks, reproduce, stages
from sage_lib.tasks import public_sets

EVERY = notebooks.found()
#: A set that the hub keeps, as a local folder has it.
HUB = "dapo_math_17k"


def notebook(folder, *cells, tag=True, sage=None):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    if tag:
        nb.cells[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nb.metadata |= {"kernelspec": kernel, "sage": sage or {"about": "a trial"}}
    nbformat.write(nb, folder / "99_trial.ipynb")
    return folder / "99_trial.ipynb"


@pytest.mark.parametrize("entry", EVERY, ids=lambda n: n.name)
def test_committed_notebooks_are_clean_and_parametrised(entry):
    nb = nbformat.read(entry.path, as_version=4)
    nbformat.validate(nb)
    assert notebooks.parameters(entry.path)
    code = [c for c in nb.cells if c.cell_type == "code"]
    for cell in code:
        assert len(cell.source.splitlines()) <= 25, "a reader does not see it at a glance"


def test_notebooks_are_numbered_without_a_gap_in_the_order_in_which_they_run():
    assert [entry.number for entry in EVERY] == [f"{n:02d}" for n in range(len(EVERY))]
    order = [entry.name[3:] for entry in EVERY]
    assert order.index("sft") < order.index("grpo_and_sage") < order.index("guides")


def test_what_a_notebook_shows_and_keeps_is_what_it_says_that_it_makes():
    """The names in its cells against its metadata: neither may forget the other."""
    for entry in EVERY:
        nb = nbformat.read(entry.path, as_version=4)
        source = "\n".join(c.source for c in nb.cells if c.cell_type == "code")
        parts = [entry.makes, *entry.by_part.values()]
        for name in [n for part in parts for n in part.figures if "{" not in n]:
            assert f'"{name}"' in source, f"{entry.name} does not draw {name}"
        for name in [n for part in parts for n in part.measured if "/" not in n]:
            assert f'"{name.removesuffix(".csv")}"' in source, f"{entry.name} does not keep {name}"


def test_a_notebook_says_its_heading_and_the_stages_that_it_asks_for(tmp_path):
    path = notebook(
        tmp_path,
        "profile = 'smoke'",
        'stages.run(settings, "sft")\nif new:\n    stages.run(settings, "sft", "rl")["rl"]',
        'other.run(settings, "trace")\nstages.check_machine(settings)',
    )
    assert notebooks.stages(path) == ("sft", "rl")
    with pytest.raises(SageError, match='must begin with the heading "# 99'):
        notebooks.title(path)
    nb = nbformat.read(path, as_version=4)
    nb.cells.insert(0, nbformat.v4.new_markdown_cell("# 99 A trial: of one thing\n\nText"))
    nbformat.write(nb, path)
    assert notebooks.title(path) == "A trial: of one thing"


@pytest.mark.parametrize("entry", EVERY, ids=lambda n: n.name)
def test_every_notebook_has_a_heading_and_asks_for_stages_that_there_are(entry):
    assert notebooks.title(entry.path)
    assert set(notebooks.stages(entry.path)) <= set(stages.STAGES)


@pytest.mark.parametrize(
    ("sage", "words"),
    [({}, "does not say what it is about"), ({"about": "x", "figurs": ["a"]}, "unknown key 'figu")],
)
def test_metadata_that_says_nothing_or_too_much_is_refused(tmp_path, sage, words):
    path = notebook(tmp_path, "profile = 'smoke'")
    nb = json.loads(path.read_text())
    nb["metadata"]["sage"] = sage
    path.write_text(json.dumps(nb))
    with pytest.raises(SageError, match=words):
        notebooks.read(path)


def test_artefacts_follow_the_profile(tmp_path):
    sage = {
        "about": "a trial",
        "figures": ["one", "curves_{family}"],
        "measured": ["t.csv"],
        "countdown": {"figures": ["ways"]},
    }
    entry = notebooks.read(notebook(tmp_path, "profile = 'smoke'", sage=sage))
    smoke = {path.name for path in entry.artefacts(load_profile("smoke"))}
    assert {"one.pdf", "ways.png", "t.csv", "curves_main.pdf", "curves_losses.pdf"} <= smoke
    smollm = {path.name for path in entry.artefacts(load_profile("smollm"))}
    assert "ways.png" not in smollm and "curves_losses.pdf" not in smollm
    exact = {"about": "a trial", "theory": {"figures": ["one"]}}
    [pdf, png] = notebooks.read(notebook(tmp_path, "seed = 0", sage=exact)).artefacts(
        load_profile("smoke")
    )
    assert (pdf, png) == (paths.figures("theory") / "one.pdf", paths.figures("theory") / "one.png")


def test_a_profile_without_what_a_notebook_needs_leaves_it_out(sandbox, capsys):
    notebook(sandbox, "profile = 'smoke'", "1 / 0", sage={"about": "a trial", "needs": ["ood"]})
    inside = [{"name": "countdown", "rows": 2, "seed": 1}]
    (sandbox / "inside.yaml").write_text(
        json.dumps({"name": "inside", "extends": "smoke", "evaluation": {"data": inside}})
    )
    assert reproduce.reproduce(load_profile(sandbox / "inside.yaml"))
    assert "the profile inside has no ood" in capsys.readouterr().out
    assert reproduce.reproduce(load_profile("smoke")) is False
    with pytest.raises(SageError, match="needs 'luck'"):
        notebooks.read(notebook(sandbox, "seed = 0", sage={"about": "x", "needs": ["luck"]}))


def test_a_notebook_runs_with_its_parameters_in_its_own_folder(tmp_path):
    path = notebook(tmp_path, "profile = 'smoke'", "open('made.txt', 'w').write(profile)")
    out = tmp_path / "out" / "99.ipynb"
    assert reproduce.run_notebook(path, out, {"profile": "laptop"}) > 0
    assert (tmp_path / "made.txt").read_text() == "laptop" and out.is_file()


def test_a_kernel_runs_the_sage_lib_of_the_process_that_started_it(tmp_path, monkeypatch):
    """A second checkout on the path, as an editable install of another one is."""
    other = tmp_path / "other" / "sage_lib"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    source = "import sage_lib; open('where.txt', 'w').write(sage_lib.__file__)"
    path = notebook(tmp_path, "profile = 'smoke'", source)
    reproduce.run_notebook(path, tmp_path / "copy.ipynb", {})
    assert (tmp_path / "where.txt").read_text() == str(paths.ROOT / "sage_lib" / "__init__.py")


def test_an_executed_notebook_becomes_a_page_whose_long_lines_wrap(sandbox):
    """What a review found: nbconvert's own page cuts a line that is wider than the window."""
    words = "a long line " * 25
    notebook(sandbox, "profile = 'smoke'", f"print({words!r})")
    assert reproduce.reproduce(load_profile("smoke"))
    page = (sandbox / "build" / "smoke" / "notebooks" / "99_trial.html").read_text()
    head, body = page.split("</head>", 1)
    assert words in body and 'jp-InputArea-editor"' in body and "<pre>" in body, (
        "what the rule names"
    )
    rule = head.rsplit("<style", 1)[1]
    assert ".jp-InputArea-editor pre" in rule and "white-space: pre-wrap" in rule, "the last rule"


def test_a_failing_cell_names_notebook_cell_and_copy(tmp_path):
    path = notebook(tmp_path, "profile = 'smoke'", "1 / 0")
    words = r"99_trial failed in cell \d+ \(ZeroDivisionError.*executed copy: .*copy\.ipynb"
    with pytest.raises(SageError, match=words):
        reproduce.run_notebook(path, tmp_path / "copy.ipynb", {})


def test_an_unknown_parameter_and_a_missing_tag_are_errors(tmp_path):
    copy = tmp_path / "c.ipynb"
    with pytest.raises(SageError, match="no parameter 'profil'"):
        reproduce.run_notebook(notebook(tmp_path, "profile = 'smoke'"), copy, {"profil": "x"})
    with pytest.raises(SageError, match="must carry the tag"):
        reproduce.run_notebook(notebook(tmp_path, "profile = 'smoke'", tag=False), copy, {})
    with pytest.raises(SageError, match="is missing from"):
        reproduce.run_notebook(tmp_path / "none.ipynb", copy, {})


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    return tmp_path


MAKES = {"about": "a trial", "measured": ["made.csv"]}


def test_a_notebook_that_does_not_make_its_artefact_fails_the_run(sandbox, capsys):
    notebook(sandbox, "profile = 'smoke'", sage=MAKES)
    assert reproduce.reproduce(load_profile("smoke")) is False
    printed = capsys.readouterr()
    assert "without making smoke/made.csv" in printed.err and "failed" in printed.out


def test_an_earlier_build_is_put_aside_unless_resumed(sandbox):
    folder = "p = pathlib.Path('measured/smoke'); p.mkdir(parents=True, exist_ok=True)"
    source = f"import pathlib; {folder}; (p / 'made.csv').write_text('1')"
    notebook(sandbox, "profile = 'smoke'", source, sage=MAKES)
    (sandbox / "build" / "smoke").mkdir(parents=True)
    assert reproduce.reproduce(load_profile("smoke"))
    assert not (sandbox / "build" / "smoke.old1").exists(), "there was nothing to keep"
    (sandbox / "build" / "smoke" / "weights").write_text("hours of work")
    assert reproduce.reproduce(load_profile("smoke"), resume=True)
    assert (sandbox / "build" / "smoke" / "weights").is_file()
    assert reproduce.reproduce(load_profile("smoke"))
    assert (sandbox / "build" / "smoke.old1" / "weights").read_text() == "hours of work"


def test_unknown_notebook_number_and_stage():
    with pytest.raises(SageError, match="no notebook '42'"):
        reproduce.select(["42"])
    with pytest.raises(SageError, match="no stage 'sfft': choose one of sft, entropies, rl"):
        stages.run(load_profile("smoke"), "sfft")


def test_paper_without_a_gpu_says_so(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SageError, match=r"needs a CUDA GPU and none was found.*dry-run"):
        stages.check_machine(load_profile("paper"))


@pytest.mark.parametrize("run", [cli.main, reproduce.main], ids=["script", "module"])
def test_dry_run_of_the_paper_prints_settings_data_runs_and_memory(capsys, offline, run):
    words = ["--profile", "paper", "--set", "rl.beta=0.2"]
    run(["dry-run", *words] if run is cli.main else [*words, "--dry-run"])
    printed = capsys.readouterr().out
    for text in (
        "profile paper+rl.beta=0.2",
        "set on the command line",
        "rl.use_bias_correction_kl",
        "eq. 38: plain k3",
        # what is not here is said, and not fetched
        "up to 60, not here yet: a run fetches https://raw.githubusercontent.com/GAIR-NLP/",
        "up to 2,000, not here yet: a run fetches open-r1/DAPO-Math-17k-Processed",
        "in all",
    ):
        assert text in printed
    # A row for each stage and method, not for each run.
    rows = [line.split() for line in printed.splitlines()]
    assert ["rl", "GRPO", "+", "Branch", "3", "3407-3409"] in [row[:6] for row in rows]
    assert sum(row[:1] == ["rl"] for row in rows) == len(load_profile("paper").methods)


def test_a_plan_loads_no_training_code():
    """What makes it quick: TRL's settings are read from its source files."""
    code = "import sys; from sage_lib.pipeline import cli; "
    code += "cli.main(['dry-run', '--profile', 'paper']); "
    code += "print('loaded:', *{'torch', 'trl', 'unsloth', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("loaded:") and not done.stderr


def test_settings_are_those_of_the_classes_themselves():
    from peft import LoraConfig
    from trl import GRPOConfig, SFTConfig

    for classes, cls in (
        (known_settings.SFT, SFTConfig),
        (known_settings.GRPO, GRPOConfig),
        (known_settings.LORA, LoraConfig),
    ):
        taken = {one.name for one in dataclasses.fields(cls) if one.init}
        assert known_settings.names(classes) == taken
    with pytest.raises(SageError, match=r"rl.temprature: GRPOConfig .* mean rl.temperature"):
        known_settings.check(load_profile("smoke+rl.temprature=1.0"))


def test_a_set_in_a_local_folder_is_here(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    assert public_sets.elsewhere("amc23").startswith("https://") and not public_sets.elsewhere("x")
    for name, local in (("amc23", "benchmarks/amc23.jsonl"), ("dapo_math_17k", f"{HUB}.jsonl")):
        assert public_sets.elsewhere(name)
        (tmp_path / local).parent.mkdir(exist_ok=True)
        (tmp_path / local).write_text("")
        monkeypatch.setenv("SAGE_DATA", str(tmp_path))
        assert not public_sets.elsewhere(name) and public_sets.elsewhere(name, "a revision")
        monkeypatch.delenv("SAGE_DATA")


def test_a_line_for_each_notebook_says_what_it_made(sandbox, capsys):
    make = "import pathlib; p = pathlib.Path('measured/smoke'); p.mkdir(parents=True); "
    make += "(p / 'made.csv').write_text('1'); print('a cell'); import sys; sys.stderr.write('no')"
    notebook(sandbox, "profile = 'smoke'", make, sage=MAKES)
    assert reproduce.reproduce(load_profile("smoke"))
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert re.fullmatch(r"99_trial \(1 of 1\): ok, \d+ s; made\.csv", lines[0])
    assert not printed.err and "a cell" not in printed.out


def test_notebooks_that_run_beside_each_other_are_told_in_their_order(sandbox, capsys):
    """And the first that fails ends the run: what it said is printed, the rest is not run."""
    for name, source in (
        ("97_slow", "import time; time.sleep(2)"),
        ("98_quick", "1 / 0"),
        ("99_rest", ""),
    ):
        notebook(sandbox, "profile = 'smoke'", source).rename(sandbox / f"{name}.ipynb")
    assert reproduce.reproduce(load_profile("smoke")) is False
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert re.fullmatch(r"97_slow \(1 of 3\): ok, \d+ s", lines[0])
    assert re.fullmatch(r"98_quick \(2 of 3\): failed, \d+ s", lines[1])
    assert "notebook 98_quick failed in cell 2 (ZeroDivisionError" in printed.err, "of the copy"
    assert re.search(r"99_rest +0.0 +0  not run", printed.out)


def test_a_kernel_that_is_killed_fails_its_notebook(sandbox, capsys):
    notebook(sandbox, "profile = 'smoke'", "import os; os.kill(os.getpid(), 9)")
    assert reproduce.reproduce(load_profile("smoke")) is False
    printed = capsys.readouterr()
    assert "notebook 99_trial failed (DeadKernelError" in printed.err
    assert "stopped: what was made is kept; the same command with --resume goes on" in printed.err
    assert re.search(r"99_trial .*failed", printed.out)


def test_a_worker_that_is_killed_fails_its_notebook(sandbox, capsys):
    notebook(sandbox, "profile = 'smoke'", "import os; os.kill(os.getppid(), 9)")
    assert reproduce.reproduce(load_profile("smoke")) is False
    assert "the process of notebook 99_trial was ended; what was made" in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_of_a_list_ends_it_without_a_word():
    words = f"{sys.executable} -m sage_lib.pipeline.cli dry-run --profile smoke | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.count("\n") == 1


def test_a_wrong_command_line_ends_with_one_sentence(capsys):
    with pytest.raises(SystemExit, match="error: there is no profile 'smoek'"):
        cli.main(["dry-run", "--profile", "smoek"])
    with pytest.raises(SystemExit, match="error: the stage rl of profile smoke has no run 'x'"):
        cli.main(["stage", "rl", "--run", "x"])


def test_a_process_that_fails_is_named_with_its_reason(sandbox):
    """RL without the model that it starts from, of which a whole stage asks before it starts."""
    profile, stage = load_profile("smoke+train=[grpo]"), stages.STAGES["rl"]
    jobs = [stages.Job(stage, run, "GRPO, seed 3407", 4) for run in stage.runs(profile)]
    words = "GRPO, seed 3407 failed: RL starts from the SFT model"
    with pytest.raises(SageError, match=words):
        stages.start(profile, jobs)
