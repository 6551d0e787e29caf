"""Prompts that are read once and continued often: prefill(), and caches on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from descant.api.call import merge_configs
from descant.api.inputs import RaggedPrompts, encode_texts, prepare_prompts
from descant.core.interfaces import KVCache, KVSpan
from descant.core.rows import Rows
from descant.engine.planner import as_model
from descant.engine.prefix_reuse import prefill_chunk
from descant.errors import InputError, UnsupportedModel, format_value
from descant.kv_cache.cached_row import is_lossless, read_layers
from descant.kv_cache.dense import DenseStore
from descant.kv_cache.paged import PagedStore
from descant.models.fingerprint import fingerprint
from descant.models.hf_caches.base import Cache

__all__ = ["PromptCache", "load_cache", "prefill"]

_FORMAT: Final = "descant cache 1"
_LARGEST_BLOCK: Final = 4096  # slots of a block that is larger than what it holds

# The kinds that can be made by name, with the settings of one that tell how to make it again.
_SAVABLE_STORES: Final[Mapping[str, tuple[type[Any], Callable[[Any], dict[str, int]]]]] = {
    "dynamic": (DenseStore, lambda store: {}),  # noqa: ARG005
    "paged": (PagedStore, lambda store: {"block": store.pool.block_size}),
}


class PromptCache(Cache):
    """What a model has read of one prompt or several, with the tokens; it never changes.

    Give it to `generate(..., past_key_values=cache)` as often as you like: its one row is what all prompts
    begin with, or its rows are what they begin with, each its own. `copy()` gives one that can be changed.
    """

    def __init__(self, store: KVCache, tokens: Sequence[Tensor], made_by: Mapping[str, str]) -> None:
        super().__init__(store)
        self.tokens: list[Tensor] | None = list(tokens)
        self.model_fingerprint = dict(made_by)  # the model's fingerprint
        self.read_only = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, from which `descant.load_cache` reads it."""
        store = self.store
        kind = next((name for name, (made, _) in _SAVABLE_STORES.items() if type(store) is made), None)
        if kind is None or not is_lossless(store) or self.tokens is None:
            must = f"must be one of {', '.join(_SAVABLE_STORES)} to be saved, with its tokens"
            raise InputError("cache", must, type(store).__name__)
        rows, size = torch.arange(len(store)), int(store.lengths.max())
        tensors = {
            "lengths": store.lengths.clone(),
            "tokens": torch.nn.utils.rnn.pad_sequence(self.tokens, batch_first=True, padding_value=-1),
        }
        for layer, (key, value) in read_layers(store, rows).items():
            tensors[f"keys.{layer}"] = key[:, :, :size].cpu().contiguous().clone()
            tensors[f"values.{layer}"] = value[:, :, :size].cpu().contiguous().clone()
        told = {
            "format": _FORMAT,
            "kind": kind,
            "settings": json.dumps(_SAVABLE_STORES[kind][1](store)),
            "model": json.dumps(self.model_fingerprint),
        }
        told["digest"] = _digest(tensors, told)
        # A reader never meets half a file.
        part = f"{os.fspath(path)}.{os.getpid()}.part"
        try:
            save_file(tensors, part, metadata=told)
            os.replace(part, path)
        finally:
            Path(part).unlink(missing_ok=True)


def prefill(
    model: Any,
    prompt: Any,
    *,
    attention_mask: Tensor | None = None,
    cache: Any = "paged",
    chunk: int | None = None,
    tokenizer: Any = None,
) -> PromptCache:
    """Read prompts, and keep what was read: `cache = prefill(model, ids)`, to be continued many times.

    `prompt` holds ids [L] or [B, L], with an `attention_mask` where they are padded, or with a `tokenizer` a
    text or several. `cache` is a name, "paged" or "dynamic", or a cache of whose kind to be. With `chunk` a
    long prompt is read so many tokens at a time, which takes less memory and a little longer.
    """
    size: Any = chunk
    if size is not None and (not isinstance(size, int) or size < 1):
        raise InputError("chunk", "must be an integer >= 1, or None", chunk)
    target = as_model(model)
    facts = target.traits
    if (
        facts.is_encoder_decoder
        or facts.cache_type != "kv"
        or facts.has_own_position_ids
        or hasattr(target, "new_cache")
    ):
        kind = type(getattr(target, "model", model)).__name__
        raise UnsupportedModel(f"{kind} has more to read than tokens, or keeps more than keys and values")
    store = _empty_store(cache)
    prompts = _prepare_prompts(model, target, prompt, attention_mask, tokenizer)
    store.extend(len(prompts))
    zeros = torch.zeros_like(prompts.lengths)
    rows = Rows(
        prompts.tokens.to(target.device),
        length=prompts.lengths,
        cached_length=zeros,
        offset=zeros.clone(),
        prompt_length=prompts.lengths.clone(),
        request=torch.arange(len(prompts)),
        slot=zeros.clone(),
    )
    with torch.no_grad():
        while len(left := rows.pending.nonzero().squeeze(1)):
            size = rows.pending[left]
            rows = prefill_chunk(target, store, rows, left, size if chunk is None else size.clamp(max=chunk))
    tokens = [prompts.prompt(line).cpu() for line in range(len(prompts))]
    return PromptCache(store, tokens, fingerprint(model))


def load_cache(path: str | os.PathLike[str], model: Any = None) -> PromptCache:
    """A cache that `save` wrote; with a `model`, an error where another one made it.

    It lies where the model is, or without one on the CPU.
    """
    tensors, told = _read_file(path)
    made_by, settings = (_parse_json_object(path, told.get(name, "")) for name in ("model", "settings"))
    if model is not None:
        own = fingerprint(model)
        odd = next((name for name in {**own, **made_by} if own.get(name) != made_by.get(name)), None)
        if odd is not None:
            what = odd if odd in own else format_value(odd)
            must = f"must be the one that made the cache, whose {what} is {format_value(made_by.get(odd))}"
            raise InputError("model", must, own.get(odd))
    kind = told.get("kind", "")
    if kind not in _SAVABLE_STORES:
        raise InputError(
            "path", f"must hold a cache of a kind known here ({', '.join(_SAVABLE_STORES)})", kind
        )
    made, lengths = _SAVABLE_STORES[kind][0], tensors.pop("lengths", torch.zeros(0))
    tokens = _row_tokens(path, tensors.pop("tokens", torch.zeros(0)), lengths)
    pairs = _layer_pairs(path, tensors, lengths)
    size = int(lengths.max())
    # What a block is made of is laid out whole, so that no number is taken on trust.
    sound = (type(value) is int and 1 <= value <= max(size, _LARGEST_BLOCK) for value in settings.values())
    if settings.keys() != _SAVABLE_STORES[kind][1](made()).keys() or not all(sound):
        raise _malformed_error(path, f"settings {format_value(settings)}")
    store: KVCache = made(**settings)
    store.extend(len(lengths))
    span = KVSpan(None, 0, size, size)
    device = None if model is None else as_model(model).device
    for layer, (key, value) in pairs.items():
        store.update(layer, key.to(device), value.to(device), span)
    store.commit(None, lengths)
    return PromptCache(store, tokens, made_by)


# ------------------------------------------------------------------------ what was given
def _empty_store(cache: Any) -> KVCache:
    """An empty store of the kind that is asked for."""
    if isinstance(cache, str):
        if cache not in _SAVABLE_STORES:
            raise InputError("cache", f"must be one of {', '.join(_SAVABLE_STORES)}, or a cache", cache)
        made: KVCache = _SAVABLE_STORES[cache][0]()
        return made
    store = getattr(cache, "store", None)
    if store is None:
        raise InputError("cache", f"must be one of {', '.join(_SAVABLE_STORES)}, or a cache", cache)
    like: KVCache = store.select(torch.zeros(0, dtype=torch.long))
    return like


def _prepare_prompts(
    model: Any, target: Any, prompt: Any, mask: Tensor | None, tokenizer: Any
) -> RaggedPrompts:
    """The prompts to be read."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts, list | tuple) and texts and isinstance(texts[0], str):
        given: dict[str, Any] = encode_texts("prompt", texts, tokenizer)
    else:
        try:
            ids = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            raise InputError("prompt", "must be token ids [L] or [B, L], or text", prompt) from None
        ids = ids[None] if ids.ndim == 1 else ids
        mask = mask[None] if mask is not None and mask.ndim == 1 else mask
        given = {"input_ids": ids, "attention_mask": mask}
    return prepare_prompts(given, merge_configs(model, None, {})[0], target.traits, target.device)


# ------------------------------------------------------------------------ files
def _digest(tensors: Mapping[str, Tensor], told: Mapping[str, str]) -> str:
    """A hash of all tensors, by name, and of what is told of them."""
    words = json.dumps({name: text for name, text in told.items() if name != "digest"}, sort_keys=True)
    whole = hashlib.sha256(words.encode())
    for name in sorted(tensors):
        one = tensors[name].contiguous()
        whole.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
        numbers: Any = one.view(-1).view(torch.uint8).numpy() if one.numel() else b""
        whole.update(numbers)
    return whole.hexdigest()


def _read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and what it says of them, whole."""
    try:
        with safe_open(os.fspath(path), "pt") as file:
            told: dict[str, str] = file.metadata() or {}
            if told.get("format") != _FORMAT:
                raise _malformed_error(path, f"format {told.get('format')!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError as error:
        raise InputError("path", "must be a file that exists", os.fspath(path)) from error
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise _malformed_error(path, str(error)) from error
    if told.get("digest") != _digest(tensors, told):
        raise _malformed_error(path, "something else than was written")
    return tensors, told


def _malformed_error(path: str | os.PathLike[str], got: str) -> InputError:
    return InputError("path", f"must be a cache that save() wrote ({Path(path).name})", got)


def _parse_json_object(path: str | os.PathLike[str], text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed_error(path, text) from error
    if not isinstance(value, dict):
        raise _malformed_error(path, text)
    return value


def _row_tokens(path: str | os.PathLike[str], tokens: Tensor, lengths: Tensor) -> list[Tensor]:
    """The tokens of each row."""
    whole = lengths.dtype == tokens.dtype == torch.long and lengths.ndim == 1 and tokens.ndim == 2
    if not whole or not len(lengths) or len(tokens) != len(lengths):
        raise _malformed_error(path, "rows without lengths and tokens")
    if int(lengths.min()) < 1 or int(lengths.max()) > tokens.shape[1]:
        raise _malformed_error(path, f"lengths {lengths.tolist()}")
    found = [line[: int(size)].clone() for line, size in zip(tokens, lengths, strict=True)]
    if any(int(one.min()) < 0 for one in found):
        raise _malformed_error(path, "tokens below 0")
    return found


def _layer_pairs(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], lengths: Tensor
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of every layer [R, H, S, D]."""
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for name in tensors:
        kind, _, layer = name.partition(".")
        if kind not in ("keys", "values") or not layer.isdecimal() or f"values.{layer}" not in tensors:
            raise _malformed_error(path, f"a tensor {name!r}")
        if kind == "keys":
            pairs[int(layer)] = tensors[name], tensors[f"values.{layer}"]
    size = int(lengths.max())
    for pair in pairs.values():
        for part in pair:
            if part.ndim != 4 or part.shape[0] != len(lengths) or part.shape[2] != size:
                raise _malformed_error(path, f"keys or values of shape {list(part.shape)}")
        if pair[0].shape[1] != pair[1].shape[1] or not pair[0].is_floating_point():
            raise _malformed_error(path, "keys and values that do not go together")
    if 2 * len(pairs) != len(tensors) or not pairs:
        raise _malformed_error(path, "values without keys")
    return pairs
