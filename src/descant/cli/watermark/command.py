"""The commands of `descant watermark`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from descant.cli import terminal
from descant.cli.command import ENVIRONMENT_KEYS, Command, DecodingCommand, load_watermark_keys
from descant.cli.options import REQUIRED, STDIO, argument, option
from descant.cli.terminal import FAILURE
from descant.config.generation_config import GenerationConfig
from descant.config.watermarking_config import SCHEMES
from descant.errors import ConfigError, DescantError, InputError

if TYPE_CHECKING:
    from descant.cli.watermark.detectors import BayesianScorer, SampleDetection, TextSample, TokenIds
    from descant.config.watermarking_config import BaseWatermarkingConfig, SynthIDTextWatermarkingConfig
    from descant.decoding.watermark.detection import Detection, Detector


@dataclass(frozen=True, kw_only=True)
class DetectCommand(Command):
    """Detect watermarks in texts: marked, not marked, or too short to tell.

    A FILE is one text, or, with the suffix .jsonl or --jsonl, JSON lines with "text" or "ids" and an optional
    "prompt", or lines of `descant generate --output`. Keys come from files or the environment
    (DESCANT_WATERMARK_KEY, DESCANT_WATERMARK_KEY_FILE). The exit code is 0 for every verdict.
    """

    needs_torch: ClassVar[bool] = True

    files: list[str] | None = argument("FILE", "Texts to check; - or nothing: standard input.", None)
    model: str = option(
        "The model that may have generated them: folder or name. Its weights are not loaded.",
        REQUIRED,
        "--model",
        "--tokenizer",
        metavar="MODEL",
    )
    key: list[str] | None = option(
        "A file with keys; may be repeated (default: the environment).", metavar="FILE"
    )
    alpha: float = option("The false positive rate.", 0.01)
    windows: bool = option("Also detect a marked passage in unmarked text.", False)
    jsonl: bool = option("Every FILE has JSON lines, whatever its name.", False)
    json: bool = option("Write one JSON object per text instead of the table.", False)
    html: Path | None = option("Write a report with every token coloured by its evidence.", metavar="FILE")
    bayes: str | None = option("Also use this detector, made by `descant watermark train`.", metavar="FOLDER")
    vocabulary: int | None = option("Vocabulary size of the model, if MODEL is only a tokenizer.", min=1)

    def run(self) -> int:
        """Check all texts."""
        from descant.cli.watermark.detectors import BayesianScorer, print_detections, read_samples, write_page
        from descant.decoding.watermark.detection import Detector
        from descant.models.loading.loading import load_tokenizer

        files = self.files or [STDIO]
        self._check_files(files)
        keys = self._load_keys()
        texts = [sample for file in files for sample in read_samples(file, self.jsonl)]
        if not texts:
            raise InputError("FILE", "must hold a text", files)
        with terminal.console().status("loading"):
            tokenizer, vocabulary = load_tokenizer(self.model)
        vocabulary = self._vocabulary_size(keys, tokenizer, vocabulary)
        detector = Detector(keys, vocabulary, tokenizer, alpha=self.alpha)
        bayes = None if self.bayes is None else BayesianScorer(self.bayes, keys)
        answers, failures = self._detect_all(texts, detector, bayes)
        if not self.json and answers:
            print_detections(answers)
        if self.html is not None and answers:
            write_page(self.html, answers, tokenizer)
        for sample, error in failures:
            terminal.print_error(f"{sample.name}: {error}")
        return FAILURE if failures else 0

    def _detect_all(
        self, texts: Sequence[TextSample], detector: Detector, bayes: BayesianScorer | None
    ) -> tuple[list[SampleDetection], list[tuple[TextSample, DescantError]]]:
        """The detection of each text, printed immediately with --json; and the failures."""
        from descant.cli.watermark.detectors import SampleDetection

        answers, failures = [], []
        for sample in texts:
            try:
                if sample.error is not None:
                    raise sample.error
                detection = _detect_sample(detector, sample, self.windows)
            except DescantError as error:
                failures.append((sample, error))
                self._write_json({**sample.origin, "error": str(error)})
                continue
            answer = SampleDetection(sample, detection, None if bayes is None else bayes.posterior(detection))
            answers.append(answer)
            extra = {} if answer.posterior is None else {"bayes": answer.posterior.to_dict()}
            self._write_json({**sample.origin, **detection.to_dict(), **extra})
        return answers, failures

    def _write_json(self, record: dict[str, Any]) -> None:
        if self.json:
            terminal.write(json.dumps(record) + "\n")

    def _load_keys(self) -> dict[str, BaseWatermarkingConfig]:
        """All watermark keys by name."""
        keys: dict[str, BaseWatermarkingConfig] = {}
        for path in self.key or [ENVIRONMENT_KEYS]:
            for name, settings in load_watermark_keys(path).items():
                if keys.get(name, settings) != settings:
                    raise InputError("key", "must give each key a name of its own", name, 'change its "name"')
                keys[name] = settings
        return keys

    def _vocabulary_size(
        self, keys: dict[str, BaseWatermarkingConfig], tokenizer: Any, config_size: int | None
    ) -> int:
        """The vocabulary size of the model, on which green lists depend."""
        from descant.config.watermarking_config import WatermarkingConfig

        if self.vocabulary is not None:
            return self.vocabulary
        if config_size is not None:
            return config_size
        if any(isinstance(settings, WatermarkingConfig) for settings in keys.values()):
            requirement = "must have a config that tells how many tokens the model scores"
            raise InputError("model", requirement, self.model, "give --vocabulary")
        return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))

    def _check_files(self, files: Sequence[str]) -> None:
        """Raise InputError for files that are given twice."""
        if files.count(STDIO) > 1:
            raise InputError("FILE", "must be standard input only once", list(files))
        if self.html is not None and self.html.exists():
            read = [Path(file) for file in files if file != STDIO and Path(file).exists()]
            if any(self.html.samefile(file) for file in read):
                raise InputError("html", "must be another file than FILE", str(self.html))


@dataclass(frozen=True, kw_only=True)
class KeyCommand(Command):
    """Create a new key, for `descant generate --watermark FILE` and `descant watermark detect --key FILE`.

    Only its owner can read the file. Keep it: watermarks cannot be detected without their key.
    """

    scheme: str = option("The watermarking scheme.", REQUIRED, metavar=f"[{'|'.join(SCHEMES)}]")
    out: str = option("A new file; - is standard output.", "key.json", metavar="FILE")
    name: str | None = option("Its name in detections (default: its fingerprint).", metavar="TEXT")

    def run(self) -> int:
        """Write the key."""
        from descant.decoding.watermark.keys import fingerprint, new_settings, write_settings

        if self.name == "":
            raise InputError("name", "must not be empty", self.name)
        settings = new_settings(self.scheme)
        if self.out == STDIO:
            named = {} if self.name is None else {"name": self.name}
            terminal.write(json.dumps({**named, **settings.to_dict()}, indent=2) + "\n")
            return 0
        write_settings(self.out, settings, self.name)
        name = self.name or fingerprint(settings)
        terminal.write_untrusted(f"{settings.scheme} key {name} in {self.out}, which only you can read\n")
        return 0


def _detect_sample(detector: Detector, sample: TextSample, windows: bool) -> Detection:
    if sample.text is None:
        return detector.ids(list(sample.ids), prompt=sample.prompt_length, windows=windows)
    return detector.text(sample.text, prompt=sample.prompt, windows=windows)


MIN_HELD_OUT_TEXTS: Final = 100  # with fewer, 1 % is less than one text


@dataclass(frozen=True, kw_only=True)
class TrainCommand(DecodingCommand):
    """Train a Bayesian detector for a SynthID key, which detects shorter texts than the mean score.

    It is trained on --marked and --unmarked, files of JSON lines with "text", "ids" or the "completions" of
    `descant generate`, or on texts that MODEL generates from --prompts, lines with "prompt". The detector is
    for texts that the model generates with the same options. Without --with-key its folder holds a
    fingerprint of the key, not the key.
    """

    out: Path = option("A new folder for the detector.", REQUIRED, metavar="FOLDER")
    watermark: str | None = option(
        "The key; without it, or with `env`: the environment's.", None, "--key", metavar="FILE"
    )
    prompts: Path | None = option('JSON lines with "prompt", to generate texts from.', metavar="FILE")
    marked: Path | None = option("JSON lines of texts marked with the key.", metavar="FILE")
    unmarked: Path | None = option("JSON lines of texts that are not marked.", metavar="FILE")
    tokens: int = option("New tokens per generated text, and maximum tokens of a given text.", 200, min=2)
    epochs: int = option("Maximum number of epochs.", 60, min=1)
    batch_size: int = option("Texts generated per batch.", 16, min=1)
    with_key: bool = option("Store the key in the folder: it is secret then.", False)

    def run(self) -> int:
        """Train and save a detector, and print its metrics."""
        from descant.cli.watermark.detectors import detector_inputs, results_table
        from descant.decoding.watermark.keys import fingerprint
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
        from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
        from descant.decoding.watermark.keys import warn_if_public

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
                given = [f"--{name}" for name, file in self._text_files if file is not None]
                must = "must be given, or both --marked and --unmarked"
                raise InputError("prompts", must, given or "none of them")
            extra = {"config": self.config, "assistant_model": self.assistant_model, **self.values}
            for name, value in extra.items():
                if value is not None and name != "seed":
                    raise ConfigError(name, "has no use where nothing is generated", value, "give --prompts")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise InputError("out", "must be a folder that is new or empty", str(self.out))
        # An hour's texts must not end where nothing can be written.
        self.out.mkdir(parents=True, exist_ok=True)

    # -------------------------------------------------------------------- texts
    def _training_texts(
        self, settings: SynthIDTextWatermarkingConfig
    ) -> tuple[list[TokenIds], list[TokenIds]]:
        """Token ids of marked and of unmarked texts, read and generated."""
        from descant.cli.watermark.detectors import TextGenerator, read_prompts
        from descant.models.loading.loading import load_tokenizer

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
        from descant.cli.watermark.detectors import read_samples, token_ids

        return [
            token_ids(sample, name, tokenizer)[: self.tokens]
            for sample in read_samples(str(file), jsonl=True)
        ]
