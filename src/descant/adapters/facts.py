"""What a transformers model accepts, found out by looking at what it declares."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from descant.errors import UnsupportedModel
from descant.ports import Facts

__all__ = ["facts_of"]

_known: WeakKeyDictionary[PreTrainedModel, Facts] = WeakKeyDictionary()


def facts_of(model: PreTrainedModel) -> Facts:
    """The facts of a model, looked up once."""
    attention = str(getattr(model.config, "_attn_implementation", None) or "eager")
    known = _known.get(model)
    if known is None or known.attention != attention:
        known = _known[model] = _looked_up(model, attention)
    return known


def _looked_up(model: PreTrainedModel, attention: str) -> Facts:
    takes = inspect.signature(model.forward).parameters
    text = model.config.get_text_config(decoder=True)
    if "past_key_values" not in takes:
        raise UnsupportedModel(
            f"{type(model).__name__} takes no `past_key_values`: "
            "models without a key-value cache are not in this version"
        )
    if _recurrent(text):
        raise UnsupportedModel(
            f"{type(model).__name__} keeps recurrent state, which is not in this version of Descant"
        )
    both = bool(model.config.is_encoder_decoder)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    vocabulary = int(getattr(head, "out_features", 0) or text.vocab_size)
    layers = (
        getattr(text, "decoder_layers", None)
        or getattr(text, "num_decoder_layers", None)
        or text.num_hidden_layers
    )
    return Facts(
        encoder_decoder=both,
        positions="position_ids" in takes and not both,
        keeps_logits="logits_to_keep" in takes,
        embeddings="inputs_embeds" in takes,
        vocabulary=vocabulary,
        size=_size(model),
        layers=int(layers),
        attention=attention,
        windows=_windows(text),
        table=_table(model),
        context=_context(text),
    )


def _recurrent(text: Any) -> bool:
    kinds = set(getattr(text, "layer_types", None) or ())
    return bool(kinds - {"full_attention", "sliding_attention", "chunked_attention"})


def _windows(text: Any) -> dict[str, int | None]:
    """How far back each kind of layer sees."""
    window = getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        window = None
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def _table(model: PreTrainedModel) -> int | None:
    """The size of the smallest learned table of positions that the decoder looks up, if it has one."""
    sizes = []
    for name, module in model.named_modules():
        where = name.lower()
        if (
            isinstance(module, torch.nn.Embedding)
            and ("position" in where or where.endswith("wpe"))
            and "encoder." not in where
        ):
            # Some tables keep their first lines for padding (OPT, BART).
            sizes.append(module.num_embeddings - int(getattr(module, "offset", 0)))
    return min(sizes) if sizes else None


def _size(model: PreTrainedModel) -> int | None:
    """How wide the embeddings of tokens are."""
    table: Any = model.get_input_embeddings()
    return int(table.embedding_dim) if isinstance(table, torch.nn.Embedding) else None


def _context(text: Any) -> int | None:
    size = getattr(text, "max_position_embeddings", None)
    return int(size) if isinstance(size, int) and size > 0 else None
