"""Texts to train a Bayesian detector on: read, or generated from prompts; and its figures as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from descant.api.inputs import prepare_prompts
from descant.api.prompt import encode_prompt
from descant.cli import terminal
from descant.cli.samples import TextSample
from descant.config.generation_config import GenerationConfig
from descant.decoding.watermark.schemes import SynthIDTextWatermarkingConfig
from descant.decoding.watermark.schemes.synthid import Tournament, repetition_mask
from descant.decoding.watermark.synthid import mean_score, weighted_mean_score
from descant.decoding.watermark.training import (
    DetectorTrainingConfig,
    DetectorTrainingResult,
    GValueBatch,
    evaluate_detector,
)
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import InputError

__all__ = ["TextGenerator", "TokenIds", "detector_inputs", "read_prompts", "results_table", "token_ids"]

TokenIds = list[int]


class TextGenerator:
    """Generates texts from prompts, in batches."""

    def __init__(
        self, model: Any, tokenizer: Any, batch_size: int, request_extras: Mapping[str, Any]
    ) -> None:
        self.session, self.batch_size = Session(model), batch_size
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.tokenizer, self.request_extras = tokenizer, {"tokenizer": tokenizer, **request_extras}

    def generate(
        self, prompts: Sequence[tuple[str, int]], config: GenerationConfig, kind: str
    ) -> list[TokenIds]:
        """The new tokens of all prompts, each with its seed, in order."""
        texts: dict[int, list[TokenIds]] = {}
        index_by_request: dict[int, int] = {}
        pending = iter(enumerate(prompts))
        stop_tokens = set(_as_list(config.eos_token_id))
        with terminal.console().status(f"writing {kind} texts") as status:
            while True:
                while len(self.session) < self.batch_size and (one := next(pending, None)) is not None:
                    index, (prompt, seed) = one
                    [number] = self.session.admit(self._request(prompt, config.replace(seed=seed)))
                    index_by_request[number] = index
                if not len(self.session):
                    break
                for event in self.session.step():
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Finished):
                        sequences = [one.tokens.tolist() for one in event.hypotheses]
                        texts[index_by_request[event.request]] = [
                            _until_stop_token(ids, stop_tokens) for ids in sequences
                        ]
                        status.update(f"writing {kind} texts: prompt {len(texts)} of {len(prompts)}")
        return [ids for index in sorted(texts) for ids in texts[index]]

    def _request(self, prompt: str, config: GenerationConfig) -> Request:
        inputs = encode_prompt(self.tokenizer, prompt)
        prompts = prepare_prompts(inputs, config, self.session.model.traits, self.session.model.device)
        return Request(
            prompts.prompt(0), config, prompts.inputs[0], config_merged=True, **self.request_extras
        )


def detector_inputs(settings: SynthIDTextWatermarkingConfig, texts: Sequence[TokenIds]) -> GValueBatch:
    """G-values of texts; repeated contexts are masked, since they are not watermarked."""
    tournament = Tournament(settings)
    width = tournament.context_size

    def encode(ids: TokenIds) -> tuple[Tensor, Tensor]:
        if len(ids) <= width:
            return torch.zeros(0, tournament.depth, dtype=torch.uint8), torch.zeros(0, dtype=torch.bool)
        tokens = torch.tensor([ids])
        contexts = tournament.context_hashes(tokens[:, :-1])
        is_new = ~repetition_mask(contexts, settings.context_history_size)
        return tournament.g_values(contexts, tokens[:, width:])[0].to(torch.uint8), is_new[0]

    return GValueBatch.from_texts([encode(ids) for ids in texts])


def results_table(result: DetectorTrainingResult, training_config: DetectorTrainingConfig) -> str:
    """Metrics on held-out texts by length, compared to detectors without training."""
    others = (
        evaluate_detector(scorer, *result.held_out, training_config.validation_lengths)[1]
        for scorer in (weighted_mean_score, mean_score)
    )
    figures = [result.by_length, *others]
    lines = [
        "held-out texts, and the share of the marked ones found at 1 % false positives",
        f"{'tokens':<10}{'marked':>8}{'unmarked':>10}{'AUC':>8}{'Bayes':>10}{'weighted mean':>16}{'mean':>9}",
    ]
    for length, metrics in result.by_length.items():
        shares = [scorer[length].true_positives for scorer in figures]
        lines.append(
            f"{length:<10}{metrics.marked:>8}{metrics.unmarked:>10}{metrics.auc:>8.3f}"
            f"{shares[0]:>10.1%}{shares[1]:>16.1%}{shares[2]:>9.1%}"
        )
    lines.append(
        f"threshold   {result.overall.threshold:.4f} (posterior, 1 % false positives at all lengths)"
    )
    return "\n".join(lines) + "\n"


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("prompts", f"must be a file of JSON lines ({error})", str(file)) from None
    return [_parse_prompt(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_prompt(line: str, number: int) -> str:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("prompt"), str):
        raise InputError("prompts", f'must hold a JSON object with text as "prompt" in line {number}', line)
    prompt: str = data["prompt"]
    return prompt


def token_ids(sample: TextSample, option: str, tokenizer: Any) -> TokenIds:
    """The token ids of a text, without its prompt and stop token."""
    if sample.error is not None:
        location = "" if sample.line is None else f" in line {sample.line}"
        raise InputError(option, f"must hold texts{location} ({sample.error})", sample.file) from sample.error
    if sample.text is None:
        return _until_stop_token(
            list(sample.ids[sample.prompt_length :]), set(_as_list(tokenizer.eos_token_id))
        )
    ids: TokenIds = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
    return ids


def _until_stop_token(ids: TokenIds, stop_tokens: set[int]) -> TokenIds:
    """The ids before the first stop token."""
    return next((ids[:index] for index, token in enumerate(ids) if token in stop_tokens), ids)


def _as_list(value: int | Sequence[int] | None) -> Sequence[int]:
    return [value] if isinstance(value, int) else value or []
