"""The wire format of both ends: a JSON header and a safetensors body, each with its length.

A message is any tree of dicts, lists, tuples, strings, numbers, booleans, None and tensors. Tensors travel in
the body; the header holds their names. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

import safetensors.torch
import torch

_LENGTHS = struct.Struct("!QQ")
_TENSOR, _TUPLE, _MAP = "$tensor", "$tuple", "$map"


class Closed(Exception):
    """The other end of the pipe is gone."""


def send(stream: BinaryIO, message: Any) -> None:
    """Write one message."""
    tensors: dict[str, torch.Tensor] = {}
    header = json.dumps(_pack(message, tensors)).encode()
    body = safetensors.torch.save(tensors) if tensors else b""
    stream.write(_LENGTHS.pack(len(header), len(body)))
    stream.write(header)
    stream.write(body)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one message; `Closed` if the stream ends."""
    header, body = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    tree = json.loads(_exactly(stream, header))
    raw = _exactly(stream, body)
    return _unpack(tree, safetensors.torch.load(raw) if raw else {})


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            raise Closed(f"the pipe ended after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(v, tensors) for v in value]}
    if isinstance(value, list):
        return [_pack(v, tensors) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _pack(v, tensors) for k, v in value.items()}
        return {_MAP: [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a message cannot hold {type(value).__name__}: {value!r}")


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpack(v, tensors) for v in value[_TUPLE])
    if _MAP in value:
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in value[_MAP]}
    return {k: _unpack(v, tensors) for k, v in value.items()}
