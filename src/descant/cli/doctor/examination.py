"""The sections of the doctor on a model: fast paths, laws, parity, times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from descant.cli import terminal
from descant.cli.doctor.laws import LawSize, run_laws
from descant.cli.doctor.machine import model_facts
from descant.cli.doctor.parity import run_half, run_parity
from descant.cli.doctor.report import DoctorReport, Fact, FastPathRow
from descant.cli.doctor.speed import SpeedSize, run_speed
from descant.cli.doctor.subject import Subject, logit_rounding, token_prompts
from descant.config.generation_config import GenerationConfig
from descant.engine.session import Request, Session
from descant.models.fast_paths import fast_paths
from descant.models.loading import load
from descant.models.tiny_llama import toy

__all__ = ["Examination", "own_subject", "tiny_subject"]

_TINY, _OWN = "tiny", "model"
_NEW_TOKENS, _QUICK_NEW_TOKENS = 24, 8  # of a parity case


@dataclass(frozen=True)
class Examination:
    """Which sections run, and how long."""

    sections: Set[str]
    is_quick: bool = False

    def run(self, subjects: Sequence[Subject], report: DoctorReport) -> None:
        """Add the results on these models to a report."""
        for subject in subjects:
            self._examine(subject, report)

    def _examine(self, subject: Subject, report: DoctorReport) -> None:
        """Run the sections on one model."""
        progress = terminal.print_info
        if "machine" in self.sections:
            report.models.append(model_facts(subject.name, subject.model))
            rounding = subject.rounding
            text = "unknown" if rounding is None else f"{rounding:.1e} of its logits"
            report.models.append(Fact(f"{subject.name}, rounding", text))
        if "fast-paths" in self.sections:
            report.fast_paths += _fast_path_rows(subject)
        if "laws" in self.sections:
            report.laws += run_laws(subject, LawSize.quick() if self.is_quick else LawSize(), progress)
        new_tokens = _QUICK_NEW_TOKENS if self.is_quick else _NEW_TOKENS
        if "parity" in self.sections:
            report.parity += run_parity(subject, new_tokens, progress)
        if "bench" in self.sections:
            size = SpeedSize.quick() if self.is_quick else SpeedSize()
            report.bench += run_speed(subject, size, "vllm" in self.sections, progress)
        if "half" in self.sections and not subject.is_half:
            gc.collect()
            report.half += run_half(subject, new_tokens, progress)


def tiny_subject(device: torch.device) -> Subject:
    """The tiny random model, the same on every machine."""

    def make(dtype: str) -> Any:
        return toy().to(device, getattr(torch, dtype))

    return _subject(_TINY, make("float32"), make)


def own_subject(folder: str, dtype: str, device: torch.device) -> Subject:
    """The user's model."""

    def make(name: str) -> Any:
        return load(folder, name, str(device))[0]

    return _subject(_OWN, make(dtype), make, folder)


def _subject(name: str, model: Any, make: Callable[[str], Any], folder: str | None = None) -> Subject:
    """A subject with its rounding, which is not known where a plain forward fails: the laws then say why."""
    try:
        rounding: float | None = logit_rounding(model)
    except Exception:  # a model that needs more inputs, a device without a kernel
        rounding = None
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
