"""Temperature fallback: a window with a poor result is decoded again at the next temperature."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from descant.api.call import CallOptions
from descant.api.generate_call import GenerateCall
from descant.api.whisper.options import WhisperOptions
from descant.config.generation_config import GenerationConfig
from descant.core.context import counter_bits
from descant.errors import InputError
from descant.models.model_output import GenerateOutput


@dataclass(frozen=True)
class WindowDecoder:
    """Continues prompts over encoded windows, with the user's processors and stopping criteria."""

    model: Any
    options: CallOptions
    pad_token_id: int

    def decode(
        self, configs: Sequence[GenerationConfig], states: Tensor, prompts: Sequence[Sequence[int]]
    ) -> GenerateOutput:
        """The output of one call, with a config and a prompt for each window [N, positions, size]."""
        options = replace(self.options, configs=list(configs))
        return self._generate(options, states, prompts)

    def first_logits(self, states: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor:
        """The raw logits after each prompt [N, V]."""
        config = GenerationConfig(
            max_new_tokens=1, pad_token_id=self.pad_token_id, return_dict_in_generate=True, output_logits=True
        )
        logits: Tensor = self._generate(CallOptions(configs=[config]), states, prompts)["logits"][0]
        return logits

    def _generate(
        self, options: CallOptions, states: Tensor, prompts: Sequence[Sequence[int]]
    ) -> GenerateOutput:
        ids, mask = left_pad(prompts, self.pad_token_id, states.device)
        inputs = {"encoder_outputs": states, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        output = GenerateCall(self.model, options).run(inputs)
        assert not isinstance(output, Tensor)
        return output


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask [N, W]."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@dataclass(frozen=True)
class WindowTask:
    """One window to decode."""

    config: GenerationConfig
    prompt: Sequence[int]
    num_init_tokens: int  # trailing prompt tokens from the start token on; before it are previous tokens
    window_index: int  # index of the window in its audio


@dataclass(frozen=True)
class WindowResult:
    """The result of one window."""

    tokens: Tensor  # [T] without the end token
    length_with_eos: int
    output: GenerateOutput  # of the call that decoded the window
    row: int  # the window's row in `output`
    prompt_width: int  # of the padded prompts of that call
    temperature: float
    is_silent: bool = False  # no speech: the tokens are discarded


class TemperatureFallback:
    """Decodes windows at the first temperature, and rejected ones at the next."""

    def __init__(
        self, decoder: WindowDecoder, options: WhisperOptions, temperatures: Sequence[float], traits: Any
    ) -> None:
        self._decoder, self._options, self._temperatures = decoder, options, temperatures
        self._max_positions, self._vocab_size = int(traits.max_target_positions), int(traits.vocab_size)

    def decode(self, states: Tensor, tasks: Sequence[WindowTask]) -> list[WindowResult]:
        """The result of each window [N, positions, size]."""
        no_speech_probs = self._no_speech_probs(states, tasks)
        results: dict[int, WindowResult] = {}
        pending = list(range(len(tasks)))
        for attempt, temperature in enumerate(self._temperatures):
            pending_tasks = [tasks[index] for index in pending]
            configs = self._window_configs(pending_tasks, temperature, attempt)
            pending_states = states if len(pending) == len(states) else states[torch.tensor(pending)]
            output = self._decoder.decode(configs, pending_states, [task.prompt for task in pending_tasks])
            width = max(len(task.prompt) for task in pending_tasks)
            rejected = []
            for row, (index, config) in enumerate(zip(pending, configs, strict=True)):
                tokens = strip_padding(output["sequences"][row], width, config)
                logprob = self._mean_logprob(output, row, tokens, temperature)
                is_rejected, is_silent = self._check_fallback(tokens, logprob, no_speech_probs[index])
                has_eos = bool(len(tokens)) and int(tokens[-1]) in _eos_token_ids(config)
                text_tokens = tokens[:-1] if has_eos else tokens
                results[index] = WindowResult(
                    text_tokens, len(tokens), output, row, width, temperature, is_silent
                )
                rejected += [index] if is_rejected else []
            pending = rejected
            if not pending:
                break
        return [results[index] for index in range(len(tasks))]

    # -------------------------------------------------------------------- configs
    def _window_configs(
        self, tasks: Sequence[WindowTask], temperature: float, attempt: int
    ) -> list[GenerationConfig]:
        """The config of each window; equal configs are one object."""
        by_key: dict[Any, GenerationConfig] = {}
        configs = []
        for task in tasks:
            base = task.config
            seed = None if base.seed is None else derive_seed(base.seed, task.window_index, attempt)
            max_new_tokens = self._max_new_tokens(base, len(task.prompt))
            key = id(base), seed, max_new_tokens
            if key not in by_key:
                by_key[key] = self._make_config(base, temperature, seed, max_new_tokens)
            configs.append(by_key[key])
        return configs

    def _make_config(
        self, base: GenerationConfig, temperature: float, seed: int | None, max_new_tokens: int | None
    ) -> GenerationConfig:
        # The prompt includes the start token, so none must be prepended.
        changes: dict[str, Any] = {"decoder_start_token_id": None, "bos_token_id": None, "seed": seed}
        changes |= {"num_return_sequences": 1, "do_sample": temperature > 0.0, "temperature": None}
        if max_new_tokens is not None:
            changes |= {"max_new_tokens": max_new_tokens, "max_length": None}
        if temperature > 0.0:
            changes |= {"temperature": temperature, "num_beams": 1}
        if not base.return_dict_in_generate:
            changes |= {"return_dict_in_generate": True, "logprobs": None}
        if self._options.return_token_timestamps:
            changes |= {"output_attentions": True}
        if self._options.logprob_threshold is not None:
            changes |= {"logprobs": base.logprobs or 0} if temperature == 0.0 else {"output_scores": True}
        return base.replace(**changes)

    def _max_new_tokens(self, base: GenerationConfig, length: int) -> int | None:
        """The length limit after a prompt; None if the config gives none, for the general default."""
        if length >= self._max_positions:
            must = f"must make a prompt shorter than the model's {self._max_positions} positions"
            raise InputError("prompt_ids", must, length, "shorten it")
        if base.max_new_tokens is not None or "max_length" not in base.given:
            return None
        # Previous tokens do not count towards the length, up to half of the positions.
        limit = base.max_length + min(self._max_positions // 2 - 1, length)
        return max(min(limit, self._max_positions) - length, 1)

    # -------------------------------------------------------------------- fallback checks
    def _no_speech_probs(self, states: Tensor, tasks: Sequence[WindowTask]) -> list[float | None]:
        """The probability of no speech: that of the no-speech token right after the start token."""
        if self._options.no_speech_threshold is None:
            return [None] * len(tasks)
        token = (tasks[0].config.no_timestamps_token_id or 0) - 1
        prompts = [task.prompt[: len(task.prompt) - task.num_init_tokens + 1] for task in tasks]
        probs = self._decoder.first_logits(states, prompts).softmax(-1)
        return [float(prob) for prob in probs[:, token]]

    def _mean_logprob(
        self, output: GenerateOutput, row: int, tokens: Tensor, temperature: float
    ) -> float | None:
        """The mean log-probability of a row's tokens [T], end token included, at temperature 1."""
        if self._options.logprob_threshold is None:
            return None
        if temperature == 0.0:
            return float(output["logprobs"][row].processed[: len(tokens)].mean())
        # The recorded scores are divided by the temperature.
        scores = torch.stack([step[row] for step in output["scores"][: len(tokens)]])
        logprobs = (scores * temperature).log_softmax(-1)
        return float(logprobs.gather(1, tokens[:, None].to(logprobs.device)).mean())

    def _check_fallback(
        self, tokens: Tensor, logprob: float | None, no_speech_prob: float | None
    ) -> tuple[bool, bool]:
        """Whether to decode again, and whether the window is silent; `tokens` [T] with the end token."""
        options, is_rejected = self._options, False
        if options.compression_ratio_threshold is not None:
            ratio = compression_ratio(tokens.tolist(), self._vocab_size)
            is_rejected = ratio > options.compression_ratio_threshold
        if logprob is None or options.logprob_threshold is None or logprob >= options.logprob_threshold:
            return is_rejected, False
        if no_speech_prob is not None and options.no_speech_threshold is not None:
            is_silent = no_speech_prob > options.no_speech_threshold
            return not is_silent, is_silent
        return True, False


def compression_ratio(tokens: Sequence[int], vocabulary: int) -> float:
    """The zlib compression ratio of a transcript; repetition makes it high."""
    size = int(math.log2(vocabulary) / 8) + 1
    plain = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(plain) / len(zlib.compress(plain))


def strip_padding(sequence: Tensor, width: int, config: GenerationConfig) -> Tensor:
    """The new tokens of a sequence up to its end token, without padding [T]."""
    new = sequence[width:]
    eos_ids = torch.tensor(_eos_token_ids(config), device=new.device, dtype=new.dtype)
    ends = torch.isin(new, eos_ids).nonzero()
    if len(ends):
        return new[: int(ends[0]) + 1]
    not_pad = (new != (-1 if config.pad_token_id is None else config.pad_token_id)).nonzero()
    return new[: int(not_pad[-1]) + 1 if len(not_pad) else 0]


def _eos_token_ids(config: GenerationConfig) -> list[int]:
    eos = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def derive_seed(seed: int, first: int, second: int) -> int:
    """A distinct seed for each pair, so that windows and copies do not share noise; (0, 0) keeps `seed`."""
    if first == second == 0:
        return seed
    return int(counter_bits(*(torch.tensor(number) for number in (seed, first, second))))
