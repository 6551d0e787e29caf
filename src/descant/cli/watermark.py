"""`descant watermark`: detect watermarks in texts, and create keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer

from descant.cli import terminal
from descant.cli.command import ENVIRONMENT_KEYS, Command, load_watermark_keys
from descant.cli.exit_codes import FAILURE
from descant.cli.samples import STDIO, TextSample, read_samples
from descant.config.watermark_schemes import SCHEMES
from descant.errors import DescantError, InputError

if TYPE_CHECKING:
    from descant.cli.bayes_scorer import BayesianScorer
    from descant.cli.detection_output import SampleDetection
    from descant.decoding.watermark.detection import Detection, Detector
    from descant.decoding.watermark.schemes import BaseWatermarkingConfig

__all__ = ["DetectCommand", "KeyCommand"]

CHOICES: Final = ", ".join(SCHEMES)


@dataclass(frozen=True, kw_only=True)
class DetectCommand(Command):
    """Detect watermarks in texts: marked, not marked, or too short to tell.

    A FILE is one text, or, with the suffix .jsonl or --jsonl, JSON lines with "text" or "ids" and an optional
    "prompt", or lines of `descant generate --output`. Keys come from files or the environment
    (DESCANT_WATERMARK_KEY, DESCANT_WATERMARK_KEY_FILE). The exit code is 0 for every verdict.
    """

    needs_torch: ClassVar[bool] = True

    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Texts to check; - or nothing: standard input."),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "--tokenizer",
            metavar="MODEL",
            help="The model that may have generated them: folder or name. Its weights are not loaded.",
        ),
    ]
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key", metavar="FILE", help="A file with keys; may be repeated (default: the environment)."
        ),
    ] = None
    alpha: Annotated[float, typer.Option(help="The false positive rate.")] = 0.01
    windows: Annotated[
        bool,
        typer.Option("--windows", metavar="", help="Also detect a marked passage in unmarked text."),
    ] = False
    jsonl: Annotated[
        bool, typer.Option("--jsonl", metavar="", help="Every FILE has JSON lines, whatever its name.")
    ] = False
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Write one JSON object per text instead of the table.")
    ] = False
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a report with every token coloured by its evidence."
        ),
    ] = None
    bayes: Annotated[
        str | None,
        typer.Option(
            "--bayes", metavar="FOLDER", help="Also use this detector, made by `descant watermark train`."
        ),
    ] = None
    vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="Vocabulary size of the model, if MODEL is only a tokenizer."),
    ] = None

    def run(self) -> int:
        """Check all texts."""
        from descant.cli.bayes_scorer import BayesianScorer
        from descant.cli.detection_output import print_detections, write_page
        from descant.decoding.watermark.detection import Detector
        from descant.models.loading import load_tokenizer

        files = self.files or [STDIO]
        self._check_files(files)
        keys = self._load_keys()
        texts = [one for file in files for one in read_samples(file, self.jsonl)]
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
        from descant.cli.detection_output import SampleDetection

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
                    advice = 'change its "name"'
                    raise InputError("key", "must give each key a name of its own", name, advice)
                keys[name] = settings
        return keys

    def _vocabulary_size(
        self, keys: dict[str, BaseWatermarkingConfig], tokenizer: Any, config_size: int | None
    ) -> int:
        """The vocabulary size of the model, on which green lists depend."""
        from descant.decoding.watermark.schemes import WatermarkingConfig

        if self.vocabulary is not None:
            return self.vocabulary
        if config_size is not None:
            return config_size
        if any(isinstance(one, WatermarkingConfig) for one in keys.values()):
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

    scheme: Annotated[
        str, typer.Option("--scheme", metavar=f"[{'|'.join(SCHEMES)}]", help="The watermarking scheme.")
    ]
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="A new file; - is standard output.")] = (
        "key.json"
    )
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="TEXT", help="Its name in detections (default: its fingerprint)."),
    ] = None

    def run(self) -> int:
        """Write the key."""
        from descant.decoding.watermark.schemes.keys import fingerprint, new_settings, write_settings

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
