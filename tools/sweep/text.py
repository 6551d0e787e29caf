"""Tiny random models that read and write text: causal language models and encoder-decoders."""

from __future__ import annotations

import inspect
import math
import re
import zlib
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tools.sweep.small import BOS, FIRST, PAD, VOCABULARY, small
from tools.sweep.subject import Entry, Subject

__all__ = ["batched", "prompts", "scale_weights", "subject"]

_LENGTHS = (5, 9, 14)

# Standard deviations: of the output of a matrix for an input with 1, of a logit, of the noise added to norms
# and biases.
_GAIN, _SPREAD, _NOISE = 1.0, 3.0, 0.15
# Other gains, by parameter name: queries and keys, so that attention is not uniform; queries without the
# division by the root of the head size; cross-attention outputs, which vary little between steps; decay,
# input and skip of a recurrent state.
_GAINS = {
    re.compile(r"(^|[._])(k|query|key|[qk]_lin|[qk]_(a|b)?_?proj\w*|kv_a\w*)\.weight$"): 1.5,
    re.compile(r"Attention\.q\.weight$"): 0.5,
    re.compile(r"(EncDecAttention\.o|encoder_attn\.out_proj|crossattention\.output\.dense)\.weight$"): 0.5,
    re.compile(r"dt_proj\.weight$"): 0.3,
    re.compile(r"x_proj\.weight$"): 2.0,
    re.compile(r"\.D$"): 0.2,
}


def subject(entry: Entry) -> Subject:
    """The tiny model of a class and three prompts of different length, one at a time and as a batch."""
    kind = getattr(transformers, entry.name)
    config = small(kind.config_class, decoder=entry.task == "causal-lm")
    torch.manual_seed(0)
    model = scale_weights(kind(config))
    settings = model.generation_config
    settings.eos_token_id = None
    if settings.pad_token_id is None:
        settings.pad_token_id = PAD
    if model.config.is_encoder_decoder and settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = BOS
    texts = prompts(entry.name)
    if hasattr(model, "num_codebooks"):
        return _codebook_subject(entry, model, texts)
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    singles = [batched([text], masked) for text in texts]
    joint = batched(texts, True, left=not model.config.is_encoder_decoder)
    return Subject(entry, model, singles, joint)


def _codebook_subject(entry: Entry, model: Any, texts: list[Tensor]) -> Subject:
    """A model with parallel token streams, one row each."""
    streams = model.num_codebooks
    model.generation_config.decoder_start_token_id = model.config.bos_token_id
    rows = [torch.stack([text.roll(stream) for stream in range(streams)]) for text in texts]
    subject = Subject(entry, model, [{"input_ids": row} for row in rows])
    subject.options = {"num_return_sequences": 1}  # its own generate() does not set the default
    subject.note = f"{streams} streams of tokens for each sequence, one sequence at a time"
    if entry.model_type == "musicgen":
        subject.reference_options = {"use_cache": False}
        subject.note += "; transformers feeds only the last frame of a prompt if it has a cache"
    return subject


def prompts(name: str, vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Three prompts of ordinary tokens, the same for a name in every process."""
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [torch.randint(FIRST, vocabulary, (length,), generator=source) for length in _LENGTHS]


def batched(texts: list[Tensor], masked: bool, left: bool = True) -> dict[str, Tensor]:
    """Texts in the format of a tokenizer: one padded tensor and its mask."""
    width = max(len(text) for text in texts)
    ids = torch.full((len(texts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        where = slice(width - len(text), width) if left else slice(0, len(text))
        ids[row, where], mask[row, where] = text, 1
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


@torch.no_grad()
def scale_weights(model: Any) -> Any:
    """Scale a new model's weights so that every part affects the output; the same model.

    Initial weights are so small that the output hardly depends on the input. Norms are exactly 1, biases and
    gates exactly 0. That would hide errors in positions, masks or caches.
    """
    source = torch.Generator().manual_seed(1)
    head, table = (getattr(part, "weight", None) for part in _embeddings(model))
    base = _GAIN if head is not table else 2 * _GAIN  # else a model repeats its last token
    embedding_scale = 1.0
    if table is not None and getattr(model.config, "scale_embedding", False):
        embedding_scale = math.sqrt(table.shape[1])
    owners = {id(tensor): module for module in model.modules() for tensor in module.parameters(recurse=False)}
    for name, tensor in model.named_parameters():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=source)
        gain = next((gain for pattern, gain in _GAINS.items() if pattern.search(name)), base)
        if tensor.ndim < 2:
            tensor.mul_(gain / base).add_(noise * _NOISE)
            continue
        owner, spread = owners[id(tensor)], float(tensor.std())
        if isinstance(owner, nn.Embedding) or tensor is head:
            gain = _SPREAD if tensor is not table or tensor is head else 2 * _SPREAD / embedding_scale
        target_std = gain / math.sqrt(_fan_in(owner, tensor))
        if not math.isfinite(spread) or spread < 1e-6:
            tensor.copy_(noise * target_std)
        elif spread < target_std or isinstance(owner, nn.Linear | nn.Embedding):
            tensor.mul_(target_std / spread)
    return model.float().eval()


def _embeddings(model: Any) -> tuple[Any, Any]:
    """The output and input embeddings of a model, if it implements them."""
    try:
        return model.get_output_embeddings(), model.get_input_embeddings()
    except NotImplementedError:
        return None, None


def _fan_in(module: nn.Module, tensor: Tensor) -> int:
    """The number of inputs that a weight sums over."""
    grouped = isinstance(module, nn.Conv1d | nn.Conv2d)
    return math.prod(tensor.shape[1:]) if grouped else int(tensor.shape[-1])
