"""What a transformers model needs, found out by looking at what it declares."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from descant.core.interfaces import Facts
from descant.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ON_MODULES", "facts_of", "overrides"]

_known: WeakKeyDictionary[PreTrainedModel, Facts] = WeakKeyDictionary()

# The names under which models take what they remember, and return it.
_PASTS = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")

# State that a model keeps on its own modules, row by row.
ON_MODULES = ("recurrent_states", "conv1d_state")

# What no declaration tells: kinds of model that put more into their cache than the tokens fed (a learned
# prefix, patches of bytes, images), or forget by cutting it, and so have to keep a cache of their own.
_OWN = frozenset({"blip_text_model", "blt", "cpmant", "git", "mllama", "moshi"})

# Kinds of model whose positions are read off the padding of a batch, so that nothing may be padded.
_LEVEL = frozenset({"prophetnet"})
# Kinds of model that mix up rows: a step of several is broadcast wrongly.
_ALONE = frozenset({"rwkv"})

# Inputs that are the loop's own affair, or that would have to be given again at every step.
_INSIDE = frozenset(
    {
        "self", "args", "kwargs", "labels", "return_dict", "use_cache", "is_first_iteration",
        "next_sequence_length", "past_key_values", "cache_params", "state", "mems", "past_buckets_states",
        "position_ids", "logits_to_keep", "head_mask",
    }
)  # fmt: skip

# What a decoder looks at beside its tokens, at every step: only for one that says so by itself.
_CROSS = frozenset({"encoder_hidden_states", "encoder_attention_mask"})

# Parts of a model whose positions are not those of its tokens.
_ELSEWHERE = ("encoder.", "vision", "visual", "image", "video", "audio", "tower", "relative")

_MEDIA = ("image", "video", "audio")


def facts_of(model: PreTrainedModel) -> Facts:
    """The facts of a model, looked up once."""
    attention = str(getattr(model.config, "_attn_implementation", None) or "eager")
    known = _known.get(model)
    if known is None or known.attention != attention:
        known = _known[model] = _looked_up(model, attention)
    return known


def _looked_up(model: PreTrainedModel, attention: str) -> Facts:
    # Here, not above: with a model at hand it is loaded, without one it takes seconds.
    from transformers import GenerationMixin

    if not isinstance(model, GenerationMixin):
        raise UnsupportedModel(
            f"{type(model).__name__} does not generate: it has no head that predicts tokens"
        )
    takes = inspect.signature(model.forward).parameters
    text = model.config.get_text_config(decoder=True)
    both = bool(model.config.is_encoder_decoder)
    memory = _memory(model, takes, text)
    asks = memory != "keys" or overrides(model, "prepare_inputs_for_generation")
    return Facts(
        encoder_decoder=both,
        positions="position_ids" in takes and not both,
        keeps_logits="logits_to_keep" in takes,
        embeddings="inputs_embeds" in takes,
        vocabulary=_vocabulary(model, text),
        size=_size(model),
        layers=_layers(text),
        attention=attention,
        windows=_windows(text),
        kinds=_kinds(text),
        table=_table(model),
        context=_context(text),
        memory=memory,
        past=next((name for name in _PASTS if name in takes), ""),
        asks=asks,
        level=asks or _stretches(text) or _squares(model) or text.model_type in _LEVEL,
        alone=text.model_type in _ALONE,
        spelt=_padded_table(model),
        places=overrides(model, "_prepare_position_ids_for_generation"),
        main=_main(model, both),
        accepts=_accepted(model, both) - (frozenset() if asks and not both else _CROSS),
        marks=_marks(model.config),
        tied=bool(getattr(model.config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))),
        head=model.get_output_embeddings() is not None,  # type: ignore[no-untyped-call]
    )


def overrides(model: PreTrainedModel, method: str) -> bool:
    """Whether a model has a way of its own to do what transformers does alike for most."""
    from transformers import GenerationMixin

    return getattr(type(model), method, None) is not getattr(GenerationMixin, method, None)


def _memory(model: Any, takes: Mapping[str, Any], text: Any) -> str:
    """Keys and values where the model's own cache would hold nothing else, or what it makes for itself."""
    if not any(name in takes for name in _PASTS):
        return "none"
    usual = model._supports_default_dynamic_cache() and "past_key_values" in takes
    usual = usual and not any(name in vars(module) for module in model.modules() for name in ON_MODULES)
    usual = usual and not {model.config.model_type, text.model_type} & _OWN
    kinds = {type(layer) for layer in DynamicCache(config=text).layers} if usual else set()
    return "keys" if usual and kinds <= {DynamicLayer, DynamicSlidingWindowLayer} else "own"


def _squares(model: PreTrainedModel) -> bool:
    """Whether attention has a triangle of its own, which takes the fed tokens for the last of all rows."""
    return any(table.ndim == 4 and table.shape[-1] == table.shape[-2] > 1 for table in model.buffers())


def _tables(model: PreTrainedModel) -> list[torch.nn.Embedding]:
    """The learned tables of positions that the decoder looks up."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and ("position" in name.lower() or name.lower().endswith("wpe"))
        and not any(part in name.lower() for part in _ELSEWHERE)
    ]


def _padded_table(model: PreTrainedModel) -> bool:
    """Whether the table of positions keeps a line for padding, from where the model would count by itself."""
    return any(table.padding_idx is not None for table in _tables(model))


def _stretches(text: Any) -> bool:
    """Whether rotary frequencies depend on the longest row of a batch, so that rows would mingle."""
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [one for one in (ropes, *ropes.values()) if isinstance(one, dict)]
    return any(one.get("rope_type", one.get("type")) in ("dynamic", "longrope") for one in kinds)


def _vocabulary(model: PreTrainedModel, text: Any) -> int:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(getattr(head, "out_features", 0) or getattr(text, "vocab_size", 0))


def _layers(text: Any) -> int:
    for name in ("decoder_layers", "num_decoder_layers", "num_hidden_layers"):
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    return 0


def _main(model: PreTrainedModel, both: bool) -> str:
    """The name of a model's main input: of its encoder's, where that has another."""
    encoder = getattr(model, "encoder", None) if both else None
    return str(getattr(encoder, "main_input_name", None) or model.main_input_name or "input_ids")


def _accepted(model: Any, both: bool) -> frozenset[str]:
    """The names of all inputs: of the model itself, of how it prepares them, of its encoder and decoder."""
    sources: list[Any] = [model.forward, model.prepare_inputs_for_generation]
    if both:
        parts = [model.get_encoder()] + [
            getattr(model, name, None) for name in ("encoder", "decoder", "model")
        ]
        sources += [part.forward for part in parts if isinstance(part, torch.nn.Module)]
    names = {name for source in sources for name in inspect.signature(source).parameters}
    return frozenset(name for name in names if name not in _INSIDE and not name.startswith("output_"))


def _marks(config: Any) -> dict[str, int]:
    """The tokens that stand for media in a prompt."""
    found: dict[str, int] = {}
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())]
    for part in parts:
        for kind in _MEDIA:
            for name in (f"{kind}_token_id", f"{kind}_token_index", f"special_{kind}_token_id"):
                token = getattr(part, name, None)
                if isinstance(token, int):
                    found.setdefault(kind, token)
    return found


def _windows(text: Any) -> dict[str, int | None]:
    """How far back each kind of layer sees."""
    window = getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        window = None
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        chunk = getattr(text, "attention_chunk_size", None)
        chunked = "chunked_attention" if chunk is not None else "full_attention"
        kinds = [chunked if window is None else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def _kinds(text: Any) -> tuple[str, ...]:
    """The kind of each layer."""
    kinds = getattr(text, "layer_types", None)
    return tuple(kinds) if kinds else (next(iter(_windows(text))),) * _layers(text)


def _table(model: PreTrainedModel) -> int | None:
    """The size of the smallest learned table of positions that the decoder looks up, if it has one."""
    # Some tables keep their first lines for padding (OPT, BART).
    sizes = [table.num_embeddings - int(getattr(table, "offset", 0)) for table in _tables(model)]
    return min(sizes) if sizes else None


def _size(model: PreTrainedModel) -> int | None:
    """How wide the embeddings of tokens are."""
    try:
        table: Any = model.get_input_embeddings()
    except NotImplementedError:  # several tables, or none that is named as such
        return None
    return int(table.embedding_dim) if isinstance(table, torch.nn.Embedding) else None


def _context(text: Any) -> int | None:
    size = getattr(text, "max_position_embeddings", None)
    return int(size) if isinstance(size, int) and size > 0 else None
