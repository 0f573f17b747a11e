"""The notebook runner: strict parameters, expected artefacts, failures that name the notebook and the cell."""

import nbformat
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import reproduce, stages
from sage_lib.pipeline.reproduce import NOTEBOOKS, Notebook


def notebook(folder, *cells, tag=True):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    if tag:
        nb.cells[0].metadata["tags"] = ["parameters"]
    nb.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(nb, folder / "99_trial.ipynb")
    return folder / "99_trial.ipynb"


@pytest.mark.parametrize("entry", NOTEBOOKS, ids=lambda n: n.name)
def test_committed_notebooks_are_clean_and_parametrised(entry):
    nb = nbformat.read(paths.NOTEBOOKS / f"{entry.name}.ipynb", as_version=4)
    nbformat.validate(nb)
    assert "profile" in reproduce._parameters(nb, entry.name)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code), (
        "committed without outputs"
    )
    assert all(len(c.source.splitlines()) <= 15 and "def " not in c.source for c in code), (
        "longer code lives in sage_lib"
    )


def test_every_notebook_is_in_the_plan():
    assert sorted(p.stem for p in paths.NOTEBOOKS.glob("*.ipynb")) == sorted(
        n.name for n in NOTEBOOKS
    )


def test_a_notebook_runs_with_its_parameters_in_its_own_folder(tmp_path):
    path = notebook(tmp_path, "profile = 'smoke'", "open('made.txt', 'w').write(profile)")
    assert reproduce.run_notebook(path, tmp_path / "out" / "99.ipynb", {"profile": "laptop"}) > 0
    assert (tmp_path / "made.txt").read_text() == "laptop" and (
        tmp_path / "out" / "99.ipynb"
    ).is_file()


def test_a_failing_cell_names_notebook_cell_and_copy(tmp_path):
    path = notebook(tmp_path, "profile = 'smoke'", "1 / 0")
    with pytest.raises(
        SageError,
        match=r"99_trial failed in cell \d+ \(ZeroDivisionError.*executed copy: .*copy\.ipynb",
    ):
        reproduce.run_notebook(path, tmp_path / "copy.ipynb", {})


def test_an_unknown_parameter_and_a_missing_tag_are_errors(tmp_path):
    with pytest.raises(SageError, match="no parameter 'profil'"):
        reproduce.run_notebook(
            notebook(tmp_path, "profile = 'smoke'"), tmp_path / "c.ipynb", {"profil": "x"}
        )
    with pytest.raises(SageError, match="must carry the tag"):
        reproduce.run_notebook(
            notebook(tmp_path, "profile = 'smoke'", tag=False), tmp_path / "c.ipynb", {}
        )
    with pytest.raises(SageError, match="is missing from"):
        reproduce.run_notebook(tmp_path / "none.ipynb", tmp_path / "c.ipynb", {})


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(
        reproduce, "NOTEBOOKS", (Notebook("99_trial", "a trial", measured=("made.csv",)),)
    )
    return tmp_path


def test_a_notebook_that_does_not_make_its_artefact_fails_the_run(sandbox, capsys):
    notebook(sandbox, "profile = 'smoke'")
    assert reproduce.reproduce(load_profile("smoke")) is False
    printed = capsys.readouterr()
    assert "without making smoke/made.csv" in printed.err and "failed" in printed.out


def test_an_earlier_build_is_put_aside_unless_resumed(sandbox):
    notebook(
        sandbox,
        "profile = 'smoke'",
        "import pathlib; p = pathlib.Path('data/measured/smoke'); p.mkdir(parents=True, exist_ok=True); (p / 'made.csv').write_text('1')",
    )
    (sandbox / "build" / "smoke").mkdir(parents=True)
    assert reproduce.reproduce(load_profile("smoke"))
    assert not (sandbox / "build" / "smoke.old1").exists(), "there was nothing to keep"
    (sandbox / "build" / "smoke" / "weights").write_text("hours of work")
    assert reproduce.reproduce(load_profile("smoke"), resume=True)
    assert (sandbox / "build" / "smoke" / "weights").is_file()
    assert reproduce.reproduce(load_profile("smoke"))
    assert (sandbox / "build" / "smoke.old1" / "weights").read_text() == "hours of work"


def test_unknown_notebook_number():
    with pytest.raises(SageError, match="no notebook '42'"):
        reproduce._select(["42"])


def test_paper_without_a_gpu_says_so(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SageError, match="needs a CUDA GPU and none was found.*--dry-run"):
        stages.check_machine(load_profile("paper"))


def test_dry_run_of_the_paper_prints_settings_data_runs_and_memory(
    capsys, offline
):  # what cannot load is said, not hidden
    reproduce.main(["--profile", "paper", "--dry-run"])
    printed = capsys.readouterr().out
    for words in (
        "rl.use_bias_correction_kl",
        "eq. 38: plain k3",
        "not loaded: the data file benchmarks/aime2024.jsonl could not be fetched",
        "open-r1/DAPO-Math-17k-Processed could not be loaded from the hub",
        "grpo_branch-s3409",
        "in all",
    ):
        assert words in printed


@pytest.mark.parametrize("stage", ["rl", "evaluate"])
def test_a_process_that_fails_is_named_with_its_reason(sandbox, monkeypatch, stage):
    profile = load_profile("smoke")
    job = stages.Job(
        stages.layout.sft_run(profile), (stage, "--method", "no_such", "--seed", "1"), "trial", 1
    )
    with pytest.raises(SageError, match="trial failed: error: there is no method 'no_such'"):
        stages._start(profile, [job])
