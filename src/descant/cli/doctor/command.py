"""The command `descant doctor`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
import typer

from descant.cli import terminal
from descant.cli.command import FAILURE, Command
from descant.cli.doctor.laws import LawSize, run_laws
from descant.cli.doctor.machine import default_device, machine_facts, model_facts
from descant.cli.doctor.parity import run_half, run_parity
from descant.cli.doctor.report import DoctorReport, Fact, FastPathRow
from descant.cli.doctor.speed import SpeedSize, clock_name, run_speed
from descant.cli.doctor.subject import Subject, logit_rounding, token_prompts
from descant.config.generation_config import GenerationConfig
from descant.core.atomic_file import write_text
from descant.engine.session import Request, Session
from descant.errors import InputError
from descant.models.fast_paths import fast_paths
from descant.models.loading import DTYPES, check_device, load
from descant.models.tiny_llama import toy

__all__ = ["DoctorCommand"]

SECTIONS: Final = ("machine", "fast-paths", "laws", "parity", "half", "bench", "vllm")
_TINY, _OWN = "tiny", "model"
_NEW_TOKENS, _QUICK_NEW_TOKENS = 24, 8  # of a parity case


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Check this machine and write one report: versions, fast paths, laws, parity with transformers, times.

    It runs on a tiny random model and, with `--model`, on yours. The report has no paths and no names of
    users. The exit code is 1 if a law or a parity check failed.
    """

    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Also check this model: a folder, or a name on the hub."
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Where to run: cpu, cuda, mps, ... (default: the accelerator, if any)")
    ] = None
    dtype: Annotated[
        str, typer.Option(help=f"Precision of --model: {', '.join(DTYPES)}. The laws need float32.")
    ] = "float32"
    output: Annotated[
        str | None, typer.Option("--output", metavar="FILE", help="Write the report as Markdown there.")
    ] = None
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON there.")
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Half a minute: fewer tokens, schedules and repeats.")
    ] = False
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar=f"[{'|'.join(SECTIONS)}]", help="Leave a section out; may be repeated."),
    ] = None

    def run(self) -> int:
        """Check the machine, and print and write the report."""
        chosen = self._sections()
        device = check_device(self.device or default_device())
        report = DoctorReport(clock=clock_name(device))
        if "machine" in chosen:
            report.machine += machine_facts()
        subjects = [_tiny(device)]
        if self.model is not None:
            report.private.append(self.model)
            terminal.print_info("loading")
            subjects.append(_own(self.model, self.dtype, device))
        for subject in subjects:
            self._examine(subject, chosen, report)
        terminal.write_untrusted(report.text())
        for name, path, text in (
            ("output", self.output, report.markdown()),
            ("json", self.json, report.json()),
        ):
            if path is not None:
                _write(name, path, text)
        return FAILURE if report.num_failed else 0

    def _sections(self) -> set[str]:
        """The sections that are not skipped."""
        skipped = {name for one in self.skip or () for name in one.split(",")}
        for name in sorted(skipped):
            if name not in SECTIONS:
                raise InputError("skip", f"must be one of {', '.join(SECTIONS)}", name)
        return set(SECTIONS) - skipped

    def _examine(self, subject: Subject, chosen: set[str], report: DoctorReport) -> None:
        """Run the chosen sections on a model."""
        progress = terminal.print_info
        if "machine" in chosen:
            report.models.append(model_facts(subject.name, subject.model))
            report.models.append(Fact(f"{subject.name}, rounding", f"{subject.rounding:.1e} of its logits"))
        if "fast-paths" in chosen:
            report.fast_paths += _fast_path_rows(subject)
        if "laws" in chosen:
            report.laws += run_laws(subject, LawSize.quick() if self.quick else LawSize(), progress)
        new_tokens = _QUICK_NEW_TOKENS if self.quick else _NEW_TOKENS
        if "parity" in chosen:
            report.parity += run_parity(subject, new_tokens, progress)
        if "bench" in chosen:
            size = SpeedSize.quick() if self.quick else SpeedSize()
            report.bench += run_speed(subject, size, "vllm" in chosen, progress)
        if "half" in chosen and not subject.is_half:
            gc.collect()
            report.half += run_half(subject, new_tokens, progress)


def _tiny(device: torch.device) -> Subject:
    """The tiny random model, the same on every machine."""

    def make(dtype: str) -> Any:
        return toy().to(device, getattr(torch, dtype))

    return _subject(_TINY, make("float32"), make)


def _own(folder: str, dtype: str, device: torch.device) -> Subject:
    """The user's model."""

    def make(name: str) -> Any:
        return load(folder, name, str(device))[0]

    return _subject(_OWN, make(dtype), make, folder)


def _subject(name: str, model: Any, make: Callable[[str], Any], folder: str | None = None) -> Subject:
    """A subject with its rounding, which is not known where a plain forward fails: the laws then say why."""
    try:
        rounding = logit_rounding(model)
    except Exception:  # a model that needs more inputs, a device without a kernel
        rounding = 0.0
    return Subject(name, model, make, rounding, folder)


def _fast_path_rows(subject: Subject) -> list[FastPathRow]:
    """The fast paths of a model after a ragged step, in which a model may show that it cannot be packed."""
    try:
        session = Session(subject.model)
        if not session.traits.is_encoder_decoder:
            config = GenerationConfig(max_new_tokens=2, do_sample=False)
            session.admit(*(Request(prompt, config) for prompt in token_prompts(subject.model, (3, 20))))
            for _ in session.drain():
                pass
        paths = fast_paths(session.model)
    except Exception as error:  # whatever a device or a library raises belongs into the report
        return [FastPathRow(subject.name, "all", "unknown", f"{type(error).__name__}: {error}", "")]
    return [
        FastPathRow(subject.name, path.name, "on" if path.is_on else "off", path.detail, path.switch)
        for path in paths
    ]


def _write(name: str, path: str, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(name, f"must be a file that can be written ({error.strerror})", path) from None
