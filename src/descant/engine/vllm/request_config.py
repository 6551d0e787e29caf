"""Between a GenerationConfig and vLLM's SamplingParams, in both directions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from vllm import SamplingParams

from descant.config.generation_config import GenerationConfig
from descant.decoding.processors.base import as_id_list
from descant.engine.vllm.batch_sampler import BatchSampler
from descant.engine.vllm.field_support import FIELD_SUPPORT, check_fields
from descant.engine.vllm.request_failures import REQUEST_ID_KEY
from descant.errors import ConfigError, InputError

PLUGIN_KEY: Final = "descant"  # of `SamplingParams.extra_args`

# Parameters by which vLLM itself would change the logits beside the plug-in, with the fields for the same.
_REPLACED: Final[Mapping[str, str]] = {
    "logit_bias": "logit_bias",
    "bad_words": "bad_words_ids",
    "allowed_token_ids": "suppress_tokens",
    "min_tokens": "min_new_tokens",
    "structured_outputs": "grammar",
    "thinking_token_budget": "thinking_budget",
    "repetition_detection": "no_repeat_ngram_size",
}
# Parameters that mean the same as the field, and their neutral values. What vLLM does by them to the one
# token that the plug-in has chosen changes nothing.
SHARED_PARAMS: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_SAMPLING_ONLY: Final = ("temperature", "top_k", "top_p", "min_p")
_MAX_NEW_TOKENS: Final = 2**30


class RequestConfig(NamedTuple):
    """The merged config of a request that the plug-in samples, and the index of its sequence."""

    config: GenerationConfig
    slot: int


def to_sampling_params(config: GenerationConfig, prompt_length: int, **others: Any) -> SamplingParams:
    """The parameters of a merged config for a prompt of that length; `others` are vLLM's own.

    Everything that changes or chooses tokens is the plug-in's. Lengths, end tokens and `n` are vLLM's.
    """
    check_fields(config, ("vllm", "plug-in", "engine"))
    ends = as_id_list(config.eos_token_id)
    stops = [*ends, *(token for token in as_id_list(config.stop_token_ids) if token not in ends)]
    given = json.loads(config.to_json_string())
    fields = {name: value for name, value in given.items() if FIELD_SUPPORT[name].by == "plug-in"}
    fields |= {
        "do_sample": config.do_sample,
        "eos_token_id": ends or None,
        "stop_token_ids": stops[len(ends) :] or None,
    }
    if config.do_sample:
        fields |= {"temperature": config.temperature, "top_k": config.top_k}
    return SamplingParams(
        n=config.num_return_sequences,
        # Greedy search is vLLM's fastest way to take the one token that is left; it refuses `n` > 1 there.
        temperature=0.0 if config.num_return_sequences == 1 else 1.0,
        seed=config.seed,
        max_tokens=_max_new_tokens(config, prompt_length),
        stop_token_ids=stops or None,
        ignore_eos=True,
        extra_args={PLUGIN_KEY: fields},
        **others,
    )


def _max_new_tokens(config: GenerationConfig, prompt_length: int) -> int:
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if "max_length" not in config.given:
        return int(config.max_length)  # the default counts new tokens
    if config.max_length <= prompt_length:
        must = f"must be > the {prompt_length} tokens of the prompt"
        raise ConfigError("max_length", must, config.max_length, "raise it or set max_new_tokens")
    return config.max_length - prompt_length


def check_params(params: SamplingParams, sampler: BatchSampler) -> None:
    """Raise a ValueError for parameters that the plug-in cannot apply exactly."""
    found = read_params(params)
    if found is None:
        return
    config = found.config
    if config.num_return_sequences not in (1, params.n):
        must = f"must be `n` ({params.n})"
        raise ConfigError("num_return_sequences", must, config.num_return_sequences, "leave it out")
    is_child = REQUEST_ID_KEY in (params.extra_args or {})  # one sequence of a request of `descant.VLLM`
    if (found.slot and not is_child) or (params.n > 1 and config.seed is not None and params.seed is None):
        must = f"must be the `seed` of the request too, by which vLLM tells {params.n} sequences apart"
        raise InputError("seed", must, params.seed, f"set the request's `seed` to {config.seed}")
    sampler.plan(config)


def read_params(params: SamplingParams, model_ends: Collection[int] = ()) -> RequestConfig | None:
    """The config of a request, by its parameters; None: it is not for the plug-in.

    `model_ends` are end tokens of the model, some of which vLLM has among the stop tokens.
    """
    try:
        given = _given_fields(params)
        if given is None:
            return None
        GenerationConfig(**given)  # before anything else looks at the values
        return _read_fields(params, given, model_ends)
    except (TypeError, RuntimeError, RecursionError) as error:
        must = f"must hold fields of GenerationConfig ({error})"
        raise InputError(PLUGIN_KEY, must, "other values") from error


def _read_fields(params: SamplingParams, given: dict[str, Any], model_ends: Collection[int]) -> RequestConfig:
    for name, field in _REPLACED.items():
        if getattr(params, name, None):
            do = f"give `{field}` in extra_args[{PLUGIN_KEY!r}]"
            raise InputError(name, "must be unset beside Descant's fields", getattr(params, name), do)
    values = {**given}
    is_sampling = bool(values.setdefault("do_sample", params.temperature > 0))
    for name, neutral in SHARED_PARAMS.items():
        own = getattr(params, name)
        # With a temperature of 0, vLLM takes the one token that is left by greedy search.
        is_neutral = own == neutral or (name == "temperature" and not own) or (name == "top_k" and own < 0)
        if is_neutral or (name in _SAMPLING_ONLY and not is_sampling):
            continue
        if values.setdefault(name, own) != own:
            must = f"must be the same in both places, it is {own} in the request's own field"
            raise InputError(name, must, values[name], "give it once")
    if is_sampling:
        values.setdefault("top_k", 0)  # vLLM's default
    slot = 0
    if values.get("seed") is None:
        values["seed"] = params.seed
    elif params.seed is not None:
        slot = params.seed - values["seed"]
    _check_stops(params, values, model_ends)
    # vLLM fills in a missing length by that of the prompt, after requests are checked.
    values["max_new_tokens"] = _MAX_NEW_TOKENS if params.max_tokens is None else params.max_tokens
    config = GenerationConfig.merge({}, GenerationConfig(**values), None)
    check_fields(config, ("vllm", "plug-in"))
    if slot < 0:
        must = f"must not be below the `seed` of the fields ({config.seed})"
        raise InputError("seed", must, params.seed, "give the same one")
    return RequestConfig(config, slot)


def check_v2_params(params: SamplingParams) -> None:
    """Raise for penalties that vLLM's V2 model runner applies before the plug-in, which applies them too."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(params, name) != SHARED_PARAMS[name]:
            do = f"give it in extra_args[{PLUGIN_KEY!r}]"
            raise InputError(name, "must be unset on vLLM's V2 runner", getattr(params, name), do)


def uses_text(config: GenerationConfig) -> bool:
    """Whether the plug-in needs the tokenizer for a config."""
    breakers = config.dry_sequence_breakers if config.dry_multiplier else None
    closes_thoughts = config.thinking_budget is not None and (
        config.thinking_end is None or config.thinking_message is not None
    )
    return (
        config.grammar is not None
        or closes_thoughts
        or any(isinstance(breaker, str) for breaker in breakers or ())
    )


def _given_fields(params: SamplingParams) -> dict[str, Any] | None:
    """The fields for the plug-in: a dict, or JSON text, which is all that HTTP can carry."""
    given = (params.extra_args or {}).get(PLUGIN_KEY)
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    if given is None or isinstance(given, dict):
        return given
    raise InputError(PLUGIN_KEY, "must be a dict of fields, or one as JSON text", given)


def _check_stops(params: SamplingParams, values: dict[str, Any], model_ends: Collection[int]) -> None:
    """Raise for ends of sequences that vLLM does not know of; the end tokens that it does are filled in."""
    known = set(params.stop_token_ids or ())
    ends: Collection[int] = as_id_list(values.get("eos_token_id"))
    if "eos_token_id" not in values:
        ends = set() if params.ignore_eos else (params.all_stop_token_ids - known) | (known & {*model_ends})
        values["eos_token_id"] = sorted(ends) or None
    elif not (params.ignore_eos and set(ends) <= known):
        must = "must be among `stop_token_ids` of the request, with `ignore_eos`"
        raise InputError("eos_token_id", must, values["eos_token_id"], "use descant.VLLM, or leave it out")
    if "stop_token_ids" not in values:
        values["stop_token_ids"] = sorted(known - set(ends)) or None
    elif not set(as_id_list(values["stop_token_ids"])) <= known:
        must = "must be among `stop_token_ids` of the request"
        raise InputError("stop_token_ids", must, values["stop_token_ids"], "give them there alone")
    for name in ("max_new_tokens", "max_length"):
        own = values.pop(name, None)
        if own is not None and (name == "max_length" or own != params.max_tokens):
            must = f"must be given as `max_tokens` of the request, which is {params.max_tokens}"
            raise InputError(name, must, own, "leave it out")
