"""Model traits, found by inspecting a transformers model and its config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from descant.core.interfaces import ModelTraits
from descant.errors import UnsupportedModel
from descant.models.forward.cache_layers import DYNAMIC_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_traits_by_model: WeakKeyDictionary[PreTrainedModel, ModelTraits] = WeakKeyDictionary()

# Names under which models take and return their cache or state.
_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")

# Per-row state that models keep as attributes of their modules.
MODULE_STATE_ATTRS = ("recurrent_states", "conv1d_state")

# Model types that cache more than the fed tokens (a learned prefix, byte patches, images) or truncate their
# cache, which nothing in the model declares. They use their own cache classes.
_OWN_CACHE_MODELS = frozenset({"blip_text_model", "blt", "cpmant", "git", "mllama", "moshi"})

# Model types that compute positions from the padding of a batch, so rows must not be padded.
_EQUAL_LENGTH_MODELS = frozenset({"prophetnet"})
# Model types whose step broadcasts wrongly over several rows.
_BATCH_SIZE_ONE_MODELS = frozenset({"rwkv"})

# Model types with a state of their own that reads a text at once as it does token by token.
_OWN_STATE_MODELS = frozenset({"minimax", "rwkv", "xlstm"})
# Model types whose forward of several tokens starts from an empty state: the scans of Mamba 1 and of the
# linear recurrent unit take none.
_CONTINUED_BY_ONE = frozenset({"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "zamba"})

# Inputs that the decoding loop sets, or that would be needed at every step.
_INTERNAL_INPUTS = frozenset(
    {
        "self", "args", "kwargs", "labels", "return_dict", "use_cache", "is_first_iteration",
        "next_sequence_length", "position_ids", "logits_to_keep", "head_mask", *_CACHE_ARGUMENTS,
    }
)  # fmt: skip

# Inputs of every decoder step, accepted only by models that prepare their own inputs.
_CROSS_ATTENTION_INPUTS = frozenset({"encoder_hidden_states", "encoder_attention_mask"})

# Names of modules whose position embeddings are not those of the decoder.
_NON_DECODER_MODULES = ("encoder.", "vision", "visual", "image", "video", "audio", "tower", "relative")

_MEDIA_TYPES = ("image", "video", "audio")

_DYNAMIC_ROPE_TYPES = ("dynamic", "longrope")


def traits_of(model: PreTrainedModel) -> ModelTraits:
    """The traits of a model, inspected once per attention implementation."""
    attention = str(getattr(model.config, "_attn_implementation", None) or "eager")
    traits = _traits_by_model.get(model)
    if traits is None or traits.attn_implementation != attention:
        traits = _traits_by_model[model] = _inspect_model(model, attention)
    return traits


def _inspect_model(model: PreTrainedModel, attention: str) -> ModelTraits:
    # Imported here: loaded already if there is a model, and slow to load without one.
    from transformers import GenerationMixin

    if not isinstance(model, GenerationMixin):
        raise UnsupportedModel(
            f"{type(model).__name__} does not generate: it has no head that predicts tokens"
        )
    params = inspect.signature(model.forward).parameters
    text = model.config.get_text_config(decoder=True)
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    cache_type = _cache_type(model, params, text)
    is_recurrent = cache_type == "recurrent"
    reads_again = not is_recurrent or _reads_again(model, text)
    prepares = cache_type != "kv" or has_override(model, "prepare_inputs_for_generation")
    return ModelTraits(
        is_encoder_decoder=is_encoder_decoder,
        supports_position_ids="position_ids" in params and not is_encoder_decoder,
        supports_logits_to_keep="logits_to_keep" in params,
        supports_inputs_embeds="inputs_embeds" in params,
        vocab_size=_vocab_size(model, text),
        embedding_size=_embedding_size(model),
        num_layers=_num_layers(text),
        attn_implementation=attention,
        sliding_windows=_sliding_windows(text),
        layer_types=_layer_types(text),
        max_positions=_max_positions(model),
        context_length=_context_length(text),
        cache_type=cache_type,
        cache_argument=next((name for name in _CACHE_ARGUMENTS if name in params), ""),
        prepares_own_inputs=prepares,
        needs_equal_lengths=prepares
        or has_dynamic_rope(text)
        or _has_own_causal_mask(model)
        or text.model_type in _EQUAL_LENGTH_MODELS,
        needs_batch_size_one=text.model_type in _BATCH_SIZE_ONE_MODELS,
        reads_again=reads_again,
        continues_by_one=not reads_again or (is_recurrent and _continues_by_one(model, text)),
        needs_position_ids=_has_padded_positions(model),
        has_own_position_ids=has_override(model, "_prepare_position_ids_for_generation"),
        main_input_name=_main_input_name(model, is_encoder_decoder),
        input_names=_input_names(model, is_encoder_decoder)
        - (frozenset() if prepares and not is_encoder_decoder else _CROSS_ATTENTION_INPUTS),
        placeholder_tokens=_placeholder_tokens(model.config),
        has_tied_embeddings=bool(
            getattr(model.config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
        ),
        has_lm_head=model.get_output_embeddings() is not None,  # type: ignore[no-untyped-call]
    )


def has_override(model: PreTrainedModel, method: str) -> bool:
    """Whether a model class overrides a method of GenerationMixin."""
    from transformers import GenerationMixin

    return getattr(type(model), method, None) is not getattr(GenerationMixin, method, None)


def _cache_type(model: Any, params: Mapping[str, Any], text: Any) -> str:
    """The cache type: "kv", "recurrent" or "none"."""
    if not any(name in params for name in _CACHE_ARGUMENTS):
        return "none"
    if not model._supports_default_dynamic_cache() or "past_key_values" not in params:
        return "recurrent"
    if any(name in vars(module) for module in model.modules() for name in MODULE_STATE_ATTRS):
        return "recurrent"
    if {model.config.model_type, text.model_type} & _OWN_CACHE_MODELS:
        return "recurrent"
    layers = DynamicCache(config=text).layers
    return "kv" if all(type(layer) in DYNAMIC_LAYERS for layer in layers) else "recurrent"


def _reads_again(model: Any, text: Any) -> bool:
    """Whether a recurrent model reads a text at once as it does token by token.

    Attention that chooses among indexed keys, and most caches of a model's own class, do not.
    """
    if text.model_type in _OWN_STATE_MODELS:
        return True
    layers = DynamicCache(config=text).layers if model._supports_default_dynamic_cache() else []
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    others = [layer for layer in layers if not isinstance(layer, LinearAttentionLayer)]
    return len(recurrent) > 0 and all(type(layer) in DYNAMIC_LAYERS for layer in others)


def _continues_by_one(model: PreTrainedModel, text: Any) -> bool:
    """Whether a forward of several tokens would not continue the state of a row.

    transformers' layers do from the release on that can record their past.
    """
    is_known = type(model).forward.__module__.startswith("transformers.")
    is_recent = hasattr(LinearAttentionLayer, "activate_past_recording")
    return not (is_known and is_recent) or text.model_type in _CONTINUED_BY_ONE


def _has_own_causal_mask(model: PreTrainedModel) -> bool:
    """Whether attention has a causal-mask buffer, which needs the fed tokens to be the last of every row."""
    return any(table.ndim == 4 and table.shape[-1] == table.shape[-2] > 1 for table in model.buffers())


def _position_embeddings(model: PreTrainedModel) -> list[torch.nn.Embedding]:
    """The learned position embeddings of the decoder."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and ("position" in name.lower() or name.lower().endswith("wpe"))
        and not any(part in name.lower() for part in _NON_DECODER_MODULES)
    ]


def _has_padded_positions(model: PreTrainedModel) -> bool:
    """Whether position embeddings have a padding index, from which the model would count positions itself."""
    return any(table.padding_idx is not None for table in _position_embeddings(model))


def has_dynamic_rope(text: Any) -> bool:
    """Whether rotary frequencies depend on the length of the longest row in a batch."""
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    settings = [value for value in (ropes, *ropes.values()) if isinstance(value, dict)]
    return any(rope.get("rope_type", rope.get("type")) in _DYNAMIC_ROPE_TYPES for rope in settings)


def _vocab_size(model: PreTrainedModel, text: Any) -> int:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(getattr(head, "out_features", 0) or getattr(text, "vocab_size", 0))


def _num_layers(text: Any) -> int:
    for name in ("decoder_layers", "num_decoder_layers", "num_hidden_layers"):
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    return 0


def _main_input_name(model: PreTrainedModel, is_encoder_decoder: bool) -> str:
    """The name of a model's main input; that of its encoder takes precedence."""
    encoder = getattr(model, "encoder", None) if is_encoder_decoder else None
    return str(getattr(encoder, "main_input_name", None) or model.main_input_name or "input_ids")


def _input_names(model: Any, is_encoder_decoder: bool) -> frozenset[str]:
    """The names of all inputs: of forward, of prepare_inputs_for_generation, of the encoder and decoder."""
    sources: list[Any] = [model.forward, model.prepare_inputs_for_generation]
    if is_encoder_decoder:
        parts = [model.get_encoder()] + [
            getattr(model, name, None) for name in ("encoder", "decoder", "model")
        ]
        sources += [part.forward for part in parts if isinstance(part, torch.nn.Module)]
    names = {name for source in sources for name in inspect.signature(source).parameters}
    return frozenset(
        name for name in names if name not in _INTERNAL_INPUTS and not name.startswith("output_")
    )


def _placeholder_tokens(config: Any) -> dict[str, int]:
    """The placeholder tokens of media in a prompt, by media type."""
    tokens: dict[str, int] = {}
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())]
    for part in parts:
        for media in _MEDIA_TYPES:
            for name in (f"{media}_token_id", f"{media}_token_index", f"special_{media}_token_id"):
                token = getattr(part, name, None)
                if isinstance(token, int):
                    tokens.setdefault(media, token)
    return tokens


def _sliding_windows(text: Any) -> dict[str, int | None]:
    """The window of each layer type; None: full attention."""
    window = getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        window = None
    layer_types = getattr(text, "layer_types", None)
    if not layer_types:
        chunk = getattr(text, "attention_chunk_size", None)
        without_window = "chunked_attention" if chunk is not None else "full_attention"
        layer_types = [without_window if window is None else "sliding_attention"]
    return {
        layer_type: window if layer_type == "sliding_attention" else None
        for layer_type in dict.fromkeys(layer_types)
    }


def _layer_types(text: Any) -> tuple[str, ...]:
    """The type of each layer."""
    layer_types = getattr(text, "layer_types", None)
    return tuple(layer_types) if layer_types else (next(iter(_sliding_windows(text))),) * _num_layers(text)


def _max_positions(model: PreTrainedModel) -> int | None:
    """The size of the smallest learned position embedding of the decoder, None if it has none."""
    # Some models reserve the first embeddings for padding (OPT, BART).
    sizes = [table.num_embeddings - int(getattr(table, "offset", 0)) for table in _position_embeddings(model)]
    return min(sizes) if sizes else None


def _embedding_size(model: PreTrainedModel) -> int | None:
    """The dimension of the token embeddings, None if there is no single table."""
    try:
        table: Any = model.get_input_embeddings()
    except NotImplementedError:  # several tables, or none that is declared
        return None
    return int(table.embedding_dim) if isinstance(table, torch.nn.Embedding) else None


def _context_length(text: Any) -> int | None:
    size = getattr(text, "max_position_embeddings", None)
    return int(size) if isinstance(size, int) and size > 0 else None
