"""Executing notebooks, the whole of reproduce, and what command lines say of bad input."""

import re
import socket
import subprocess
import sys

import pytest
from jupyter_client.provisioning.local_provisioner import LocalPortCache
from test_stages import fake, notebook, starts

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import cli, figures, notebooks, reproduce, stages

__all__ = ["fake"]  # the fixture


def test_a_notebook_needs_what_a_profile_may_not_have():
    smoke = load_profile("smoke")
    needs = {need: notebooks.Notebook(None, (need,)) for need in notebooks.NEEDS}
    assert [need for need, one in needs.items() if one.lacks(smoke)] == []
    alone = load_profile("smoke+train=[grpo]+exploration.seeds=0")
    lacking = [need for need, one in needs.items() if one.lacks(alone)]
    assert lacking == ["exploration", "front"], "one beta is no front"
    sampled = load_profile("smollm")  # which calls a family of methods "front"
    assert [need for need, one in needs.items() if one.lacks(sampled)] == [
        "exploration", "ood", "exact pass@k", "front",
    ]  # fmt: skip


def test_a_notebook_runs_with_its_parameters_in_its_own_folder_and_with_this_sage_lib(
    tmp_path, monkeypatch
):
    """Although a second checkout is on the path, as an editable install of another one is."""
    other = tmp_path / "other" / "sage_lib"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    source = "import os, sage_lib; threads = os.environ['OMP_NUM_THREADS']\n"
    source += "open('made.txt', 'w').write(f'{profile} {sage_lib.__file__} {threads}')"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    notebooks.execute(
        notebook(tmp_path, "99_trial", source), tmp_path / "out" / "c.ipynb", {"profile": "laptop"}
    )
    place = paths.ROOT / "sage_lib" / "__init__.py"
    assert (tmp_path / "made.txt").read_text() == f"laptop {place} 1"
    assert (tmp_path / "out" / "c.ipynb").is_file()


def test_a_kernel_whose_port_another_took_is_started_again(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports, real = [server.getsockname()[1]], LocalPortCache.find_available_port
        monkeypatch.setattr(
            LocalPortCache, "find_available_port", lambda *ip: ports.pop() if ports else real(*ip)
        )
        notebooks.execute(notebook(tmp_path, "99_trial", "1 + 1"), tmp_path / "copy.ipynb", {})
    assert not ports and (tmp_path / "copy.ipynb").is_file()


def test_a_failing_cell_and_a_missing_tag_are_named(tmp_path):
    copy = tmp_path / "copy.ipynb"
    words = r"99_trial failed in cell \d+ \(ZeroDivisionError.*executed copy: .*copy\.ipynb"
    with pytest.raises(SageError, match=words):
        notebooks.execute(notebook(tmp_path, "99_trial", "1 / 0"), copy, {})
    path = notebook(tmp_path, "99_trial")
    path.write_text(path.read_text().replace('"parameters"', '"other"'))
    with pytest.raises(SageError, match="must carry the tag"):
        notebooks.parameters(path)


@pytest.fixture
def sandbox(tmp_path, monkeypatch, fake):
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    return tmp_path


SPEC = "smoke+train=[grpo]+exploration.seeds=0"


def test_runs_are_made_notebooks_executed_and_told(sandbox, capsys, fake):
    """A notebook with what the profile lacks is left out; one that fails, or whose kernel is
    killed, stops no other; --resume makes no run twice, and without it the build is put aside."""
    fake(seconds=0.05)
    profile = load_profile(SPEC)
    for name, source in (
        ("08_good", "assert profile.startswith('smoke')\nopen('own', 'w').write(str(own_results))"),
        ("09_bad", "1 / 0"),
        ("10_killed", "import os; os.kill(os.getpid(), 9)"),
    ):
        notebook(sandbox, name, source, parameters="profile = 'smoke'\nown_results = False")
    notebook(sandbox, "99_trial", "1 / 0", needs=["exploration"])
    failed = r"09_bad failed in cell 2 \(ZeroDivisionError.*DeadKernelError.*--resume goes on"
    with pytest.raises(SageError, match=failed):
        reproduce.reproduce(profile)
    table, compared = capsys.readouterr().out.split("\nnotebook")[-1].split("\n\n")
    assert "nothing is published for" in compared  # a failure does not keep it from being told
    states = [re.sub(r" +[\d.e+]+ +", " ", line) for line in table.splitlines()[1:-1]]
    lacks = f"99_trial no exploration in {profile.name}"
    assert states == ["08_good done", "09_bad failed", "10_killed failed", lacks]
    assert (sandbox / "own").read_text() == "True"
    made = len(starts(sandbox))
    (sandbox / "09_bad.ipynb").unlink()
    (sandbox / "10_killed.ipynb").unlink()
    (sandbox / "08_good.ipynb").unlink()
    for more in ({"resume": True}, {"only": ["99"]}):  # whose notebook is left out
        reproduce.reproduce(profile, **more)
    assert len(starts(sandbox)) == made
    reproduce.reproduce(profile)
    assert len(starts(sandbox)) == 2 * made
    assert (sandbox / "build" / f"{profile.name}.old1").is_dir()
    assert "nothing is published for" in capsys.readouterr().out


def test_figures_are_drawn_from_published_results_without_the_walk(sandbox, capsys):
    notebook(sandbox, "04_walk", "1 / 0")
    notebook(sandbox, "08_results", "open('made', 'a').write(f'{profile} ')")
    figures.draw(None, [None, "laptop"])
    assert sorted((sandbox / "made").read_text().split()) == ["laptop", "smoke"]
    notebook(sandbox, "08_results", "1 / 0")
    with pytest.raises(SageError, match=r"08_results failed: notebook 08_results failed in cell 1"):
        figures.draw(["08"], [None])


def test_paper_without_a_gpu_says_so(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SageError, match=r"needs a CUDA GPU and none was found.*dry-run"):
        stages.check_machine(load_profile("paper"))


def test_a_reader_who_has_seen_enough_of_a_list_ends_it_without_a_word():
    code = "from sage_lib.pipeline import cli, plan; plan.check_settings = lambda profile: None; "
    code += "cli.main(['dry-run', '--profile', 'smoke'])"
    words = ["bash", "-c", f'set -o pipefail; {sys.executable} -c "{code}" | head -n 1']
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.count("\n") == 1


def test_a_wrong_command_line_ends_with_one_sentence():
    for words, sentence in (
        (["dry-run", "--profile", "smoek"], "error: there is no profile 'smoek'"),
        (["stage", "rl", "--run", "x"], "error: the stage rl of profile smoke has no run 'x'"),
        (
            ["stage", "evaluate", "--run", "x"],
            "error: the stage evaluation of profile smoke has no",
        ),
        (["stage", "rl", "--set", "rl"], "a change is KEY=VALUE"),
        (["figures", "--only", "42"], "error: there is no notebook '42'"),
        (["figures", "--only", "19", "--profile", "smoke"], "error: none of these notebooks shows"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            cli.main(words)
