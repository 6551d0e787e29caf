"""The pictures of the page on watermarks: watermarked texts, each token coloured by its score.

    python tools/docs/watermark_pictures.py pictures FOLDER     write every picture to this folder
    python tools/docs/watermark_pictures.py texts               generate the texts with the model

As a mkdocs hook it replaces the comments `<!-- marked: NAME -->` of the pages. The texts are stored beside
this script, so that building the pages does not need the model. The token scores are computed.
"""

import argparse
import html
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from descant.config.watermarking_config import BaseWatermarkingConfig, as_watermarking_config
from descant.decoding.watermark.detection import Detection, Detector
from descant.decoding.watermark.report import (
    TextSpan,
    format_number,
    format_p_value,
    split_spans,
    to_printable,
)

TEXTS = Path(__file__).with_suffix(".json")
MODEL = "models/smollm2"
PROMPT = "The lighthouse stood at the end of the harbour wall, and every evening"
TOKENS = 110

# These keys are public: they are for pictures only.
GREEN: Mapping[str, Any] = {"hashing_key": 7340033, "greenlist_ratio": 0.25, "bias": 3.0}
KEYS: Mapping[str, Mapping[str, Any]] = {
    "green": GREEN,
    "unmarked": GREEN,
    "passage": GREEN,
    "synthid": {"ngram_len": 5, "keys": [(2654435761 * place) % 2**31 for place in range(1, 31)]},
    "gumbel": {"key": 20231213, "nonces": 1},
}

# Layout in units of the view box: monospaced text, lines LINE apart.
WIDTH, LEFT, TOP, LINE = 760, 16, 64, 25
SIZE, PITCH, MONOSPACED = 13, 7.8, "ui-monospace, Menlo, Consolas, monospace"
FOR, AGAINST, EDGE = "#2da44e", "#e5534b", "#4493f8"
OPACITY = (0.0, 0.16, 0.32, 0.5)  # of a token's background, by the strength of its score
STROKE = (0.0, 1.0, 2.0, 3.0)  # of the underline

STYLE = """<style>
svg { color: #1f2328; background: #fff }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }
</style>"""

MARK = re.compile(r"<!-- marked: (?P<name>[\w-]+) -->")


@dataclass(frozen=True)
class Text:
    """A stored text: its token ids, the string of each, and the vocabulary size of its model."""

    ids: list[int]
    pieces: list[str]
    vocabulary: int

    @classmethod
    def read(cls, name: str) -> "Text":
        """The text of a picture."""
        stored = json.loads(TEXTS.read_text(encoding="utf-8"))
        return cls(vocabulary=stored["vocabulary"], **stored["texts"][name])


def settings(name: str) -> BaseWatermarkingConfig:
    """The watermark of a picture."""
    return as_watermarking_config(KEYS[name])


def detection(name: str) -> Detection:
    """The detection on a picture's text."""
    text = Text.read(name)
    return Detector({"pictures": settings(name)}, text.vocabulary).ids(text.ids, windows=name == "passage")


def svg(name: str, style: str = "") -> str:
    """A picture: the text, a background and an underline for each token, and the total score."""
    found, text = detection(name), Text.read(name)
    tokens, lines = draw_tokens(split_spans(found, text.pieces))
    height = TOP + LINE * lines + 36
    title, p = f"{found.scheme}: {found.verdict}", format_p_value(found.p_value)
    p = f"p {p}" if p.startswith("<") else f"p = {p}"
    caption = (
        f"{found.scored} of {found.tokens} tokens scored, mean {format_number(found.score)} "
        f"({format_number(found.expected)} in unmarked text), z = {format_number(found.z, 1)}, {p}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-labelledby="marked-{name}-title marked-{name}-desc" width="{WIDTH}" height="{height}" '
            'style="max-width:100%;height:auto">',
            f'<title id="marked-{name}-title">{html.escape(title)}</title>',
            f'<desc id="marked-{name}-desc">{html.escape(caption)}. The text: '
            f"{_plain(''.join(text.pieces))}</desc>",
            *([style] if style else []),
            '<g font-family="system-ui, sans-serif" fill="currentColor">',
            f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{html.escape(title)}</text>',
            f'<text x="{LEFT}" y="41" font-size="12" opacity="0.75">{html.escape(caption)}</text>',
            "</g>",
            f'<g font-family="{MONOSPACED}" font-size="{SIZE}" fill="currentColor">',
            *tokens,
            "</g>",
            '<g font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
            *legend(found, height - 14),
            "</g>",
            "</svg>",
        ]
    )


def draw_tokens(shown: Sequence[TextSpan]) -> tuple[list[str], int]:
    """The tokens, wrapped into lines, and the number of lines."""
    elements, column, line = [], 0, 0
    line_width = int((WIDTH - 2 * LEFT) / PITCH)
    for part in shown:
        for piece in _line_pieces(to_printable(part.text).replace("\n", "↵"), line_width):
            text = piece.lstrip() if column + len(piece) > line_width else piece
            if column + len(piece) > line_width:
                column, line = 0, line + 1
            if text:
                elements.append(token(part, text, LEFT + PITCH * column, TOP + LINE * line))
                column += len(text)
    return elements, line + 1


def token(part: TextSpan, text: str, x: float, y: float) -> str:
    """One token: its background, its underline (dotted if evidence against) and its text."""
    width, level = PITCH * len(text), part.level or 0
    colour = FOR if level > 0 else AGAINST
    box = f'x="{x + 0.5:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="18"'
    kind = "none" if part.level is None else "for" if level > 0 else "against" if level < 0 else "even"
    shapes = [f"<title>{html.escape(', '.join(part.titles))}</title>"]
    if level:
        dots = ' stroke-dasharray="2 2"' if level < 0 else ""
        shapes.append(f'<rect {box} rx="2" fill="{colour}" fill-opacity="{OPACITY[abs(level)]}"/>')
        shapes.append(
            f'<line x1="{x + 0.5:.1f}" x2="{x + width - 0.5:.1f}" y1="{y + 18:.1f}" y2="{y + 18:.1f}" '
            f'stroke="{colour}" stroke-width="{STROKE[abs(level)]}"{dots}/>'
        )
    if part.in_passage:
        shapes += [
            f'<line class="edge" x1="{x:.1f}" x2="{x + width:.1f}" y1="{edge:.1f}" y2="{edge:.1f}" '
            f'stroke="{EDGE}" stroke-width="1.5"/>'
            for edge in (y - 2.5, y + 21.5)
        ]
    dim = ' opacity="0.55"' if part.level is None else ""
    shapes.append(
        f'<text x="{x:.1f}" y="{y + 13:.1f}" textLength="{width:.1f}" xml:space="preserve" '
        f'style="white-space:pre"{dim}>{html.escape(text)}</text>'
    )
    return f'<g class="{kind}">{"".join(shapes)}</g>'


def legend(found: Detection, y: int) -> list[str]:
    """The legend of colours and lines."""
    binary = found.scheme == "green list"
    level = 2 if binary else 3
    entries = [
        ("for", level, "on the green list" if binary else "evidence for"),
        ("against", -level, "not on it" if binary else "evidence against"),
        ("none", None, "not scored"),
    ]
    out, x = [], float(LEFT)
    mono = f'font-family="{MONOSPACED}" font-size="11"'
    for word, strength, about in entries:
        sample = TextSpan(text=word, token_indices=(), titles=(about,), level=strength, in_passage=False)
        out.append(f"<g {mono}>{token(sample, word, x, y - 13)}</g>")
        out.append(f'<text x="{x + PITCH * len(word) + 8:.1f}" y="{y}" opacity="0.85">{about}</text>')
        x += PITCH * len(word) + 6.2 * len(about) + 34
    if found.span is not None:
        sample = TextSpan(
            text="between", token_indices=(), titles=("the passage found",), level=None, in_passage=True
        )
        out.append(f"<g {mono}>{token(sample, 'between', x, y - 13)}</g>")
        out.append(f'<text x="{x + PITCH * 7 + 8:.1f}" y="{y}" opacity="0.85">the passage found</text>')
    return out


def fill_page(text: str) -> str:
    """A page's Markdown with its comments replaced by pictures."""

    def replacement(mark: re.Match[str]) -> str:
        if mark["name"] not in KEYS:
            raise ValueError(f"a picture must be one of {', '.join(KEYS)}, got {mark['name']!r}")
        return f'<figure data-search-exclude style="margin-left:0">\n{svg(mark["name"])}\n</figure>'

    return MARK.sub(replacement, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return fill_page(markdown)


def texts() -> dict[str, Any]:
    """Texts of the model with and without a watermark, and a marked passage between unmarked ones."""
    import torch
    import transformers

    import descant

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)

    def generate_ids(mark: Any, seed: int, count: int = TOKENS) -> list[int]:
        inputs = tokenizer(PROMPT, return_tensors="pt")
        out = descant.generate(
            model,
            **inputs,
            do_sample=True,
            seed=seed,
            repetition_penalty=1.2,
            max_new_tokens=count,
            min_new_tokens=count,
            watermarking_config=mark,
        )
        return [int(one) for one in out[0, inputs["input_ids"].shape[1] :]]

    ids_by_name = {name: generate_ids(None if name == "unmarked" else settings(name), 1) for name in KEYS}
    plain = generate_ids(None, 2, 2 * TOKENS)
    ids_by_name["passage"] = plain[:TOKENS] + ids_by_name["passage"] + plain[TOKENS:]
    found = {
        name: {"ids": ids, "pieces": [tokenizer.decode([one]) for one in ids]}
        for name, ids in ids_by_name.items()
    }
    return {"vocabulary": model.config.vocab_size, "texts": found}


def _plain(text: str) -> str:
    return html.escape(" ".join(to_printable(text).split()))


def _line_pieces(text: str, line_width: int) -> Iterator[str]:
    """The text in pieces of at most one line."""
    for start in range(0, len(text), line_width):
        yield text[start : start + line_width]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("texts", help="generate the texts")
    commands.add_parser("pictures", help="write every picture").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "texts":
        TEXTS.write_text(json.dumps(texts(), indent=1) + "\n", encoding="utf-8")
        print(f"{len(KEYS)} texts in {TEXTS.name}")
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in KEYS:
        (arguments.folder / f"{name}.svg").write_text(svg(name, STYLE) + "\n", encoding="utf-8")
    print(f"{len(KEYS)} pictures in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
