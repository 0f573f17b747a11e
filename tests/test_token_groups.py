"""Groups of tokens: kinds, parts and means, worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from sage_lib.policy.token_groups import grouped, kind, largest, merged, parts


def test_kinds_are_told_by_their_text():
    expected = {
        "number": ["12", "x1"],
        "operator": ["+", " * ", "="],
        "bracket or comma": [",", "("],
        "format": ["<SOLUTION>", "", "\n"],
        "word": ["L", "Wait", "é"],
        "other": ["?!"],
    }
    for name, texts in expected.items():
        assert {kind(text) for text in texts} == {name}


def test_the_largest_fifth_is_rounded_up_and_parts_are_of_equal_size():
    assert largest([1, 5, 3, 4, 2]).tolist() == [False, True, False, False, False]
    assert largest([1, 1, 1, 1, 1, 1]).tolist() == [True, True, False, False, False, False]
    assert largest(np.arange(10)).sum() == 2
    assert parts([4, 1, 3, 2], 2).tolist() == [2, 1, 2, 1]
    assert np.bincount(parts(np.random.default_rng(0).normal(size=100)))[1:].tolist() == [10] * 10


@pytest.fixture
def tokens():
    """Two completions of five tokens: the first is sure, the second not."""
    return pd.DataFrame(
        {
            "completion": [0] * 5 + [1] * 5,
            "sign": ["positive"] * 5 + ["negative"] * 5,
            "kind": ["number", "operator", "number", "word", "format"] * 2,
            "place": [0.0, 0.2, 0.4, 0.6, 0.8] * 2,
            "before": [0.1] * 5 + [1.0] * 5,
            "after": [0.1, 0.1, 0.1, 0.0, 0.1, 0.5, 1.0, 1.2, 1.0, 1.0],
            "p_before": [0.9] * 5 + [0.5] * 5,
            "p_after": [0.95, 0.9, 0.9, 0.9, 0.9, 0.43, 0.5, 0.56, 0.5, 0.5],
        }
    )


def test_groups_hold_means_over_their_tokens(tokens):
    table = grouped(tokens).set_index(["by", "group", "sign"])
    positive, negative = (table.loc[("all", "all", sign)] for sign in ("positive", "negative"))
    assert positive["tokens"] == negative["tokens"] == 5
    assert positive["before"] == pytest.approx(0.1) and negative["after"] == pytest.approx(0.94)
    assert positive["rise"] == pytest.approx(0.01) == positive["shift"]
    assert negative["rise"] == pytest.approx(-0.002)
    assert negative["shift"] == pytest.approx(0.026)
    # 0.07 is above 0.06; 0.06 (its float a little above or below) and 0.05 are no more than it
    assert positive["moved"] == 0 and negative["moved"] >= 0.2
    # the two of ten that fell most: 0.5 (a negative number) and 0.1 (a positive word)
    assert table.loc[("kind", "word", "positive"), "fallen"] == 1
    assert table.loc[("kind", "number", "negative"), "fallen"] == 0.5
    # the first tenth of either completion is its first token, the surer completion the lower fifth
    assert table.loc[("position", "1", "negative"), "after"] == 0.5
    assert ("perplexity", "1", "positive") in table.index
    assert ("perplexity", "1", "negative") not in table.index
    assert table["gradient"].isna().all()
    # -0.07 and 0.06 are the largest two of ten, whatever their sign
    assert table.loc[("kind", "number", "negative"), "shifted"] == 1
    # tenths of the entropy before: of equal ones the first token is in the lower one
    ends = [table.loc[("entropy", *of), "after"] for of in (("1", "positive"), ("10", "negative"))]
    assert ends == pytest.approx([0.1, 1.0])
    longer = grouped(pd.concat([tokens[:5], tokens[:6]], ignore_index=True))  # ten sure, one not
    fifths = longer[longer["by"] == "perplexity"].set_index("sign")["group"]
    assert fifths.to_dict() == {"positive": "1", "negative": "2"}, "a mean over tokens"


def test_merging_weighs_by_tokens(tokens):
    doubled = pd.concat([tokens, tokens.assign(completion=tokens["completion"] + 2)])
    one, two = grouped(tokens.iloc[:5]), grouped(tokens.iloc[5:])
    both = merged(pd.concat([one, two, two.assign(before=0.0)]))
    row = both.set_index(["by", "group", "sign"]).loc[("all", "all", "negative")]
    assert row["tokens"] == 10 and row["before"] == pytest.approx(0.5)
    assert both["gradient"].isna().all(), "not 0"
    assert merged(grouped(doubled)).shape == grouped(doubled).shape
