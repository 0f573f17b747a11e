"""The comparison of policies over all k: against passk-inference on its published counts, against
closed forms, and the command against the function."""

import gzip
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import optimize, stats

import sage_lib
from sage_lib.errors import SageError
from sage_lib.evaluation import bands, metrics, passk_comparison
from sage_lib.paths import ROOT
from sage_lib.pipeline import cli

PUBLISHED = ROOT / "tests" / "data" / "passk_inference"


def write(path, counts):
    rows = [{"id": key, "c": c, "n": n} for key, (c, n) in counts.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drawn(seed, problems=40, n=16, shift=0.0):
    rng = np.random.default_rng(seed)
    p = np.random.default_rng(0).beta(0.5, 1.0, problems)
    c = rng.binomial(n, np.clip(p + shift, 0, 1))
    return {f"p{i}": (int(one), n) for i, one in enumerate(c)}


def test_published_counts_give_what_passk_inference_finds():
    """1,060 problems, 128 samples each; result.json is that of passk-inference 0.3.1."""
    theirs = json.loads((PUBLISHED / "result.json").read_text())
    sides = (f"{name}={PUBLISHED / name}.jsonl.gz" for name in ("rl", "base"))
    result = sage_lib.pass_at_k(*sides)
    for side, name in zip(result["policies"], ("rl", "base"), strict=True):
        assert side["pass_at_k"] == pytest.approx(theirs[f"{name}_pass_at_k"], abs=2e-6)
    [found] = result["differences"]
    assert found["difference"] == pytest.approx(theirs["mean"], abs=2e-6)
    assert found["gain"] == theirs["certified_positive_budgets"] == [*range(1, 11)]
    assert found["loss"] == theirs["certified_negative_budgets"] == [*range(61, 129)]
    assert found["first_loss"] == theirs["first_loss_interval"] == [11, 61]
    # Both bands are simulated: their widths differ by the noise of 4,000 draws.
    widths = np.subtract(found["band_high"], found["band_low"])
    assert widths == pytest.approx(np.subtract(theirs["upper"], theirs["lower"]), rel=0.02)


def test_the_command_prints_what_the_function_returns(tmp_path, capsys, monkeypatch):
    a, b = (write(tmp_path / f"{name}.jsonl", drawn(i)) for i, name in enumerate("ab"))
    result = sage_lib.pass_at_k(a, against=b)
    cli.main(["pass-at-k", str(a), str(b), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("sage_companion") == sage_lib.__version__
    assert printed == json.loads(json.dumps(result))
    # of counts in memory, and of the standard input
    in_memory = sage_lib.pass_at_k(drawn(0), against=drawn(1))
    assert in_memory["differences"][0]["band_low"] == result["differences"][0]["band_low"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(a.read_bytes())))
    cli.main(["pass-at-k", "a=-", str(b), "--json"])
    piped = json.loads(capsys.readouterr().out)
    assert passk_comparison.differing(piped["differences"], printed["differences"]) == []


def test_an_expected_result_is_held(tmp_path, capsys):
    a, b = (write(tmp_path / f"{name}.jsonl", drawn(i)) for i, name in enumerate("ab"))
    cli.main(["pass-at-k", str(a), str(b), "--json"])
    expected = tmp_path / "expected.json"
    expected.write_text(capsys.readouterr().out)
    moved = tmp_path / "a.gz"
    moved.write_bytes(gzip.compress(a.read_bytes()))  # another file with the same counts
    cli.main(["pass-at-k", f"a={moved}", str(b), "--expect", str(expected)])
    assert "The result is the one in expected.json." in capsys.readouterr().out
    other = write(tmp_path / "c.jsonl", drawn(5))
    said = "error: the result is not the one in expected.json: policies.0.pass_at_k.0: "
    with pytest.raises(SystemExit, match=said):
        cli.main(["pass-at-k", f"a={other}", str(b), "--expect", str(expected)])
    with pytest.raises(SystemExit, match="cannot be read"):
        cli.main(["pass-at-k", str(a), "--expect", str(tmp_path / "none.json")])


def test_a_band_over_one_k_is_its_interval():
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 40, 1))
    *band, level = bands.simultaneous_band(a, b)
    assert level == pytest.approx(0.95, abs=0.005)
    assert np.allclose(band, metrics.paired_difference(a, b)[1:], atol=0.005)


def test_a_band_over_independent_columns_is_that_of_sidak():
    """Sidak 1967: m independent intervals hold at once at the level 0.95^(1/m) each."""
    apart = np.random.default_rng(1).normal(size=(20_000, 5))
    _, _, level = bands.simultaneous_band(apart, 0 * apart, draws=40_000)
    assert level == pytest.approx(0.95 ** (1 / 5), abs=0.001)
    _, _, same = bands.simultaneous_band(np.tile(apart[:, :1], 5), np.zeros((20_000, 5)))
    assert same == pytest.approx(0.95, abs=0.005)


def test_columns_are_correlated_as_their_means_are():
    """Problems move two columns together and seeds move them apart, by as much in the mean."""
    rng = np.random.default_rng(0)
    seeds, problems = rng.normal(size=3), rng.normal(size=100)
    of_seeds, of_problems = ((x - x.mean()) / stats.sem(x) for x in (seeds, problems))
    apart = of_seeds[:, None, None] * [1.0, -1.0] + of_problems[:, None]
    level = bands._normal_level(apart, 40_000, np.random.default_rng(1))
    assert level == pytest.approx(0.95**0.5, abs=0.001), "Sidak's"


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
def test_the_level_over_few_seeds_is_that_of_an_integral(noise):
    """One column of 3 seeds and 4 problems: in the variance of the mean seeds have 1/3, problems
    0.1 and ``noise``. What is estimated over seeds is chi squared of two degrees of freedom."""
    of_seeds, of_problems = 1 / 3, 0.1
    rest = np.outer([1.0, -2.0, 1.0], [1.0, -1.0, -1.0, 1.0]) * np.sqrt(noise * 3)
    apart = np.array([-1.0, 0.0, 1.0])[:, None] + rest
    apart = apart + np.array([-3.0, -1.0, 1.0, 3.0]) * np.sqrt((of_problems + noise) * 3 / 5)
    between = of_seeds * stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, 2) / 2
    total = of_problems + np.maximum(between, noise)
    doubt = np.where(between < noise, noise**2 / 6, between**2 / 2) + of_problems**2 / 3
    scale = np.sqrt(total / (of_problems + of_seeds))

    def missed(rate):
        return np.mean(2 * stats.norm.sf(stats.t.isf(rate / 2, total**2 / doubt) * scale)) - 0.05

    level = bands._bootstrap_level(apart[..., None], 100_000, np.random.default_rng(0))
    assert level == pytest.approx(1 - optimize.brentq(missed, 1e-6, 0.9), abs=0.003)


def test_a_column_without_any_variation_tells_nothing():
    apart = np.array([[0.0, 0.1], [0.0, 0.3], [0.0, -0.1]])
    low, high, _ = bands.simultaneous_band(apart, 0 * apart)
    assert (low[0], high[0]) == (-1, 1) and -1 < low[1] < high[1] < 1


def test_curves_over_all_k_are_those_of_each_k():
    counts = np.array([[8, 0], [8, 3], [9, 9], [12, 5], [8, 3]])
    curves = metrics.pass_at_k_curve(counts[:, 0], counts[:, 1], [1, 3, 8])
    for place, k in enumerate((1, 3, 8)):
        each = metrics.pass_at_k(counts[:, 0], counts[:, 1], k)
        assert curves[:, place] == pytest.approx(each, abs=1e-15)


def test_repeated_rows_have_the_interval_of_all_rows():
    values = np.repeat([[0.0], [0.5], [1.0]], [20, 5, 15], axis=0)
    whole = metrics.bootstrap_interval(values, 20_000, 0)
    short = metrics.bootstrap_interval([[0.0], [0.5], [1.0]], 20_000, 0, repeats=[20, 5, 15])
    assert np.allclose(whole, short, atol=0.004)


def test_notes_say_why_an_interval_is_missing_or_wide(tmp_path, capsys):
    files = [write(tmp_path / f"{i}.jsonl", drawn(i, problems=12)) for i in range(2)]
    cli.main(["pass-at-k", f"two={files[0]},{files[1]}"])
    said = capsys.readouterr().out
    assert "Note: two: two seeds give no interval of pass@k; three or more do." in said
    assert "Note: two: 12 problems, so intervals are wide" in said
    assert not (tmp_path / "pass_at_k").exists() and "written" not in said


def test_three_policies_are_compared_with_one_that_is_named():
    sides = [passk_comparison.counted(name, {"p": (1, 2), "q": (0, 2)}) for name in "abc"]
    alone, against = (passk_comparison.report(sides, None, compared) for compared in (False, True))
    assert not alone["differences"] and "--against FILE" in alone["notes"][-1]
    assert len(against["differences"]) == 2 and not any("--against" in n for n in against["notes"])


def test_counts_in_memory_are_checked():
    for counts, words in (
        ([{"a": (1, 2)}, {"b": (1, 2)}], "every seed needs counts of the same problems"),
        ({"a": 1, "b": (1, 2)}, "pairs"),
        ({"a": (0.5, 2)}, "whole numbers"),
        ({}, "at least one problem"),
    ):
        with pytest.raises(SageError, match=words):
            sage_lib.pass_at_k(counts)
    seeds = sage_lib.pass_at_k([drawn(i) for i in range(3)], against=drawn(9))
    assert seeds["differences"][0]["seeds"] == 3 and seeds["policies"][1]["seeds"] == 1


def test_the_command_needs_neither_torch_nor_pandas(tmp_path):
    a = write(tmp_path / "a.jsonl", drawn(0))
    code = (
        "import sys; from sage_lib.pipeline import cli; cli.main(sys.argv[1:]); "
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code, "pass-at-k", f"a={a}", f"b={a}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = set(eval(done.stdout.splitlines()[-1]))
    heavy = {"torch", "transformers", "pandas", "pyarrow", "matplotlib", "seaborn", "pydantic"}
    assert "numpy" in loaded and not loaded & heavy


def test_a_list_of_files_may_be_longer_than_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{'a' * 30}{seed}.jsonl" for seed in range(10)]
    for seed, name in enumerate(names):
        write(tmp_path / name, drawn(seed))
    assert len(",".join(names)) > 255
    [policy] = sage_lib.pass_at_k(",".join(names))["policies"]
    assert policy["seeds"] == 10


def test_a_file_named_in_two_ways_is_given_twice_and_a_problem_without_samples_is_said(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", drawn(0))
    with pytest.raises(SageError, match=r"\./a\.jsonl is given twice"):
        sage_lib.pass_at_k("a.jsonl+./a.jsonl")
    for counts in ({"p": (0, 0), "q": (1, 8)}, {"p": (9, 8)}):
        with pytest.raises(SageError, match=r"counts are \(right, samples\)"):
            sage_lib.pass_at_k(counts)


def test_at_each_k_as_many_samples_are_asked_for_as_pass_at_k_needs():
    a, b = ({f"p{i}": (16 * (i < right), 16) for i in range(60)} for right in (40, 25))
    [found] = sage_lib.pass_at_k(a, against=b)["differences"]
    ks = np.arange(1, len(found["samples_to_tell"]) + 1)
    assert all(n is None or n >= k for n, k in zip(found["samples_to_tell"], ks, strict=True))
