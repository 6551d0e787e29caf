"""The models of the fuzz: one tiny random model of each kind, built once per process."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers.pytorch_utils import Conv1D

from tests.support import tiny_models
from tools.sweep.kinds import representative
from tools.sweep.small import FIRST, PAD, VOCABULARY
from tools.sweep.trial import subject_of

__all__ = ["ADAPTED", "KINDS", "Store", "Subject", "adapted", "subject", "tokenizer"]


@dataclass(frozen=True)
class Store:
    """A cache by name, with its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewinds: bool = True  # whether a method may take tokens back on it
    lossy: bool = False

    def fields(self) -> dict[str, Any]:
        """The fields of a config that names it."""
        named: dict[str, Any] = {"cache_implementation": self.name}
        return {**named, "cache_config": dict(self.settings)} if self.settings else named


@dataclass(frozen=True)
class Subject:
    """A model, what its tokens mean, and the caches that it supports."""

    name: str
    model: Any
    draft: Any  # a model much like it; None: it cannot verify drafts
    vocab: int
    eos: int
    pad: int
    first: int  # the smallest token of a prompt
    start: int | None  # the first token of the decoder; None: it has no encoder
    cache_type: str
    exact: tuple[Store, ...]
    lossy: tuple[Store, ...]
    folder: Path | None = None  # where 4.52.4 finds the same weights

    @property
    def encodes(self) -> bool:
        """Whether it has an encoder."""
        return self.start is not None

    @property
    def tokens(self) -> range:
        """Tokens without a special meaning."""
        return range(self.first, self.vocab - 1)


# Fewer tokens than the tests' models have, so that n-grams repeat and stops occur: vocabulary, bos, eos, pad.
_SMALL = {
    "llama": (48, 1, 2, 0),
    "gpt2": (47, 46, 46, 46),
    "gpt-neox": (41, 3, 2, 1),
    "mistral": (48, 1, 2, 0),
    "gemma": (45, 2, 1, 0),
    "opt": (43, 2, 3, 1),
    "t5": (44, 0, 1, 0),
    "bart": (46, 0, 2, 1),
}
# By the kinds of the sweep.
_SWEPT = {
    "bloom": "ALiBi, no positions",
    "gemma3": "sliding and full attention by layer",
    "mixtral": "mixture of experts",
    "deepseek": "latent attention (MLA)",
    "mamba": "recurrent",
    "jamba": "recurrent and attention by layer",
    "qwen3next": "linear attention",
    "gpt1": "no memory at all",
}
# How often each is chosen.
KINDS: dict[str, int] = {
    "llama": 6, "gpt2": 4, "gpt-neox": 2, "mistral": 4, "gemma": 2, "opt": 2, "t5": 4, "bart": 5,
    "bloom": 1, "gemma3": 2, "mixtral": 1, "deepseek": 1, "mamba": 2, "jamba": 1, "qwen3next": 1, "gpt1": 1,
}  # fmt: skip

# Kinds that have adapters, too. The others have experts or a mixer, whose LoRA does not go row by row.
ADAPTED = ("llama", "gpt2", "gpt-neox", "mistral", "gemma", "t5", "bart", "bloom", "gemma3")

_ANY = (
    Store("dynamic"),
    Store("paged"),
    Store("static", {"max_cache_len": 128}),
    Store("offloaded"),
    Store("offloaded_static", {"max_cache_len": 128}),
)
_WINDOWED = (Store("hybrid", rewinds=False),)
_SLIDING = (*_WINDOWED, Store("sliding_window", rewinds=False))
# Caches that evict, with room for everything.
_ROOMY_ROTARY = (Store("sink", {"window_length": 128, "num_sink_tokens": 2}, rewinds=False),)
_ROOMY = (
    Store("snapkv", {"budget": 128, "window": 8, "kernel": 3}, rewinds=False),
    Store("h2o", {"budget": 128, "recent": 8}, rewinds=False),
)
_TIGHT_ROTARY = (Store("sink", {"window_length": 6, "num_sink_tokens": 2}, rewinds=False, lossy=True),)
_TIGHT = (
    Store("snapkv", {"budget": 5, "window": 3, "kernel": 3}, rewinds=False, lossy=True),
    Store("h2o", {"budget": 5, "recent": 3}, rewinds=False, lossy=True),
)
_ROUNDED = (Store("quantized", {"backend": "quanto", "nbits": 4, "residual_length": 3}, lossy=True),)
_RECURRENT = (Store("dynamic"), Store("mamba"), Store("hybrid"))
_EXACT = {
    "llama": (*_ANY, *_ROOMY_ROTARY, *_ROOMY),
    "gpt-neox": (*_ANY, *_ROOMY_ROTARY),
    "gpt2": (*_ANY, *_ROOMY),
    "mistral": (*_ANY, *_SLIDING),
    "gemma3": (*_ANY, *_SLIDING),
    "mamba": _RECURRENT,
    "jamba": _RECURRENT,
    "qwen3next": _RECURRENT,
    "gpt1": (Store("dynamic"),),
}
_LOSSY = {
    "llama": (*_TIGHT_ROTARY, *_TIGHT, *_ROUNDED),
    "gpt-neox": _TIGHT_ROTARY,
    "gpt2": (*_TIGHT, *_ROUNDED),
    "t5": _ROUNDED,
}


@functools.cache
def subject(name: str) -> Subject:
    """The model of a kind, in double precision, so that no choice depends on rounding."""
    return _tiny(name) if name in _SMALL else _swept(name)


def _tiny(name: str) -> Subject:
    """A model of the test suite with a smaller vocabulary."""
    known = tiny_models.ARCHITECTURES[name]
    vocab, bos, eos, pad = _SMALL[name]
    arch = replace(known, config={**known.config, "vocab_size": vocab}, bos=bos, eos=eos, pad=pad)
    folder = tiny_models.build(arch, Path(_folder().name) / name)
    model = tiny_models.load(arch, folder).model.double()
    first = 4 if eos < 4 else 0
    caches = _EXACT.get(name, _ANY), _LOSSY.get(name, ())
    return Subject(
        name, model, _near(model), vocab, eos, pad, first, arch.start, "kv", *caches, folder=folder
    )


def _swept(name: str) -> Subject:
    """A model of the sweep; its own config has no end token."""
    model = subject_of(representative(_SWEPT[name])).model.double()
    model.set_experts_implementation("eager")  # the others have no kernel for double precision
    cache_type = "recurrent" if _EXACT.get(name) is _RECURRENT else "none" if name == "gpt1" else "kv"
    draft = None if cache_type == "recurrent" else _near(model)
    caches = _EXACT.get(name, _ANY), _LOSSY.get(name, ())
    return Subject(name, model, draft, VOCABULARY, 2, PAD, FIRST, None, cache_type, *caches)


@functools.cache
def adapted(name: str) -> Subject:
    """The model of a kind with the LoRA adapters A, which is active, and B."""
    on = subject(name)
    model = copy.deepcopy(on.model)
    torch.manual_seed(23)
    for adapter in "BA":  # the last one is active
        lora = LoraConfig(
            r=2,
            lora_alpha=8,
            target_modules="all-linear",
            init_lora_weights=False,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        with warnings.catch_warnings():  # of a second adapter
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            model.add_adapter(lora, adapter_name=adapter)
    return replace(on, model=model.double().eval(), folder=None)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fuzz-")


@torch.no_grad()
def _near(model: Any) -> Any:
    """A draft model: the model with a little noise on its weights."""
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(17)
    for weight in made.parameters():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.mul_(0.99).add_(noise * weight.std(), alpha=0.1)
    return made


@functools.cache
def tokenizer(vocab: int) -> Any:
    """A tokenizer of that many tokens: a letter or a mark each, the last ones two or three letters."""
    import transformers
    from tokenizers import Tokenizer, decoders, models

    marks = [chr(97 + index) for index in range(26)] + [chr(33 + index) for index in range(64)]
    words = ["ab", "abc", "ca", "bcd", "the", "zz"] + [one + two for one in "abcdef" for two in "abcdefgh"]
    texts = list(dict.fromkeys(marks[: vocab - 6] + words))[:vocab]
    made = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, []))
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)
