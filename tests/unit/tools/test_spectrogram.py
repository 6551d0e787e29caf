"""The pictures of the page "Sound" are those of its first call."""

from __future__ import annotations

import base64
import struct
import sys
import zlib
from xml.etree import ElementTree

import torch

from tools.docs import spectrogram


def _pixels(address: str) -> torch.Tensor:
    """The opacity of each pixel of a picture [H, W]."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, body, size = 8, b"", (0, 0)
    while place < len(data):
        length, name = struct.unpack(">I4s", data[place : place + 8])
        part = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(
            name + part
        )
        if name == b"IHDR":
            size = struct.unpack(">II", part[:8])
        body += part if name == b"IDAT" else b""
        place += 12 + length
    lines = torch.frombuffer(bytearray(zlib.decompress(body)), dtype=torch.uint8).view(size[1], -1)
    return lines[:, 1:].reshape(size[1], size[0], 4)[..., 3]


def test_a_picture_has_the_shades_it_was_given() -> None:
    shades = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.0, 0.2]])
    assert _pixels(spectrogram.png(shades)).tolist() == [[0, 128, 255], [255, 0, 51]]


def test_the_codes_start_a_step_after_each_other(tmp_path, monkeypatch) -> None:
    codes, sound, rate, pad = spectrogram.decoded()
    starts = [int((line != pad).nonzero()[0]) for line in codes]
    assert starts == [0, 1, 2, 3]
    assert len(sound) / rate > 1
    monkeypatch.setattr(sys, "argv", ["spectrogram", str(tmp_path / "sound.svg")])
    assert spectrogram.main() == 0
    tree = ElementTree.fromstring((tmp_path / "sound.svg").read_text())
    images = [one for one in tree.iter() if one.tag.endswith("image")]
    shown = _pixels(images[0].get("href"))
    assert shown.shape == codes.shape
    assert torch.equal(shown == 0, codes == pad)
