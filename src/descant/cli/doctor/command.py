"""`descant doctor`: one report on a machine, its fast paths, the laws, parity with transformers and times."""

from __future__ import annotations

import gc
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from descant.cli import terminal
from descant.cli.command import Command, write_file
from descant.cli.options import option
from descant.cli.terminal import FAILURE
from descant.config.dtype_names import DTYPES
from descant.errors import InputError

if TYPE_CHECKING:
    from descant.cli.doctor.checks import CheckedModel
    from descant.cli.doctor.report import DoctorReport


SECTIONS: Final = ("machine", "fast-paths", "laws", "parity", "half", "bench", "vllm", "device")


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Check this machine and write one report: versions, fast paths, laws, parity with transformers, times.

    It runs on a tiny random model and, with `--model`, on yours. The report has no paths and no names of
    users. The exit code is 1 if a law or a parity check failed.
    """

    needs_torch: ClassVar[bool] = True

    model: str | None = option("Also check this model: a folder, or a name on the hub.", metavar="MODEL")
    device: str | None = option("Where to run: cpu, cuda, mps, ... (default: the accelerator, if any)")
    dtype: str = option(f"Precision of --model: {', '.join(DTYPES)}. The laws need float32.", "float32")
    output: str | None = option("Write the report as Markdown there.", metavar="FILE")
    json: str | None = option("Write the report as JSON there.", metavar="FILE")
    quick: bool = option("Half a minute: fewer tokens, schedules and repeats.", False)
    skip: list[str] | None = option(
        "Leave a section out; may be repeated.", metavar=f"[{'|'.join(SECTIONS)}]"
    )

    def run(self) -> int:
        """Check the machine, and print and write the report."""
        # Imported here: the help of the command need not load torch, nor other commands transformers' models.
        from descant.cli.doctor.checks import own_model, tiny_model
        from descant.cli.doctor.report import DoctorReport, clock_name, default_device, machine_facts
        from descant.models.loading.loading import check_device

        chosen = self._sections()
        device = check_device(self.device or default_device())
        report = DoctorReport(clock=clock_name(device))
        if "machine" in chosen:
            report.machine += machine_facts()
        models = [tiny_model(device)]
        if self.model is not None:
            report.private.append(self.model)
            terminal.print_info("loading")
            models.append(own_model(self.model, self.dtype, device))
        for checked in models:
            self._check(checked, chosen, report)
        terminal.write_untrusted(report.text())
        for name, path, text in (
            ("output", self.output, report.markdown()),
            ("json", self.json, report.json()),
        ):
            if path is not None:
                write_file(name, path, text)
        return FAILURE if report.num_failed else 0

    def _check(self, checked: CheckedModel, sections: Set[str], report: DoctorReport) -> None:
        """Add the results of the sections on a model."""
        from descant.cli.doctor.checks import LawSize, fast_path_rows, run_half, run_laws, run_parity
        from descant.cli.doctor.device_costs import run_device_costs
        from descant.cli.doctor.report import Fact, model_facts
        from descant.cli.doctor.speed import SpeedSize, run_speed

        progress, new_tokens = terminal.print_info, 8 if self.quick else 24
        if "machine" in sections:
            rounding = checked.rounding
            text = "unknown" if rounding is None else f"{rounding:.1e} of its logits"
            report.models += model_facts(checked.name, checked.model), Fact(f"{checked.name}, rounding", text)
        if "fast-paths" in sections:
            report.fast_paths += fast_path_rows(checked)
        if "laws" in sections:
            report.laws += run_laws(checked, LawSize.quick() if self.quick else LawSize(), progress)
        if "parity" in sections:
            report.parity += run_parity(checked, new_tokens, progress)
        if "bench" in sections:
            size = SpeedSize.quick() if self.quick else SpeedSize()
            report.bench += run_speed(checked, size, "vllm" in sections, progress)
        if "half" in sections and not checked.is_half:
            gc.collect()
            report.half += run_half(checked, new_tokens, progress)
        if "device" in sections:
            report.device += run_device_costs(checked, progress)

    def _sections(self) -> set[str]:
        """The sections that are not skipped."""
        skipped = {name for names in self.skip or () for name in names.split(",")}
        for name in sorted(skipped):
            if name not in SECTIONS:
                raise InputError("skip", f"must be one of {', '.join(SECTIONS)}", name)
        return set(SECTIONS) - skipped
