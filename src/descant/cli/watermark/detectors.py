"""Texts, their detections as tables, posteriors of a trained detector, and the texts to train one on."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from descant.api.chat_prompt import encode_prompt
from descant.api.inputs import prepare_prompts
from descant.cli import terminal
from descant.cli.command import write_file
from descant.cli.options import STDIO
from descant.config.generation_config import GenerationConfig
from descant.config.watermarking_config import BaseWatermarkingConfig, SynthIDTextWatermarkingConfig
from descant.decoding.processors.base import as_id_list
from descant.decoding.watermark.detection import Detection
from descant.decoding.watermark.keys import fingerprint
from descant.decoding.watermark.report import (
    VERDICT_TEXTS,
    explain_verdict,
    format_number,
    format_p_value,
    render_report,
    summary_items,
)
from descant.decoding.watermark.synthid import (
    Tournament,
    get_tournament,
    mean_score,
    repetition_mask,
    weighted_mean_score,
)
from descant.decoding.watermark.training import (
    DetectorTrainingConfig,
    DetectorTrainingResult,
    GValueBatch,
    evaluate_detector,
)
from descant.engine.request import MERGED
from descant.engine.session import Failed, Finished, Request, Session
from descant.errors import InputError, Words, file_errors

JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class TextSample:
    """One text, as text or token ids, with its origin; or the error of its line."""

    file: str
    line: int | None = None  # in a file of lines
    completion_index: int | None = None  # in a line with several completions
    line_id: Any = None  # the line's own "id"
    text: str | None = None
    prompt: str | None = None
    ids: tuple[int, ...] = ()
    prompt_length: int = 0  # number of ids that are the prompt
    error: InputError | None = None

    @property
    def name(self) -> str:
        """The name in a table."""
        parts = ["standard input" if self.file == STDIO else self.file, self.line, self.completion_index]
        return ":".join(str(part) for part in parts if part is not None)

    @property
    def origin(self) -> dict[str, Any]:
        """The origin as JSON values."""
        origin = {
            "file": self.file,
            "line": self.line,
            "completion": self.completion_index,
            "id": self.line_id,
        }
        return {name: value for name, value in origin.items() if value is not None}


def read_samples(file: str, jsonl: bool) -> list[TextSample]:
    """The texts of a file or of standard input: one text, or one per JSON line."""
    text = _read_text(file)
    if not jsonl and Path(file).suffix.lower() not in JSONL_SUFFIXES:
        # Drop the newline that an editor or `echo` adds.
        return [_check_text(TextSample(file, text=text.removesuffix("\n")))]
    samples = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            samples += _line_samples(TextSample(file, number), line)
    return samples


def _read_text(file: str) -> str:
    with file_errors("FILE", file):
        data = sys.stdin.buffer.read() if file == STDIO else Path(file).read_bytes()
    try:
        # Normalise line ends.
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline=None).read()
    except UnicodeDecodeError as error:
        raise InputError("FILE", f"must be text in UTF-8 ({error.reason})", file) from None


def _line_samples(origin: TextSample, line: str) -> list[TextSample]:
    """The texts of a line: its text or completions; or its error."""
    try:
        data = _parse_object(line)
        origin = replace(origin, line_id=data.get("id"))
        completions = data.get("completions")
        if not isinstance(completions, list):
            return [_parse_sample(origin, data)]
        prompt = {"prompt": data["prompt"]} if isinstance(data.get("prompt"), str) else {}
        return [
            _parse_sample(replace(origin, completion_index=index), {**prompt, **_require_object(part)})
            for index, part in enumerate(completions, 1)
        ]
    except InputError as error:
        return [replace(origin, error=error)]


def _parse_sample(origin: TextSample, data: Mapping[str, Any]) -> TextSample:
    text, ids, prompt = data.get("text"), data.get("ids"), data.get("prompt")
    if (text is None) == (ids is None):
        raise InputError("text", 'must be given, or "ids"', Words("neither" if text is None else "both"))
    if ids is not None:
        if not _is_token_list(ids):
            raise InputError("ids", "must be a list of token ids", ids)
        if prompt is None or (type(prompt) is int and 0 <= prompt <= len(ids)):
            return replace(origin, ids=tuple(ids), prompt_length=prompt or 0)
        if not _is_token_list(prompt):
            requirement = "must be token ids, or how many of the ids are the prompt's,"
            raise InputError("prompt", f'{requirement} where there are "ids"', prompt)
        return replace(origin, ids=(*prompt, *ids), prompt_length=len(prompt))
    if not isinstance(text, str):
        raise InputError("text", "must be text", text)
    if prompt is not None and not isinstance(prompt, str):
        raise InputError("prompt", "must be text, as the text is", prompt)
    sample = _check_text(replace(origin, text=text, prompt=prompt))
    if sample.error is not None:
        raise sample.error
    return sample


def _check_text(sample: TextSample) -> TextSample:
    """The sample, with an error if its text has lone surrogates, which tokenizers do not accept."""
    try:
        f"{sample.text}{sample.prompt}".encode()
    except UnicodeEncodeError:
        error = InputError("text", "must hold whole characters", sample.text, "leave lone surrogates out")
        return replace(sample, error=error)
    return sample


def _parse_object(line: str) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("FILE", f"must hold a JSON object in each line ({error})", line) from None
    return _require_object(data)


def _require_object(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise InputError("FILE", "must hold a JSON object in each line", data)
    return data


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


@dataclass(frozen=True)
class Posterior:
    """The probability that a text is watermarked, given a prior of 1/2, and the detector's threshold."""

    value: float
    threshold: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        marked = None if self.threshold is None else self.value > self.threshold
        return {"posterior": self.value, "threshold": self.threshold, "marked": marked}

    def __str__(self) -> str:
        if self.threshold is None:
            return f"posterior {self.value:.4f}"
        return f"posterior {self.value:.4f} (1 % of unmarked texts are above {self.threshold:.4f})"


class BayesianScorer:
    """A trained detector with its key."""

    def __init__(self, folder: str, keys: Mapping[str, BaseWatermarkingConfig]) -> None:
        from descant.models.bayesian_detector import load_detector  # slow to import

        self.model = load_detector(folder)
        trained = self.model.config.key_fingerprint
        matching = [
            settings
            for settings in keys.values()
            if isinstance(settings, SynthIDTextWatermarkingConfig)
            and trained in (None, fingerprint(settings))
        ]
        if len(matching) != 1:
            requirement = "must be the detector of one of the keys" + (f", {trained}" if trained else "")
            given_keys = [
                f"{name} ({settings.scheme}, {fingerprint(settings)})" for name, settings in keys.items()
            ]
            raise InputError("bayes", requirement, given_keys, "give that key with --key")
        [self.settings] = matching
        depth = len(self.settings.keys)
        if depth != self.model.watermarking_depth:
            requirement = f"must be a detector of {depth} rounds, as the key has"
            raise InputError("bayes", requirement, self.model.watermarking_depth)

    def posterior(self, detection: Detection) -> Posterior:
        """The posterior of a detected text, without its prompt."""
        tournament = get_tournament(self.settings)
        ids = torch.tensor([detection.ids[len(detection.ids) - detection.tokens :]], dtype=torch.long)
        if ids.shape[1] > tournament.context_size:
            contexts = tournament.context_hashes(ids[:, :-1])
            mask = ~repetition_mask(contexts, self.settings.context_history_size)
            g_values = tournament.g_values(contexts, ids[:, tournament.context_size :])
        else:  # too short: the prior remains
            g_values, mask = torch.zeros(1, 0, tournament.depth), torch.zeros(1, 0, dtype=torch.bool)
        with torch.no_grad():
            probability = torch.sigmoid(self.model.log_odds(g_values, mask))
        return Posterior(float(probability), self.model.config.threshold)


VERDICT_STYLES: Final = {"marked": "green", "not marked": "", "too short to tell": "yellow"}
COLUMNS: Final = ("text", "verdict", "scheme", "key", "scored", "score", "95 % interval", "z", "p")
OPTIONAL_COLUMNS: Final = ("passage", "bayes")
RIGHT_ALIGNED: Final = frozenset({"scored", "score", "z", "p"})
TABLE_WIDTH, PROSE_WIDTH = 200, 80  # width of a table that is not on a terminal, and of sentences


@dataclass(frozen=True)
class SampleDetection:
    """A text and its detection."""

    sample: TextSample
    detection: Detection
    posterior: Posterior | None = None

    def named_figures(self) -> list[tuple[str, str]]:
        """The figures with their names."""
        bayes = [] if self.posterior is None else [("bayes", str(self.posterior))]
        # Names of files and keys come from elsewhere.
        named = [("text", self.sample.name), *summary_items(self.detection), *bayes]
        return [(name, terminal.escape_control(value)) for name, value in named]


def print_detections(answers: Sequence[SampleDetection]) -> None:
    """Write detections to standard output."""
    console = Console(highlight=False, markup=False)
    is_plain = not console.is_terminal
    if is_plain:
        console = Console(highlight=False, markup=False, width=TABLE_WIDTH)
    with console.capture() as captured:
        console.print(_figures_table(answers[0]) if len(answers) == 1 else _detections_table(answers))
        for sentence in _verdict_notes(answers):
            console.print()
            console.print(textwrap.fill(sentence, min(console.width, PROSE_WIDTH)))
    # The last cell of a line is padded too: strip it.
    terminal.write("\n".join(line.rstrip() if is_plain else line for line in captured.get().split("\n")))


def _verdict_notes(answers: Sequence[SampleDetection]) -> list[str]:
    """The meaning of the verdicts."""
    if len(answers) == 1:
        return [explain_verdict(answers[0].detection)]
    verdicts = {answer.detection.verdict for answer in answers}
    alpha, count = answers[0].detection.alpha, len(answers)
    return [
        *(f"{verdict}: {meaning}" for verdict, meaning in VERDICT_TEXTS.items() if verdict in verdicts),
        f"At --alpha {alpha:g}, {count * alpha:.2g} of {count} unmarked texts are called marked on average.",
    ]


def _figures_table(answer: SampleDetection) -> Table:
    grid = Table.grid(padding=(0, 3, 0, 0))
    for name, value in answer.named_figures():
        style = VERDICT_STYLES[answer.detection.verdict] if name == "verdict" else ""
        grid.add_row(Text(name, style="dim"), Text(value, style=style))
    return grid


def _detections_table(answers: Sequence[SampleDetection]) -> Table:
    figures = [dict(answer.named_figures()) for answer in answers]
    extra_columns = [name for name in OPTIONAL_COLUMNS if any(name in detection for detection in figures)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in (*COLUMNS, *extra_columns):
        table.add_column(column, justify="right" if column in RIGHT_ALIGNED else "left", overflow="fold")
    for answer, named in zip(answers, figures, strict=True):
        detection = answer.detection
        # Shorter than in the list of one text.
        short = {
            "scored": f"{detection.scored}/{detection.tokens}",
            "score": format_number(detection.score),
            "p": format_p_value(detection.p_value),
        }
        cells = [{**named, **short}.get(column, "") for column in (*COLUMNS, *extra_columns)]
        styles = [
            VERDICT_STYLES[detection.verdict] if column == "verdict" else ""
            for column in (*COLUMNS, *extra_columns)
        ]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return table


def write_page(target: Path, answers: Sequence[SampleDetection], tokenizer: Any) -> None:
    """Write the HTML report of `--html`."""
    detections = [answer.detection for answer in answers]
    # Without offsets the position of a token in the text is unknown: show the token alone.
    texts = [
        answer.sample.text
        if answer.sample.text is not None and answer.detection.offsets is not None
        else [tokenizer.decode([token]) for token in answer.detection.ids]
        for answer in answers
    ]
    write_file("html", target, render_report(detections, texts, [answer.sample.name for answer in answers]))


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
        stop_tokens = set(as_id_list(config.eos_token_id))
        with terminal.console().status(f"writing {kind} texts") as status:
            while True:
                while len(self.session) < self.batch_size and (entry := next(pending, None)) is not None:
                    index, (prompt, seed) = entry
                    [request_id] = self.session.admit(self._request(prompt, config.replace(seed=seed)))
                    index_by_request[request_id] = index
                if not len(self.session):
                    break
                for event in self.session.step():
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Finished):
                        sequences = [hypothesis.tokens.tolist() for hypothesis in event.hypotheses]
                        texts[index_by_request[event.request]] = [
                            _until_stop_token(ids, stop_tokens) for ids in sequences
                        ]
                        status.update(f"writing {kind} texts: prompt {len(texts)} of {len(prompts)}")
        return [ids for index in sorted(texts) for ids in texts[index]]

    def _request(self, prompt: str, config: GenerationConfig) -> Request:
        inputs = encode_prompt(self.tokenizer, prompt)
        prompts = prepare_prompts(inputs, config, self.session.model.traits, self.session.model.device)
        return Request(prompts.prompt(0), config, prompts.inputs[0], _call=MERGED, **self.request_extras)


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
        stop_tokens = set(as_id_list(tokenizer.eos_token_id))
        return _until_stop_token(list(sample.ids[sample.prompt_length :]), stop_tokens)
    ids: TokenIds = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
    return ids


def _until_stop_token(ids: TokenIds, stop_tokens: set[int]) -> TokenIds:
    """The ids before the first stop token."""
    return next((ids[:index] for index, token in enumerate(ids) if token in stop_tokens), ids)
