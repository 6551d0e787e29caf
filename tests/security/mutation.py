"""Mutations of files: seeded, so that a failure can be seen again; each gives new bytes for good ones."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

_DEEP = 100_000
_MEGABYTE = 2**20
# Texts of JSON values that a careless reader trips over.
VALUES = (
    "9" * 5000, "-" + "9" * 400, "1e999", "-1e400", "1e-999", "NaN", "Infinity", "-Infinity",
    "9223372036854775808", "18446744073709551616", "1e308", "-1", "0", "-0.0", "3.5", "2147483648",
    "1000000007", "true", "false", "null", '""', '"\\ud800"', '"\\udfff x"', '"\\u0000"', '"\\u202e"',
    '"' + "a" * _MEGABYTE + '"', '"(((((((((((((((((a+)+)+)+)+)+"', "[]", "{}", "[[]]", "[null]",
    '{"a": {"b": []}}', "[1, 2, 3]", "[-1]", "[1.5]", '["a", 1]', '{"1": "a"}', "[" * 200 + "]" * 200,
    "[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP, "[" + "1," * 100_000 + "1]",
    "[" + "[1]," * 20_000 + "[1]]", "0x10", "1_000", "'a'", "undefined", "[1,]",
    "[" + "[]," * 100_000 + "[]]",
)  # fmt: skip
KEYS = (
    "__class__", "__init__", "__reduce__", "__dict__", "_name", "auto_map", "transformers_version",
    "\\ud800", "", "torch_dtype", "dtype", "model_type", "from_dict", "to_dict", "\\u0000", "a" * 10_000,
    "keys", "kind", "extra",
)  # fmt: skip


# ------------------------------------------------------------------------ any file
def flipped(chance: random.Random, data: bytes) -> bytes:
    """Some bits are another."""
    new = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        if new:
            new[chance.randrange(len(new))] ^= 1 << chance.randrange(8)
    return bytes(new)


def cut(chance: random.Random, data: bytes) -> bytes:
    """The end, the beginning or a part is gone."""
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return chance.choice((data[:first], data[last:], data[:first] + data[last:], b""))


def stuffed(chance: random.Random, data: bytes) -> bytes:
    """Something strange stands somewhere in it."""
    strange = (
        chance.randbytes(chance.choice((1, 3, 40))),
        b"\0" * chance.choice((1, 100)),
        b"\xff\xfe\xfd",
        "\u202e\u2066\ufeff\u200b".encode(),
        b"\xed\xa0\x80",  # a lone surrogate
        b"\r\r\n\x1a\x0c\x1b[2J",
        b"{" * 50,
        b"9" * 6000,
        data[: chance.randrange(len(data) + 1)],
        b"(" * chance.choice((300, 20_000)),
        b"\\" * 200,
    )
    place = chance.choice((0, len(data), chance.randrange(len(data) + 1)))
    return data[:place] + chance.choice(strange) + data[place:]


def encoded(chance: random.Random, data: bytes) -> bytes:
    """The same text in another encoding, or with a mark before it."""
    text = data.decode("latin-1")
    ways = (
        lambda: b"\xef\xbb\xbf" + data,
        lambda: b"\xef\xbb\xbf" * 2 + data,
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-16-be"),
        lambda: text.encode("utf-32"),
        lambda: text.encode("utf-7"),
        lambda: b"\xff\xfe" + data,
        lambda: data.replace(b" ", b"\xa0"),
        lambda: data.replace(b"\n", b"\r"),
        lambda: data.replace(b'"', "”".encode()),
    )
    return chance.choice(ways)()


def swollen(chance: random.Random, data: bytes) -> bytes:
    """An excessive amount."""
    size = chance.choice((_MEGABYTE + 1, 5 * _MEGABYTE))
    return chance.choice(
        (data + b" " * size, data + b"\n" * size, b" " * size + data, data + data * (size // len(data)))
    )


ANY: tuple[Mutation, ...] = (flipped, flipped, cut, stuffed, encoded)


# ------------------------------------------------------------------------ JSON
def _json_with(value: Any, chosen: dict[int, str]) -> str:
    """JSON text of a value with given texts for some of its parts, by identity."""
    if id(value) in chosen:
        return chosen[id(value)]
    if isinstance(value, _Box):
        return _json_with(value.held, chosen)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_json_with(v, chosen)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json_with(one, chosen) for one in value) + "]"
    return json.dumps(value)


class _Box:
    """A value with an identity of its own."""

    def __init__(self, held: Any) -> None:
        self.held = held


def _boxed(value: Any, boxes: list[_Box]) -> _Box:
    if isinstance(value, dict):
        value = {name: _boxed(part, boxes) for name, part in value.items()}
    elif isinstance(value, list):
        value = [_boxed(part, boxes) for part in value]
    boxes.append(_Box(value))
    return boxes[-1]


def replaced(chance: random.Random, data: bytes) -> bytes:
    """Some of its values are others."""
    boxes: list[_Box] = []
    whole = _boxed(json.loads(data), boxes)
    some = chance.sample(boxes, min(len(boxes), chance.choice((1, 1, 1, 2, 5))))
    return _json_with(whole, {id(one): chance.choice(VALUES) for one in some}).encode()


def rekeyed(chance: random.Random, data: bytes) -> bytes:
    """Names are gone, new, twice there or exchanged."""
    boxes: list[_Box] = []
    whole = _boxed(json.loads(data), boxes)
    objects = [one for one in boxes if isinstance(one.held, dict) and one.held] or [whole]
    chosen = chance.choice(objects)
    if not isinstance(chosen.held, dict):
        return replaced(chance, data)
    names = list(chosen.held)
    name, other = chance.choice(names), chance.choice(names)
    value = chance.choice((*VALUES, _json_with(chosen.held[other], {})))
    texts = {key: _json_with(part, {}) for key, part in chosen.held.items()}
    pairs = [(json.dumps(key), text) for key, text in texts.items()]
    way = chance.randrange(5)
    if way == 0:
        pairs = [pair for pair in pairs if pair[0] != json.dumps(name)]
    elif way == 1:
        pairs.append((f'"{chance.choice(KEYS)}"', value))
    elif way == 2:
        pairs.append((json.dumps(name), value))
    elif way == 3:
        pairs = [(json.dumps(other) if key == json.dumps(name) else key, text) for key, text in pairs]
    else:
        pairs += [(f'"{place}"', value[:20_000] if value[:1] == '"' else "1") for place in range(2000)]
    return _json_with(whole, {id(chosen): "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"}).encode()


def wrapped(chance: random.Random, data: bytes) -> bytes:
    """The whole is inside something else, or something else."""
    text = data.decode()
    ways = (
        f"[{text}]",
        json.dumps(text),
        f'{{"a": {text}}}',
        f"{text}{text}",
        f"/* */{text}",
        chance.choice(VALUES),
    )
    return chance.choice(ways).encode()


JSON: tuple[Mutation, ...] = (replaced, replaced, replaced, rekeyed, rekeyed, wrapped, swollen, *ANY)


# ------------------------------------------------------------------------ safetensors
_KINDS = ("F64", "F32", "F16", "BF16", "BOOL", "U8", "I32", "I64", "F8_E4M3", "C64", "X9", "")
_NAMES = ("more", "", "a" * 1000, "keys.99", "keys.-1", "keys.٣")


def _split(data: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + size], data[8 + size :]


def _joined(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def misheaded(chance: random.Random, data: bytes) -> bytes:
    """The length of the header is wrong."""
    header, body = _split(data)
    size = len(header)
    lies = (
        0,
        1,
        2,
        size - 1,
        size + 1,
        size + 8,
        len(data),
        len(data) - 8,
        100_000_001,
        2**31,
        2**32,
        2**63,
        2**64 - 1,
    )
    return struct.pack("<Q", chance.choice(lies)) + header + body


def header_mutated(chance: random.Random, data: bytes) -> bytes:
    """The header is JSON that has been tampered with."""
    header, body = _split(data)
    return _joined(
        chance.choice((replaced, replaced, rekeyed, flipped, cut, stuffed, wrapped))(chance, header), body
    )


def tensor_lied(chance: random.Random, data: bytes) -> bytes:
    """The metadata of a tensor is wrong: its dtype, its shape, its offsets."""
    header, body = _split(data)
    fields = json.loads(header)
    names = [name for name in fields if name != "__metadata__"]
    one, other = fields[chance.choice(names)], fields[chance.choice(names)]
    first, last = one["data_offsets"]
    ways: tuple[Callable[[], Any], ...] = (
        lambda: one.update(
            dtype=chance.choice(("F64", "F16", "BF16", "BOOL", "U8", "I64", "F8_E4M3", "C64", "X9", ""))
        ),
        lambda: one.update(shape=[*one["shape"], chance.choice((0, 1, 2, 2**40))]),
        lambda: one.update(shape=one["shape"][::-1]),
        lambda: one.update(shape=[2**32, 2**32, 2**32]),
        lambda: one.update(shape=[0]),
        lambda: one.update(shape=[-1, *one["shape"]]),
        lambda: one.update(shape=[1.5]),
        lambda: one.update(shape=[1] * 70 + one["shape"]),
        lambda: one.update(shape=[(last - first) // 4] if last - first >= 4 else []),
        lambda: one.update(data_offsets=other["data_offsets"]),
        lambda: one.update(data_offsets=[last, first]),
        lambda: one.update(data_offsets=[first + 1, last + 1]),
        lambda: one.update(data_offsets=[first, 2**63]),
        lambda: one.update(data_offsets=[-4, last]),
        lambda: one.update(data_offsets=[0, len(body)]),
        lambda: one.update(other),
        lambda: fields.pop(chance.choice(names)),
        lambda: fields.update(
            {chance.choice(("more", "", "a" * 1000, "keys.99", "keys.-1", "keys.٣")): dict(one)}
        ),
        lambda: fields.update(
            {"empty": {"dtype": "F32", "shape": [0], "data_offsets": [len(body), len(body)]}}
        ),
    )
    chance.choice(ways)()
    return _joined(json.dumps(fields).encode(), body)


def metadata_bombed(chance: random.Random, data: bytes) -> bytes:
    """What is written beside the tensors is enormous, or strange."""
    header, body = _split(data)
    fields = json.loads(header)
    kept = fields.get("__metadata__", {})
    name = chance.choice((*kept, "format"))
    deep = '{"a":' * _DEEP + "1" + "}" * _DEEP
    ways: tuple[Any, ...] = (
        {**kept, **{f"name {place}": "x" for place in range(20_000)}},
        {**kept, name: "x" * (2 * _MEGABYTE)},
        {**kept, name: deep},
        {**kept, name: chance.choice(VALUES)},
        {**kept, name: chance.choice(VALUES)},
        {**kept, name: 5},
        {**kept, name: None},
        {},
        [],
        "x",
    )
    fields["__metadata__"] = chance.choice(ways)
    return _joined(json.dumps(fields).encode(), body)


def body_mutated(chance: random.Random, data: bytes) -> bytes:
    """The header stands, the numbers do not."""
    header, body = _split(data)
    ways = (
        lambda: chance.randbytes(len(body)),
        lambda: b"\xff" * len(body),
        lambda: b"\0" * len(body),
        lambda: body[: chance.randrange(len(body) + 1)],
        lambda: body + chance.randbytes(64),
        lambda: flipped(chance, body),
    )
    return _joined(header, chance.choice(ways)())


SAFETENSORS: tuple[Mutation, ...] = (
    misheaded, header_mutated, header_mutated, tensor_lied, tensor_lied, tensor_lied, metadata_bombed,
    body_mutated, body_mutated, flipped, cut, stuffed,
)  # fmt: skip


# ------------------------------------------------------------------------ lines of text
REQUIREMENTS = (
    "-r other.txt", "--index-url http://a", "-e .", "x @ file:///etc/passwd", "git+https://a/b", "./here",
    "torch>=", "torch==" + "9" * 5000, "a" * 100_000,
    "torch; python_version < '3' and " * 200 + "os_name == 'a'", "torch[", "[x]",
    "torch; " + "(" * 5000 + "os_name == 'a'" + ")" * 5000, "torch>=1,<0", "\u202etorch", "tor\0ch", "-",
    ";", "#", "=", "torch; os_name in 'a'", "torch!=1.*,!=2.*" * 100, "torch===x", "torch~=1", "torch @ ",
    "${HOME}", "torch\\\n>=99",
)  # fmt: skip
PYTHON = (
    "x = " + "(" * 400 + ")" * 400, "x = " + "-" * 50_000 + "1", "x = " + "1+" * 20_000 + "1",
    "def generate(model): ...", "strategy = 1", "import os; os._exit(3)", "#" * 500_000,
    "x = " + "[" * 90 + "]" * 90, "# -*- coding: rot13 -*-", "x = '\u202e'", "\tgenerate = 1",
    "del generate", "x = 0" + "9" * 5000, "x = '''", "@" * 1000, "x\u200by = 1", "raise",
    "if 1:\n" + "".join(" " * depth + "if 1:\n" for depth in range(1, 150)),
    "x = f'" + "{" * 200 + "}" * 200 + "'", "class generate: ...", "from .other import *",
    "match x:\n case _: pass", "x = 1e" + "9" * 4000, "global generate",
)  # fmt: skip


def _lined(lines: tuple[str, ...]) -> Mutation:
    def mutation(chance: random.Random, data: bytes) -> bytes:
        new = data.decode().split("\n")
        new.insert(chance.randrange(len(new) + 1), chance.choice(lines))
        return "\n".join(new).encode("utf-8", "surrogatepass")

    return mutation


TEXT: tuple[Mutation, ...] = (swollen, *ANY)
REQUIREMENT_LINES: tuple[Mutation, ...] = (_lined(REQUIREMENTS), _lined(REQUIREMENTS), *TEXT)
PYTHON_LINES: tuple[Mutation, ...] = (_lined(PYTHON), _lined(PYTHON), *TEXT)
