"""A call: prompts with their configs, admitted together into a Session of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.api.inputs import Prepared, prepared
from descant.api.user_cache import Loan, given_back
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.core.interfaces import Cache
from descant.core.records import Hypothesis, Observation
from descant.decoding.guidance.cfg import NEGATIVE
from descant.engine.planner import pad_of
from descant.engine.session import Request, Session
from descant.errors import ConfigError, InputError
from descant.kv_cache.cached_row import Past
from descant.models.hf_config import given_of
from descant.models.no_cache import Unkept
from descant.recipes.loading import load_recipe
from descant.recipes.recipe import Recipe
from descant.tokenization.token_healing import Tail
from descant.trace.tracer import Tracer

__all__ = ["Asked", "Call", "listed", "merged", "placed", "recipe_of", "rows_of"]

# What concerns the call as a whole and not one sequence: all rows must say the same.
_SHARED = (
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
    "cache_config", "return_legacy_cache",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What a caller asks for: how to decode, with one config for all prompts or one for each."""

    configs: Sequence[GenerationConfig]  # merged
    processors: Sequence[Any] = ()
    criteria: Sequence[Any] = ()
    tokenizer: Any = None
    several: str = "generation_config"  # the argument that may be a list, and is
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    past: Any = None  # the user's cache
    recipe: Recipe | None = None  # somebody else's part of the loop
    tracer: Tracer | None = None  # who records the run

    @classmethod
    def of(cls, model: Any, argument: Any, call: Mapping[str, Any], **others: Any) -> Asked:
        """What a call comes to, whose config is `argument` and whose fields are `call`."""
        several = "generation_config" if isinstance(argument, list | tuple) else "seed"
        return cls(merged(model, argument, call), several=several, **others)

    @property
    def config(self) -> GenerationConfig:
        """The config of the call as a whole."""
        return self.configs[0]


def merged(model: Any, argument: Any, call: Mapping[str, Any]) -> list[GenerationConfig]:
    """The configs that count: one for all prompts, or one each where the argument or the seed is a list."""
    own = getattr(model, "generation_config", None)
    given = list(argument) if isinstance(argument, list | tuple) else [argument]
    if not given:
        raise InputError("generation_config", "must hold a config for each prompt", argument)
    calls = _by_seed(call, len(given))
    given = given * len(calls) if len(given) == 1 else given
    calls = calls * len(given) if len(calls) == 1 else calls
    made: dict[Any, GenerationConfig] = {}
    configs = []
    for one, how in zip(given, calls, strict=True):
        key = (id(one), id(how))
        if key not in made:
            # A model's own config handed back as the argument is still the model's: leftovers stay harmless.
            made[key] = GenerationConfig.merge(how, None if one is own else _config(one), _config(own))
        configs.append(made[key])
    _refuse_differences(configs)
    return configs


def _by_seed(call: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """The call for all prompts, or where its seeds are several, one for each, of `count` unless that is 1."""
    seeds: Any = call.get("seed")
    if not isinstance(seeds, list | tuple) and not getattr(seeds, "ndim", 0):
        return [call]
    each = list(seeds if isinstance(seeds, list | tuple) else seeds.tolist())
    if not each or count not in (1, len(each)):
        many = "one number or a list" if count == 1 else str(count)
        raise ConfigError("seed", f"must be {many}, one a prompt", each)
    kept = {seed: {**call, "seed": seed} for seed in dict.fromkeys(FIELDS["seed"].parse(one) for one in each)}
    return [kept[FIELDS["seed"].parse(seed)] for seed in each]


class Call:
    """The prompts of one call in a Session: which request is which prompt, and which lines are its."""

    def __init__(
        self,
        model: Any,
        asked: Asked,
        *,
        states: Sequence[str] = (),
        observe: Callable[[Observation], None] | None = None,
    ) -> None:
        self.asked = asked
        self.loan = None if asked.past is None else Loan(asked.past)
        cache = _refused(asked.config, self.loan)
        self.session = Session(model, states=states, observe=observe, cache=cache, trace=asked.tracer)
        self.numbers: list[int] = []
        self.configs: list[GenerationConfig] = []
        self.healed: list[Tail] = []  # what token healing has taken off each prompt

    def admit(self, given: Mapping[str, Any]) -> Prepared:
        """Take the prompts of the model inputs `given` in."""
        asked, model = self.asked, self.session.model
        given = dict(given)
        negative = _negative(given.pop(NEGATIVE, None), given.pop("negative_prompt_attention_mask", None))
        prompts = prepared(given, asked.config, model.facts, model.device)
        if negative is not None and len(negative) != len(prompts):
            raise InputError(
                NEGATIVE, f"must have one line for each of the {len(prompts)} prompts", len(negative)
            )
        self.configs = _by_length(asked.configs, asked.criteria)
        if len(self.configs) == 1:
            self.configs *= len(prompts)
        if len(self.configs) != len(prompts):
            must = f"must be one for each of the {len(prompts)} prompts, or one for all"
            raise InputError(asked.several, must, f"{len(self.configs)} of them")
        whole = [prompts.prompt(line) for line in range(len(prompts))]
        self.healed = [
            Tail.of(asked.tokenizer, ids.tolist())
            if config.token_healing and asked.tokenizer is not None
            else Tail()
            for config, ids in zip(self.configs, whole, strict=True)
        ]
        pasts = [None] * len(prompts) if self.loan is None else self.loan.pasts(prompts)
        prompts = prompts.shortened([len(tail) for tail in self.healed], pad_of(asked.config))
        keep = self._keeps(sum(config.num_return_sequences for config in self.configs))
        first, requests = 0, []
        for line, config in enumerate(self.configs):
            requests.append(
                Request(
                    whole[line],
                    config,
                    prompts.inputs[line]
                    if negative is None
                    else {**prompts.inputs[line], NEGATIVE: negative[line]},
                    tuple(asked.processors),
                    tuple(asked.criteria),
                    tokenizer=asked.tokenizer,
                    assistant_model=asked.assistant_model,
                    assistant_tokenizer=asked.assistant_tokenizer,
                    past=pasts[line],
                    recipe=asked.recipe,
                    keep=keep,
                    batch=line,
                    width=prompts.shown.shape[1],
                    # How many rows a recipe makes of a prompt is its own affair, and so is its luck.
                    line=-1 if asked.recipe is not None and asked.recipe.kind == "strategy" else first,
                    merged=True,
                )
            )
            first += rows_of(config)
        self.numbers = self.session.admit(*requests, lines=first)
        return prompts

    def _keeps(self, sequences: int) -> bool:
        """Whether anybody will see what so many sequences hold."""
        config, facts = self.asked.config, self.session.model.facts
        if facts.encoder_decoder:
            return False  # what it sees of the encoder is no part of what rows hold
        single = facts.memory == "keys" or (facts.memory == "own" and sequences == 1)
        if self.loan is not None and (not self.loan.frozen or config.return_dict_in_generate):
            if not single:
                must = "of a model that keeps more than keys and values is filled for one sequence alone"
                raise InputError("past_key_values", must, f"{sequences} sequences", "pass them one by one")
            return True
        told = config.source("use_cache") in ("call", "argument") and config.use_cache
        wanted = config.return_dict_in_generate and (told or bool(config.return_legacy_cache))
        return wanted and single and not hasattr(self.session.model, "new_cache")

    def cache(self, pasts: Sequence[Past], found: Sequence[Hypothesis], prompts: Prepared) -> Any:
        """The cache that holds what the sequences found hold: the user's, if it can be changed."""
        if not pasts:
            return None
        counts = [config.num_return_sequences for config in self.configs]
        whose = [line for line, count in enumerate(counts) for _ in range(count)]
        tokens = [
            torch.cat((prompts.prompt(line).cpu(), one.tokens[:-1]))
            for line, one in zip(whose, found, strict=True)
        ]
        wide = prompts.shown.shape[1]
        # As far as all of them are read: the last token of one that ended early is not.
        columns = torch.ones(len(found), wide + min(len(one.tokens) for one in found) - 1, dtype=torch.bool)
        if prompts.here is not None:
            columns[:, :wide] = prompts.here.cpu()[whose]
        return given_back(self.loan, pasts, tokens, columns)

    def lines(self, count: Callable[[GenerationConfig], int]) -> dict[int, int]:
        """The first line of each request where each has `count(config)` lines."""
        first, lines = 0, {}
        for number, config in zip(self.numbers, self.configs, strict=True):
            lines[number] = first
            first += count(config)
        return lines


def _refused(config: GenerationConfig, loan: Loan | None) -> Cache | None:
    """The cache of the call, where it is not for the model to say; an error where two are asked for."""
    if config.use_cache is False and config.source("use_cache") != "model":
        if loan is not None:
            raise ConfigError("use_cache", "must not be False with `past_key_values`", False, "leave one out")
        if config.assistant_early_exit is not None:
            must = "must not be False with `assistant_early_exit`, which reads what its layers keep"
            raise ConfigError(("use_cache", "assistant_early_exit"), must, False, "leave one out")
        return Unkept()
    if loan is None:
        return None
    if config.cache_implementation is not None and config.source("cache_implementation") != "model":
        do = "leave one of them out"
        must = "has no use with `past_key_values`, which is of a kind already"
        raise ConfigError("cache_implementation", must, config.cache_implementation, do)
    return loan.table()


def _negative(ids: Any, mask: Any) -> list[Tensor] | None:
    """Negative prompts [B, L] as lines without padding."""
    if ids is None:
        if mask is not None:
            do = "leave it out"
            raise InputError("negative_prompt_attention_mask", f"has no use without `{NEGATIVE}`", mask, do)
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(NEGATIVE, "must be [batch, length] of ids", ids)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        raise InputError("negative_prompt_attention_mask", f"must have the shape of `{NEGATIVE}`", mask)
    return [line if mask is None else line[mask[at].bool()] for at, line in enumerate(ids)]


def _by_length(configs: Sequence[GenerationConfig], criteria: Sequence[Any]) -> list[GenerationConfig]:
    """The configs, their lengths replaced by a MaxLengthCriteria given by hand, as documented."""
    lengths = [one.max_length for one in criteria if type(one).__name__ == "MaxLengthCriteria"]
    if not lengths:
        return list(configs)
    made = {id(one): one.replace(max_length=min(lengths), max_new_tokens=None) for one in configs}
    return [made[id(one)] for one in configs]


def recipe_of(given: dict[str, Any]) -> tuple[Recipe | None, dict[str, Any]]:
    """The recipe among the keyword arguments of a call, with its own arguments, and all the others."""
    given = dict(given)
    trust = given.pop("trust_remote_code", None)
    both = {name: given.pop(name, None) for name in ("recipe", "custom_generate")}
    named = {name: value for name, value in both.items() if value is not None}
    if not named:
        if trust:
            raise InputError("trust_remote_code", "has no use without `recipe`", trust, "leave it out")
        return None, given
    if len(named) > 1:
        must = "is another name of `recipe`, and must be given alone"
        raise InputError("custom_generate", must, named["custom_generate"], "leave it out")
    [asked] = named.values()
    recipe = load_recipe(asked, trust_remote_code=trust)
    return recipe.split(given) if recipe.kind != "generate" else (recipe, given)


def listed(name: str, given: Any) -> tuple[Any, ...]:
    """Processors or criteria, one or a list of them, as a tuple."""
    if given is None:
        return ()
    if callable(given) and not isinstance(given, list | tuple):
        return (given,)
    if not isinstance(given, list | tuple):
        raise InputError(name, "must be a list of callables", given)
    return tuple(given)


def placed(model: Any, inputs: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The model's inputs, with `inputs` under its own name."""
    given = dict(others)
    if inputs is None:
        return given
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids" and isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        return {**given, main: inputs}
    if not isinstance(inputs, torch.Tensor) or inputs.ndim not in (2, 3):
        raise InputError("inputs", "must be [batch, length] of ids or [batch, length, size]", inputs)
    name = "inputs_embeds" if inputs.ndim == 3 else "input_ids"
    if given.get(name) is not None:
        raise InputError(name, "must not be given beside `inputs`, which is the same", given[name])
    return {**given, name: inputs}


def rows_of(config: GenerationConfig) -> int:
    """How many rows a request draws for: beams draw as one."""
    return config.num_return_sequences if config.num_beams == 1 else 1


def _config(given: Any) -> GenerationConfig | None:
    """A generation config of ours, from ours or transformers' own."""
    if given is None or isinstance(given, GenerationConfig):
        return given
    if not hasattr(given, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig, or a list of them", given)
    # Its attributes and not its `to_dict`, which copies everything deeply at every call.
    return GenerationConfig.from_transformers(given_of(given))


def _refuse_differences(configs: Sequence[GenerationConfig]) -> None:
    """Raise for configs of one call that differ in what concerns it as a whole."""
    for name in _SHARED:
        values = [getattr(config, name) for config in configs]
        odd = next((value for value in values if value != values[0]), values[0])
        if odd != values[0]:
            must = f"must be the same for every prompt of a call, the first has {values[0]!r}"
            raise ConfigError(name, must, odd)
