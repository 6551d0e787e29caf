"""Sequences of frames: what they need besides their codes, and what differs between model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from descant.core.interfaces import ModelTraits
from descant.models.own_loop import LoopInputs

__all__ = [
    "CODEBOOK_INPUT",
    "Codebook",
    "CodebookFamily",
    "FrameInputs",
    "FrameState",
    "LoopChanges",
    "PreparedLoop",
]

CODEBOOK_INPUT = "codebook"  # the name of a request's `Codebook` among its inputs


# (depth model, its config, prompts [B, 2], seeds) -> [B, 1 + C]: a place and all codes of each frame
DecodeDepth = Callable[[Any, Any, Tensor, list[int] | None], Tensor]


@dataclass(eq=False)
class FrameState:
    """What is known of a running sequence besides the codes in its rows."""

    seed: int | None = None  # of the sequence
    decode: DecodeDepth | None = None  # the loop that decodes the other codes of a frame
    hidden: Tensor | None = None  # [D] the network's last state at the last position that was fed
    more_codes: list[Tensor] = field(default_factory=list)  # [C - rows] each: the other codes of new frames


@dataclass(frozen=True, eq=False)
class FrameInputs:
    """What one sequence of frames needs besides its codes.

    A sequence begins with given codes, or behind a prompt of another kind (text). The first code of such a
    sequence stands for the last position of its prompt, and is never fed.
    """

    inputs: Mapping[str, Any]  # of the network
    pad_token_id: int  # the code of a codebook that has ended
    forced: Tensor | None = None  # [C, L] codes that are fed whatever is chosen; -1: the chosen one
    prefix: Tensor | None = None  # [E, D] embeddings before the first frame
    prompt: Mapping[str, Tensor] | None = None  # the prompt, where it is of another kind; [E, ...] each
    prompt_length: int = 0  # E
    guidance_scale: float = 1.0
    uncond_inputs: Mapping[str, Any] | None = None  # of the unconditional row; None: no guidance
    uncond_prefix: Tensor | None = None  # [E, D]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the family
    state: FrameState = field(default_factory=FrameState)

    @property
    def prefix_length(self) -> int:
        """The number of positions before the first frame."""
        if self.prompt is not None:
            return self.prompt_length - 1
        return 0 if self.prefix is None else len(self.prefix)


@dataclass(frozen=True, eq=False)
class Codebook:
    """One codebook of a sequence."""

    frames: FrameInputs
    number: int


class StepInputs(NamedTuple):
    """One more frame of rows that all have the same length."""

    codes: Tensor  # [N, 1, C]
    past: Any  # the cache, as the network takes it
    position: int  # of the frame
    encoder_states: Tensor | None = None  # [N, S, D]
    encoder_mask: Tensor | None = None  # [N, S]


class PreparedLoop(NamedTuple):
    """The loop of a model's own generate(), as that has prepared it."""

    model: Any  # the copy of the model that generate() runs on
    inputs: LoopInputs


class LoopChanges(NamedTuple):
    """What a family adds to a call; processors and criteria get all rows of the call at once."""

    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    fields: Mapping[str, Any] = {}


class CodebookFamily(Protocol):
    """How the networks of one architecture are fed frames and read."""

    @property
    def num_codebooks(self) -> int:
        """The number of codes in a frame."""
        ...

    @property
    def num_rows(self) -> int:
        """The number of codebooks that are rows; the others are in `FrameState.more_codes`."""
        ...

    @property
    def num_known_codes(self) -> int:
        """The number of codes that may be fed, special ones included."""
        ...

    @property
    def network(self) -> Any:
        """The module that is run in every step."""
        ...

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads `FrameState.hidden`."""
        ...

    @property
    def has_guidance(self) -> bool:
        """Whether it has logits without condition, so that `guidance_scale` has a meaning."""
        ...

    @property
    def processors(self) -> frozenset[str] | None:
        """The fields of the processors that it supports; None: all."""
        ...

    @property
    def processes_forced(self) -> bool:
        """Whether processors see forced codes; else those that were chosen in their place."""
        ...

    def network_traits(self) -> ModelTraits:
        """The traits of the network, as it is fed here."""
        ...

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L], and what it needs besides."""
        ...

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The arguments of the network that hold the codes [N, T, C]."""
        ...

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The modules that `step` does not call: one with hooks is called. Empty: there is no `step`."""
        ...

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, R * V] after one more frame.

        It runs the layers of the network without what is around them, and takes less time than a call of the
        network. Only a family with `skipped_modules` has it.
        """
        ...

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The arguments of the network that hold prompts of another kind, right-padded."""
        ...

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        ...

    def frame_logits(self, output: Any, count: int) -> Tensor:
        """The logits [N, T, R * V] of the network's output for `count` sequences of R rows."""
        ...

    def guide(self, cond: Tensor, uncond: Tensor, scales: Tensor, frames: Sequence[FrameInputs]) -> Tensor:
        """The guided logits [N, C, V] of rows with and without condition, with scales [N]."""
        ...

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:
        """What it adds to a call for these sequences."""
        ...

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:
        """What transformers' loop would return, from ours: ids [B * R, L], or an output that has them."""
        ...
