"""Temperature fallback: a window is heard again, less surely, when what was heard is not to be believed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.api.outputs import GenerateOutput
from descant.api.whisper.decoder import WindowDecoder
from descant.api.whisper.options import WhisperOptions
from descant.config.generation_config import GenerationConfig
from descant.core.counter_rng import counter_bits
from descant.errors import InputError

__all__ = [
    "TemperatureFallback",
    "WindowResult",
    "WindowTask",
    "compression_ratio",
    "derive_seed",
    "strip_padding",
]


@dataclass(frozen=True)
class WindowTask:
    """One window to be heard."""

    config: GenerationConfig
    prompt: Sequence[int]
    num_init_tokens: int  # how many tokens of the prompt are no past: the start token and what follows
    window_index: int  # which window of its audio it is, from 0


@dataclass(frozen=True)
class WindowResult:
    """What was heard in one window."""

    tokens: Tensor  # [T] without the end token
    length_with_eos: int  # how many tokens there were with it
    output: GenerateOutput  # of the call it came from
    line: int  # which line of that it is
    prompt_width: int  # of the prompts there
    temperature: float
    is_silent: bool = False  # nobody speaks: what was heard does not count


class TemperatureFallback:
    """Hears windows at the first temperature, and those that are not believed at the next."""

    def __init__(
        self, decoder: WindowDecoder, options: WhisperOptions, temperatures: Sequence[float], facts: Any
    ) -> None:
        self._decoder, self._options, self._temperatures = decoder, options, temperatures
        self._max_positions, self._vocab_size = int(facts.max_target_positions), int(facts.vocab_size)

    def decode(self, states: Tensor, tasks: Sequence[WindowTask]) -> list[WindowResult]:
        """What is in each window [N, positions, size]."""
        speechless = self._no_speech_probs(states, tasks)
        found: dict[int, WindowResult] = {}
        waiting = list(range(len(tasks)))
        for attempt, temperature in enumerate(self._temperatures):
            mine = [tasks[at] for at in waiting]
            configs = self._window_configs(mine, temperature, attempt)
            seen = states if len(waiting) == len(states) else states[torch.tensor(waiting)]
            record = self._decoder.decode(configs, seen, [task.prompt for task in mine])
            width = max(len(task.prompt) for task in mine)
            again = []
            for line, (at, config) in enumerate(zip(waiting, configs, strict=True)):
                tokens = strip_padding(record["sequences"][line], width, config)
                sure = self._mean_logprob(record, line, tokens, temperature)
                doubted, silent = self._check_fallback(tokens, sure, speechless[at])
                ended = bool(len(tokens)) and int(tokens[-1]) in _eos_token_ids(config)
                kept = tokens[:-1] if ended else tokens
                found[at] = WindowResult(kept, len(tokens), record, line, width, temperature, silent)
                again += [at] if doubted else []
            waiting = again
            if not waiting:
                break
        return [found[at] for at in range(len(tasks))]

    # -------------------------------------------------------------------- the call
    def _window_configs(
        self, tasks: Sequence[WindowTask], temperature: float, attempt: int
    ) -> list[GenerationConfig]:
        """How each window is decoded; equal ones are one object."""
        made: dict[Any, GenerationConfig] = {}
        configs = []
        for task in tasks:
            base = task.config
            seed = None if base.seed is None else derive_seed(base.seed, task.window_index, attempt)
            room = self._max_new_tokens(base, len(task.prompt))
            key = id(base), seed, room
            if key not in made:
                made[key] = self._make_config(base, temperature, seed, room)
            configs.append(made[key])
        return configs

    def _make_config(
        self, base: GenerationConfig, temperature: float, seed: int | None, room: int | None
    ) -> GenerationConfig:
        # The prompt is whole: no start token is to be put before it.
        changes: dict[str, Any] = {"decoder_start_token_id": None, "bos_token_id": None, "seed": seed}
        changes |= {"num_return_sequences": 1, "do_sample": temperature > 0.0, "temperature": None}
        if room is not None:
            changes |= {"max_new_tokens": room, "max_length": None}
        if temperature > 0.0:
            changes |= {"temperature": temperature, "num_beams": 1}
        if not base.return_dict_in_generate:
            changes |= {"return_dict_in_generate": True, "logprobs": None}
        if self._options.return_token_timestamps:
            changes |= {"output_attentions": True}
        if self._options.logprob_threshold is not None:
            exact = {"logprobs": base.logprobs or 0} if temperature == 0.0 else {"output_scores": True}
            changes |= exact
        return base.replace(**changes)

    def _max_new_tokens(self, base: GenerationConfig, length: int) -> int | None:
        """How many tokens may follow a prompt; None where no length is given: the general default."""
        if length >= self._max_positions:
            must = f"must leave room: the model has {self._max_positions} positions and the prompt takes {length}"
            raise InputError("prompt_ids", must, length, "shorten it")
        if base.max_new_tokens is not None or "max_length" not in base.given:
            return None
        # What was said before does not count towards the length, as far as half of the positions.
        limit = base.max_length + min(self._max_positions // 2 - 1, length)
        return max(min(limit, self._max_positions) - length, 1)

    # -------------------------------------------------------------------- the verdict
    def _no_speech_probs(self, states: Tensor, tasks: Sequence[WindowTask]) -> list[float | None]:
        """How likely it is that nobody speaks: the model says so right after the start token."""
        if self._options.no_speech_threshold is None:
            return [None] * len(tasks)
        token = (tasks[0].config.no_timestamps_token_id or 0) - 1
        prompts = [task.prompt[: len(task.prompt) - task.num_init_tokens + 1] for task in tasks]
        law = self._decoder.first_logits(states, prompts).softmax(-1)
        return [float(chance) for chance in law[:, token]]

    def _mean_logprob(
        self, record: GenerateOutput, line: int, tokens: Tensor, temperature: float
    ) -> float | None:
        """The mean log-probability of a line's tokens [T], end token included, as if at temperature 1."""
        if self._options.logprob_threshold is None:
            return None
        if temperature == 0.0:
            return float(record["logprobs"][line].processed_logprobs[: len(tokens)].mean())
        # The scores are divided by the temperature, which likelihood must not depend on.
        scores = torch.stack([step[line] for step in record["scores"][: len(tokens)]])
        law = (scores * temperature).log_softmax(-1)
        return float(law.gather(1, tokens[:, None].to(law.device)).mean())

    def _check_fallback(
        self, tokens: Tensor, sure: float | None, speechless: float | None
    ) -> tuple[bool, bool]:
        """Whether to listen again, and whether there was nothing to hear; `tokens` [T] with their end."""
        options, again = self._options, False
        if options.compression_ratio_threshold is not None:
            ratio = compression_ratio(tokens.tolist(), self._vocab_size)
            again = ratio > options.compression_ratio_threshold
        if sure is None or options.logprob_threshold is None or sure >= options.logprob_threshold:
            return again, False
        if speechless is not None and options.no_speech_threshold is not None:
            silent = speechless > options.no_speech_threshold
            return not silent, silent
        return True, False


def compression_ratio(tokens: Sequence[int], vocabulary: int) -> float:
    """How many times smaller zlib makes a transcript: what repeats itself shrinks most."""
    size = int(math.log2(vocabulary) / 8) + 1
    plain = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(plain) / len(zlib.compress(plain))


def strip_padding(sequence: Tensor, width: int, config: GenerationConfig) -> Tensor:
    """The new tokens of a line up to its end token, without padding [T]."""
    new = sequence[width:]
    ended = torch.isin(
        new, torch.tensor(_eos_token_ids(config), device=new.device, dtype=new.dtype)
    ).nonzero()
    if len(ended):
        return new[: int(ended[0]) + 1]
    real = (new != (-1 if config.pad_token_id is None else config.pad_token_id)).nonzero()
    return new[: int(real[-1]) + 1 if len(real) else 0]


def _eos_token_ids(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def derive_seed(seed: int, one: int, other: int) -> int:
    """A seed of its own for each pair, or all windows and copies would draw the same noise."""
    if one == other == 0:
        return seed
    return int(counter_bits(*(torch.tensor(number) for number in (seed, one, other))))
