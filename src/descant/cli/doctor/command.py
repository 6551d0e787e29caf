"""The command `descant doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import typer

from descant.cli import terminal
from descant.cli.command import Command
from descant.cli.exit_codes import FAILURE
from descant.config.dtype_names import DTYPES
from descant.core.atomic_file import write_text
from descant.errors import InputError

__all__ = ["DoctorCommand"]

SECTIONS: Final = ("machine", "fast-paths", "laws", "parity", "half", "bench", "vllm")


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Check this machine and write one report: versions, fast paths, laws, parity with transformers, times.

    It runs on a tiny random model and, with `--model`, on yours. The report has no paths and no names of
    users. The exit code is 1 if a law or a parity check failed.
    """

    needs_torch: ClassVar[bool] = True

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
        # Imported here: the help of the command need not load torch.
        from descant.cli.doctor.machine import clock_name, default_device, machine_facts
        from descant.cli.doctor.report import DoctorReport
        from descant.models.loading import check_device

        chosen = self._sections()
        device = check_device(self.device or default_device())
        report = DoctorReport(clock=clock_name(device))
        if "machine" in chosen:
            report.machine += machine_facts()
        # Late imports: they load transformers' models, which other commands do not need.
        from descant.cli.doctor.examination import Examination, own_subject, tiny_subject

        subjects = [tiny_subject(device)]
        if self.model is not None:
            report.private.append(self.model)
            terminal.print_info("loading")
            subjects.append(own_subject(self.model, self.dtype, device))
        Examination(chosen, self.quick).run(subjects, report)
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


def _write(name: str, path: str, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(name, f"must be a file that can be written ({error.strerror})", path) from None
