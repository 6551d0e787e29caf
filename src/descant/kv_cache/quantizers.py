"""Quantizers: how keys and values become few bits, with what optimum-quanto or hqq choose for each group.

A package chooses the codes, the scale and the offset of groups of numbers. Which numbers make a group, how
codes are packed and how they are read again is the same for all, so that chunks of any origin can be read
together, and nothing has to be compiled.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.errors import ConfigError, MissingExtra

__all__ = ["BACKENDS", "HQQ", "GroupCodec", "QuantizedTensor", "Quantizer", "Quanto", "build_quantizer"]


class QuantizedTensor(NamedTuple):
    """Keys or values of some positions of a row: `code * scale + offset`, group by group."""

    codes: Tensor  # [H, C, B] uint8: the codes of a position, several in a byte
    scale: Tensor  # [H, C, G]; where groups run over positions [H, G, D]
    offset: Tensor

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(part.nbytes for part in self)


@dataclass(frozen=True)
class Quantizer(ABC):
    """What chooses the codes of keys and of values; its fields are those of `QuantizedCacheConfig`.

    `compute_dtype` is what scales and offsets are kept in; None: what keys come in. Keys and values are
    always given back as they came, for attention takes them in no other dtype.
    """

    nbits: int = 4
    axis_key: int = 0
    axis_value: int = 0
    q_group_size: int = 64
    compute_dtype: torch.dtype | None = None

    extra: ClassVar[str]  # what installs its package, and its name as a backend
    module: ClassVar[str]
    supported_nbits: ClassVar[tuple[int, ...]]  # how many bits it can make
    axis_over_positions: ClassVar[
        Mapping[int, bool]
    ]  # its name of an axis -> whether groups run over positions

    def __post_init__(self) -> None:
        if self.nbits not in self.supported_nbits:
            raise ConfigError(
                "nbits", f"must be one of {list(self.supported_nbits)} with {self.extra}", self.nbits
            )
        for name in ("axis_key", "axis_value"):
            if getattr(self, name) not in self.axis_over_positions:
                must = f"must be one of {list(self.axis_over_positions)} with {self.extra}"
                raise ConfigError(name, must, getattr(self, name))
        if self.q_group_size < 1:
            raise ConfigError("q_group_size", "must be >= 1", self.q_group_size)
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise ConfigError("compute_dtype", "must be a floating point dtype", self.compute_dtype)
        self._package()

    @property
    def key_codec(self) -> GroupCodec:
        """How keys are coded."""
        return GroupCodec(self, self.axis_over_positions[self.axis_key])

    @property
    def value_codec(self) -> GroupCodec:
        """How values are coded."""
        return GroupCodec(self, self.axis_over_positions[self.axis_value])

    @abstractmethod
    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of numbers [G, g], float32."""

    def _package(self) -> Any:
        """The module that does it."""
        try:
            with warnings.catch_warnings():
                # Both import parts of torch that call themselves deprecated.
                warnings.simplefilter("ignore")
                return import_module(self.module)
        except ImportError as error:
            raise MissingExtra(self.extra, f"a quantized cache with the backend {self.extra!r}") from error


class Quanto(Quantizer):
    """Between the least and the greatest of each group, in even steps: optimum-quanto."""

    extra = "quanto"
    module = "optimum.quanto"
    supported_nbits = (2, 4)
    axis_over_positions: ClassVar[Mapping[int, bool]] = {0: False, -1: True}

    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of numbers [G, g], float32."""
        package, (count, size) = self._package(), content.shape
        if count == 1:  # taken for a tensor without groups
            content = content.expand(2, size)
        kind = package.qint4 if self.nbits == 4 else package.qint2
        scale, shift = package.MaxOptimizer()(content, kind, 0, size)
        codes = torch.ops.quanto.quantize_affine(content, self.nbits, 0, size, scale, shift)
        # A group of equal numbers has a scale of 0, and anything for codes.
        return codes[:count] & (2**self.nbits - 1), scale[:count], -shift[:count]


class HQQ(Quantizer):
    """Steps whose zero fits most of each group well, at the cost of outliers: half-quadratic quantization."""

    extra = "hqq"
    module = "hqq.core.quantize"
    supported_nbits = (1, 2, 3, 4, 8)
    axis_over_positions: ClassVar[Mapping[int, bool]] = {0: True, 1: False}

    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of numbers [G, g], float32."""
        codes, found = self._package().Quantizer.quantize(
            content,
            nbits=self.nbits,
            axis=1,
            group_size=content.shape[1],
            bitpack=False,
            device=str(content.device),
        )
        return codes.to(torch.uint8), found["scale"], -found["zero"] * found["scale"]


BACKENDS: Mapping[str, type[Quantizer]] = {"quanto": Quanto, "hqq": HQQ}


def build_quantizer(config: Any) -> Quantizer:
    """The quantizer that a `QuantizedCacheConfig` describes."""
    kind = BACKENDS.get(str(config.backend).lower())
    if kind is None:
        raise ConfigError("backend", f"must be one of {', '.join(BACKENDS)}", config.backend)
    return kind(config.nbits, config.axis_key, config.axis_value, config.q_group_size, config.compute_dtype)


class GroupCodec(NamedTuple):
    """How keys, or values, are cut into groups: over a position's channels, or over a channel's positions.

    A group has at most `q_group_size` numbers, all of one row and one head; where that does not go up evenly,
    groups are smaller and as even as can be.
    """

    quantizer: Quantizer
    over_positions: bool  # groups run over positions

    def encode(self, content: Tensor) -> QuantizedTensor:
        """What stands for [H, C, D] from now on."""
        plain = content.detach().float()
        heads, length, size = plain.shape
        count, width = self._group_shape(length if self.over_positions else size)
        plain = _pad_last(plain.transpose(1, 2) if self.over_positions else plain, count * width)
        codes, scale, offset = self.quantizer.quantize_groups(plain.reshape(-1, width).contiguous())
        codes = codes.view(heads, -1, count * width)
        kept = self.quantizer.compute_dtype or content.dtype
        shape = (heads, -1, count)
        scale, offset = (one.to(kept).view(shape) for one in (scale, offset))
        if self.over_positions:
            codes = codes[..., :length].transpose(1, 2)
            scale, offset = scale.transpose(1, 2), offset.transpose(1, 2)
        return QuantizedTensor(_pack(codes, self.quantizer.nbits), scale.contiguous(), offset.contiguous())

    def decode(self, parts: Sequence[QuantizedTensor], into: Tensor) -> None:
        """Write what the parts stand for, one after the other, to `into` [H, N, S, D], line by line."""
        dtype = into.dtype
        codes = _unpack(_concat([part.codes for part in parts]), self.quantizer.nbits)
        scale = _concat([part.scale for part in parts]).to(dtype)
        offset = _concat([part.offset for part in parts]).to(dtype)
        if self.over_positions:
            for target, begin, groups in self._decode_runs(parts, into):
                shape = target.shape[1:3]
                source = codes[:, begin : begin + shape.numel(), : into.shape[-1]].unflatten(1, shape)
                torch.mul(source, scale[:, groups, None], out=target)
                target.add_(offset[:, groups, None])
            return
        count, width = self._group_shape(into.shape[-1])
        lines = into.shape[1:3]
        source = codes[..., : count * width].unflatten(1, lines).unflatten(-1, (count, width))
        scale, offset = scale.unflatten(1, lines)[..., None], offset.unflatten(1, lines)[..., None]
        if count * width == into.shape[-1]:
            target = into.unflatten(-1, (count, width))
            torch.mul(source, scale, out=target)
            target.add_(offset)
        else:
            into.copy_((source * scale + offset).flatten(-2)[..., : into.shape[-1]])

    def _group_shape(self, size: int) -> tuple[int, int]:
        """How many groups so many numbers make, and the size of all but the last."""
        count = -(-size // self.quantizer.q_group_size)
        return count, -(-size // count)

    def _decode_runs(
        self, parts: Sequence[QuantizedTensor], into: Tensor
    ) -> Iterator[tuple[Tensor, int, slice]]:
        """Places [H, G, g, D] to write at once, where their codes begin, and which groups they are."""
        runs: list[list[int]] = []  # where it begins, its length, its first group, the size of a group
        begin, group, size = 0, 0, into.shape[2]
        for part in parts:
            length = part.codes.shape[1]
            width = self._group_shape(length)[1]
            if runs and begin % size and runs[-1][3] == width and runs[-1][1] % width == 0:
                runs[-1][1] += length
            else:
                runs.append([begin, length, group, width])
            begin, group = begin + length, group + part.scale.shape[1]
        for begin, length, group, width in runs:
            line, at = divmod(begin, size)
            room, whole = into[:, line, at : at + length], length // width
            if whole:
                target = room[:, : whole * width].unflatten(1, (whole, width))
                yield target, begin, slice(group, group + whole)
            if whole * width < length:
                target = room[:, None, whole * width :]
                yield target, begin + whole * width, slice(group + whole, group + whole + 1)

    def split(self, whole: QuantizedTensor, lengths: Sequence[int]) -> list[QuantizedTensor]:
        """The parts that `joined` made one, by how many positions each has."""
        groups = [self._group_shape(one)[0] if self.over_positions else one for one in lengths]
        pieces = zip(
            whole.codes.split(list(lengths), 1),
            whole.scale.split(groups, 1),
            whole.offset.split(groups, 1),
            strict=True,
        )
        return [QuantizedTensor(*(one.clone() for one in piece)) for piece in pieces]

    @staticmethod
    def concat(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Several parts as one, in memory of its own."""
        return QuantizedTensor(*(torch.cat(one, 1) for one in zip(*parts, strict=True)))


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _pad_last(content: Tensor, size: int) -> Tensor:
    """The last dimension made that long with its last number, which no group's bounds notice."""
    more = size - content.shape[-1]
    return torch.cat((content, content[..., -1:].expand(*content.shape[:-1], more)), -1) if more else content


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., D] as bytes [..., B]: byte `b` holds those of `b`, `b + B`, `b + 2B`, ..., lowest first.

    Three bits are two and one, each packed by itself.
    """
    if bits == 8:
        return codes.contiguous()
    if bits == 3:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8))
        return torch.cat((_pack(codes & 3, 2), _pack(codes >> 2, 1)), -1)
    parts = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % parts))
    first, *rest = codes.chunk(parts, -1)
    packed = first.clone()
    for number, part in enumerate(rest, 1):
        packed |= part << (bits * number)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes again, and some zeros after them."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
        return _unpack(low, 2) | (_unpack(high, 1) << 2)
    parts, mask = 8 // bits, 2**bits - 1
    found = [packed & mask]
    found += [(packed >> (bits * number)) & mask for number in range(1, parts - 1)]
    return torch.cat([*found, packed >> (bits * (parts - 1))], -1)
