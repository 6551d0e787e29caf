"""Quantizers of keys and values, on top of optimum-quanto or hqq.

The package chooses codes, scale and offset of each group. Grouping, packing and decoding are common to all
backends, so chunks of any backend are read the same way and no extension has to be compiled.
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

from descant.config.cache_config import QUANTIZED_BACKENDS
from descant.errors import ConfigError, MissingExtra


class QuantizedTensor(NamedTuple):
    """Quantized keys or values of consecutive positions of a row: `code * scale + offset` per group."""

    codes: Tensor  # [H, C, B] uint8: packed codes of each position
    scale: Tensor  # [H, C, G]; [H, G, D] where groups run over positions
    offset: Tensor

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return sum(tensor.nbytes for tensor in self)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """A copy on a device."""
        return QuantizedTensor(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class Quantizer(ABC):
    """A quantization backend; the fields are those of `QuantizedCacheConfig`.

    `compute_dtype` is the dtype of scales and offsets; None: the dtype of the keys. Decoded keys and values
    always have their original dtype, as attention requires.
    """

    nbits: int = 4
    axis_key: int = 0
    axis_value: int = 0
    q_group_size: int = 64
    compute_dtype: torch.dtype | None = None

    extra: ClassVar[str]  # the extra that installs the package, and the backend's name
    module: ClassVar[str]
    supported_nbits: ClassVar[tuple[int, ...]]  # the values of `nbits` it supports
    axis_over_positions: ClassVar[Mapping[int, bool]]  # axis -> whether groups run over positions

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
        """The codec of keys."""
        return GroupCodec(self, self.axis_over_positions[self.axis_key])

    @property
    def value_codec(self) -> GroupCodec:
        """The codec of values."""
        return GroupCodec(self, self.axis_over_positions[self.axis_value])

    @abstractmethod
    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of values [G, g], float32."""

    def _package(self) -> Any:
        """The backend's module."""
        try:
            with warnings.catch_warnings():
                # Both packages import deprecated parts of torch.
                warnings.simplefilter("ignore")
                return import_module(self.module)
        except ImportError as error:
            raise MissingExtra(self.extra, f"a quantized cache with the backend {self.extra!r}") from error


class Quanto(Quantizer):
    """optimum-quanto: even steps between the minimum and maximum of each group."""

    extra = "quanto"
    module = "optimum.quanto"
    supported_nbits, axis_over_positions = QUANTIZED_BACKENDS[extra]

    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of values [G, g], float32."""
        package, (count, size) = self._package(), content.shape
        if count == 1:  # a single group is treated as an ungrouped tensor
            content = content.expand(2, size)
        qtype = package.qint4 if self.nbits == 4 else package.qint2
        scale, shift = package.MaxOptimizer()(content, qtype, 0, size)
        codes = torch.ops.quanto.quantize_affine(content, self.nbits, 0, size, scale, shift)
        # A group of equal values has scale 0 and arbitrary codes, so codes are masked to nbits.
        return codes[:count] & (2**self.nbits - 1), scale[:count], -shift[:count]


class HQQ(Quantizer):
    """hqq: half-quadratic quantization, which fits most of each group at the cost of outliers."""

    extra = "hqq"
    module = "hqq.core.quantize"
    supported_nbits, axis_over_positions = QUANTIZED_BACKENDS[extra]

    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [G, g], scales [G, 1] and offsets [G, 1] of groups of values [G, g], float32."""
        codes, meta = self._package().Quantizer.quantize(
            content,
            nbits=self.nbits,
            axis=1,
            group_size=content.shape[1],
            bitpack=False,
            device=str(content.device),
        )
        return codes.to(torch.uint8), meta["scale"], -meta["zero"] * meta["scale"]


BACKENDS: Mapping[str, type[Quantizer]] = {"quanto": Quanto, "hqq": HQQ}


class _SizingQuantizer(Quantizer):
    """A quantizer that needs no package, for sizes alone: its codes, scales and offsets have no content."""

    def _package(self) -> None: ...

    def quantize_groups(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Placeholder codes [G, g], scales [G, 1] and offsets [G, 1] of groups [G, g]."""
        scale = content[:, :1]
        return content.to(torch.uint8), scale, scale


def build_quantizer(config: Any, backend: str | None = None, *, for_sizes: bool = False) -> Quantizer:
    """The quantizer of a `QuantizedCacheConfig`; `for_sizes`: one that needs no package and only has sizes.

    `backend` overrides the backend of the config.
    """
    name = str(backend or config.backend).lower()
    if name not in BACKENDS:
        raise ConfigError("backend", f"must be one of {', '.join(BACKENDS)}", config.backend)
    kind: Any = BACKENDS[name]
    if for_sizes:
        kind = type("SizingQuantizer", (_SizingQuantizer, kind), {})
    settings = config.nbits, config.axis_key, config.axis_value, config.q_group_size, config.compute_dtype
    quantizer: Quantizer = kind(*settings)
    return quantizer


class GroupCodec(NamedTuple):
    """Encoder and decoder of keys or values in groups, over the channels of a position or the reverse.

    A group has at most `q_group_size` values of one row and one head. Where the size is not divisible,
    groups are smaller and as even as possible.
    """

    quantizer: Quantizer
    over_positions: bool  # groups run over the positions of a channel

    def encode(self, content: Tensor) -> QuantizedTensor:
        """Quantize [H, C, D]."""
        plain = content.detach().float()
        heads, length, size = plain.shape
        count, width = self._group_shape(length if self.over_positions else size)
        plain = _pad_last(plain.transpose(1, 2) if self.over_positions else plain, count * width)
        codes, scale, offset = self.quantizer.quantize_groups(plain.reshape(-1, width).contiguous())
        codes = codes.view(heads, -1, count * width)
        dtype = self.quantizer.compute_dtype or content.dtype
        shape = (heads, -1, count)
        scale, offset = scale.to(dtype).view(shape), offset.to(dtype).view(shape)
        if self.over_positions:
            codes = codes[..., :length].transpose(1, 2)
            scale, offset = scale.transpose(1, 2), offset.transpose(1, 2)
        return QuantizedTensor(_pack(codes, self.quantizer.nbits), scale.contiguous(), offset.contiguous())

    def decode(self, parts: Sequence[QuantizedTensor], out: Tensor) -> None:
        """Decode the parts one after the other into `out` [H, N, S, D], row by row."""
        dtype = out.dtype
        codes = _unpack(_concat([part.codes for part in parts]), self.quantizer.nbits)
        scale = _concat([part.scale for part in parts]).to(dtype)
        offset = _concat([part.offset for part in parts]).to(dtype)
        if self.over_positions:
            for target, begin, groups in self._decode_runs(parts, out):
                shape = target.shape[1:3]
                source = codes[:, begin : begin + shape.numel(), : out.shape[-1]].unflatten(1, shape)
                torch.mul(source, scale[:, groups, None], out=target)
                target.add_(offset[:, groups, None])
            return
        count, width = self._group_shape(out.shape[-1])
        rows = out.shape[1:3]
        source = codes[..., : count * width].unflatten(1, rows).unflatten(-1, (count, width))
        scale, offset = scale.unflatten(1, rows)[..., None], offset.unflatten(1, rows)[..., None]
        if count * width == out.shape[-1]:
            target = out.unflatten(-1, (count, width))
            torch.mul(source, scale, out=target)
            target.add_(offset)
        else:
            out.copy_((source * scale + offset).flatten(-2)[..., : out.shape[-1]])

    def _group_shape(self, size: int) -> tuple[int, int]:
        """The number of groups of `size` values, and the width of all but the last."""
        count = -(-size // self.quantizer.q_group_size)
        return count, -(-size // count)

    def _decode_runs(
        self, parts: Sequence[QuantizedTensor], out: Tensor
    ) -> Iterator[tuple[Tensor, int, slice]]:
        """Slices [H, G, g, D] of `out` to write at once, the start of their codes, and their groups."""
        runs: list[list[int]] = []  # start, length, first group, group width
        begin, group, size = 0, 0, out.shape[2]
        for part in parts:
            length = part.codes.shape[1]
            width = self._group_shape(length)[1]
            if runs and begin % size and runs[-1][3] == width and runs[-1][1] % width == 0:
                runs[-1][1] += length
            else:
                runs.append([begin, length, group, width])
            begin, group = begin + length, group + part.scale.shape[1]
        for begin, length, group, width in runs:
            row, position = divmod(begin, size)
            run, full = out[:, row, position : position + length], length // width
            if full:
                target = run[:, : full * width].unflatten(1, (full, width))
                yield target, begin, slice(group, group + full)
            if full * width < length:
                target = run[:, None, full * width :]
                yield target, begin + full * width, slice(group + full, group + full + 1)


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _pad_last(content: Tensor, size: int) -> Tensor:
    """Pad the last dimension by repeating its last value, which leaves the bounds of the group unchanged."""
    more = size - content.shape[-1]
    return torch.cat((content, content[..., -1:].expand(*content.shape[:-1], more)), -1) if more else content


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] to bytes [..., B]: byte `b` has the codes `b`, `b + B`, ..., lowest bits first.

    Three-bit codes are packed as two bits and one bit.
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
    """The inverse of `_pack`; codes may be followed by zeros."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
        return _unpack(low, 2) | (_unpack(high, 1) << 2)
    parts, mask = 8 // bits, 2**bits - 1
    codes = [packed & mask]
    codes += [(packed >> (bits * number)) & mask for number in range(1, parts - 1)]
    return torch.cat([*codes, packed >> (bits * (parts - 1))], -1)
