"""HTML report of detections: every token coloured by its score, in one self-contained file."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import erf, exp, isfinite, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from descant.errors import InputError
from descant.tokenization.display import escape_invisible, join_pieces

if TYPE_CHECKING:
    from descant.decoding.watermark.detection import Detection


# General meaning of each verdict.
VERDICT_TEXTS: Final = {
    "marked": (
        "Most likely it, or a part of it, was made with this key. That names a key, not the person who used "
        "it."
    ),
    "not marked": (
        "It scores below what even a weak mark of this key reaches: most likely it is not marked with this "
        "key, or the watermark was removed. That does not say that a person wrote it: text of other models "
        "and other keys looks the same."
    ),
    "too short to tell": (
        "What could be scored is too little to tell marked text from unmarked. That speaks for neither."
    ),
}

_MIN_P_VALUE: Final = 1e-15  # smaller values are shown as `< 1e-15`


def summary_items(detection: Detection) -> list[tuple[str, str]]:
    """Return the figures of a detection with their labels."""
    low, high = detection.interval
    note = "" if detection.tests == 1 else f" (corrected for {detection.tests} tests)"
    items = [
        ("verdict", detection.verdict),
        ("scheme", detection.scheme),
        ("key", detection.key),
        ("scored tokens", f"{detection.scored} of {detection.tokens}"),
        ("score", f"{format_number(detection.score)} (unmarked text: {format_number(detection.expected)})"),
        ("95 % interval", f"{format_number(low)} to {format_number(high)}"),
        ("z", format_number(detection.z, 2)),
        ("p", format_p_value(detection.p_value) + note),
    ]
    if detection.span is not None:
        first, last = detection.span
        where = f"tokens {first} to {last - 1}"
        if detection.characters is not None:
            where += f", characters {detection.characters[0]} to {detection.characters[1] - 1}"
        items.append(("passage", where))
    return items


def explain_verdict(detection: Detection) -> str:
    """Explain what the verdict means, and what it does not mean."""
    text = VERDICT_TEXTS[detection.verdict]
    if detection.verdict == "marked":
        odds = _format_odds(detection.p_value)
        return f"A text written without this key would score as high with a chance of {odds}. {text}"
    if detection.verdict == "too short to tell" and detection.needed is not None:
        return f"{text} About {detection.needed} scored tokens would tell."
    return text


def format_number(value: float, decimals: int = 3) -> str:
    """Format a number; `none` if it is not finite."""
    return f"{value:.{decimals}f}" if isfinite(value) else "none"


def format_p_value(p: float) -> str:
    """Format a p-value."""
    if p >= 0.001:
        return f"{p:.3f}"
    return f"{p:.1e}" if p >= _MIN_P_VALUE else "< 1e-15"


def _format_odds(p: float) -> str:
    """Format a small probability as odds with two significant digits."""
    if p < _MIN_P_VALUE:
        return "less than 1 in a million billions"
    return f"1 in {float(f'{1 / p:.1e}'):,.0f}"


MAX_LEVEL: Final = 3  # level of the strongest evidence for or against the watermark
_GREEN_LIST: Final = "green list"
_BINARY_LEVEL: Final = 2  # level of binary scores
# White space stays as it is; joiners are part of letters and emoji.
_UNESCAPED: Final = "\n\t\u00a0\u3000\u200c\u200d"


@dataclass(frozen=True)
class TextSpan:
    """A piece of text of one token, of several that share a character, or of none."""

    text: str
    token_indices: tuple[int, ...]  # token positions
    titles: tuple[str, ...]  # description of each token
    level: int | None  # from -MAX_LEVEL (against) to MAX_LEVEL (for the watermark); None: not scored
    in_passage: bool  # whether it belongs to the passage found


def split_spans(detection: Detection, text: str | Sequence[str]) -> list[TextSpan]:
    """Split a text, given as a string or as its token strings, into consecutive spans."""
    if isinstance(text, str):
        if detection.offsets is None:
            raise InputError("texts", "must be token strings if the detection has no offsets", text)
        pieces = list(_split_by_tokens(text, detection.offsets))
    else:
        if len(text) != len(detection.ids):
            raise InputError("texts", f"must have {len(detection.ids)} tokens, like the detection", len(text))
        pieces = [(piece, (index,)) for index, piece in enumerate(text)]
    levels, passage = _score_levels(detection), _passage_mask(detection, [tokens for _, tokens in pieces])
    return [
        _make_span(detection, levels, piece, tokens, in_passage)
        for (piece, tokens), in_passage in zip(pieces, passage, strict=True)
    ]


def to_printable(text: str) -> str:
    """Replace invisible and bidirectional control characters by their code points."""
    return join_pieces(escape_invisible(text, keep=_UNESCAPED))


def _make_span(
    detection: Detection, levels: Sequence[int | None], piece: str, tokens: tuple[int, ...], in_passage: bool
) -> TextSpan:
    scored = [level for level in (levels[token] for token in tokens) if level is not None]
    return TextSpan(
        text=piece,
        token_indices=tokens,
        titles=tuple(_token_title(detection, token, piece) for token in tokens),
        level=round(sum(scored) / len(scored)) if scored else None,
        in_passage=in_passage,
    )


def _passage_mask(detection: Detection, pieces: Sequence[tuple[int, ...]]) -> list[bool]:
    """Mask of the pieces between the first and the last token of the passage, gaps included."""
    if detection.span is None:
        return [False] * len(pieces)
    first, last = detection.span
    inside = [index for index, tokens in enumerate(pieces) if any(first <= token < last for token in tokens)]
    return [bool(inside) and inside[0] <= index <= inside[-1] for index in range(len(pieces))]


def _split_by_tokens(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Split the text into pieces with their tokens; tokens that share characters share a piece."""
    end, start, tokens = 0, 0, list[int]()
    for index, (first, last) in enumerate(offsets):
        if last <= first:  # a token without text, such as a start token
            continue
        if tokens and first < end:
            tokens.append(index)
            end = max(end, last)
            continue
        if tokens:
            yield text[start:end], tuple(tokens)
        if first > end:
            yield text[end:first], ()
        start, end, tokens = first, last, [index]
    if tokens:
        yield text[start:end], tuple(tokens)
    if end < len(text):
        yield text[end:], ()


def _score_levels(detection: Detection) -> list[int | None]:
    """Level of each token, on a scale where all levels are about equally frequent in unmarked text."""
    mask, values = detection.evidence
    spread = float(np.std(values[mask])) if mask.any() else 0.0

    def level(value: float) -> int:
        if detection.scheme == _GREEN_LIST:
            return _BINARY_LEVEL if value > 0.5 else -_BINARY_LEVEL
        if detection.scheme == "gumbel":
            quantile = 1.0 - exp(-value)
        else:
            quantile = 0.5 + 0.5 * erf((value - detection.expected) / (spread or 1.0) / sqrt(2.0))
        return min(int(quantile * (2 * MAX_LEVEL + 1)), 2 * MAX_LEVEL) - MAX_LEVEL

    return [level(float(value)) if is_scored else None for is_scored, value in zip(mask, values, strict=True)]


def _token_title(detection: Detection, token: int, piece: str) -> str:
    mask, values = detection.evidence
    if not mask[token]:
        description = "not scored"
    elif detection.scheme == _GREEN_LIST:
        description = "green" if values[token] > 0.5 else "red"
    else:
        reference = f" (unmarked: {detection.expected:.2f})" if isfinite(detection.expected) else ""
        description = f"value {values[token]:.2f}{reference}"
    return f"{piece!r}, id {detection.ids[token]}, {description}"


_SYMBOLS: Final = {"marked": "●", "not marked": "○", "too short to tell": "?"}
_VERDICT_CLASSES: Final = {"marked": "yes", "not marked": "no", "too short to tell": "open"}
_SMOOTHING_WINDOW: Final = 25  # scored tokens per point of the curve
_WIDTH, _HEIGHT, _MARGIN = 1000, 120, 6  # of the curve, in view box units

# Colours differ by hue; solid or dotted underlines of different width carry the same information.
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1f2328; --dim: #59636e; --paper: #fff; --card: #f6f8fa;
  --line: #d1d9e0; --for: 26 127 55; --against: 207 34 46; --edge: #0969da }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --paper: #0d1117;
  --card: #151b23; --line: #3d444d; --for: 63 185 80; --against: 248 81 73; --edge: #4493f8 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 1rem } h2 { font-size: 1.1rem; margin: 0; overflow-wrap: anywhere }
section { margin-top: 2.5rem } header { display: flex; flex-wrap: wrap; gap: .75rem; align-items: center }
.badge { padding: .1rem .75rem; border: 1.5px solid currentColor; border-radius: 2rem; font-weight: 600 }
.yes { color: rgb(var(--for)) } .no { color: var(--dim) } .open { color: var(--edge) }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2.5rem; margin: 1rem 0; padding: 1rem 1.25rem;
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem }
dt { color: var(--dim); font-size: .8rem } dd { margin: 0; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums }
.means { max-width: 48rem } .note, figcaption { color: var(--dim); font-size: .85rem }
figure { margin: 1.25rem 0 } svg { display: block; width: 100%; height: 7.5rem }
.text { margin: 1rem 0; padding: 1.25rem; border: 1px solid var(--line); border-radius: .6rem;
  font: 15px/2 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
.text span, .legend span { unicode-bidi: isolate; border-radius: .2rem; padding: .1em 0 }
.text span { margin-right: 1px } .text i { color: var(--dim); font-style: normal; user-select: none }
.none { color: var(--dim) } .zero { box-shadow: inset 0 0 0 1px var(--line) }
.f1, .f2, .f3 { border-bottom: 1px solid rgb(var(--for)); background: rgb(var(--for) / .12) }
.f2 { border-bottom-width: 2px; background: rgb(var(--for) / .26) }
.f3 { border-bottom-width: 3px; background: rgb(var(--for) / .42) }
.a1, .a2, .a3 { border-bottom: 1px dotted rgb(var(--against)); background: rgb(var(--against) / .1) }
.a2 { border-bottom-width: 2px; background: rgb(var(--against) / .2) }
.a3 { border-bottom-width: 3px; background: rgb(var(--against) / .34) }
mark { color: inherit; background: none; outline: 2px solid var(--edge); outline-offset: 3px;
  border-radius: .2rem; box-decoration-break: clone; -webkit-box-decoration-break: clone }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.25rem; font-size: .85rem }
.legend span { padding: .1rem .5rem; font-family: ui-monospace, monospace }
details { font-size: .85rem } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--line);
  white-space: pre }
"""


def render_report(
    detections: Sequence[Detection],
    texts: Sequence[str | Sequence[str]],
    names: Sequence[str] | None = None,
) -> str:
    """Return one HTML page with a section per detection and its text.

    A text is a string, which the detection's offsets refer to, or a list of token strings.
    """
    titles = [f"Text {index}" for index in range(1, len(texts) + 1)] if names is None else names
    sections = [
        _section(index, *entry) for index, entry in enumerate(zip(detections, texts, titles, strict=True))
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            # The text is untrusted: the policy blocks scripts and requests even if escaping failed.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>Watermark evidence</title>",
            f"<style>{_STYLE}</style>",
            "<h1>Watermark evidence</h1>",
            *sections,
            "</html>\n",
        ]
    )


def _section(index: int, detection: Detection, text: str | Sequence[str], title: str) -> str:
    spans = split_spans(detection, text)
    figures = [
        f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>"
        for name, value in summary_items(detection)
        if name != "verdict"
    ]
    css_class = _VERDICT_CLASSES[detection.verdict]
    return "\n".join(
        [
            f'<section aria-labelledby="text-{index}">',
            f'<header><h2 id="text-{index}">{_escape(title)}</h2>'
            f'<span class="badge {css_class}">{_SYMBOLS[detection.verdict]} '
            f"{_escape(detection.verdict)}</span>"
            "</header>",
            f"<dl>{''.join(figures)}</dl>",
            f'<p class="means">{_escape(explain_verdict(detection))}</p>',
            *_score_chart(detection),
            _legend(detection),
            f'<div class="text">{_highlighted_text(spans)}</div>',
            _token_table(spans),
            "</section>",
        ]
    )


def _highlighted_text(spans: Sequence[TextSpan]) -> str:
    """Render the text with one span per part; the passage found has an outline."""
    html_parts, in_passage = [], False
    for span in spans:
        if span.in_passage != in_passage:
            in_passage = span.in_passage
            html_parts.append("<mark>" if in_passage else "</mark>")
        body = _escape(span.text).replace("\n", '<i aria-hidden="true">↵</i>\n')
        if span.token_indices:
            title = _escape("\n".join(span.titles))
            html_parts.append(f'<span class="{_css_class(span)}" title="{title}">{body}</span>')
        else:
            html_parts.append(body)
    return "".join(html_parts) + ("</mark>" if in_passage else "")


def _css_class(span: TextSpan) -> str:
    """CSS class of a span's level."""
    if span.level is None:
        return "none"
    return f"{'f' if span.level > 0 else 'a'}{abs(span.level)}" if span.level else "zero"


def _legend(detection: Detection) -> str:
    if detection.scheme == "green list":
        entries = [("f2", "green", "on the green list"), ("a2", "red", "not on it")]
    else:
        entries = [
            (f"f{MAX_LEVEL}", "high", "evidence for the watermark"),
            ("f1", "above", "a little"),
            ("zero", "even", "as in unmarked text"),
            ("a1", "below", "a little"),
            (f"a{MAX_LEVEL}", "low", "evidence against it"),
        ]
    entries.append(("none", "grey", "not scored: no context, or a repetition"))
    items = [
        f'<div><span class="{css_class}">{label}</span> {meaning}</div>'
        for css_class, label, meaning in entries
    ]
    if detection.span is not None:
        items.append("<div><mark>outlined</mark>&nbsp; the passage found</div>")
    return f'<div class="legend" aria-label="Legend">{"".join(items)}</div>'


def _token_table(spans: Sequence[TextSpan]) -> str:
    """All tokens as a table, for readers who cannot see the colours."""
    rows = [
        f"<tr><td>{token}</td><td>{_escape(title)}</td></tr>"
        for span in spans
        for token, title in zip(span.token_indices, span.titles, strict=True)
    ]
    head = "<tr><th>position</th><th>token, id and value</th></tr>"
    return f"<details><summary>All tokens as a table</summary><table>{head}{''.join(rows)}</table></details>"


def _score_chart(detection: Detection) -> list[str]:
    """Chart of the moving mean score along the text, relative to unmarked text."""
    positions = np.flatnonzero(detection.evidence.mask)
    if len(positions) < 2 * _SMOOTHING_WINDOW or not isfinite(detection.expected):
        return []
    sums = np.cumsum(np.concatenate(([0.0], detection.evidence.values[positions])))
    means = (sums[_SMOOTHING_WINDOW:] - sums[:-_SMOOTHING_WINDOW]) / _SMOOTHING_WINDOW
    middles = positions[_SMOOTHING_WINDOW // 2 : _SMOOTHING_WINDOW // 2 + len(means)]
    low, high = min(float(means.min()), detection.expected), max(float(means.max()), detection.expected)
    value_range, last_index = (high - low) or 1.0, max(len(detection.ids) - 1, 1)

    def x(token: float) -> str:
        return f"{_WIDTH * token / last_index:.1f}"

    def y(value: float) -> str:
        return f"{_MARGIN + (_HEIGHT - 2 * _MARGIN) * (high - value) / value_range:.1f}"

    points = " ".join(f"{x(token)},{y(value)}" for token, value in zip(middles, means, strict=True))
    band = ""
    if detection.span is not None:
        first, last = detection.span
        band = (
            f'<rect x="{x(first)}" y="0" width="{_WIDTH * (last - 1 - first) / last_index:.1f}" '
            f'height="{_HEIGHT}" style="fill:var(--edge)" opacity=".12"/>'
        )
    level = y(detection.expected)
    caption = (
        f"Mean value of {_SMOOTHING_WINDOW} neighbouring scored tokens along the text, "
        f"{format_number(float(means.min()))} to {format_number(float(means.max()))}; "
        f"dashed: unmarked text, {format_number(detection.expected)}."
    )
    return [
        "<figure>",
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{caption}">{band}'
        f'<line x1="0" x2="{_WIDTH}" y1="{level}" y2="{level}" stroke-dasharray="6 5" '
        'style="stroke:var(--dim)" vector-effect="non-scaling-stroke"/>'
        f'<polyline points="{points}" fill="none" style="stroke:rgb(var(--for))" stroke-width="2" '
        'stroke-linejoin="round" vector-effect="non-scaling-stroke"/></svg>',
        f"<figcaption>{caption}</figcaption>",
        "</figure>",
    ]


def _escape(text: str) -> str:
    return html.escape(to_printable(text))
