"""The documented inputs of generate() as ragged prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits
from descant.errors import ConfigError, InputError
from descant.models.multimodal import split_by_prompt

__all__ = ["RaggedPrompts", "encode_texts", "prepare_prompts"]

# Handed over by transformers' own generate() when it calls us, or of no meaning to a loop with its own cache.
_IGNORED_INPUTS = frozenset({"use_cache", "position_ids", "logits_to_keep", "cache_position", "return_dict"})


_TEXT_INPUTS = ("input_ids", "attention_mask", "inputs_embeds")
_DECODER_INPUTS = ("encoder_outputs", "decoder_input_ids", "decoder_attention_mask")
_TENSOR_INPUTS = (*_TEXT_INPUTS, "decoder_input_ids", "decoder_attention_mask")


@dataclass(frozen=True)
class RaggedPrompts:
    """A call's prompts: padded as given, ragged as used."""

    padded_ids: Tensor  # [B, W] what the returned sequences begin with
    lengths: Tensor  # [B] (host) tokens of each prompt
    tokens: Tensor  # [B, L] the same tokens, left aligned
    inputs: list[dict[str, Any]] = field(default_factory=list)  # of each prompt, what else the model wants
    embed_width: int = 0  # how wide the padded prompts are where they have no tokens
    mask: Tensor | None = None  # [B, W] which of what is shown are tokens of a prompt; None: all

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """How many positions the padded prompts take."""
        return self.embed_width or self.padded_ids.shape[1]

    def prompt(self, line: int) -> Tensor:
        """The tokens of one prompt."""
        return self.tokens[line, : int(self.lengths[line])]

    def drop_last_tokens(self, counts: Sequence[int], pad: int) -> RaggedPrompts:
        """The same prompts without the last tokens, so many of each; shown padded on the left."""
        if not any(counts):
            return self
        lengths = self.lengths - torch.tensor(counts)
        shown = self.tokens.new_full((len(self), int(lengths.max())), pad)
        for line, size in enumerate(lengths.tolist()):
            shown[line, shown.shape[1] - size :] = self.tokens[line, :size]
        here = torch.arange(shown.shape[1]) >= shown.shape[1] - lengths[:, None]
        return replace(self, padded_ids=shown, lengths=lengths, mask=here.to(shown.device))


def prepare_prompts(
    given: Mapping[str, Any], config: GenerationConfig, facts: ModelTraits, device: torch.device
) -> RaggedPrompts:
    """The prompts of a call from its model inputs."""
    given = {
        name: value for name, value in given.items() if value is not None and name not in _IGNORED_INPUTS
    }
    given = _drop_unused_token_types(given, facts)
    known = {*_TEXT_INPUTS, *facts.input_names}
    if facts.is_encoder_decoder:
        known |= set(_DECODER_INPUTS)
    unknown = sorted(given.keys() - known)
    if unknown:
        do = f"known are {sorted(known)} and the fields of GenerationConfig"
        raise InputError(
            unknown[0], "is neither a generation parameter nor an input of this model", given[unknown[0]], do
        )
    for name, value in given.items():
        if isinstance(value, Tensor):
            given[name] = value.to(device)
        elif name in _TENSOR_INPUTS:
            raise InputError(name, "must be a tensor", value)
    build = _prepare_encoder_decoder if facts.is_encoder_decoder else _prepare_decoder_only
    return build(given, config, facts, device)


def encode_texts(name: str, texts: Sequence[Any], tokenizer: Any) -> dict[str, Tensor]:
    """Texts, given as `name`, as ids and mask [B, L], padded on the right: all one to ragged rows."""
    if not all(isinstance(text, str) for text in texts):
        raise InputError(name, "must hold nothing but texts when it is a list", texts)
    if tokenizer is None:
        raise InputError("tokenizer", f"must be given when `{name}` is text", None)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise InputError(name, "must hold texts of at least one token", text)
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, row in enumerate(rows):
        ids[line, : len(row)], mask[line, : len(row)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def _drop_unused_token_types(given: dict[str, Any], facts: ModelTraits) -> dict[str, Any]:
    """The inputs without marks that tokenizers give and the model does not know, where they say nothing."""
    kinds = given.get("token_type_ids")
    if isinstance(kinds, Tensor) and "token_type_ids" not in facts.input_names and not bool(kinds.any()):
        return {name: value for name, value in given.items() if name != "token_type_ids"}
    return given


def _num_prompts(given: Mapping[str, Any], facts: ModelTraits) -> int:
    """How many prompts there are, by the model's main input or the first that there is."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    main = given.get(facts.main_input_name)
    return len(main) if isinstance(main, Tensor) else len(tensors[0]) if tensors else 1


def _prepare_decoder_only(
    given: dict[str, Any], config: GenerationConfig, facts: ModelTraits, device: torch.device
) -> RaggedPrompts:
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    media = {name: value for name, value in given.items() if name not in _TEXT_INPUTS}
    if ids is None and embeds is None:
        if config.bos_token_id is None:
            raise InputError("input_ids", "must be given when the config has no `bos_token_id`", None)
        _validate_token_id("bos_token_id", config.bos_token_id, facts)
        ids = torch.tensor([[config.bos_token_id]] * _num_prompts(media, facts), device=device)
    if embeds is not None:
        if media:
            raise InputError(
                next(iter(media)), "must not be given beside `inputs_embeds`, which hold it", embeds
            )
        return _prepare_embeddings(ids, embeds, given.get("attention_mask"), facts)
    ids = _validate_ids("input_ids", ids, _num_known_ids(facts))
    mask = _infer_mask(given.get("attention_mask"), ids, config)
    return _pack_left(ids, ids, mask, split_by_prompt(media, ids, mask, facts.placeholder_tokens, len(ids)))


def _num_known_ids(facts: ModelTraits) -> int:
    """How many token ids a prompt may use: those that stand for media can lie beyond the vocabulary."""
    return max(facts.vocab_size, *(token + 1 for token in facts.placeholder_tokens.values()), 0)


def _prepare_embeddings(
    ids: Tensor | None, embeds: Tensor, mask: Tensor | None, facts: ModelTraits
) -> RaggedPrompts:
    """Prompts given as embeddings, alone or with the tokens they stand for."""
    if not facts.supports_inputs_embeds:
        raise InputError("inputs_embeds", "is not taken by this model", embeds)
    _validate_embeddings("inputs_embeds", embeds, facts)
    if ids is not None and ids.numel():
        ids = _validate_ids("input_ids", ids, facts.vocab_size)
        if ids.shape != embeds.shape[:2]:
            raise InputError("inputs_embeds", f"must be as long as `input_ids` {list(ids.shape)}", embeds)
    here = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
    mask = here if mask is None else _validate_mask("attention_mask", mask, here.shape)
    inputs = [{"inputs_embeds": line[here.bool()]} for line, here in zip(embeds, mask, strict=True)]
    if ids is None or not ids.numel():
        none = torch.zeros(len(embeds), 0, dtype=torch.long, device=embeds.device)
        empty = torch.zeros(len(embeds), dtype=torch.long)
        return RaggedPrompts(none, empty, none, inputs, embeds.shape[1])
    return _pack_left(ids, ids, mask, inputs)


def _prepare_encoder_decoder(
    given: dict[str, Any], config: GenerationConfig, facts: ModelTraits, device: torch.device
) -> RaggedPrompts:
    if facts.main_input_name != "input_ids" and "input_ids" in given and facts.main_input_name in given:
        # Beside what an encoder of another kind reads, tokens are the decoder's.
        given = {**given, "decoder_input_ids": given.get("decoder_input_ids", given["input_ids"])}
        del given["input_ids"]
    ids, embeds, ready = (given.get(name) for name in ("input_ids", "inputs_embeds", "encoder_outputs"))
    mask = given.get("attention_mask")
    media = {name: value for name, value in given.items() if name not in (*_TEXT_INPUTS, *_DECODER_INPUTS)}
    if ids is not None and embeds is not None:
        raise InputError("inputs_embeds", "must not be given beside `input_ids` to an encoder", embeds)
    if ready is not None:
        states = _encoder_states(ready, facts, device)
        source = {"encoder_outputs": states}
    elif embeds is not None:
        source = {"inputs_embeds": _validate_embeddings("inputs_embeds", embeds, facts)}
    elif ids is not None:
        source = {"input_ids": _validate_ids("input_ids", ids, _num_known_ids(facts))}
        if mask is None:
            mask = _infer_mask(None, source["input_ids"], config, leading=False).long()
    elif media:
        return _prepare_media_encoder(given, media, config, facts, device)
    else:
        raise InputError(facts.main_input_name, "must hold the encoder's input", None)
    main = next(iter(source.values()))
    if mask is not None:
        source["attention_mask"] = _validate_mask("attention_mask", mask, main.shape[:2]).long()
    inputs = [{name: value[line] for name, value in source.items()} for line in range(len(main))]
    if media and ready is None:
        here = None if mask is None else mask.bool()
        shares = split_by_prompt(media, ids, here, facts.placeholder_tokens, len(main))
        if here is not None:
            inputs = [
                {name: value[line][at] for name, value in source.items()} for line, at in enumerate(here)
            ]
        inputs = [{**line, **share} for line, share in zip(inputs, shares, strict=True)]
    return _with_decoder_prompts(given, inputs, config, facts, device)


def _prepare_media_encoder(
    given: dict[str, Any],
    media: dict[str, Any],
    config: GenerationConfig,
    facts: ModelTraits,
    device: torch.device,
) -> RaggedPrompts:
    """Prompts of an encoder that reads no tokens: sounds, images."""
    count = _num_prompts(media, facts)
    if "attention_mask" in given:
        media = {**media, "attention_mask": given["attention_mask"]}
    lines: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in media.items():
        if not isinstance(value, Tensor) or len(value) != count:
            raise InputError(name, f"must have an entry for each of {count} prompts", value)
        for line in range(count):
            # A mask goes without its batch dimension, as that of tokens does.
            lines[line][name] = value[line] if name == "attention_mask" else value[line : line + 1]
    lines = [_trim_audio_padding(line, facts.main_input_name) for line in lines]
    return _with_decoder_prompts(given, lines, config, facts, device)


def _trim_audio_padding(line: dict[str, Any], main: str) -> dict[str, Any]:
    """A sound without the silence that only fills it up to its neighbours: its encoder need not hear it."""
    mask, heard = line.get("attention_mask"), line.get(main)
    if mask is None or heard is None or heard.shape[1:2] != mask.shape:
        return line
    long = int(mask.sum())
    if long == len(mask) or not bool(mask[:long].all()):
        return line
    return {**line, main: heard[:, :long], "attention_mask": mask[:long]}


def _with_decoder_prompts(
    given: dict[str, Any],
    inputs: list[dict[str, Any]],
    config: GenerationConfig,
    facts: ModelTraits,
    device: torch.device,
) -> RaggedPrompts:
    """The decoder's prompts beside what the encoder reads."""
    begun = _decoder_prompt_ids(given.get("decoder_input_ids"), config, facts, len(inputs), device)
    inner = given.get("decoder_attention_mask")
    here = torch.ones_like(begun, dtype=torch.bool)
    if inner is not None:
        # The start token may have been put before what the user gave.
        width = begun.shape[1] if inner.shape[-1] == begun.shape[1] else begun.shape[1] - 1
        here[:, begun.shape[1] - width :] = _validate_mask(
            "decoder_attention_mask", inner, torch.Size((len(inputs), width))
        )
    return _pack_left(begun, begun, here, inputs)


def _encoder_states(ready: Any, facts: ModelTraits, device: torch.device) -> Tensor:
    """The hidden states of encoder outputs that the user computed [B, S, D]."""
    states = ready
    if not isinstance(ready, Tensor):
        states = getattr(ready, "last_hidden_state", None)
        if states is None and isinstance(ready, tuple | list) and ready:
            states = ready[0]
    if not isinstance(states, Tensor):
        raise InputError("encoder_outputs", "must hold the encoder's last hidden states", ready)
    return _validate_embeddings("encoder_outputs", states.to(device), facts)


def _decoder_prompt_ids(
    ids: Tensor | None, config: GenerationConfig, facts: ModelTraits, batch: int, device: torch.device
) -> Tensor:
    """What the decoder begins with: its start token, then what the user gave."""
    name = "bos_token_id" if config.decoder_start_token_id is None else "decoder_start_token_id"
    start = getattr(config, name)
    if ids is not None:
        ids = _validate_ids("decoder_input_ids", ids, facts.vocab_size)
        if len(ids) != batch:
            raise InputError("decoder_input_ids", f"must have {batch} lines", ids)
    if start is None:
        if ids is None:
            raise ConfigError("decoder_start_token_id", "must be set for an encoder-decoder model", None)
        return ids
    first = torch.tensor(start, device=device).reshape(-1)
    for token in first.tolist():
        _validate_token_id(name, token, facts)
    if len(first) not in (1, batch):
        raise ConfigError(name, f"must be one token or {batch}, one a prompt", start)
    first = first.expand(batch)[:, None]
    if ids is None:
        return first.clone()
    return ids if bool((ids[:, :1] == first).all()) else torch.cat((first, ids), 1)


def _validate_token_id(name: str, token: int, facts: ModelTraits) -> None:
    """Raise for a token of the config that the model would have to look up and does not have."""
    if not 0 <= token < facts.vocab_size:
        raise ConfigError(name, f"must be below {facts.vocab_size}, the vocabulary", token)


def _validate_embeddings(name: str, states: Tensor, facts: ModelTraits) -> Tensor:
    """Embeddings or hidden states, checked to be [B, L, D] of the model's size."""
    if not states.is_floating_point() or states.ndim != 3 or not states.shape[0] or not states.shape[1]:
        raise InputError(name, "must be a tensor of floats [batch, length, size]", states)
    if facts.embedding_size is not None and states.shape[2] != facts.embedding_size:
        raise InputError(name, f"must be of size {facts.embedding_size}, the model's", states)
    return states


def _validate_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask, checked to be of that shape, of zeros and ones, and to leave every line something [B, L]."""
    if mask.shape != shape:
        raise InputError(name, f"must be of shape {list(shape)}", mask)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(name, "must hold nothing but 0 and 1", mask)
    here = mask.bool()
    if not bool(here.any(1).all()):
        raise InputError(name, "must leave every prompt at least one token", mask)
    return here


def _validate_ids(name: str, ids: Any, vocabulary: int | None) -> Tensor:
    """Token ids, checked to be [B, L] and known to the model."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(name, "must be a tensor of token ids", ids)
    if ids.ndim != 2 or not ids.shape[0] or not ids.shape[1]:
        raise InputError(name, "must be [batch, length], neither of them 0", ids)
    if vocabulary is not None and (int(ids.max()) >= vocabulary or int(ids.min()) < 0):
        worst = int(ids.max()) if int(ids.max()) >= vocabulary else int(ids.min())
        raise InputError(name, f"must hold ids from 0 to {vocabulary - 1}", worst)
    return ids.long()


def _infer_mask(mask: Tensor | None, ids: Tensor, config: GenerationConfig, leading: bool = True) -> Tensor:
    """Which ids are real [B, L]: what the user says, else all but the padding that can only be padding.

    Without a mask only an unbroken run of the pad token at the beginning (at the end, for an encoder) is
    padding; a pad token inside a prompt is a token. Where the pad token is also the end or the begin
    token, such a run may be real, and where it may be either the user has to say.
    """
    if mask is not None:
        return _validate_mask("attention_mask", mask, ids.shape)
    pad = config.pad_token_id
    if pad is None:
        return torch.ones_like(ids, dtype=torch.bool)
    inner = (ids != pad).long() if leading else (ids != pad).flip(1).long()
    here = inner.cumsum(1) > 0
    here = here if leading else here.flip(1)
    if bool(here.all()):
        return here
    eos = config.eos_token_id
    doubles = {config.bos_token_id, *(eos if isinstance(eos, tuple | list) else (eos,))}
    if pad in doubles:
        if len({tuple(line) for line in here.tolist()}) == 1:
            return torch.ones_like(here)  # every prompt begins so: these are tokens, not padding
        do = "pass attention_mask, as the tokenizer gives it"
        raise InputError(
            "attention_mask", "must be given: the pad token is also the end or begin token", None, do
        )
    if not bool(here.any(1).all()):
        raise InputError("input_ids", "must hold more than padding in every prompt", ids)
    return here


def _pack_left(shown: Tensor, ids: Tensor, here: Tensor, inputs: list[dict[str, Any]]) -> RaggedPrompts:
    """The real tokens of each line moved to the left."""
    lengths = here.sum(1).cpu()
    if bool(here.all()):
        return RaggedPrompts(shown, lengths, ids, inputs)
    order = (~here).long().sort(dim=1, stable=True).indices
    return RaggedPrompts(shown, lengths, ids.gather(1, order)[:, : int(lengths.max())], inputs, mask=here)
