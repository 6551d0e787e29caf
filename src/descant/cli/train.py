"""`descant watermark train`: a Bayesian detector for one model and one key, from texts or from prompts."""

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
from descant.cli import terminal
from descant.cli.command import DecodingCommand, load_watermark_keys
from descant.cli.prompt import encode_prompt
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

MIN_HELD_OUT_TEXTS: Final = 100  # held-out texts below which 1 % of them is less than one

TokenIds = list[int]


@dataclass(frozen=True, kw_only=True)
class TrainCommand(DecodingCommand):
    """Train a Bayesian detector of a SynthID key, which finds the mark in shorter texts than a mean does.

    It learns from --marked and --unmarked, files of JSON lines with "text", "ids" or the "completions" of
    `descant generate`, or from texts of both kinds that MODEL writes after --prompts, lines with "prompt".
    The detector is for texts as the model writes them with the same options. Without --with-key its folder
    holds a fingerprint of the key, not the key.
    """

    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where the detector goes; a new folder.")
    ]
    watermark: Annotated[
        str | None,
        typer.Option("--key", metavar="FILE", help="The key; without it, or with `env`: the environment's."),
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON lines with "prompt", to write texts after.')
    ] = None
    marked: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines of texts marked with the key.")
    ] = None
    unmarked: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines of texts that are not marked.")
    ] = None
    tokens: Annotated[
        int, typer.Option(min=2, help="New tokens of each text written, and most tokens read of a given one.")
    ] = 200
    epochs: Annotated[int, typer.Option(min=1, help="Most rounds through the texts.")] = 60
    batch_size: Annotated[int, typer.Option(min=1, help="GValueBatch that are written side by side.")] = 16
    with_key: Annotated[
        bool, typer.Option("--with-key", metavar="", help="Store the key in the folder: it is secret then.")
    ] = False

    def run(self) -> int:
        """Train, save and say how good it is."""
        # Here, not above: slow to load, and no other command needs them.
        from descant.models.bayesian_detector import (
            BayesianDetectorConfig,
            BayesianDetectorModel,
            save_detector,
        )

        settings = self._load_synthid_key()
        self._check_options()
        marked, unmarked = self._training_texts(settings)
        plan = DetectorTrainingConfig(epochs=self.epochs, seed=self._seed)
        model = BayesianDetectorModel(BayesianDetectorConfig(len(settings.keys)))
        # Batches are half marked, so the prior is known: what is learnt is how a marked text looks.
        model.prior.requires_grad_(False)
        with terminal.console().status("training") as status:

            def report(penalty: float, epoch: int, entropy: float) -> None:
                status.update(f"training: penalty {penalty:g}, epoch {epoch}, cross entropy {entropy:.4f}")

            found = train_detector(
                model, _detector_inputs(settings, marked), _detector_inputs(settings, unmarked), plan, report
            )
        model.load_state_dict(found.state_dict)
        config = model.config
        config.set_detector_information(self.model, settings if self.with_key else None)
        config.key_fingerprint = fingerprint(settings)
        config.threshold, config.validation_metrics = found.overall.threshold, found.to_dict()
        save_detector(model, self.out)
        terminal.write(_results_table(found, plan) + f"detector    {self.out}\n")
        if (fewest := min(len(texts.mask) for texts in found.held_out)) < MIN_HELD_OUT_TEXTS:
            terminal.print_info(
                f"only {fewest} texts of a kind were held out: the figures are rough, give more"
            )
        return 0

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """How texts are written, marked or not."""
        return {"do_sample": True, **self.values, "max_new_tokens": self.tokens}

    @property
    def _seed(self) -> int:
        return int(self.values.get("seed") or 0)

    def _load_synthid_key(self) -> SynthIDTextWatermarkingConfig:
        """The key, which must be SynthID's."""
        given = load_watermark_keys(self.watermark)
        fit = {name: one for name, one in given.items() if isinstance(one, SynthIDTextWatermarkingConfig)}
        if len(fit) != 1:
            got = [f"{name} ({one.scheme})" for name, one in given.items()]
            raise InputError("key", "must be one SynthID key", got, "give a file with that key alone")
        [settings] = fit.values()
        warn_if_public(settings)
        return settings

    def _check_options(self) -> None:
        """Raise for options that cannot be done, before anything is loaded or written."""
        for name in ("max_new_tokens", "max_length"):
            if self.values.get(name) is not None:
                raise ConfigError(name, "is not taken here", self.values[name], "use --tokens")
        if self.prompts is None:
            if self.marked is None or self.unmarked is None:
                got = [f"--{name}" for name, file in self._text_files if file is not None] or "none of them"
                raise InputError("prompts", "must be given, or both --marked and --unmarked", got)
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
        """Token ids of marked and of unmarked texts, from all that was given."""
        if self.prompts is None:
            tokenizer, _ = load_tokenizer(self.model)
            one, other = (self._read_texts(file, name, tokenizer) for name, file in self._text_files)
            return one, other
        prompts = _read_prompts(self.prompts)
        model, tokenizer = self.load()
        given = [self._read_texts(file, name, tokenizer) for name, file in self._text_files]
        writer = _TextGenerator(model, tokenizer, self.batch_size, self.request_extras())
        for place, (texts, mark) in enumerate(zip(given, (settings, None), strict=True)):
            # Each its own seed: of texts that draw the same chance one says what the other does.
            first = self._seed * 2 * len(prompts) + place
            seeds = [(first + 2 * number) % 2**62 for number in range(len(prompts))]
            values = {**self.parameters, "watermarking_config": mark}
            config = GenerationConfig.merge(values, self.file_config(), writer.model_config)
            texts += writer.generate([*zip(prompts, seeds, strict=True)], config, self._text_files[place][0])
        return given[0], given[1]

    @property
    def _text_files(self) -> tuple[tuple[str, Path | None], tuple[str, Path | None]]:
        return ("marked", self.marked), ("unmarked", self.unmarked)

    def _read_texts(self, file: Path | None, name: str, tokenizer: Any) -> list[TokenIds]:
        """The token ids in a file of texts."""
        if file is None:
            return []
        return [
            _token_ids(one, name, tokenizer)[: self.tokens] for one in read_samples(str(file), jsonl=True)
        ]


class _TextGenerator:
    """A model that continues prompts, some side by side."""

    def __init__(self, model: Any, tokenizer: Any, width: int, brought: Mapping[str, Any]) -> None:
        self.session, self.batch_size = Session(model), width
        self.model_config = GenerationConfig.from_transformers(model.generation_config)
        self.tokenizer, self.request_extras = tokenizer, {"tokenizer": tokenizer, **brought}

    def generate(
        self, prompts: Sequence[tuple[str, int]], config: GenerationConfig, kind: str
    ) -> list[TokenIds]:
        """The new tokens of all texts after the prompts, each with its seed, in the order of the prompts."""
        made: dict[int, list[TokenIds]] = {}
        places: dict[int, int] = {}
        waiting = iter(enumerate(prompts))
        ends = set(_as_list(config.eos_token_id))
        with terminal.console().status(f"writing {kind} texts") as status:
            while True:
                while len(self.session) < self.batch_size and (one := next(waiting, None)) is not None:
                    place, (prompt, seed) = one
                    [number] = self.session.admit(self._request(prompt, config.replace(seed=seed)))
                    places[number] = place
                if not len(self.session):
                    break
                for event in self.session.step():
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Finished):
                        found = [one.tokens.tolist() for one in event.hypotheses]
                        made[places[event.request]] = [_until_stop_token(ids, ends) for ids in found]
                        status.update(f"writing {kind} texts: prompt {len(made)} of {len(prompts)}")
        return [ids for place in sorted(made) for ids in made[place]]

    def _request(self, prompt: str, config: GenerationConfig) -> Request:
        given = encode_prompt(self.tokenizer, prompt)
        ready = prepare_prompts(given, config, self.session.model.traits, self.session.model.device)
        return Request(ready.prompt(0), config, ready.inputs[0], config_merged=True, **self.request_extras)


def _detector_inputs(settings: SynthIDTextWatermarkingConfig, texts: Sequence[TokenIds]) -> GValueBatch:
    """Texts as the detector sees them: no context counts that has come up before, as it was not marked."""
    tournament = Tournament(settings)
    width = tournament.context_size

    def one(ids: TokenIds) -> tuple[Tensor, Tensor]:
        if len(ids) <= width:
            return torch.zeros(0, tournament.depth, dtype=torch.uint8), torch.zeros(0, dtype=torch.bool)
        line = torch.tensor([ids])
        contexts = tournament.context_hashes(line[:, :-1])
        fresh = ~repetition_mask(contexts, settings.context_history_size)
        return tournament.g_values(contexts, line[:, width:])[0].to(torch.uint8), fresh[0]

    return GValueBatch.from_texts([one(ids) for ids in texts])


def _results_table(found: DetectorTrainingResult, plan: DetectorTrainingConfig) -> str:
    """The figures of the held-out texts, length by length, beside those of detectors that learn nothing."""
    others = (
        evaluate_detector(one, *found.held_out, plan.validation_lengths)[1]
        for one in (weighted_mean_score, mean_score)
    )
    figures = [found.by_length, *others]
    lines = [
        "held-out texts, and the share of the marked ones found at 1 % false positives",
        f"{'tokens':<10}{'marked':>8}{'unmarked':>10}{'AUC':>8}{'Bayes':>10}{'weighted mean':>16}{'mean':>9}",
    ]
    for length, own in found.by_length.items():
        shares = [one[length].true_positives for one in figures]
        lines.append(
            f"{length:<10}{own.marked:>8}{own.unmarked:>10}{own.auc:>8.3f}"
            f"{shares[0]:>10.1%}{shares[1]:>16.1%}{shares[2]:>9.1%}"
        )
    lines.append(f"threshold   {found.overall.threshold:.4f} (posterior, 1 % false positives at all lengths)")
    return "\n".join(lines) + "\n"


def _read_prompts(file: Path) -> list[str]:
    """The prompts in a file's lines."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("prompts", f"must be a file of JSON lines ({error})", str(file)) from None
    return [_parse_prompt(line, place) for place, line in enumerate(lines, 1) if line.strip()]


def _parse_prompt(line: str, place: int) -> str:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("prompt"), str):
        raise InputError("prompts", f'must hold a JSON object with text as "prompt" in line {place}', line)
    prompt: str = data["prompt"]
    return prompt


def _token_ids(sample: TextSample, option: str, tokenizer: Any) -> TokenIds:
    """The token ids of a text, without its prompt and its end."""
    if sample.error is not None:
        where = "" if sample.line is None else f" in line {sample.line}"
        raise InputError(option, f"must hold texts{where} ({sample.error})", sample.file) from sample.error
    if sample.text is None:
        return _until_stop_token(
            list(sample.ids[sample.prompt_length :]), set(_as_list(tokenizer.eos_token_id))
        )
    ids: TokenIds = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
    return ids


def _until_stop_token(ids: TokenIds, ends: set[int]) -> TokenIds:
    """The ids before the first that ends a text."""
    return next((ids[:place] for place, token in enumerate(ids) if token in ends), ids)


def _as_list(value: int | Sequence[int] | None) -> Sequence[int]:
    return [value] if isinstance(value, int) else value or []
