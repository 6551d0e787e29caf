"""The fields of a config that codebooks support."""

from __future__ import annotations

from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.config.generation_mode import GenerationMode
from descant.decoding.processors.pipeline import PROCESSOR_SPECS
from descant.errors import NotInThisVersion
from descant.models.codebooks.frames import CodebookFamily

__all__ = ["SAMPLING_PROCESSORS", "check_codebook_config", "codebook_config", "row_seed"]

# Fields of processors that read scores alone, and no tokens before them.
SAMPLING_PROCESSORS: Final = frozenset(
    {
        "remove_invalid_values", "temperature", "dynamic_temperature_range", "top_n_sigma", "top_h", "top_k",
        "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "p_less", "xtc_probability",
        "renormalize_logits",
    }
)  # fmt: skip

_SEED_STEP: Final = 0x9E3779B97F4A7C15  # odd and irregular, so that the seeds of rows are far apart
_MAX_SEED: Final = 2**62

_TEXT: Final = "needs the text of tokens, and codes have none"
_ONE_SEQUENCE: Final = "needs rows that move alone, and the codebooks of a sequence move together"
_REASONS: Final = {
    "stop_strings": _TEXT,
    "stop_regex": _TEXT,
    "token_healing": _TEXT,
    "grammar": _TEXT,
    "banned_phrases": _TEXT,
    "num_return_sequences": "must be 1 for codebooks: pass the prompt several times",
    "cache_implementation": "is not supported for codebooks, whose rows share a cache of their own",
    "prefill_chunk_size": "is not supported for codebooks",
    "logprobs": "is not supported for codebooks",
    "output_attentions": "is not supported for codebooks: attention is that of sequences",
    "output_hidden_states": "is not supported for codebooks: hidden states are those of sequences",
}


def check_codebook_config(
    config: GenerationConfig, family: CodebookFamily, assistant_model: Any = None
) -> None:
    """Raise for a field that has no meaning for codebooks, or no support."""
    model = type(family.network).__name__
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        names = {
            "num_beams": config.num_beams > 1,
            "dola_layers": config.dola_layers is not None,
            "penalty_alpha": mode is GenerationMode.CONTRASTIVE_SEARCH,
        }
        name = next((name for name, is_set in names.items() if is_set), "assistant_model")
        value = getattr(config, name, type(assistant_model).__name__)
        raise NotInThisVersion(name, f"{_ONE_SEQUENCE} ({model})", value, "leave it out")
    for name, reason in _REASONS.items():
        value = getattr(config, name)
        is_neutral = value is None or value is False or (value == 1 and value is not True)
        if not is_neutral and config.source(name) != "model":
            raise NotInThisVersion(name, f"{reason} ({model})", value, "leave it out")
    if config.guidance_scale not in (None, 1.0) and not family.has_guidance:
        must = f"has no meaning for {model}, which reads nothing that could be left out"
        raise NotInThisVersion("guidance_scale", must, config.guidance_scale, "leave it out")
    if config.use_cache is False and config.source("use_cache") != "model":
        must = f"must not be False for codebooks, whose rows share a cache ({model})"
        raise NotInThisVersion("use_cache", must, False, "leave it out")
    if family.processors is None:
        return
    for spec in PROCESSOR_SPECS:
        if spec.name not in family.processors and spec.is_enabled(config):
            must = f"reads tokens before the code, and frames of {model} are no tokens"
            raise NotInThisVersion(spec.name, must, getattr(config, spec.name), "leave it out")


def row_seed(seed: int, number: int) -> int:
    """The seed of a row of a sequence with this seed: rows must not share their noise."""
    return (seed + number * _SEED_STEP) % _MAX_SEED


def codebook_config(config: GenerationConfig, max_new_tokens: int, **values: Any) -> GenerationConfig:
    """The config of a codebook's row: guidance is the network's, and the length is that of the sequence."""
    return config.replace(guidance_scale=None, max_length=None, max_new_tokens=max_new_tokens, **values)
