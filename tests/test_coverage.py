"""What the intervals hold, simulated: seeds and problems under no effect, and few problems.

Every simulated world is a column, so that one call judges all of them.
"""

import numpy as np
import pytest

from sage_lib.evaluation import bands, metrics

WORLDS = 1500


def checkpoints(rng, seeds, problems, spread, own, noise, samples, worlds=WORLDS):
    """What is measured of two methods' checkpoints: solve rates (2, seeds, problems, worlds).

    Problems from never to always solved. On the log-odds of a problem lie: the seed's part, such
    that seeds differ by ``spread`` in pass@1; the method's own part (``own``); a part of every pair
    of seed and problem (``noise``). None of them differs between the methods on average.
    """
    rates = rng.beta(0.5, 1.0, (problems, worlds))
    rates[rng.random(rates.shape) < 0.15] = 0.0005
    odds = np.log(rates / np.maximum(1 - rates, 1e-9)).clip(-9, 9)
    slope = np.maximum((rates * (1 - rates)).mean(axis=0), 0.02)
    of_seeds = rng.normal(0, 1, (2, seeds, 1, worlds)) * spread / slope
    of_methods = rng.normal(0, 1, (2, 1, problems, worlds)) * own
    of_pairs = rng.normal(0, 1, (2, seeds, problems, worlds)) * noise
    p = 1 / (1 + np.exp(-(odds + of_seeds + of_methods + of_pairs)))
    return p if samples is None else rng.binomial(samples, p) / samples


def pass_at(k, solved, samples):
    """pass@k, exactly from probabilities (``samples`` None) or unbiased from shares of samples."""
    if samples is None:
        return 1 - (1 - solved) ** k
    by_count = metrics.pass_at_k(samples, np.arange(samples + 1), k)
    return by_count[np.rint(solved * samples).astype(int)]


def missed(low, high, truth=0.0):
    """Share of intervals that leave out the truth; one that is not known leaves out nothing."""
    return np.mean((low > truth) | (high < truth))


@pytest.mark.parametrize(
    ("seeds", "problems", "spread", "own", "samples", "k"),
    [
        # seeds as far apart as measured (0.001 at pass@256 by exact evaluation), and further
        (3, 180, 0.001, 0.0, None, 64),
        (3, 180, 0.005, 0.0, None, 1),
        (3, 180, 0.02, 0.0, 64, 1),
        (5, 180, 0.005, 0.3, None, 1),
        (10, 60, 0.02, 0.0, None, 1),
        (3, 24, 0.005, 0.3, 64, 1),
    ],
)
def test_no_effect_is_called_real_in_3_to_8_percent(seeds, problems, spread, own, samples, k):
    rng = np.random.default_rng(0)
    drawn = checkpoints(rng, seeds, problems, spread, own, 0.1, samples)
    ours, theirs = (pass_at(k, one, samples) for one in drawn)
    _, low, high = metrics.paired_difference(ours, theirs)
    assert 0.03 <= missed(low, high) <= 0.08


def test_one_seed_covers_problems_alone():
    """Two checkpoints on other problems: covered; the methods behind them: not."""
    rng = np.random.default_rng(2)
    ours, theirs = checkpoints(rng, 1, 180, 0.02, 0.3, 0.1, None)
    _, low, high = metrics.paired_difference(ours[0], theirs[0])
    assert missed(low, high) > 0.3, "seeds differ by 0.02, which one seed cannot show"
    ours, theirs = checkpoints(rng, 1, 180, 0.0, 0.3, 0.1, None)
    _, low, high = metrics.paired_difference(ours[0], theirs[0])
    assert 0.03 <= missed(low, high) <= 0.08


@pytest.mark.parametrize(
    ("seeds", "problems", "of_seed"), [(1, 60, 0.0), (3, 60, 0.03), (5, 180, 0.01)]
)
def test_the_detectable_effect_is_found_with_its_power_over_seeds_and_problems(
    seeds, problems, of_seed
):
    rng = np.random.default_rng(3)
    of_seeds = rng.normal(0, of_seed, (seeds, 1, 4000))
    of_problems = rng.normal(0, 0.02, (1, problems, 4000))
    drawn = of_seeds + of_problems + rng.normal(0, 0.02, (seeds, problems, 4000))
    # One estimate of a spread over 3 seeds is rough: over many worlds its square is right.
    effect = np.sqrt(np.mean(metrics.minimum_detectable_effect(drawn) ** 2))
    _, low, high = metrics.paired_difference(drawn + effect, np.zeros_like(drawn))
    assert missed(low, high) == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_crossing_lies_in_its_interval(seeds):
    ks, rng, hits, trials = (1, 2, 4, 8, 16, 32, 64), np.random.default_rng(4), 0, 200
    rising = np.linspace(-0.06, 0.06, len(ks))  # crosses at k = 8
    for _ in range(trials):
        of_seeds = rng.normal(0, 0.01, (seeds, 1, 1)) if seeds > 1 else 0
        drawn = rising + of_seeds + rng.normal(0, 0.1, (1, 60, 1))
        drawn = drawn + rng.normal(0, 0.02, (seeds, 60, len(ks)))
        found = bands.crossing_interval(np.zeros_like(drawn), drawn, ks)
        hits += not (found["low"] > 8 or found["high"] < 8)
    assert 0.90 <= hits / trials <= 1.0


#: Shares of kinds of problems, and the chances of a right sample under two policies: the synthetic
#: populations of passk-inference 0.3.1, examples/coverage/simulate.py.
POPULATIONS = {
    "alike": ([1.0], [0.1], [0.1]),
    "rare": ([1.0], [0.001], [0.001]),
    "easy and hard": ([0.5, 0.5], [0.001, 0.4], [0.001, 0.4]),
    "crossing": ([0.7, 0.3], [0.15, 0.02], [0.3, 0.0002]),
}
GRID = np.arange(1, 33)


def held_whole(low, high, truth):
    return bool(((low <= truth) & (truth <= high)).all())


def share_of_populations(name, problems, trials):
    """How often the band of one seed holds the true difference at k = 1 to 32."""
    shares, before, after = map(np.array, POPULATIONS[name])
    truth = sum(
        w * ((1 - p) ** GRID - (1 - q) ** GRID)
        for w, p, q in zip(shares, before, after, strict=True)
    )
    rng, held = np.random.default_rng(1), 0
    for trial in range(trials):
        kind = rng.choice(len(shares), problems, p=shares)
        sides = (rng.binomial(64, chances[kind]) for chances in (after, before))
        n = np.full(problems, 64)
        a, b = (metrics.pass_at_k_curve(n, c, GRID) for c in sides)
        low, high, _ = bands.simultaneous_band(a, b, draws=1000, seed=trial)
        held += held_whole(low, high, truth)
    return held / trials


def share_over_seeds(seeds, problems, spread, trials):
    """The same without an effect, where seeds differ by ``spread`` in pass@1."""
    drawn = checkpoints(np.random.default_rng(0), seeds, problems, spread, 0.1, 0.1, 64, trials)
    held, n = 0, np.full(seeds * problems, 64)
    for trial in range(trials):
        counts = np.rint(64 * drawn[..., trial]).astype(int).reshape(2, -1)
        a, b = (metrics.pass_at_k_curve(n, c, GRID).reshape(seeds, problems, -1) for c in counts)
        low, high, _ = bands.simultaneous_band(a, b, draws=1000, seed=trial)
        held += held_whole(low, high, 0.0)
    return held / trials


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize(
    ("problems", "trials", "least", "most"),
    [
        (100, 100, 0.88, 1.0),
        pytest.param(50, 1000, 0.92, 0.98, marks=pytest.mark.slow),
        pytest.param(200, 1000, 0.92, 0.98, marks=pytest.mark.slow),
    ],
)
def test_the_band_holds_the_whole_curve(name, problems, trials, least, most):
    assert least <= share_of_populations(name, problems, trials) <= most


@pytest.mark.parametrize(
    ("seeds", "problems", "spread", "least"),
    [(3, 100, 0.005, 0.92), (3, 100, 0.02, 0.87), (5, 100, 0.02, 0.92), (10, 60, 0.02, 0.92)],
)
@pytest.mark.parametrize("trials", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_band_over_seeds_holds_the_whole_curve(seeds, problems, spread, least, trials):
    """Three seeds that lie far apart tell little: there it holds in about 91 %. Of few trials the
    share may be lower by chance."""
    least = least if trials == 1000 else 0.83
    assert share_over_seeds(seeds, problems, spread, trials) >= least


#: (name, mean, values of (problems, worlds))
KINDS = {
    "binary 0.5": (0.5, lambda rng, shape: rng.random(shape) < 0.5),
    "binary 0.1": (0.1, lambda rng, shape: rng.random(shape) < 0.1),
    "binary 0.02": (0.02, lambda rng, shape: rng.random(shape) < 0.02),
    "binary 0.98": (0.98, lambda rng, shape: rng.random(shape) < 0.98),
    "pass@1": (1 / 3, lambda rng, shape: rng.beta(0.5, 1.0, shape)),
    "pass@1, most near 0": (0.05, lambda rng, shape: rng.beta(0.1, 1.9, shape)),
    "pass@k, most near 1": (0.95, lambda rng, shape: rng.beta(1.9, 0.1, shape)),
    "one in 20 solved": (
        0.05 * 0.5 + 0.95 * 0.01,
        lambda rng, shape: np.where(rng.random(shape) < 0.05, 0.5, 0.01),
    ),
}


@pytest.mark.parametrize("problems", [8, 24, 60, 180])
def test_intervals_over_few_problems_keep_93_percent(problems):
    for kind, (mean, draw) in KINDS.items():
        values = draw(np.random.default_rng(0), (problems, WORLDS)).astype(float)
        low, high = metrics.bootstrap_interval(values, 1000, 0)
        assert missed(low, high, mean) <= 0.07, kind
    # of pass@1, little wider than the normal interval
    values = np.random.default_rng(0).beta(0.5, 1.0, (problems, WORLDS))
    low, high = metrics.bootstrap_interval(values, 1000, 0)
    normal = 2 * 1.96 * np.mean(values.std(axis=0, ddof=1)) / np.sqrt(problems)
    assert np.mean(high - low) / normal < {8: 1.5, 24: 1.25, 60: 1.15, 180: 1.1}[problems]
