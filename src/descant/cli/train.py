"""`descant watermark train`: train a Bayesian detector for one model and one key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from descant.cli import terminal
from descant.cli.command import DecodingCommand, load_watermark_keys
from descant.cli.samples import read_samples
from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError, InputError

if TYPE_CHECKING:
    from descant.cli.training_texts import TokenIds
    from descant.decoding.watermark.schemes import SynthIDTextWatermarkingConfig

__all__ = ["TrainCommand"]

MIN_HELD_OUT_TEXTS: Final = 100  # with fewer, 1 % is less than one text


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
        from descant.cli.training_texts import detector_inputs, results_table
        from descant.decoding.watermark.schemes.keys import fingerprint
        from descant.decoding.watermark.training import DetectorTrainingConfig, train_detector
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
                detector_inputs(settings, marked),
                detector_inputs(settings, unmarked),
                training_config,
                report,
            )
        model.load_state_dict(result.state_dict)
        config = model.config
        config.set_detector_information(self.model, settings if self.with_key else None)
        config.key_fingerprint = fingerprint(settings)
        config.threshold, config.validation_metrics = result.overall.threshold, result.to_dict()
        save_detector(model, self.out)
        terminal.write_untrusted(results_table(result, training_config) + f"detector    {self.out}\n")
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
        from descant.decoding.watermark.schemes import SynthIDTextWatermarkingConfig
        from descant.decoding.watermark.schemes.keys import warn_if_public

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
        from descant.cli.training_texts import TextGenerator, read_prompts
        from descant.models.loading import load_tokenizer

        if self.prompts is None:
            tokenizer, _ = load_tokenizer(self.model)
            marked, unmarked = (self._read_texts(file, name, tokenizer) for name, file in self._text_files)
            return marked, unmarked
        prompts = read_prompts(self.prompts)
        model, tokenizer = self.load()
        texts_by_kind = [self._read_texts(file, name, tokenizer) for name, file in self._text_files]
        generator = TextGenerator(model, tokenizer, self.batch_size, self.request_extras())
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
        from descant.cli.training_texts import token_ids

        return [
            token_ids(sample, name, tokenizer)[: self.tokens]
            for sample in read_samples(str(file), jsonl=True)
        ]
