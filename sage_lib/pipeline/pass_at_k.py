"""pass@k of samples in files, with intervals, paired differences and a band over all k."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sage_lib
from sage_lib.errors import SageError
from sage_lib.evaluation import passk_comparison, sample_files
from sage_lib.evaluation.policy_counts import read_policy
from sage_lib.files import write_text
from sage_lib.text import count, ranges, table, visible

#: How many unreadable lines are printed; unreadable.csv and the JSON have all.
MOST_LINES = 10
#: How many differences from an expected result are printed.
MOST_DIFFERENCES = 3
TO_TELL = ("detectable", "problems_to_tell", "seeds_to_tell", "samples_to_tell")
BOUNDS = ("low", "high", "band_low", "band_high")
COLUMNS = ("what", "policy", "against", "k", "value", *BOUNDS, "seeds", "problems", "samples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "[LABEL=]FILE[:METHOD], - for the standard input; FILE,FILE: other training seeds; "
    about += "FILE+FILE or a quoted pattern: more samples"
    parser.add_argument("files", nargs="+", metavar="FILE", help=about)
    about = "what each FILE is compared with; of two FILEs, the second is"
    parser.add_argument("--against", metavar="FILE", help=about)
    about = "the values of k; default: all, and the text has the powers of 2"
    parser.add_argument("--ks", nargs="+", type=int, metavar="K", help=about)
    about = "which metric, reward or scorer is the verdict, where a file has several"
    parser.add_argument("--metric", help=about)
    parser.add_argument("--filter", help="which filter of lm-evaluation-harness")
    about = "a score of at least this is right; without it verdicts must be 0 or 1"
    parser.add_argument("--threshold", type=float, metavar="SCORE", help=about)
    about = "print the result as JSON, and nothing else"
    parser.add_argument("--json", action="store_true", help=about)
    about = "fail where the result differs from FILE, which --json wrote"
    parser.add_argument("--expect", type=Path, metavar="FILE", help=about)
    about = "also write pass_at_k.csv, pass_at_k.json and the figure into this folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about)


def run_pass_at_k(options: argparse.Namespace) -> None:
    words = [*options.files, *([options.against] if options.against else [])]
    if options.out and options.out.exists() and not options.out.is_dir():
        raise SageError(f"--out {options.out} is a file: name a folder")
    if sum(sample_files.STDIN in word.split("=")[-1:] for word in words) > 1:
        raise SageError("the standard input is read once: give the other policy as a file")
    choices = options.metric, options.filter, options.threshold
    policies = [read_policy(word, *choices) for word in words]
    compared = bool(options.against) or len(policies) == 2
    result = passk_comparison.report(policies, options.ks, compared)
    stored = {**result, "sage_companion": sage_lib.__version__}
    if options.json:
        print(json.dumps(stored, indent=1, allow_nan=False))
    else:
        print(visible(described(result, all_ks=bool(options.ks))))
    if options.out:
        paths = _write(stored, options.out)
        if not options.json:
            print("\nwritten:", visible(", ".join(str(path) for path in paths)))
    if options.expect:
        _expect(stored, options.expect)
        if not options.json:
            print(f"\nThe result is the one in {options.expect.name}.")


def _expect(result: dict[str, Any], path: Path) -> None:
    try:
        expected = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SageError(f"--expect {path} cannot be read ({error}): --json writes it") from None
    differences = passk_comparison.differing(json.loads(json.dumps(result)), expected)
    if differences:
        sentences = differences[:MOST_DIFFERENCES]
        if len(differences) > MOST_DIFFERENCES:
            sentences.append(f"and {len(differences) - MOST_DIFFERENCES} more")
        raise SageError(f"the result is not the one in {path.name}: {'; '.join(sentences)}")


def described(result: dict[str, Any], all_ks: bool) -> str:
    """Return a result as text: the files, the curves, and the differences."""
    files = [file for policy in result["policies"] for file in policy["files"]]
    lines = [line for policy in result["policies"] for line in policy["unreadable"]]
    first = lines[:MOST_LINES]
    named = [f"  {Path(x['file']).name}, line {x['line']} {x['reason']}" for x in first]
    if len(lines) > MOST_LINES:
        named.append(f"  and {len(lines) - MOST_LINES} more lines, which --json and --out write")
    parts = ["\n".join([*map(_file, files), *named])]
    parts += ["\n".join(f"Note: {note}." for note in result["notes"])] if result["notes"] else []
    ks = result["ks"]
    # Of all k only the powers of 2 are printed.
    indices = [i for i, k in enumerate(ks) if all_ks or k & (k - 1) == 0]
    names = ["policy", "k", "pass@k", "low", "high", "seeds", "problems", "samples"]
    rows = []
    for policy in result["policies"]:
        size = [policy[name] for name in names[-3:]]
        for i in indices:
            bounds = (_shown(policy[name][i]) for name in ("pass_at_k", "low", "high"))
            rows.append([policy["policy"], ks[i], *bounds, *size])
    title = "pass@k, the mean over problems, and its 95 % interval"
    parts.append(f"{title}\n{table(names, rows)}")
    parts += [_difference(pair, ks, indices) for pair in result["differences"]]
    return "\n\n".join(parts)


def _file(file: dict[str, Any]) -> str:
    metric = f", by {file['metric']}" if file["metric"] else ""
    sizes = [count(file["problems"], "problem"), count(file["samples"], "sample")]
    sizes.append(count(file["unreadable"], "unreadable line"))
    return f"{file['file']}: {file['format']}{metric}, {', '.join(sizes)}"


def _difference(pair: dict[str, Any], ks: Sequence[int], indices: Sequence[int]) -> str:
    ours, theirs = pair["policy"], pair["against"]
    size = f"{count(pair['problems'], 'problem')}, {count(pair['seeds'], 'seed')}"
    lines = [f"{ours} minus {theirs}, paired by problem: {size}"]
    for label, alone in ((ours, pair["only_ours"]), (theirs, pair["only_theirs"])):
        if alone:
            lines.append(f"{count(alone, 'problem')} only in {label}, left out")
    names = ["difference", *BOUNDS, *TO_TELL]
    rows = [[ks[i], *(_shown(pair[name][i], name) for name in names)] for i in indices]
    lines.append(table(["k", *names], rows))
    lines.append("Each interval (low, high) holds with 95 %; the band holds at all k at once.")
    verdicts = [f"better at k = {ranges(pair['gain'])}" if pair["gain"] else ""]
    verdicts.append(f"worse at k = {ranges(pair['loss'])}" if pair["loss"] else "")
    no_k = "neither better nor worse at any k: these data cannot tell"
    lines.append(f"By the band, {ours} is {'; '.join(filter(None, verdicts)) or no_k}.")
    if pair["first_loss"]:
        start, end = pair["first_loss"]
        bound = "with no upper end" if end is None else f"at most {end}"
        lines.append(
            f"95 % set of the first k at which {ours} is worse: at least {start}, {bound}."
        )
    lines.append(_crossing(pair["crossing"], ks))
    return "\n".join(lines)


def _crossing(crossing: dict[str, Any], ks: Sequence[int]) -> str:
    if crossing["k"] is None:
        return f"The curves do not cross between k = {ks[0]} and {ks[-1]}."
    sentence = f"{crossing['up']} passes {crossing['down']} at k = {crossing['k']:.3g}."
    low, high = crossing["low"], crossing["high"]
    start = f"below {ks[0]}" if low is None else f"{low:.3g}"
    end = f"beyond {ks[-1]}" if high is None else f"{high:.3g}"
    doubt = "" if crossing["crosses"] else ", so that there may be no crossing"
    return f"{sentence} The 95 % interval of this k is {start} to {end}{doubt}."


def _shown(number: float | str | None, name: str = "") -> str:
    """Write a number with 3 digits, a count without a fraction, and None as a dash."""
    if number is None or isinstance(number, str):
        return number or "-"
    return f"{number:.0f}" if name.endswith("_to_tell") else f"{number:.3g}"


def _write(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the result as CSV, as JSON and as a figure."""
    rows = []
    for policy in result["policies"]:
        size = {name: policy[name] for name in ("seeds", "problems", "samples")}
        columns = (result["ks"], policy["pass_at_k"], policy["low"], policy["high"])
        for numbers in zip(*columns, strict=True):
            of_k = dict(zip(("k", "value", "low", "high"), numbers, strict=True))
            rows.append({"what": "pass@k", "policy": policy["policy"], **of_k, **size})
    for pair in result["differences"]:
        size = {name: pair[name] for name in ("policy", "against", "seeds", "problems", "samples")}
        for i, k in enumerate(result["ks"]):
            of_k = {name: pair[name][i] for name in (*BOUNDS, *TO_TELL)}
            row = {"what": "difference", "k": k, "value": pair["difference"][i]}
            rows.append({**row, **size, **of_k})
        crossing = pair["crossing"]
        if crossing["k"] is not None:
            size |= {"policy": crossing["up"], "against": crossing["down"]}
        ends = {"value": crossing["k"], "low": crossing["low"], "high": crossing["high"]}
        rows.append({"what": "crossing", **size, **ends})
    paths = [write_text(folder / "pass_at_k.csv", _csv([*COLUMNS, *TO_TELL], rows))]
    paths.append(write_text(folder / "pass_at_k.json", json.dumps(result, indent=1) + "\n"))
    (folder / "unreadable.csv").unlink(missing_ok=True)  # of an earlier call
    lines = [line for policy in result["policies"] for line in policy["unreadable"]]
    if lines:
        paths.append(write_text(folder / "unreadable.csv", _csv(["file", "line", "reason"], lines)))
    from sage_lib.report import passk_figure  # late: matplotlib takes longer to load than all else

    return paths + passk_figure.save(result, folder)


def _csv(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    import pandas as pd  # late, too

    return pd.DataFrame(rows, columns=names, dtype=object).to_csv(index=False)
