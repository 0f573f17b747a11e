"""The live pages: their numbers are the library's, keys move them, and nothing leaves the browser.

The formulas run in Node. What a visitor sees runs in headless Chromium (make test-site).
"""

import json
import re
import shutil
from html import unescape
from urllib.parse import quote

import forks
import numpy as np
import pytest

from sage_lib import paths
from sage_lib.evaluation.passk_comparison import pass_at_k
from sage_lib.report.tilt import SCRIPT, live_tilt

STATIC = paths.ROOT / "docs" / "_static"
PASSK = STATIC / "passk.js"
SITE = paths.build("site")
SCRIPTS = [SCRIPT, *sorted(STATIC.glob("*.js"))]
NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")
#: Without Chromium's own calls to other hosts.
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]

with_node = pytest.mark.skipif(NODE is None, reason="needs Node.js: the program node is not there")


def in_node(script, code):
    """What an expression of a script's functions is, as JSON has it."""
    program = f"require({json.dumps(str(script))}); console.log(JSON.stringify({code}))"
    return json.loads(forks.output_of([NODE, "-e", program]))


def in_chromium(address, folder, hash="", flags=()):
    """The page's elements after its scripts have run."""
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={folder}/chromium"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"{address.as_uri()}{hash}"]
    return forks.output_of(command)


def result(page, folder, flags=()):
    """What a page's script wrote into its element `result`."""
    (folder / "page.html").write_text(f"<meta charset='utf-8'>{page}<pre id='result'></pre>")
    shown = in_chromium(folder / "page.html", folder, flags=flags)
    found = re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
    return json.loads(unescape(found[1]))


NUMBERS = """(() => {
  const t = globalThis.tilt, [reference, reward, beta, q] = %s;
  const policy = t.optimum(reference, reward, beta, q), p = t.success(policy, reward);
  return { policy, numbers: [p, t.passAt(p, 256), t.rho(reference, reward, q)] };
})()"""
COUNTS = [(64, c) for c in (0, 0, 1, 2, 5, 9, 12, 30, 40, 63, 64, 0, 3)] + [(80, 7), (64, 1)]


@with_node
@pytest.mark.parametrize("beta", [0.05, 0.2, 1.0, 3.0])
def test_the_tilt_is_eq_4(beta):
    rng = np.random.default_rng(0)
    reference, q = rng.dirichlet(np.ones(5)), rng.uniform(0.1, 4, 5)
    reward = np.array([1.0, 0.0, 1.0, 0.0, 0.0])
    given = [reference.tolist(), reward.tolist(), beta, q.tolist()]
    found = in_node(SCRIPT, NUMBERS % json.dumps(given))
    weights = q * reference * np.exp(reward / beta)
    policy = weights / weights.sum()
    right = reward == 1
    p = policy[right].sum()
    mean = [(reference * q)[side].sum() / reference[side].sum() for side in (right, ~right)]
    np.testing.assert_allclose(found["policy"], policy, rtol=1e-10)
    expected = [p, 1 - (1 - p) ** 256, mean[0] / mean[1]]
    np.testing.assert_allclose(found["numbers"], expected, rtol=1e-10)


@with_node
def test_pass_at_k_of_counts_is_the_librarys():
    lines = "\n".join(["n, c", *(f"{n}, {c}" for n, c in COUNTS)])
    ks = [1, 2, 7, 32, 64]
    code = f"passk.curve(passk.read({json.dumps(lines)}).counts, {ks})"
    found = in_node(PASSK, code)
    [policy] = pass_at_k({i: (c, n) for i, (n, c) in enumerate(COUNTS)}, ks=ks)["policies"]
    assert [row["mean"] for row in found] == pytest.approx(policy["pass_at_k"], rel=1e-9)
    for name in ("low", "high"):  # other random draws of the same bootstrap
        assert [row[name] for row in found] == pytest.approx(policy[name], abs=0.01)


@with_node
def test_samples_a_line_are_counted_as_the_library_counts_them(tmp_path):
    from sage_lib.evaluation.sample_files import read_sample_file

    lines = ['{"problem": "a", "correct": true}', '{"problem": "a", "correct": 0}', ""]
    lines += ['{"problem": "b", "correct": 2}', "{", '{"problem": "b"}', '["b"]']
    lines += ['{"problem": "b", "correct": 1, "number": 3}'] * 2
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    found = in_node(PASSK, f"passk.read({json.dumps(chr(10).join(lines))})")
    theirs = read_sample_file(tmp_path / "samples.jsonl")
    ours = {(-1, row["problem"]): (row["n"], row["c"]) for row in found["counts"]}
    assert ours == theirs.counts == {(-1, "a"): (2, 1), (-1, "b"): (1, 1)}
    assert [line for line, _ in found["unreadable"]] == [line for line, _ in theirs.unreadable]
    assert found["unreadable"][0] == [4, "has 2 for correct, not 0 or 1"]
    assert found["unreadable"][-1] == [9, "repeats what line 8 has of b"]


@with_node
@pytest.mark.parametrize(
    ("text", "counts", "lost"),
    [
        ("4,1\n4,0", [[4, 1], [4, 0]], []),
        ("id;c;n\nx;3;5\n\ny;6;5", [[5, 3]], [[4, "has c = 6 and n = 5"]]),
        ("n,c\n4\n4,1.5\n4,2", [[4, 2]], [[2, "has 1 fields"], [3, "has a count"]]),
        ('{"id": 1, "c": 2, "n": 4}\n{"id": 1, "c": 2, "n": 4}', [[4, 2]], [[2, "repeats"]]),
        (
            '{"id": 1, "c": 2, "n": 4, "seed": 1}\n{"id": 1, "c": 2, "n": 4, "seed": 2}',
            [[4, 2]],
            [[2, "is of another training seed"]],
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text, counts, lost):
    found = in_node(PASSK, f"passk.read({json.dumps(text)})")
    assert [[row["n"], row["c"]] for row in found["counts"]] == counts
    assert [line for line, _ in found["unreadable"]] == [line for line, _ in lost]
    for (_, said), (_, begin) in zip(found["unreadable"], lost, strict=True):
        assert said.startswith(begin)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_asks_no_host_for_anything(path):
    source = path.read_text().replace("http://www.w3.org/2000/svg", "")
    calls = r"fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\(|\.src =|https?://"
    assert not re.findall(calls, source)


def test_a_notebook_gets_the_one_script():
    shown = live_tilt().data
    assert SCRIPT.read_text() in shown and "src=" not in shown
    assert "</script>" not in SCRIPT.read_text()


# --- what a visitor sees --------------------------------------------------------------------------

site = pytest.mark.site
with_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: it is not there")
#: Moves the sliders as a key does: the browser changes the value, and sends these two events.
MOVE = """
const press = (slider, value) => {
  slider.value = value;
  for (const name of ["input", "change"]) slider.dispatchEvent(new Event(name, { bubbles: true }));
};
const read = () => Object.fromEntries([...document.querySelectorAll("[data-number]")]
  .map((one) => [one.dataset.number, one.textContent]));
"""


def tilt_page(script):
    """The tilt's page with a script that runs once it is there, and may use :data:`MOVE`."""
    loaded = f'addEventListener("load", () => {script});'
    return f"{live_tilt().data}<script>{MOVE}{loaded}</script>"


@site
@with_chromium
def test_the_tilt_moves_with_its_sliders_and_plays(tmp_path):
    script = """{
      const found = { begin: read() }, sliders = [...document.querySelectorAll("[type=range]")];
      const said = document.querySelector("[aria-live]");
      found.quiet = said.textContent;
      press(sliders[0], 0);
      found.small = read();
      press(sliders[2], 4);
      found.rare = read();
      found.said = said.textContent;
      found.named = sliders.every((one) => one.labels.length === 1);
      found.values = sliders.map((one) => one.getAttribute("aria-valuetext"));
      const [play, reset] = document.querySelectorAll(".tilt button");
      reset.click();
      found.again = read();
      play.click();
      found.played = read();
      setTimeout(() => {
        found.ended = read();
        document.getElementById("result").textContent = JSON.stringify(found);
      }, 12000);
    }"""
    found = result(tilt_page(script), tmp_path)
    reference, right = np.array([0.0008, 0.0002, 0.55, 0.3, 0.149]), np.array([1, 1, 0, 0, 0])
    settings = {"begin": (0.2, 1), "small": (0.05, 1), "rare": (0.05, 4), "played": (3, 1)}
    for name, (beta, q) in settings.items():
        guide = np.array([1, q, 1, 1, 1])
        weights = reference * guide * np.exp(right / beta)
        p = (weights / weights.sum())[:2].sum()
        rho = (reference * guide)[:2].sum() / 0.001
        for key, value in {"pass@1": p, "pass@256": 1 - (1 - p) ** 256, "rho": rho}.items():
            shown = found[name][key]
            assert (value > 0.999) if shown.startswith(">") else abs(float(shown) - value) < 0.006
    assert found["quiet"] == "" and found["said"].startswith("pass@1 ") and found["named"]
    assert found["values"][0] == "0.05" and found["values"][2] == "4.00"
    assert found["again"] == found["begin"] and found["ended"] == found["small"]


@site
@with_chromium
def test_who_wants_less_motion_sees_the_end_at_once(tmp_path):
    script = """{
      document.querySelector(".tilt button").click();
      document.getElementById("result").textContent = JSON.stringify(read());
    }"""
    found = result(tilt_page(script), tmp_path, flags=["--force-prefers-reduced-motion"])
    assert found["pass@1"] == "> 0.999"


@site
@with_chromium
def test_the_page_of_counts_draws_what_is_pasted_and_names_a_broken_line(tmp_path):
    page = (
        f'<div id="passk"></div><script>{PASSK.read_text()}</script>'
        + """<script>
      const text = document.querySelector("textarea");
      text.value = "n, c\\n8, 3\\n8, 9\\n8, 0";
      text.dispatchEvent(new Event("input"));
      setTimeout(() => {
        const cells = [...document.querySelectorAll("tbody tr")].map((row) => row.innerText);
        const lost = document.querySelector(".lost").innerText;
        const said = document.querySelector("[role=status]").innerText;
        const drawn = document.querySelectorAll("figure svg path").length;
        const found = { cells, lost, said, drawn };
        document.getElementById("result").textContent = JSON.stringify(found);
      }, 5000);
    </script>"""
    )
    found = result(page, tmp_path)
    assert found["lost"].startswith("Line 3 has c = 9 and n = 8") and found["drawn"] > 5
    assert found["said"].startswith("2 problems, at least 8 samples of each.")
    assert [row.split()[:2] for row in found["cells"]][:2] == [["1", "0.1875"], ["2", "0.3214"]]


@site
@with_chromium
def test_the_run_browser_keeps_its_choice_in_the_address(tmp_path):
    shown = in_chromium(SITE / "runs.html", tmp_path, "#grpo_branch:3407,branch_strong")
    legend = re.search(r'<div class="legend".*?</div>', shown, re.DOTALL)[0]
    assert re.findall(r"</svg>([^<]+)<", legend) == [
        "GRPO + Branch (1 seed)",
        "GRPO + strong Branch (8 seeds)",
    ]
    assert "--profile study --run grpo_branch-s3407" in shown and "guide: " in shown


def with_script(name, script, folder):
    """What a page of the site is after a script at its end, in a copy of it."""
    page = (SITE / f"{name}.html").read_text()
    (folder / "_static").symlink_to(SITE / "_static")
    (folder / "page.html").write_text(
        page.replace("</body>", f"<script>addEventListener('load', () => {script})</script></body>")
    )
    return in_chromium(folder / "page.html", folder)


@site
@with_chromium
def test_the_run_browser_draws_a_log_of_the_visitor(tmp_path):
    """The script hands over two files as a drop does."""
    log = [{"step": s, "reward": s / 10, "entropy": 1.0, "kl": 0.1} for s in range(1, 9)]
    files = {"trainer_state.json": json.dumps({"log_history": log}), "other.json": "[]"}
    files = f"Object.entries({json.dumps(files)}).map(([name, text]) => new File([text], name))"
    shown = with_script("runs", f"runs.take({files})", tmp_path)
    assert "</svg>trainer_state.json</span>" in shown
    assert "other.json cannot be shown: it has no log_history." in shown
    assert shown.count("<title>trainer_state.json, seed of yours</title>") == 3


@site
@with_chromium
def test_claims_are_filtered_below_a_head_that_stays(tmp_path):
    script = """{
      const head = document.querySelector(".claims th");
      scrollTo({ top: 1500, behavior: "instant" });
      const place = head.getBoundingClientRect().top;
      const words = document.querySelector("[type=search]");
      words.value = "clip-cov";
      words.dispatchEvent(new Event("input"));
      const said = document.querySelector("#filter span").textContent;
      document.title = `${Math.round(place)}: ${said}`;
    }"""
    shown = with_script("claims", script, tmp_path)
    title = re.search(r"<title>(.*?)</title>", shown)[1]
    found = re.fullmatch(r"(\d+): (\d+) of (\d+) claims", title)
    assert found and int(found[1]) < 100 and 0 < int(found[2]) < 10 < int(found[3]), title


@site
@with_chromium
def test_the_first_page_has_the_live_tilt(tmp_path):
    home = in_chromium(SITE / "index.html", tmp_path)
    assert home.count('type="range"') == 6


@site
@with_chromium
@pytest.mark.parametrize("words", ["rho", "anchor", "pass@k"])
def test_the_search_finds_a_term_of_the_glossary_first(tmp_path, words):
    shown = in_chromium(SITE / "search.html", tmp_path, f"?q={quote(words)}")
    found = re.search(r' class="search">.*?href="([^"]+)"', shown, re.DOTALL)
    assert found and found[1].startswith("glossary.html#term-"), found and found[1]
