"""The HTML report: every token in place, coloured by its score, and no text is interpreted as markup."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from descant import InputError
from descant.decoding.watermark.detection import Detection
from descant.decoding.watermark.report import (
    VERDICT_TEXTS,
    explain_verdict,
    format_p_value,
    render_report,
    split_spans,
    summary_items,
    to_printable,
)
from descant.decoding.watermark.statistics import TokenScores

MEANS = {"green list": 0.25, "synthid": 0.5, "gumbel": 1.0}


def detection(values: Any, scheme: str = "green list", **more: Any) -> Detection:
    """A detection of tokens with these values; None is one that was not scored."""
    scored = np.array([value is not None for value in values], dtype=bool)
    value = np.array([0.0 if value is None else float(value) for value in values])
    return Detection(
        **{
            "verdict": "marked",
            "scheme": scheme,
            "key": "ours",
            "tokens": len(values),
            "scored": int(scored.sum()),
            "score": 0.5,
            "expected": MEANS[scheme],
            "interval": (0.4, 0.6),
            "z": 4.2,
            "p_value": 2.5e-6,
            "uncorrected": 2.5e-6,
            "tests": 1,
            "alpha": 0.01,
            "span": None,
            "characters": None,
            "ids": tuple(range(100, 100 + len(values))),
            "evidence": TokenScores(scored, value),
            "offsets": None,
            **more,
        }
    )


class Reader(HTMLParser):
    """The spans of a page's texts as (class, title, text), and all that a browser would do."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.spans: list[list[str]] = []
        self.tags: list[str] = []
        self.outlined: list[str] = []
        self._open: list[str] = []
        self._in_text = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        assert not any(name.startswith("on") for name in given)
        assert not {"src", "href"} & given.keys()
        if tag == "div" and given.get("class") == "text":
            self._in_text = len(self._open) + 1
        if tag not in ("meta", "line", "polyline", "rect"):
            self._open.append(tag)
        if self._in_text and tag == "span":
            self.spans.append([given["class"], given["title"], ""])

    def handle_endtag(self, tag: str) -> None:
        if tag in ("html", "title") or tag not in self._open:
            return
        if self._in_text == len(self._open) and tag == "div":
            self._in_text = 0
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._in_text and "i" not in self._open[self._in_text :]:
            if "span" in self._open[self._in_text :]:
                self.spans[-1][2] += data
            else:
                self.spans.append(["", "", data])
            if "mark" in self._open[self._in_text :]:
                self.outlined.append(data)


def test_a_green_list_is_green_and_red() -> None:
    seen = Reader(render_report([detection([None, 1, 0, 1])], [["The", " cat", " sat", "\n"]]))
    assert seen.spans == [
        ["none", "'The', id 100, not scored", "The"],
        ["f2", "' cat', id 101, green", " cat"],
        ["a2", "' sat', id 102, red", " sat"],
        ["f2", r"'\n', id 103, green", "\n"],
    ]


@pytest.mark.parametrize(
    ("scheme", "values", "kinds"),
    [
        ("gumbel", [0.05, 0.2, 0.45, 0.69, 1.0, 1.5, 4.0, None],
         ["a3", "a2", "a1", "zero", "f1", "f2", "f3", "none"]),
        ("synthid", [0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7], ["a3", "a2", "a1", "zero", "f1", "f2", "f3"]),
    ],
)  # fmt: skip
def test_the_others_have_a_scale_around_unmarked_text(scheme: str, values: Any, kinds: list[str]) -> None:
    made = render_report([detection(values, scheme)], [[f"{at} " for at in range(len(values))]])
    seen = Reader(made)
    assert [kind for kind, _, _ in seen.spans] == kinds
    assert f"value {values[0]:.2f} (unmarked: {MEANS[scheme]:.2f})" in seen.spans[0][1]


def test_the_text_is_whole_and_in_order() -> None:
    text = "  The café 🙂 sat.  "
    offsets = ((0, 0), (2, 5), (5, 10), (11, 12), (11, 12), (12, 16), (16, 17))
    made = detection([None, 1, None, 0, 1, 0, 1], offsets=offsets, span=(3, 6))
    found = split_spans(made, text)
    assert "".join(part.text for part in found) == text
    assert [(part.text, part.token_indices, part.level, part.in_passage) for part in found] == [
        ("  ", (), None, False),
        ("The", (1,), 2, False),
        (" café", (2,), None, False),
        (" ", (), None, False),
        ("🙂", (3, 4), 0, True),
        (" sat", (5,), -2, True),
        (".", (6,), 2, False),
        ("  ", (), None, False),
    ]
    assert [len(part.titles) for part in found] == [0, 1, 1, 0, 2, 1, 1, 0]
    seen = Reader(render_report([made], [text]))
    assert "".join(data for _, _, data in seen.spans) == text
    assert seen.outlined == ["🙂", " sat"]


def test_a_gap_inside_the_passage_is_of_the_passage() -> None:
    offsets = ((0, 1), (2, 3), (4, 5))
    found = split_spans(detection([1, 1, 1], offsets=offsets, span=(0, 2)), "a b c")
    assert [(part.text, part.in_passage) for part in found] == [
        ("a", True), (" ", True), ("b", True), (" ", False), ("c", False),
    ]  # fmt: skip


HOSTILE = [
    "<script>alert(1)</script>",
    "</span></div><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x=\'',
    "]]><!-- </style><style>*{display:none}",
    "&lt;b&gt;",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_is_interpreted_as_markup(text: str) -> None:
    made = detection([1, 0], key=text, offsets=((0, 4), (4, len(text))))
    seen, plain = (
        Reader(render_report([made], [text], [text])),
        Reader(render_report([detection([1, 0])], [["a", "b"]])),
    )
    assert seen.tags == plain.tags
    assert "".join(data for _, _, data in seen.spans) == text
    pieces = Reader(render_report([detection([1])], [[text]]))
    assert pieces.spans[0][2] == text


def test_what_turns_or_hides_text_is_shown() -> None:
    assert to_printable("a\u202eb\x07\u200b\ud800\u2028 é\n\t") == (
        "a‹U+202E›b‹U+0007›‹U+200B›‹U+D800›‹U+2028› é\n\t"
    )
    assert to_printable("👩\u200d👧") == "👩\u200d👧"
    made = render_report([detection([1])], [["\u202etxt\ud800"]], ["\u202ename"])
    made.encode()
    assert "\u202e" not in made


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    made = render_report([detection([1] * 60, span=(0, 5))], [["x"] * 60])
    assert "script" not in made
    assert not re.search(r"https?:|url\(|@import", made)
    assert "default-src 'none'; style-src 'unsafe-inline'" in made
    assert made.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in made


@pytest.mark.parametrize("verdict", VERDICT_TEXTS)
def test_the_summary_says_it_all(verdict: str) -> None:
    one = detection([1, 0], verdict=verdict, tests=32, span=(0, 1), characters=(0, 3), needed=240)
    made = html.unescape(render_report([one], [["a", "b"]], ["essay.txt"]))
    assert explain_verdict(one) in made
    assert all(
        f"<dt>{name}</dt><dd>{value}</dd>" in made for name, value in summary_items(one) if name != "verdict"
    )
    assert re.search(rf'<span class="badge \w+">. {verdict}</span>', made)
    assert "essay.txt" in made
    assert ("p", "2.5e-06 (corrected for 32 tests)") in summary_items(one)
    assert ("passage", "tokens 0 to 0, characters 0 to 2") in summary_items(one)
    assert ("score", "0.500 (unmarked text: 0.250)") in summary_items(one)


def test_what_the_verdicts_mean() -> None:
    one = detection([1])
    assert explain_verdict(one).startswith(
        "A text written without this key would score as high with a chance of 1 in 400,000."
    )
    assert "1 in 50." in explain_verdict(replace(one, p_value=0.02))
    assert "less than 1 in a million billions" in explain_verdict(replace(one, p_value=0.0))
    short = replace(one, verdict="too short to tell", needed=240)
    assert explain_verdict(short).endswith("About 240 scored tokens would tell.")
    assert "None" not in explain_verdict(replace(short, needed=None))
    assert [format_p_value(p) for p in (0.5, 0.0123, 0.001, 9.9e-4, 1e-20)] == [
        "0.500", "0.012", "0.001", "9.9e-04", "< 1e-15",
    ]  # fmt: skip


def test_nothing_scored_is_no_number() -> None:
    one = detection([None], verdict="too short to tell", score=float("nan"), interval=(0.0, float("inf")))
    made = render_report([one], [["a"]])
    assert "nan" not in dict(summary_items(one)).values()
    assert "none (unmarked text: 0.250)" in made
    assert render_report([detection([])], [[]]).count("<section") == 1


def test_a_curve_shows_where_the_mark_is() -> None:
    values = [0.0] * 60 + [1.0] * 60
    made = render_report([detection(values, span=(60, 120))], [["x"] * 120])
    [points] = re.findall(r'points="([^"]+)"', made)
    heights = [float(pair.split(",")[1]) for pair in points.split()]
    assert heights[0] > heights[-1]
    assert len(heights) == 120 - 25 + 1
    [(left, width)] = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', made)
    assert float(left) == pytest.approx(1000 * 60 / 119, abs=0.1)
    assert float(left) + float(width) == pytest.approx(1000, abs=0.2)
    assert "<svg" not in render_report([detection([1] * 30)], [["x"] * 30])


def test_all_tokens_are_in_the_table_too() -> None:
    made = html.unescape(render_report([detection([1, None])], [["<b>", " cat"]]))
    assert "<tr><td>0</td><td>'<b>', id 100, green</td></tr>" in made
    assert "<tr><td>1</td><td>' cat', id 101, not scored</td></tr>" in made


def test_texts_must_fit() -> None:
    with pytest.raises(InputError, match="must be token strings if the detection has no offsets"):
        render_report([detection([1])], ["a"])
    with pytest.raises(InputError, match="`texts` must have 1 tokens, like the detection, got 2"):
        render_report([detection([1])], [["a", "b"]])
    with pytest.raises(ValueError, match="shorter"):
        render_report([detection([1])], [])
