"""A tiny Whisper with random weights, recordings for it, and the comparison with transformers' own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

import descant

# The vocabulary: text, then the special tokens in the order of a multilingual Whisper, then timestamps.
END, START = 100, 101
LANGUAGES = {"<|en|>": 102, "<|de|>": 103, "<|fr|>": 104, "<|yue|>": 105}
TASKS = {"translate": 106, "transcribe": 107}
PREVIOUS, SILENCE, TIMELESS = 109, 110, 111
ZERO = 112
POSITIONS, STRIDE, BINS = 16, 2, 8
WINDOW = POSITIONS * STRIDE
VOCABULARY = ZERO + POSITIONS + 1

SETTINGS: dict[str, Any] = {
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "no_timestamps_token_id": TIMELESS,
    "prev_sot_token_id": PREVIOUS,
    "suppress_tokens": [3, 7, START, *LANGUAGES.values(), *TASKS.values(), 108, PREVIOUS, SILENCE],
    "begin_suppress_tokens": [5, END],
    "max_initial_timestamp_index": 4,
    "alignment_heads": [[0, 1], [1, 0], [1, 2]],
    "max_new_tokens": 28,
    "return_timestamps": False,
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
}


@functools.cache
def whisper(attention: str = "sdpa") -> Any:
    """The model; what a test changes in its generation config it must change in a copy."""
    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=BINS, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=POSITIONS, max_target_positions=64, median_filter_width=3,
        bos_token_id=END, eos_token_id=END, pad_token_id=END, decoder_start_token_id=START,
        attn_implementation=attention,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if "embed" in name:
                weight.copy_(noise * 0.55)
            elif weight.ndim > 1:
                # The audio must have more influence than the previous text.
                gain = 4.0 if "encoder_attn.v" in name or "encoder_attn.out" in name else 1.6
                weight.copy_(noise * gain / weight[0].numel() ** 0.5)
            else:
                weight.add_(noise * 0.2)
        table = model.model.decoder.embed_tokens.weight
        for token, scale in ((END, 2.0), (SILENCE, 2.0)):
            table[token] *= scale
    model.generation_config = transformers.GenerationConfig(**SETTINGS)
    return model


def changed(model: Any, **settings: Any) -> Any:
    """The same weights with another generation config; None takes an entry away."""
    other = copy.copy(model)
    kept = {name: value for name, value in {**SETTINGS, **settings}.items() if value is not None}
    other.generation_config = transformers.GenerationConfig(**kept)
    return other


def recordings(*frames: int, seed: int = 0) -> dict[str, Tensor]:
    """Noise of these lengths, as a feature extractor hands recordings over."""
    source = torch.Generator().manual_seed(seed)
    features = torch.zeros(len(frames), BINS, max(frames))
    mask = torch.zeros(len(frames), max(frames), dtype=torch.long)
    for line, count in enumerate(frames):
        features[line, :, :count] = torch.randn(BINS, count, generator=source)
        mask[line, :count] = 1
    return {"input_features": features, "attention_mask": mask}


def both(model: Any, seed: int | None = None, **call: Any) -> tuple[Any, Any]:
    """The outputs of transformers' own generate and of ours for one call, with the same seed."""
    found = []
    for way in (type(model).generate, descant.generate):
        if seed is not None:
            torch.manual_seed(seed)
        with torch.no_grad():
            found.append(way(model, **call))
    return found[0], found[1]


def equal(theirs: Any, ours: Any) -> None:
    """Assert that both transcripts are equal: tokens, and the tokens and times of each segment."""
    if isinstance(theirs, Tensor):
        assert torch.equal(theirs, ours), (theirs, ours)
        return
    assert torch.equal(theirs["sequences"], ours["sequences"])
    assert len(theirs["segments"]) == len(ours["segments"])
    for line, (wanted, got) in enumerate(zip(theirs["segments"], ours["segments"], strict=True)):
        assert len(wanted) == len(got), line
        for one, other in zip(wanted, got, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            assert float(one["start"]) == float(other["start"])
            assert float(one["end"]) == float(other["end"])
            assert one["idxs"] == other["idxs"]


def compared(model: Any, seed: int | None = None, **call: Any) -> Any:
    """Ours, after it was found equal to theirs."""
    theirs, ours = both(model, seed, **call)
    equal(theirs, ours)
    return ours
