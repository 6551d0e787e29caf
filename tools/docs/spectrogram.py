"""The pictures of the page "Sound": the codes of a call, and the spectrogram of its sound.

    python tools/docs/spectrogram.py FILE       write the picture to a file

As a mkdocs hook it runs the first block of the page, and replaces the comment `<!-- spectrogram -->` by the
picture of what that decodes.
"""

import argparse
import base64
import contextlib
import functools
import io
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "sound.md"
MARK = "<!-- spectrogram -->"

WIDTH, LEFT, TOP, ROW, GAP, HEIGHT = 640, 74, 16, 14, 34, 150
WINDOW, HOP = 512, 256  # samples of a column of the spectrogram, and between columns

STYLE = """<style>
svg { color: #1f2328; background: #fff }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }
</style>"""


@functools.cache
def decoded() -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The codes of the page's first call as they are fed [C, T], the sound [S], its rate, the pad code."""
    import descant

    transformers_logging.set_verbosity_error()
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    values: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block[1], values)  # noqa: S102
    model, text = values["music"], values["text"]
    options = {"max_new_tokens": 100, "do_sample": True, "guidance_scale": 3.0, "seed": 1}
    request = descant.sound_request(model, **text, **options)
    session = descant.Session(model)
    numbers = session.admit(*request.requests)
    done = {event.request: event for event in session.drain() if isinstance(event, descant.Finished)}
    codes = torch.stack([done[number].hypotheses[0].tokens for number in numbers])
    pattern = request.requests[0].inputs["codebook"].frames.forced[:, 1:]
    return (
        torch.where(pattern >= 0, pattern, codes),
        values["sound"][0, 0],
        values["config"].audio_encoder.sampling_rate,
        int(pattern.max()),
    )


def spectrogram(sound: torch.Tensor) -> torch.Tensor:
    """The power of a sound in decibels [F, T], between 0 (60 below the loudest) and 1."""
    spectrum = torch.stft(sound, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    decibels = 20 * spectrum.abs().clamp(min=1e-9).log10()
    return ((decibels - decibels.max()) / 60 + 1).clamp(0, 1)


def png(shade: torch.Tensor) -> str:
    """A picture of shades between 0 and 1 [H, W], indigo on transparent, as a data address."""
    pixels = torch.zeros(*shade.shape, 4, dtype=torch.uint8)
    pixels[..., :3] = torch.tensor([82, 108, 254], dtype=torch.uint8)
    pixels[..., 3] = (255 * shade).round().to(torch.uint8)
    lines = b"".join(b"\0" + line.numpy().tobytes() for line in pixels)
    height, width = shade.shape
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def svg(style: str = "") -> str:
    """Both pictures, one above the other, on one axis of time."""
    codes, sound, rate, pad = decoded()
    # Codes are shades by their number; what the pattern forces is empty.
    shades = torch.where(codes == pad, 0.0, 0.15 + 0.85 * codes / (pad - 1))
    inner, codes_height = WIDTH - LEFT - 8, ROW * len(codes)
    top = TOP + codes_height + GAP
    seconds = len(sound) / rate
    image = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
    parts = [
        f'<image x="{LEFT}" y="{TOP}" width="{inner}" height="{codes_height}" {image} href="{png(shades)}"/>',
        f'<image x="{LEFT}" y="{top}" width="{inner}" height="{HEIGHT}" {image} '
        f'href="{png(spectrogram(sound).flip(0))}"/>',
    ]
    for number in range(len(codes)):
        y = TOP + ROW * (number + 0.5) + 3.5
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">codebook {number}</text>')
    for part in (0, 0.5, 1):
        y = top + HEIGHT * (1 - part) + 3.5
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{part * rate / 2000:g} kHz</text>')
        x, anchor = LEFT + inner * part, ("start", "middle", "end")[int(2 * part)]
        parts.append(
            f'<text x="{x}" y="{top + HEIGHT + 15}" text-anchor="{anchor}">{part * seconds:.2f} s</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{top - 18}">{codes.shape[1]} steps</text>')
    height = top + HEIGHT + 22
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-labelledby="spectrogram-title" width="{WIDTH}" height="{height}" '
            'style="max-width:100%;height:auto">',
            '<title id="spectrogram-title">The codes of four codebooks by step, each a step after the one '
            "before it, and the spectrogram of the sound they make</title>",
            *([style] if style else []),
            '<g font-family="system-ui, sans-serif" font-size="10" fill="currentColor">',
            *parts,
            "</g>",
            "</svg>",
        ]
    )


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    if MARK not in markdown:
        return markdown
    figure = f'<figure data-search-exclude style="margin-left:0">\n{svg()}\n</figure>'
    return markdown.replace(MARK, figure)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(svg(STYLE) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
