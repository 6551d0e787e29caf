"""`descant watermark train`: train a Bayesian detector for one model and one key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from torch import Tensor

from descant.api.inputs import prepare_prompts
from descant.api.prompt import encode_prompt
from descant.cli import terminal
from descant.cli.command import DecodingCommand, load_watermark_keys
from descant.cli.samples import TextSample, read_samples
from descant.config.generation_config import GenerationConfig
from descant.decoding.watermark.schemes import SynthIDTextWatermarkingConfig
from descant.decoding.watermark.schemes.keys import fingerprint, warn_if_public
from descant.decoding.watermark.schemes.synthid import Tournament, repetition_mask
from descant.decoding.watermark.synthid import mean_score, weighted_mean_score
from descant.decoding.watermark.training import (
    DetectorTrainingConfig,
    DetectorTrainingResult,
    GValueBatch,
    evaluate_detector,
    train_detector,
)
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import ConfigError, InputError
from descant.models.loading import load_tokenizer

__all__ = ["TrainCommand"]

MIN_HELD_OUT_TEXTS: Final = 100  # with fewer, 1 % is less than one text

TokenIds = list[int]


@dataclass(frozen=True, kw_only=True)
class TrainCommand(DecodingCommand):
    """Train a Bayesian detector for a SynthID key, which detects shorter texts than the mean score.

    It is trained on --marked and --unmarked, files of JSON lines with "text", "ids" or the "completions" of
    `descant generate`, or on texts that MODEL generates from --prompts, lines with "prompt". The detector is
    for texts that the model generates with the same options. Without --with-key its folder holds a
    fingerprint of the key, not the key.
    """

    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="A new folder for the detector.")]
    watermark: Annotated[
        str | None,
        typer.Option("--key", metavar="FILE", help="The key; without it, or with `env`: the environment's."),
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON lines with "prompt", to generate texts from.')
    ] = None
    marked: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines of texts marked with the key.")
    ] = None
    unmarked: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines of texts that are not marked.")
    ] = None
    tokens: Annotated[
        int, typer.Option(min=2, help="New tokens per generated text, and maximum tokens of a given text.")
    ] = 200
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs.")] = 60
    batch_size: Annotated[int, typer.Option(min=1, help="Texts generated per batch.")] = 16
    with_key: Annotated[
        bool, typer.Option("--with-key", metavar="", help="Store the key in the folder: it is secret then.")
    ] = False

    def run(self) -> int:
        """Train and save a detector, and print its metrics."""
        # Imported here: slow, and no other command needs it.
        from descant.models.bayesian_detector import (
            BayesianDetectorConfig,
            BayesianDetectorModel,
            save_detector,
        )

        settings = self._load_synthid_key()
        self._check_options()
        marked, unmarked = self._training_texts(settings)
        training_config = DetectorTrainingConfig(epochs=self.epochs, seed=self._seed)
        model = BayesianDetectorModel(BayesianDetectorConfig(len(settings.keys)))
        # Batches are half marked, so the prior is known and not trained.
        model.prior.requires_grad_(False)
        with terminal.console().status("training") as status:

            def report(penalty: float, epoch: int, entropy: float) -> None:
                status.update(f"training: penalty {penalty:g}, epoch {epoch}, cross entropy {entropy:.4f}")

            result = train_detector(
                model,
                _detector_inputs(settings, marked),
                _detector_inputs(settings, unmarked),
                training_config,
                report,
            )
        model.load_state_dict(result.state_dict)
        config = model.config
        config.set_detector_information(self.model, settings if self.with_key else None)
        config.key_fingerprint = fingerprint(settings)
        config.threshold, config.validation_metrics = result.overall.threshold, result.to_dict()
        save_detector(model, self.out)
        terminal.write_untrusted(_results_table(result, training_config) + f"detector    {self.out}\n")
        if (fewest := min(len(texts.mask) for texts in result.held_out)) < MIN_HELD_OUT_TEXTS:
            terminal.print_info(
                f"only {fewest} texts of a kind were held out: the figures are rough, give more"
            )
        return 0

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """Generation parameters of the texts, marked or not."""
        return {"do_sample": True, **self.values, "max_new_tokens": self.tokens}

    @property
    def _seed(self) -> int:
        return int(self.values.get("seed") or 0)

    def _load_synthid_key(self) -> SynthIDTextWatermarkingConfig:
        """The key, which must be a SynthID key."""
        keys = load_watermark_keys(self.watermark)
        matching = {
            name: settings_of
            for name, settings_of in keys.items()
            if isinstance(settings_of, SynthIDTextWatermarkingConfig)
        }
        if len(matching) != 1:
            given_keys = [f"{name} ({settings_of.scheme})" for name, settings_of in keys.items()]
            raise InputError("key", "must be one SynthID key", given_keys, "give a file with that key alone")
        [settings] = matching.values()
        warn_if_public(settings)
        return settings

    def _check_options(self) -> None:
        """Raise for invalid options, before anything is loaded or written."""
        for name in ("max_new_tokens", "max_length"):
            if self.values.get(name) is not None:
                raise ConfigError(name, "is not taken here", self.values[name], "use --tokens")
        if self.prompts is None:
            if self.marked is None or self.unmarked is None:
                given_files = [
                    f"--{name}" for name, file in self._text_files if file is not None
                ] or "none of them"
                raise InputError("prompts", "must be given, or both --marked and --unmarked", given_files)
            extra = {"config": self.config, "assistant_model": self.assistant_model, **self.values}
            for name, value in extra.items():
                if value is not None and name != "seed":
                    raise ConfigError(name, "has no use where nothing is generated", value, "give --prompts")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise InputError("out", "must be a folder that is new or empty", str(self.out))
        self.out.mkdir(
            parents=True, exist_ok=True
        )  # an hour's texts must not end where nothing can be written

    # -------------------------------------------------------------------- texts
    def _training_texts(
        self, settings: SynthIDTextWatermarkingConfig
    ) -> tuple[list[TokenIds], list[TokenIds]]:
        """Token ids of marked and of unmarked texts, read and generated."""
        if self.prompts is None:
            tokenizer, _ = load_tokenizer(self.model)
            marked, unmarked = (self._read_texts(file, name, tokenizer) for name, file in self._text_files)
            return marked, unmarked
        prompts = _read_prompts(self.prompts)
        model, tokenizer = self.load()
        texts_by_kind = [self._read_texts(file, name, tokenizer) for name, file in self._text_files]
        generator = _TextGenerator(model, tokenizer, self.batch_size, self.request_extras())
        for kind_index, (texts, watermark) in enumerate(zip(texts_by_kind, (settings, None), strict=True)):
            # Different seeds: texts with the same noise would resemble each other.
            first_seed = self._seed * 2 * len(prompts) + kind_index
            seeds = [(first_seed + 2 * number) % 2**62 for number in range(len(prompts))]
            values = {**self.parameters, "watermarking_config": watermark}
            config = GenerationConfig.merge(values, self.file_config(), generator.model_config)
            texts += generator.generate(
                [*zip(prompts, seeds, strict=True)], config, self._text_files[kind_index][0]
            )
        return texts_by_kind[0], texts_by_kind[1]

    @property
    def _text_files(self) -> tuple[tuple[str, Path | None], tuple[str, Path | None]]:
        return ("marked", self.marked), ("unmarked", self.unmarked)

    def _read_texts(self, file: Path | None, name: str, tokenizer: Any) -> list[TokenIds]:
        """The token ids in a file of texts."""
        if file is None:
            return []
        return [
            _token_ids(sample, name, tokenizer)[: self.tokens]
            for sample in read_samples(str(file), jsonl=True)
        ]


class _TextGenerator:
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


def _detector_inputs(settings: SynthIDTextWatermarkingConfig, texts: Sequence[TokenIds]) -> GValueBatch:
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


def _results_table(result: DetectorTrainingResult, training_config: DetectorTrainingConfig) -> str:
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


def _read_prompts(file: Path) -> list[str]:
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


def _token_ids(sample: TextSample, option: str, tokenizer: Any) -> TokenIds:
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
