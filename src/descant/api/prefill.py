"""prefill(): the KV cache of prompts for reuse in several calls, and cache files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from descant.api.call import merge_configs
from descant.api.inputs import RaggedPrompts, encode_texts, prepare_prompts
from descant.core.atomic_file import write_bytes
from descant.core.interfaces import KVCache, KVSpan
from descant.core.rows import Rows
from descant.engine.tables.prefix_reuse import prefill_chunk
from descant.errors import InputError, UnsupportedModel, format_value
from descant.kv_cache.model_state import changes_so_far
from descant.kv_cache.row_views import is_lossless, read_layers
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from descant.models.compat.hf_caches.base import Cache
from descant.models.model_adapter import as_model
from descant.models.wrapping.fingerprint import check_fingerprint, fingerprint
from descant.models.wrapping.wrapped_model import unwrap_model

_FORMAT: Final = "descant cache 1"
_LARGEST_BLOCK: Final = 4096  # slots; limit for a block longer than the cached tokens

# Store classes by name, with the settings needed to build an equal store.
_SAVABLE_STORES: Final[Mapping[str, tuple[type[Any], Callable[[Any], dict[str, int]]]]] = {
    "dynamic": (DenseStore, lambda store: {}),  # noqa: ARG005
    "paged": (PagedStore, lambda store: {"block_size": store.pool.block_size}),
}


class PromptCache(Cache):
    """A read-only KV cache of one or more prompts, with their tokens.

    Pass it to `generate(..., past_key_values=cache)` any number of times. Its single row is a prefix of all
    prompts, or it has one row per prompt with a prefix of that prompt. `copy()` returns a writable cache.
    """

    def __init__(
        self, store: KVCache, tokens: Sequence[Tensor], model_fingerprint: Mapping[str, str]
    ) -> None:
        super().__init__(store)
        self.tokens: list[Tensor] | None = list(tokens)
        self.model_fingerprint = dict(model_fingerprint)
        self.made_at = changes_so_far()  # reported changes of its model after it make it stale
        self.read_only = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file for `descant.load_cache`, whole or not at all."""
        store = self.commit_store()
        kind = next(
            (name for name, (store_type, _) in _SAVABLE_STORES.items() if type(store) is store_type), None
        )
        if kind is None or not is_lossless(store) or self.tokens is None:
            must = f"must be one of {', '.join(_SAVABLE_STORES)}, with its tokens, to be saved"
            raise InputError("cache", must, type(store).__name__)
        rows, size = torch.arange(len(store)), int(store.lengths.max())
        tensors = {
            "lengths": store.lengths.clone(),
            "tokens": torch.nn.utils.rnn.pad_sequence(self.tokens, batch_first=True, padding_value=-1),
        }
        for layer, (key, value) in read_layers(store, rows).items():
            tensors[f"keys.{layer}"] = key[:, :, :size].cpu().contiguous().clone()
            tensors[f"values.{layer}"] = value[:, :, :size].cpu().contiguous().clone()
        metadata = {
            "format": _FORMAT,
            "kind": kind,
            "settings": json.dumps(_SAVABLE_STORES[kind][1](store)),
            "model": json.dumps(self.model_fingerprint),
        }
        metadata["digest"] = _digest(tensors, metadata)
        # Not `save_file`: it writes under a temporary name of its own, which stays if the process is killed.
        write_bytes(path, save(tensors, metadata))


def prefill(
    model: Any,
    prompt: Any,
    *,
    attention_mask: Tensor | None = None,
    cache: Any = "paged",
    chunk: int | None = None,
    tokenizer: Any = None,
) -> PromptCache:
    """Run prompts through the model and return their cache: `cache = prefill(model, ids)`.

    `prompt` is ids [L] or [B, L], with an `attention_mask` if they are padded, or a text or a list of texts,
    with a `tokenizer`. `cache` is "paged", "dynamic", or a cache whose type is used. `chunk` is the number of
    tokens of each forward: a small number takes less memory and a little longer.
    """
    size: Any = chunk
    if size is not None and (not isinstance(size, int) or size < 1):
        raise InputError("chunk", "must be an integer >= 1, or None", chunk)
    model = unwrap_model(model)
    target = as_model(model)
    traits = target.traits
    if (
        traits.is_encoder_decoder
        or traits.cache_type != "kv"
        or traits.has_own_position_ids
        or traits.needs_own_cache
    ):
        name = type(getattr(target, "model", model)).__name__
        raise UnsupportedModel(f"`prefill` needs a decoder-only model with a KV cache, got {name}")
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
        while len(unread := rows.pending.nonzero().squeeze(1)):
            size = rows.pending[unread]
            sizes = size if chunk is None else size.clamp(max=chunk)
            rows = prefill_chunk(target.forward, store, rows, unread, sizes)
    tokens = [prompts.prompt(index).cpu() for index in range(len(prompts))]
    return PromptCache(store, tokens, fingerprint(model))


def load_cache(path: str | os.PathLike[str], model: Any = None) -> PromptCache:
    """A cache written by `PromptCache.save`, on the device of `model`, or without a model on the CPU.

    Raises if another model made the cache, or the same one with other weights.
    """
    tensors, metadata = _read_file(path)
    made_by, settings = (_parse_json_object(path, metadata.get(name, "")) for name in ("model", "settings"))
    if model is not None:
        check_fingerprint(model, made_by, "model", cheap=False)
    kind = metadata.get("kind", "")
    if kind not in _SAVABLE_STORES:
        raise InputError("path", f"must hold a cache of type {' or '.join(_SAVABLE_STORES)}", kind)
    store_type, lengths = _SAVABLE_STORES[kind][0], tensors.pop("lengths", torch.zeros(0))
    tokens = _row_tokens(path, tensors.pop("tokens", torch.zeros(0)), lengths)
    pairs = _layer_pairs(path, tensors, lengths)
    size = int(lengths.max())
    # A block is allocated whole, so its size from the file is validated before.
    is_valid = (type(value) is int and 1 <= value <= max(size, _LARGEST_BLOCK) for value in settings.values())
    if settings.keys() != _SAVABLE_STORES[kind][1](store_type()).keys() or not all(is_valid):
        raise _malformed_error(path, f"settings {format_value(settings)}")
    store: KVCache = store_type(**settings)
    store.extend(len(lengths))
    span = KVSpan(None, 0, size, size)
    device = None if model is None else as_model(model).device
    for layer, (keys, values) in pairs.items():
        store.update(layer, keys.to(device), values.to(device), span)
    store.commit(None, lengths)
    return PromptCache(store, tokens, made_by)


# ------------------------------------------------------------------------ arguments
def _empty_store(cache: Any) -> KVCache:
    """An empty store of the requested type."""
    if isinstance(cache, str):
        if cache not in _SAVABLE_STORES:
            raise InputError("cache", f"must be one of {', '.join(_SAVABLE_STORES)}, or a cache", cache)
        new_store: KVCache = _SAVABLE_STORES[cache][0]()
        return new_store
    store = cache.commit_store() if hasattr(cache, "commit_store") else None
    if store is None:
        raise InputError("cache", f"must be one of {', '.join(_SAVABLE_STORES)}, or a cache", cache)
    empty_store: KVCache = store.select(torch.zeros(0, dtype=torch.long))
    return empty_store


def _prepare_prompts(
    model: Any, target: Any, prompt: Any, mask: Tensor | None, tokenizer: Any
) -> RaggedPrompts:
    """The prompts to prefill."""
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
def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A hash of all tensors and of the metadata."""
    header = json.dumps({name: text for name, text in metadata.items() if name != "digest"}, sort_keys=True)
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        data: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        digest.update(data)
    return digest.hexdigest()


def _read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file, verified against its digest."""
    try:
        with safe_open(os.fspath(path), "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise _malformed_error(path, f"format {metadata.get('format')!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError as error:
        raise InputError("path", "must be a file that exists", os.fspath(path)) from error
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise _malformed_error(path, str(error)) from error
    if metadata.get("digest") != _digest(tensors, metadata):
        raise _malformed_error(path, "content that does not match its digest")
    return tensors, metadata


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
    is_valid = lengths.dtype == tokens.dtype == torch.long and lengths.ndim == 1 and tokens.ndim == 2
    if not is_valid or not len(lengths) or len(tokens) != len(lengths):
        raise _malformed_error(path, "rows without lengths and tokens")
    if int(lengths.min()) < 1 or int(lengths.max()) > tokens.shape[1]:
        raise _malformed_error(path, f"lengths {lengths.tolist()}")
    rows = [row[: int(length)].clone() for row, length in zip(tokens, lengths, strict=True)]
    if any(int(row.min()) < 0 for row in rows):
        raise _malformed_error(path, "tokens below 0")
    return rows


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
            raise _malformed_error(path, "keys and values that do not match")
    if 2 * len(pairs) != len(tensors) or not pairs:
        raise _malformed_error(path, "values without keys")
    return pairs
