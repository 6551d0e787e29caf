"""What a transformers model needs, found out by looking at what it declares."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from descant.core.interfaces import ModelTraits
from descant.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MODULE_STATE_ATTRS", "has_override", "traits_of"]

_traits_by_model: WeakKeyDictionary[PreTrainedModel, ModelTraits] = WeakKeyDictionary()

# The names under which models take what they remember, and return it.
_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")

# State that a model keeps on its own modules, row by row.
MODULE_STATE_ATTRS = ("recurrent_states", "conv1d_state")

# What no declaration tells: kinds of model that put more into their cache than the tokens fed (a learned
# prefix, patches of bytes, images), or forget by cutting it, and so have to keep a cache of their own.
_OWN_CACHE_MODELS = frozenset({"blip_text_model", "blt", "cpmant", "git", "mllama", "moshi"})

# Kinds of model whose positions are read off the padding of a batch, so that nothing may be padded.
_EQUAL_LENGTH_MODELS = frozenset({"prophetnet"})
# Kinds of model that mix up rows: a step of several is broadcast wrongly.
_BATCH_SIZE_ONE_MODELS = frozenset({"rwkv"})

# Inputs that are the loop's own affair, or that would have to be given again at every step.
_INTERNAL_INPUTS = frozenset(
    {
        "self", "args", "kwargs", "labels", "return_dict", "use_cache", "is_first_iteration",
        "next_sequence_length", "past_key_values", "cache_params", "state", "mems", "past_buckets_states",
        "position_ids", "logits_to_keep", "head_mask",
    }
)  # fmt: skip

# What a decoder looks at beside its tokens, at every step: only for one that says so by itself.
_CROSS_ATTENTION_INPUTS = frozenset({"encoder_hidden_states", "encoder_attention_mask"})

# Parts of a model whose positions are not those of its tokens.
_NON_DECODER_MODULES = ("encoder.", "vision", "visual", "image", "video", "audio", "tower", "relative")

_MEDIA_TYPES = ("image", "video", "audio")


def traits_of(model: PreTrainedModel) -> ModelTraits:
    """The facts of a model, looked up once."""
    attention = str(getattr(model.config, "_attn_implementation", None) or "eager")
    known = _traits_by_model.get(model)
    if known is None or known.attn_implementation != attention:
        known = _traits_by_model[model] = _inspect_model(model, attention)
    return known


def _inspect_model(model: PreTrainedModel, attention: str) -> ModelTraits:
    # Here, not above: with a model at hand it is loaded, without one it takes seconds.
    from transformers import GenerationMixin

    if not isinstance(model, GenerationMixin):
        raise UnsupportedModel(
            f"{type(model).__name__} does not generate: it has no head that predicts tokens"
        )
    takes = inspect.signature(model.forward).parameters
    text = model.config.get_text_config(decoder=True)
    both = bool(model.config.is_encoder_decoder)
    memory = _cache_type(model, takes, text)
    asks = memory != "kv" or has_override(model, "prepare_inputs_for_generation")
    return ModelTraits(
        is_encoder_decoder=both,
        supports_position_ids="position_ids" in takes and not both,
        supports_logits_to_keep="logits_to_keep" in takes,
        supports_inputs_embeds="inputs_embeds" in takes,
        vocab_size=_vocab_size(model, text),
        embedding_size=_embedding_size(model),
        num_layers=_num_layers(text),
        attn_implementation=attention,
        sliding_windows=_sliding_windows(text),
        layer_types=_layer_types(text),
        max_positions=_max_positions(model),
        context_length=_context_length(text),
        cache_type=memory,
        cache_argument=next((name for name in _CACHE_ARGUMENTS if name in takes), ""),
        prepares_own_inputs=asks,
        needs_equal_lengths=asks
        or _has_dynamic_rope(text)
        or _has_own_causal_mask(model)
        or text.model_type in _EQUAL_LENGTH_MODELS,
        needs_batch_size_one=text.model_type in _BATCH_SIZE_ONE_MODELS,
        needs_position_ids=_has_padded_positions(model),
        has_own_position_ids=has_override(model, "_prepare_position_ids_for_generation"),
        main_input_name=_main_input_name(model, both),
        input_names=_input_names(model, both)
        - (frozenset() if asks and not both else _CROSS_ATTENTION_INPUTS),
        placeholder_tokens=_placeholder_tokens(model.config),
        has_tied_embeddings=bool(
            getattr(model.config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
        ),
        has_lm_head=model.get_output_embeddings() is not None,  # type: ignore[no-untyped-call]
    )


def has_override(model: PreTrainedModel, method: str) -> bool:
    """Whether a model has a way of its own to do what transformers does alike for most."""
    from transformers import GenerationMixin

    return getattr(type(model), method, None) is not getattr(GenerationMixin, method, None)


def _cache_type(model: Any, takes: Mapping[str, Any], text: Any) -> str:
    """Keys and values where the model's own cache would hold nothing else, or what it makes for itself."""
    if not any(name in takes for name in _CACHE_ARGUMENTS):
        return "none"
    usual = model._supports_default_dynamic_cache() and "past_key_values" in takes
    usual = usual and not any(
        name in vars(module) for module in model.modules() for name in MODULE_STATE_ATTRS
    )
    usual = usual and not {model.config.model_type, text.model_type} & _OWN_CACHE_MODELS
    kinds = {type(layer) for layer in DynamicCache(config=text).layers} if usual else set()
    return "kv" if usual and kinds <= {DynamicLayer, DynamicSlidingWindowLayer} else "recurrent"


def _has_own_causal_mask(model: PreTrainedModel) -> bool:
    """Whether attention has a triangle of its own, which takes the fed tokens for the last of all rows."""
    return any(table.ndim == 4 and table.shape[-1] == table.shape[-2] > 1 for table in model.buffers())


def _position_embeddings(model: PreTrainedModel) -> list[torch.nn.Embedding]:
    """The learned tables of positions that the decoder looks up."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and ("position" in name.lower() or name.lower().endswith("wpe"))
        and not any(part in name.lower() for part in _NON_DECODER_MODULES)
    ]


def _has_padded_positions(model: PreTrainedModel) -> bool:
    """Whether the table of positions keeps a line for padding, from where the model would count by itself."""
    return any(table.padding_idx is not None for table in _position_embeddings(model))


def _has_dynamic_rope(text: Any) -> bool:
    """Whether rotary frequencies depend on the longest row of a batch, so that rows would mingle."""
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [one for one in (ropes, *ropes.values()) if isinstance(one, dict)]
    return any(one.get("rope_type", one.get("type")) in ("dynamic", "longrope") for one in kinds)


def _vocab_size(model: PreTrainedModel, text: Any) -> int:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(getattr(head, "out_features", 0) or getattr(text, "vocab_size", 0))


def _num_layers(text: Any) -> int:
    for name in ("decoder_layers", "num_decoder_layers", "num_hidden_layers"):
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    return 0


def _main_input_name(model: PreTrainedModel, both: bool) -> str:
    """The name of a model's main input: of its encoder's, where that has another."""
    encoder = getattr(model, "encoder", None) if both else None
    return str(getattr(encoder, "main_input_name", None) or model.main_input_name or "input_ids")


def _input_names(model: Any, both: bool) -> frozenset[str]:
    """The names of all inputs: of the model itself, of how it prepares them, of its encoder and decoder."""
    sources: list[Any] = [model.forward, model.prepare_inputs_for_generation]
    if both:
        parts = [model.get_encoder()] + [
            getattr(model, name, None) for name in ("encoder", "decoder", "model")
        ]
        sources += [part.forward for part in parts if isinstance(part, torch.nn.Module)]
    names = {name for source in sources for name in inspect.signature(source).parameters}
    return frozenset(
        name for name in names if name not in _INTERNAL_INPUTS and not name.startswith("output_")
    )


def _placeholder_tokens(config: Any) -> dict[str, int]:
    """The tokens that stand for media in a prompt."""
    found: dict[str, int] = {}
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())]
    for part in parts:
        for kind in _MEDIA_TYPES:
            for name in (f"{kind}_token_id", f"{kind}_token_index", f"special_{kind}_token_id"):
                token = getattr(part, name, None)
                if isinstance(token, int):
                    found.setdefault(kind, token)
    return found


def _sliding_windows(text: Any) -> dict[str, int | None]:
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


def _layer_types(text: Any) -> tuple[str, ...]:
    """The kind of each layer."""
    kinds = getattr(text, "layer_types", None)
    return tuple(kinds) if kinds else (next(iter(_sliding_windows(text))),) * _num_layers(text)


def _max_positions(model: PreTrainedModel) -> int | None:
    """The size of the smallest learned table of positions that the decoder looks up, if it has one."""
    # Some tables keep their first lines for padding (OPT, BART).
    sizes = [table.num_embeddings - int(getattr(table, "offset", 0)) for table in _position_embeddings(model)]
    return min(sizes) if sizes else None


def _embedding_size(model: PreTrainedModel) -> int | None:
    """How wide the embeddings of tokens are."""
    try:
        table: Any = model.get_input_embeddings()
    except NotImplementedError:  # several tables, or none that is named as such
        return None
    return int(table.embedding_dim) if isinstance(table, torch.nn.Embedding) else None


def _context_length(text: Any) -> int | None:
    size = getattr(text, "max_position_embeddings", None)
    return int(size) if isinstance(size, int) and size > 0 else None
