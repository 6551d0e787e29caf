"""Conversion of the documented inputs of generate() into ragged prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.api.chat_prompt import encode_prompt
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.registry import suggest_name
from descant.core.interfaces import ModelTraits
from descant.errors import ConfigError, InputError
from descant.models.forward.inputs import split_by_prompt

# Passed by transformers' generate() when it calls ours, or meaningless to a loop with its own cache.
_IGNORED_INPUTS = frozenset({"use_cache", "position_ids", "logits_to_keep", "cache_position", "return_dict"})

# Arguments of a call that are neither config fields nor inputs, for suggestions.
_CALL_ARGUMENTS = (
    "adapter_names", "assistant_model", "assistant_tokenizer", "custom_generate", "engine",
    "generation_config", "logits_processor", "negative_prompt_attention_mask", "negative_prompt_ids",
    "past_key_values", "prefix_allowed_tokens_fn", "progress", "recipe", "scheduler", "stopping_criteria",
    "streamer", "synced_gpus", "tokenizer", "trace", "trust_remote_code", "use_model_defaults",
)  # fmt: skip

_TEXT_INPUTS = ("input_ids", "attention_mask", "inputs_embeds")
_DECODER_INPUTS = ("encoder_outputs", "decoder_input_ids", "decoder_attention_mask")
_TENSOR_INPUTS = (*_TEXT_INPUTS, "decoder_input_ids", "decoder_attention_mask")


@dataclass(frozen=True)
class RaggedPrompts:
    """The prompts of a call, as given (padded) and as decoded (ragged)."""

    padded_ids: Tensor  # [B, W] the beginning of the returned sequences
    lengths: Tensor  # [B] (host) number of tokens of each prompt
    tokens: Tensor  # [B, L] the same tokens, left-aligned
    inputs: list[dict[str, Any]] = field(default_factory=list)  # other model inputs of each prompt
    embed_width: int = 0  # padded width of prompts given as embeddings without tokens
    mask: Tensor | None = None  # [B, W] which of `padded_ids` are not padding; None: all

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Number of positions of the padded prompts."""
        return self.embed_width or self.padded_ids.shape[1]

    def prompt(self, index: int) -> Tensor:
        """The tokens of one prompt."""
        return self.tokens[index, : int(self.lengths[index])]

    def drop_last_tokens(self, counts: Sequence[int], pad: int) -> RaggedPrompts:
        """The prompts without the last `counts[i]` tokens of prompt i, padded on the left."""
        lengths = self.lengths - torch.tensor(counts)
        padded = self.tokens.new_full((len(self), int(lengths.max())), pad)
        width = padded.shape[1]
        for index, length in enumerate(lengths.tolist()):
            padded[index, width - length :] = self.tokens[index, :length]
        mask = torch.arange(width) >= width - lengths[:, None]
        return replace(self, padded_ids=padded, lengths=lengths, mask=mask.to(padded.device))


def bind_inputs(model: Any, inputs: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs, with `inputs` under the name that the model uses."""
    given = dict(others)
    if inputs is None:
        return given
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids" and isinstance(inputs, Tensor) and inputs.is_floating_point():
        return {**given, main: inputs}
    if isinstance(inputs, Mapping) or hasattr(inputs, "input_ids"):  # what a tokenizer returns
        do = "unpack it: generate(model, **inputs)"
        raise InputError("inputs", "must be ids or text, not several inputs", type(inputs).__name__, do)
    if not isinstance(inputs, Tensor) or inputs.ndim not in (2, 3):
        must = "must be [batch, length] of ids, [batch, length, size] of floats, or text"
        raise InputError("inputs", must, inputs)
    name = "inputs_embeds" if inputs.ndim == 3 else "input_ids"
    if given.get(name) is not None:
        raise InputError(name, "must not be given with `inputs`, which is the same argument", given[name])
    return {**given, name: inputs}


def prepare_prompts(
    given: Mapping[str, Any], config: GenerationConfig, traits: ModelTraits, device: torch.device
) -> RaggedPrompts:
    """The prompts in the model inputs of a call."""
    ignored = _IGNORED_INPUTS | traits.unused_inputs
    given = {name: value for name, value in given.items() if value is not None and name not in ignored}
    types = given.get("token_type_ids")
    if isinstance(types, Tensor) and "token_type_ids" not in traits.input_names and not bool(types.any()):
        del given["token_type_ids"]  # tokenizers give zeros to models that take none
    known = {*_TEXT_INPUTS, *traits.input_names}
    if traits.is_encoder_decoder:
        known |= set(_DECODER_INPUTS)
    unknown = sorted(given.keys() - known)
    if unknown:
        do = (
            suggest_name(unknown[0], {*known, *FIELDS, *_CALL_ARGUMENTS})
            or f"use one of {sorted(known)} or a field of GenerationConfig"
        )
        must = "is neither a generation parameter nor an input of this model"
        raise InputError(unknown[0], must, given[unknown[0]], do)
    for name, value in given.items():
        if isinstance(value, Tensor):
            given[name] = value.to(device)
        elif name in _TENSOR_INPUTS:
            raise InputError(name, "must be a tensor", value)
    build = _prepare_encoder_decoder if traits.is_encoder_decoder else _prepare_decoder_only
    return build(given, config, traits, device)


def _num_prompts(given: Mapping[str, Any], traits: ModelTraits) -> int:
    """The number of prompts, from the model's main input or else the first tensor."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    main = given.get(traits.main_input_name)
    return len(main) if isinstance(main, Tensor) else len(tensors[0]) if tensors else 1


def _prepare_decoder_only(
    given: dict[str, Any], config: GenerationConfig, traits: ModelTraits, device: torch.device
) -> RaggedPrompts:
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    media = {name: value for name, value in given.items() if name not in _TEXT_INPUTS}
    if ids is None and embeds is None:
        if config.bos_token_id is None:
            raise InputError("input_ids", "must be given when the config has no `bos_token_id`", None)
        _validate_token_id("bos_token_id", config.bos_token_id, traits.num_prompt_ids)
        ids = torch.tensor([[config.bos_token_id]] * _num_prompts(media, traits), device=device)
    if embeds is not None:
        if media:
            raise InputError(
                next(iter(media)), "must not be given with `inputs_embeds`, which include it", embeds
            )
        return _prepare_embeddings(ids, embeds, given.get("attention_mask"), traits)
    ids = _validate_ids("input_ids", ids, traits.num_prompt_ids)
    mask = _infer_mask(given.get("attention_mask"), ids, config)
    inputs: list[dict[str, Any]] = [{} for _ in range(len(ids))]
    if media:
        inputs = split_by_prompt(media, ids, mask, traits.placeholder_tokens, len(ids))
    return _pack_left(ids, ids, mask, inputs)


def _prepare_embeddings(
    ids: Tensor | None, embeds: Tensor, mask: Tensor | None, traits: ModelTraits
) -> RaggedPrompts:
    """Prompts given as embeddings, with or without their tokens."""
    if not traits.supports_inputs_embeds:
        raise InputError("inputs_embeds", "is not supported by this model", embeds)
    _validate_embeddings("inputs_embeds", embeds, traits)
    if ids is not None and ids.numel():
        ids = _validate_ids("input_ids", ids, traits.vocab_size)
        if ids.shape != embeds.shape[:2]:
            raise InputError("inputs_embeds", f"must be as long as `input_ids` {list(ids.shape)}", embeds)
    everything = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
    mask = everything if mask is None else _validate_mask("attention_mask", mask, everything.shape)
    inputs = [{"inputs_embeds": row[row_mask.bool()]} for row, row_mask in zip(embeds, mask, strict=True)]
    if ids is None or not ids.numel():
        no_tokens = torch.zeros(len(embeds), 0, dtype=torch.long, device=embeds.device)
        lengths = torch.zeros(len(embeds), dtype=torch.long)
        return RaggedPrompts(no_tokens, lengths, no_tokens, inputs, embeds.shape[1])
    return _pack_left(ids, ids, mask, inputs)


def _prepare_encoder_decoder(
    given: dict[str, Any], config: GenerationConfig, traits: ModelTraits, device: torch.device
) -> RaggedPrompts:
    if traits.main_input_name != "input_ids" and "input_ids" in given and traits.main_input_name in given:
        # With the main input of a non-text encoder, `input_ids` are for the decoder.
        given = {**given, "decoder_input_ids": given.get("decoder_input_ids", given["input_ids"])}
        del given["input_ids"]
    ids, embeds, encoded = (given.get(name) for name in ("input_ids", "inputs_embeds", "encoder_outputs"))
    mask = given.get("attention_mask")
    media = {name: value for name, value in given.items() if name not in (*_TEXT_INPUTS, *_DECODER_INPUTS)}
    if ids is not None and embeds is not None:
        raise InputError("inputs_embeds", "must not be given with `input_ids` to an encoder", embeds)
    if encoded is not None:
        source = {"encoder_outputs": _encoder_states(encoded, traits, device)}
    elif embeds is not None:
        source = {"inputs_embeds": _validate_embeddings("inputs_embeds", embeds, traits)}
    elif ids is not None:
        source = {"input_ids": _validate_ids("input_ids", ids, traits.num_prompt_ids)}
        if mask is None:
            mask = _infer_mask(None, source["input_ids"], config, leading=False).long()
    elif media:
        return _prepare_media_encoder(given, media, config, traits, device)
    else:
        raise InputError(traits.main_input_name, "must be given, as the encoder's input", None)
    main = next(iter(source.values()))
    if mask is not None:
        source["attention_mask"] = _validate_mask("attention_mask", mask, main.shape[:2]).long()
    inputs = [{name: value[index] for name, value in source.items()} for index in range(len(main))]
    if media and encoded is None:
        bool_mask = None if mask is None else mask.bool()
        media_inputs = split_by_prompt(media, ids, bool_mask, traits.placeholder_tokens, len(main))
        if bool_mask is not None:
            inputs = [
                {name: value[index][row_mask] for name, value in source.items()}
                for index, row_mask in enumerate(bool_mask)
            ]
        inputs = [{**text, **other} for text, other in zip(inputs, media_inputs, strict=True)]
    return _with_decoder_prompts(given, inputs, config, traits, device)


def _prepare_media_encoder(
    given: dict[str, Any],
    media: dict[str, Any],
    config: GenerationConfig,
    traits: ModelTraits,
    device: torch.device,
) -> RaggedPrompts:
    """Prompts of an encoder of audio or images."""
    count = _num_prompts(media, traits)
    if "attention_mask" in given:
        media = {**media, "attention_mask": given["attention_mask"]}
    inputs: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in media.items():
        if not isinstance(value, Tensor) or len(value) != count:
            raise InputError(name, f"must have an entry for each of {count} prompts", value)
        for index in range(count):
            # A mask has no batch dimension, like that of a text prompt.
            inputs[index][name] = value[index] if name == "attention_mask" else value[index : index + 1]
    inputs = [_trim_audio_padding(prompt, traits.main_input_name) for prompt in inputs]
    return _with_decoder_prompts(given, inputs, config, traits, device)


def _trim_audio_padding(inputs: dict[str, Any], main: str) -> dict[str, Any]:
    """The inputs of a prompt without right padding of its audio."""
    mask, audio = inputs.get("attention_mask"), inputs.get(main)
    if mask is None or audio is None or audio.shape[1:2] != mask.shape:
        return inputs
    length = int(mask.sum())
    if length == len(mask) or not bool(mask[:length].all()):
        return inputs
    return {**inputs, main: audio[:, :length], "attention_mask": mask[:length]}


def _with_decoder_prompts(
    given: dict[str, Any],
    inputs: list[dict[str, Any]],
    config: GenerationConfig,
    traits: ModelTraits,
    device: torch.device,
) -> RaggedPrompts:
    """The decoder's prompts, with the encoder's inputs."""
    ids = _decoder_prompt_ids(given.get("decoder_input_ids"), config, traits, len(inputs), device)
    given_mask = given.get("decoder_attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool)
    if given_mask is not None:
        # The start token may have been prepended to the user's ids.
        width = ids.shape[1] if given_mask.shape[-1] == ids.shape[1] else ids.shape[1] - 1
        mask[:, ids.shape[1] - width :] = _validate_mask(
            "decoder_attention_mask", given_mask, torch.Size((len(inputs), width))
        )
    return _pack_left(ids, ids, mask, inputs)


def _encoder_states(outputs: Any, traits: ModelTraits, device: torch.device) -> Tensor:
    """The hidden states of encoder outputs that the user computed [B, S, D]."""
    states = outputs
    if not isinstance(outputs, Tensor):
        states = getattr(outputs, "last_hidden_state", None)
        if states is None and isinstance(outputs, tuple | list) and outputs:
            states = outputs[0]
    if not isinstance(states, Tensor):
        raise InputError("encoder_outputs", "must hold the encoder's last hidden states", outputs)
    return _validate_embeddings("encoder_outputs", states.to(device), traits)


def _decoder_prompt_ids(
    ids: Tensor | None, config: GenerationConfig, traits: ModelTraits, batch: int, device: torch.device
) -> Tensor:
    """The decoder's prompts [B, L]: the start token, then the user's ids."""
    name = "bos_token_id" if config.decoder_start_token_id is None else "decoder_start_token_id"
    start = getattr(config, name)
    if ids is not None:
        ids = _validate_ids("decoder_input_ids", ids, traits.vocab_size)
        if len(ids) != batch:
            raise InputError("decoder_input_ids", f"must have {batch} rows", ids)
    if start is None:
        if ids is None:
            raise ConfigError("decoder_start_token_id", "must be set for an encoder-decoder model", None)
        return ids
    first = torch.tensor(start, device=device).reshape(-1)
    for token in first.tolist():
        _validate_token_id(name, token, traits.vocab_size)
    if len(first) not in (1, batch):
        raise ConfigError(name, f"must be one token, or {batch} with one per prompt", start)
    first = first.expand(batch)[:, None]
    if ids is None:
        return first.clone()
    return ids if bool((ids[:, :1] == first).all()) else torch.cat((first, ids), 1)


def _validate_token_id(name: str, token: int, vocab_size: int) -> None:
    """Raise for a token of the config that is not in the model's vocabulary."""
    if not 0 <= token < vocab_size:
        raise ConfigError(name, f"must be below {vocab_size}, the vocabulary size", token)


def _validate_embeddings(name: str, states: Tensor, traits: ModelTraits) -> Tensor:
    """Embeddings or hidden states, validated to be [B, L, D] of the model's size."""
    if not states.is_floating_point() or states.ndim != 3 or not states.shape[0] or not states.shape[1]:
        raise InputError(name, "must be a tensor of floats [batch, length, size]", states)
    if traits.embedding_size is not None and states.shape[2] != traits.embedding_size:
        raise InputError(name, f"must be of size {traits.embedding_size}, the model's embedding size", states)
    return states


def _validate_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask [B, L] as bool, validated to have this shape, only 0 and 1, and a 1 in every row."""
    if mask.shape != shape:
        raise InputError(name, f"must be of shape {list(shape)}", mask)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(name, "must hold only 0 and 1", mask)
    bool_mask = mask.bool()
    if not bool(bool_mask.any(1).all()):
        raise InputError(name, "must keep at least one token of every prompt", mask)
    return bool_mask


def _validate_ids(name: str, ids: Any, vocabulary: int | None) -> Tensor:
    """Token ids, validated to be [B, L] and in the vocabulary."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(name, "must be a tensor of token ids", ids)
    if ids.ndim != 2 or not ids.shape[0] or not ids.shape[1]:
        raise InputError(name, "must be [batch, length], both > 0", ids)
    if vocabulary is not None and (int(ids.max()) >= vocabulary or int(ids.min()) < 0):
        invalid = int(ids.max()) if int(ids.max()) >= vocabulary else int(ids.min())
        raise InputError(name, f"must hold ids from 0 to {vocabulary - 1}", invalid)
    return ids.long()


def _infer_mask(mask: Tensor | None, ids: Tensor, config: GenerationConfig, leading: bool = True) -> Tensor:
    """Which ids are tokens [B, L]: the user's mask, or else all ids that are not clearly padding.

    Without a mask only an unbroken run of the pad token at the beginning (for an encoder, at the end) is
    padding. If the pad token is also the end or begin token, such a run is ambiguous: it is read as tokens
    if all prompts have the same run, and is an error otherwise.
    """
    if mask is not None:
        return _validate_mask("attention_mask", mask, ids.shape)
    pad = config.pad_token_id
    if pad is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not bool((ids[:, 0 if leading else -1] == pad).any()):
        return torch.ones_like(ids, dtype=torch.bool)
    not_pad = (ids != pad).long() if leading else (ids != pad).flip(1).long()
    inferred = not_pad.cumsum(1) > 0
    inferred = inferred if leading else inferred.flip(1)
    eos = config.eos_token_id
    bos_and_eos = {config.bos_token_id, *(eos if isinstance(eos, tuple | list) else (eos,))}
    if pad in bos_and_eos:
        if len({tuple(row) for row in inferred.tolist()}) == 1:
            return torch.ones_like(inferred)
        must = "must be given, as the pad token is also the end or begin token"
        raise InputError("attention_mask", must, None, "pass the tokenizer's attention_mask")
    if not bool(inferred.any(1).all()):
        raise InputError("input_ids", "must hold more than padding in every prompt", ids)
    return inferred


def _pack_left(padded: Tensor, ids: Tensor, mask: Tensor, inputs: list[dict[str, Any]]) -> RaggedPrompts:
    """The prompts with the tokens of each row moved to the left."""
    lengths = mask.sum(1).cpu()
    if bool(mask.all()):
        return RaggedPrompts(padded, lengths, ids, inputs)
    order = (~mask).long().sort(dim=1, stable=True).indices
    return RaggedPrompts(padded, lengths, ids.gather(1, order)[:, : int(lengths.max())], inputs, mask=mask)


def is_text(inputs: Any) -> bool:
    """Whether prompts are a text, messages, or a list of texts or of lists of messages."""
    return isinstance(inputs, str) or (isinstance(inputs, list | tuple) and len(inputs) > 0)


def encode_texts(name: str, inputs: Any, tokenizer: Any) -> dict[str, Tensor]:
    """The texts or messages of argument `name` as ids and mask [B, L], padded on the right."""
    prompts = [inputs] if isinstance(inputs, str) or _is_conversation(inputs) else list(inputs)
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_conversation(prompt):
            must = "must hold only texts, or only lists of messages, when it is a list"
            raise InputError(name, must, prompt, "pass token ids as a tensor")
        if tokenizer is None:
            do = "pass the model's tokenizer"
            raise InputError("tokenizer", f"must be given when `{name}` is text", None, do)
        if not isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
            must = "must have a chat template when prompts are messages"
            raise InputError("tokenizer", must, type(tokenizer).__name__, "pass texts")
    rows = [_encode(name, prompt, tokenizer) for prompt in prompts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def bind_prompts(model: Any, inputs: Any, others: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The model's inputs, with `inputs` encoded or under the name that the model uses."""
    if not is_text(inputs):
        return bind_inputs(model, inputs, others)
    encoded = encode_texts("inputs", inputs, tokenizer)
    for name in encoded:
        if others.get(name) is not None:
            raise InputError(name, "must not be given with texts as `inputs`", others[name])
    return {**others, **encoded}


def _is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _encode(name: str, prompt: str | Sequence[Any], tokenizer: Any) -> Tensor:
    """The token ids of one prompt [L]."""
    if isinstance(prompt, str) and not len(tokenizer(prompt)["input_ids"]):
        raise InputError(name, "must hold texts of at least one token", prompt)
    ids: Tensor = encode_prompt(tokenizer, prompt)["input_ids"][0]
    return ids
