"""A user's call as requests: options, merged configs, and admission into a Session of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from os import PathLike
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.inputs import RaggedPrompts, prepare_prompts
from descant.api.user_cache import UserCache, return_cache
from descant.config.fields import thaw
from descant.config.generation_config import FIELDS, STEP_OUTPUT_FIELDS, GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.config.registry import GenerationMode
from descant.core.interfaces import RowCache
from descant.core.records import Observation
from descant.decoding.guidance import NEGATIVE_PROMPT_KEY
from descant.engine.planning.planner import pad_token_id
from descant.engine.protocol import Engine, is_engine
from descant.engine.request import CallPlace, Request
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Finished, Session
from descant.errors import ConfigError, InputError, NotInThisVersion, SessionBusy
from descant.kv_cache.row_views import CachedRow
from descant.models.compat.hf_generation_config import explicit_values
from descant.models.forward.no_cache import NoCache
from descant.recipes.loading import load_recipe
from descant.recipes.recipe import Recipe
from descant.tokenization.detokenizer import IncrementalDetokenizer
from descant.tokenization.regions import ResponseReader
from descant.tokenization.response_syntax import HERMES, ResponseSyntax
from descant.tokenization.token_healing import HealedSuffix
from descant.trace.tracer import Tracer

# A config as plain data: each name with the type and the value of its entry. 1, 1.0 and True are equal, and
# differ as values of a field.
_Entries = tuple[tuple[str, Any, Any], ...]

_PLAIN_TYPES: Final = frozenset({bool, int, float, str})


def merge_config(
    call: Mapping[str, Any],
    argument: Any,
    model_config: Any,
    use_model_defaults: bool,
    **options: bool,
) -> GenerationConfig:
    """The effective config of call arguments, a config given as argument and the model's; None: not given.

    `options` are those of `GenerationConfig.merge`.
    Calls often repeat all three: plain data that has been merged before is not parsed and checked again.
    """
    if argument is None and not isinstance(model_config, GenerationConfig):
        call_entries = _plain_entries(call)
        model_entries: _Entries | None = None
        if model_config is None:
            model_entries = ()
        elif hasattr(model_config, "to_dict") and not hasattr(model_config, "_filled"):
            # Not by it: it makes a deep copy at every call.
            model_entries = _plain_entries(vars(model_config), keeps_none=False)
        if call_entries is not None and model_entries is not None:
            # A copy, since it may change.
            return copy(_merge_plain(call_entries, model_entries, model_config is not None, **options))
    explicit, defaults = _as_generation_config(argument), _as_generation_config(model_config)
    if defaults is not None and explicit is not None and not use_model_defaults:
        defaults = defaults.only_special_tokens()
    return GenerationConfig.merge(call, explicit, defaults, **options)


@lru_cache(maxsize=256)
def _merge_plain(call: _Entries, model: _Entries, has_model: bool, **options: bool) -> GenerationConfig:
    """The effective config of plain call arguments and a plain config of the model."""
    defaults = GenerationConfig.from_transformers(_as_values(model)) if has_model else None
    return GenerationConfig.merge(_as_values(call), None, defaults, **options)


def _plain_entries(values: Mapping[str, Any], keeps_none: bool = True) -> _Entries | None:
    """The values as plain data, None among them if `keeps_none`; None: there is something else."""
    entries: list[tuple[str, Any, Any]] = []
    for name, value in values.items():
        kind = type(value)
        if value is None and not keeps_none:
            continue
        if value is None or kind in _PLAIN_TYPES:
            entries.append((name, kind, value))
        elif kind in (list, tuple) and all(type(part) in _PLAIN_TYPES for part in value):
            entries.append((name, (kind, *map(type, value)), tuple(value)))
        else:
            return None
    return tuple(entries)


def _as_values(entries: _Entries) -> dict[str, Any]:
    """The values of plain data."""
    return {name: kind[0](value) if isinstance(kind, tuple) else value for name, kind, value in entries}


def _as_generation_config(given: Any) -> GenerationConfig | None:
    """Our generation config, from ours or from transformers'."""
    if given is None or isinstance(given, GenerationConfig):
        return given
    if not hasattr(given, "to_dict"):
        raise InputError("generation_config", "must be a GenerationConfig, or a list of them", given)
    return GenerationConfig.from_transformers(explicit_values(given))


def adapter_names_of(given: Any, num_prompts: int) -> list[str | None]:
    """The adapter of each prompt."""
    names = [given] * num_prompts if given is None or isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(
        name is None or isinstance(name, str) for name in names
    ):
        raise InputError("adapter_names", "must be a name, or a list with a name for each prompt", given)
    if len(names) != num_prompts:
        raise InputError("adapter_names", f"must have a name for each of the {num_prompts} prompts", given)
    return list(names)


def negative_prompts(ids: Any, mask: Any) -> list[Tensor]:
    """Negative prompts [B, L] as rows without padding."""
    if ids is None:
        must = f"has no use without `{NEGATIVE_PROMPT_KEY}`"
        raise InputError("negative_prompt_attention_mask", must, mask, "leave it out")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputError(NEGATIVE_PROMPT_KEY, "must be [batch, length] of ids", ids)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        raise InputError(
            "negative_prompt_attention_mask", f"must have the shape of `{NEGATIVE_PROMPT_KEY}`", mask
        )
    return [row if mask is None else row[mask[index].bool()] for index, row in enumerate(ids)]


# Fields of the call as a whole: they must be equal for all prompts.
_SHARED_FIELDS = (
    "return_dict_in_generate", *STEP_OUTPUT_FIELDS, "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "generation_kwargs",
)  # fmt: skip

# Methods whose rows keep their place from the first step to the last.
_FIXED_ROW_MODES: Final = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.DOLA_GENERATION,
}


_NO_SUFFIX: Final = HealedSuffix()

# The arguments of a call that are neither config fields nor inputs of the model.
_RECIPE_ARGUMENTS: Final = frozenset({"recipe", "custom_generate", "trust_remote_code"})
_OPTIONS: Final = (
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "tokenizer", "assistant_model",
    "assistant_tokenizer", "past_key_values", "adapter_names", "trace", "scheduler", "streamer", "progress",
    "use_model_defaults",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The arguments of one call by name, and the configs that they make."""

    configs: Sequence[GenerationConfig] = ()  # merged: one for all prompts, or one for each
    inputs: Any = None
    generation_config: Any = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    tokenizer: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None
    past_key_values: Any = None  # the user's cache
    adapter_names: Any = None  # of PEFT: one for all prompts, or a list with one for each
    recipe: Recipe | None = None
    trace: Tracer | None = None  # records the run
    scheduler: SchedulerConfig | None = None  # the budgets of the call; None: all prompts run at once
    streamer: Any = None
    progress: bool = False  # whether a bar counts the finished prompts
    use_model_defaults: bool = True  # whether the model's config completes a given one
    # Whether it is a model's method: lengths include the padding, an output object has the cache, and some
    # errors are warnings.
    is_method: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the config
    others: Mapping[str, Any] = field(default_factory=dict)  # inputs of the model, and its own arguments

    @classmethod
    def parse(cls, arguments: Mapping[str, Any], *, is_method: bool = False) -> CallOptions:
        """The options of a call with these arguments; None of an option is not given."""
        recipe, others = None, dict(arguments)
        if not _RECIPE_ARGUMENTS.isdisjoint(others):
            recipe, others = _pop_recipe(others)
        options: dict[str, Any] = {}
        for name in _OPTIONS:
            value = others.pop(name, None)
            if value is not None:
                options[name] = value
        if options.get("progress") not in (None, True, False):
            raise InputError("progress", "must be True or False", options["progress"])
        if "trace" in options:
            options["trace"] = Tracer.from_argument(options["trace"], options.get("tokenizer"))
        fields: dict[str, Any] = {}
        for name in list(others):
            if name in FIELDS:
                fields[name] = others.pop(name)
        return cls(recipe=recipe, is_method=is_method, fields=fields, others=others, **options)

    def merged(self, model: Any, **fields: Any) -> CallOptions:
        """The call with its configs on a model, where `fields` win over its own."""
        configs = merge_configs(
            model,
            self.generation_config,
            {**self.fields, **fields},
            self.use_model_defaults is not False,
            lenient=self.is_method,  # values that transformers 4.52.4 ignores are ignored
            has_strategy=self.recipe is not None and self.recipe.kind == "strategy",
        )
        return replace(self, configs=configs)

    @property
    def processors(self) -> tuple[Any, ...]:
        """The user's logits processors."""
        given = self.logits_processor
        return () if given is None else _as_tuple("logits_processor", given)

    @property
    def criteria(self) -> tuple[Any, ...]:
        """The user's stopping criteria."""
        given = self.stopping_criteria
        return () if given is None else _as_tuple("stopping_criteria", given)

    @property
    def forks(self) -> bool:
        """Whether a recipe says how many sequences a prompt has."""
        return self.recipe is not None and any(map(self.recipe.forks, self.configs))

    def check_unused(
        self, *names: str, must: str, error: type[ConfigError | InputError] = NotInThisVersion
    ) -> None:
        """Raise for an option of these names that is given and that this call cannot use."""
        for name in names:
            value = getattr(self, name)
            is_empty = isinstance(value, list | tuple) and not value
            if value is not getattr(CallOptions, name) and not is_empty:
                shown = name in ("recipe", "use_model_defaults")
                got = value if shown else True if name == "trace" else type(value).__name__
                raise error(name, must, got, "leave it out")


def merge_configs(
    model: Any,
    argument: Any,
    fields: Mapping[str, Any],
    use_model_defaults: bool = True,
    **checks: bool,
) -> list[GenerationConfig]:
    """The effective configs: one for all prompts, or one each if the argument or the seed is a list.

    Without `use_model_defaults` a config given as the argument takes only special tokens from the model's.
    `checks` are `lenient` and `has_strategy` of `GenerationConfig.merge`.
    """
    model_config = getattr(model, "generation_config", None)
    arguments = list(argument) if isinstance(argument, list | tuple) else [argument]
    if not arguments:
        raise InputError("generation_config", "must hold a config for each prompt", argument)
    seed = fields.get("seed")
    calls: list[Mapping[str, Any]] = [fields]
    if seed is not None and not isinstance(seed, int):
        calls = _split_by_seed(fields, len(arguments))
    arguments = arguments * len(calls) if len(arguments) == 1 else arguments
    calls = calls * len(arguments) if len(calls) == 1 else calls
    merged: dict[Any, GenerationConfig] = {}
    configs = []
    for config, call in zip(arguments, calls, strict=True):
        key = (id(config), id(call))
        if key not in merged:
            # The model's own config passed as the argument counts as the model's: unused values are allowed.
            explicit = None if config is model_config else config
            merged[key] = merge_config(call, explicit, model_config, use_model_defaults, **checks)
        configs.append(merged[key])
    if len(merged) > 1:
        _validate_shared_fields(configs)
    return configs


def _split_by_seed(fields: Mapping[str, Any], num_configs: int) -> list[Mapping[str, Any]]:
    """The fields for all prompts, or one mapping per prompt if `seed` is a list."""
    seeds: Any = fields.get("seed")
    if not isinstance(seeds, list | tuple) and not getattr(seeds, "ndim", 0):
        return [fields]
    per_prompt = list(seeds if isinstance(seeds, list | tuple) else seeds.tolist())
    if not per_prompt or num_configs not in (1, len(per_prompt)):
        expected = (
            "an int or a list with one int" if num_configs == 1 else f"a list of {num_configs} ints, one"
        )
        raise ConfigError("seed", f"must be {expected} per prompt", per_prompt)
    parsed = [FIELDS["seed"].parse(seed) for seed in per_prompt]
    by_seed = {seed: {**fields, "seed": seed} for seed in dict.fromkeys(parsed)}
    return [by_seed[seed] for seed in parsed]


class Call:
    """The prompts of one call in a Session, and the mapping between requests, prompts and output rows."""

    def __init__(
        self,
        model: Any,
        options: CallOptions,
        *,
        states: Sequence[str] = (),
        observe: Callable[[Observation], None] | None = None,
    ) -> None:
        self.options = options
        self.user_cache = None if options.past_key_values is None else UserCache(options.past_key_values)
        self.session: Engine
        if is_engine(model):
            _check_engine(model, options)
            self.session = model
        else:
            cache = None
            if self.user_cache is not None or options.configs[0].use_cache is False:
                cache = _requested_cache(options.configs[0], self.user_cache)
            self.session = Session(
                model,
                states=states,
                observe=observe,
                cache=cache,
                trace=options.trace,
                scheduler=options.scheduler,
            )
        self.prompts: RaggedPrompts  # as they are fed, from `admit` on
        self.criteria = options.criteria  # as they are called
        self.request_ids: list[int] = []
        self.returns_cache = False  # whether the cache of its sequences is written back or returned
        self.configs: list[GenerationConfig] = []
        self.row_counts: list[int] = []  # rows of random noise of each prompt
        self.healed_suffixes: list[HealedSuffix] = []  # the tokens that healing removed from each prompt

    def admit(self, inputs: Mapping[str, Any]) -> None:
        """Admit the prompts given as model inputs."""
        options = self.options
        config, session = options.configs[0], self.session  # the shared fields are those of the first
        # Arguments of the call win over those in the config.
        inputs = {**thaw(config.generation_kwargs), **inputs} if config.generation_kwargs else dict(inputs)
        negative_ids = inputs.pop(NEGATIVE_PROMPT_KEY, None)
        negative_mask = inputs.pop("negative_prompt_attention_mask", None)
        prompts = prepare_prompts(inputs, config, session.traits, session.device)
        if negative_ids is not None or negative_mask is not None:
            negative = negative_prompts(negative_ids, negative_mask)
            if len(negative) != len(prompts):
                must = f"must have one row for each of the {len(prompts)} prompts"
                raise InputError(NEGATIVE_PROMPT_KEY, must, len(negative))
            pairs = zip(prompts.inputs, negative, strict=True)
            prompts = replace(prompts, inputs=[{**given, NEGATIVE_PROMPT_KEY: ids} for given, ids in pairs])
        self.configs = list(options.configs)
        if self.criteria:
            self.configs = _apply_max_length_criteria(self.configs, options.criteria)
        count = len(prompts)
        if len(self.configs) == 1:
            self.configs *= count
        if len(self.configs) != count:
            must = f"must be one for each of the {count} prompts, or one for all"
            name = "generation_config" if isinstance(options.generation_config, list | tuple) else "seed"
            raise InputError(name, must, f"{len(self.configs)} of them")
        full_prompts = list(map(prompts.prompt, range(count)))
        no_rows: list[CachedRow | None] = [None] * count
        cached_rows = no_rows if self.user_cache is None else self.user_cache.cached_rows(prompts)
        self.prompts = prompts
        self.healed_suffixes = [_NO_SUFFIX] * count
        if options.tokenizer is not None:
            self.healed_suffixes = [
                HealedSuffix.from_prompt(options.tokenizer, ids.tolist())
                if config.token_healing
                else _NO_SUFFIX
                for config, ids in zip(self.configs, full_prompts, strict=True)
            ]
            healed_counts = list(map(len, self.healed_suffixes))
            if any(healed_counts):
                self.prompts = prompts.drop_last_tokens(healed_counts, pad_token_id(config))
        self.row_counts = list(map(_num_rows, self.configs))
        requests = self._requests(full_prompts, cached_rows)
        self.request_ids = session.admit(*requests, noise_rows=sum(self.row_counts))

    def detokenizer(self, index: int) -> IncrementalDetokenizer:
        """The text of one sequence of a prompt, as its tokens come; the call has a tokenizer."""
        return IncrementalDetokenizer(
            self.options.tokenizer,
            prompt_ids=self.prompts.prompt(index).tolist(),
            stop_strings=self.configs[index].stop_strings or (),
            # The text that token healing regenerates is part of the prompt.
            skip=len(self.healed_suffixes[index].text.decode(errors="ignore")),
            skip_special_tokens=True,
        )

    def response_syntax(self, index: int) -> ResponseSyntax | None:
        """The markers of the responses to a prompt; None: they have none, or there is no tokenizer.

        What a grammar rules has calls in the grammar's form, and none in another's.
        """
        if self.options.tokenizer is None:
            return None
        own, grammar = ResponseSyntax.of_tokenizer(self.options.tokenizer), self.configs[index].grammar
        if not isinstance(grammar, GrammarSpec):
            return own
        thought, calls = None if own is None else own.thought, HERMES if grammar.kind == "tools" else None
        return None if thought is None and calls is None else ResponseSyntax(thought, calls)

    def response_reader(self, index: int) -> ResponseReader | None:
        """The parts of one sequence of a prompt; None: they are its text."""
        syntax = self.response_syntax(index)
        if syntax is None:
            return None
        return ResponseReader(syntax, self.prompts.prompt(index).tolist(), self.detokenizer(index))

    def cancel(self) -> None:
        """Cancel the requests of the call that have not ended, where others use its engine after it."""
        if not isinstance(self.session, Session):
            for request in set(self.request_ids) & set(self.session.running):
                self.session.cancel(request)

    def _requests(
        self, full_prompts: Sequence[Tensor], cached_rows: Sequence[CachedRow | None]
    ) -> list[Request]:
        """One request for each prompt."""
        options, prompts = self.options, self.prompts
        self.returns_cache = keep_cache = self._must_return_cache()
        scheduler = options.scheduler
        if keep_cache and self.session.traits.is_encoder_decoder:
            assert isinstance(self.session, Session)
            self.session.model.encoder.keeps_finished = True
        if keep_cache and scheduler is not None and scheduler.num_blocks is not None:
            must = "must have no `num_blocks` in a call that returns its cache, which holds all sequences"
            raise InputError("scheduler", must, scheduler, "leave one of them out")
        # The number of rows of a strategy recipe is unknown here, and with a scheduler the rows of a call are
        # not all at the same step, so they have no noise rows of the call.
        is_strategy_recipe = options.recipe is not None and options.recipe.kind == "strategy"
        draws_alone = is_strategy_recipe or scheduler is not None
        first_row, requests, processors = 0, [], options.processors
        has_own_code = processors or self.criteria or options.recipe is not None
        batch_size = self._num_fixed_rows() if has_own_code else 0
        adapter_names: list[str | None] = [None] * len(self.configs)
        if options.adapter_names is not None:
            adapter_names = adapter_names_of(options.adapter_names, len(self.configs))
        traits, past = self.session.traits, self.user_cache
        is_checked = traits.cache_type == "kv" and not traits.is_encoder_decoder  # admission refuses others
        if past is not None and is_checked and isinstance(self.session, Session):
            past.check_model(self.session.model, adapter_names)
        for index, config in enumerate(self.configs):
            requests.append(
                Request(
                    full_prompts[index],
                    config,
                    prompts.inputs[index],
                    processors,
                    self.criteria,
                    tokenizer=options.tokenizer,
                    assistant_model=options.assistant_model,
                    assistant_tokenizer=options.assistant_tokenizer,
                    past_key_values=cached_rows[index],
                    recipe=options.recipe,
                    return_past_key_values=keep_cache,
                    adapter_name=adapter_names[index],
                    _call=CallPlace(
                        prompt_index=index,
                        padded_width=prompts.padded_ids.shape[1],
                        counted_width=prompts.width if options.is_method else 0,
                        batch_row=first_row,
                        batch_size=batch_size,
                        noise_row=-1 if draws_alone else first_row,
                        config_merged=True,
                        healed_suffix=self.healed_suffixes[index] if options.tokenizer is not None else None,
                    ),
                )
            )
            first_row += self.row_counts[index]
        return requests

    def _num_fixed_rows(self) -> int:
        """The number of rows that user processors and criteria are shown in every step; 0: the running ones.

        Beams, candidates and drafts have no fixed rows, nor have prompts that wait for each other.
        """
        if self.options.scheduler is not None:
            return 0
        configs = {id(config): config for config in self.configs}.values()  # most often one for all
        modes = {config.get_generation_mode(self.options.assistant_model) for config in configs}
        is_plain = modes <= _FIXED_ROW_MODES and not any(config.banned_phrases for config in configs)
        return sum(self.row_counts) if is_plain else 0

    def _must_return_cache(self) -> bool:
        """Whether the cache of the returned sequences is written back or returned."""
        config, traits = self.options.configs[0], self.session.traits
        if self.user_cache is not None and self.user_cache.is_encoder_decoder != traits.is_encoder_decoder:
            return False
        is_supported, num_sequences = traits.cache_type == "kv", 1
        if not is_supported:
            num_sequences = sum([config.num_return_sequences for config in self.configs])
            is_supported = traits.cache_type == "recurrent" and num_sequences == 1 and not self.options.forks
        if self.user_cache is not None and (not self.user_cache.frozen or config.return_dict_in_generate):
            if not is_supported:
                must = "must be given with one returned sequence for a model with recurrent state"
                got = f"{num_sequences} sequences" if num_sequences > 1 else "a recipe that forks"
                raise InputError("past_key_values", must, got, "pass the prompts one by one")
            return True
        is_explicit = config.source("use_cache") in ("call", "argument") or bool(config.return_legacy_cache)
        # A model's method returns the cache unless it is limited, or switched off.
        scheduler = self.options.scheduler
        is_limited = scheduler is not None and scheduler.num_blocks is not None
        is_implied = self.options.is_method and self.options.recipe is None and not is_limited
        is_implied = is_implied and traits.cache_type == "kv"
        is_requested = config.return_dict_in_generate and config.use_cache and (is_explicit or is_implied)
        return is_requested and is_supported and not traits.needs_own_cache

    def result_cache(self, events: Sequence[Finished]) -> Any:
        """The cache of the returned sequences: the user's if it is writable, else a new one."""
        if not self.returns_cache:
            return None
        cached_rows = [row for event in events for row in event.past_key_values]
        if not cached_rows:
            return None
        prompts = self.prompts
        prompt_of = [index for index, event in enumerate(events) for _ in event.hypotheses]
        hypotheses = [hypothesis for event in events for hypothesis in event.hypotheses]
        tokens = [
            torch.cat((prompts.prompt(index).cpu(), hypothesis.tokens[:-1]))
            for index, hypothesis in zip(prompt_of, hypotheses, strict=True)
        ]
        width = prompts.padded_ids.shape[1]
        # The last token of a sequence was not fed, so the shortest sequence limits the common columns.
        num_new = min(len(hypothesis.tokens) for hypothesis in hypotheses) - 1
        columns = torch.ones(len(hypotheses), width + num_new, dtype=torch.bool)
        if prompts.mask is not None:
            columns[:, :width] = prompts.mask.cpu()[prompt_of]
        cross = ()
        if self.session.traits.is_encoder_decoder:
            assert isinstance(self.session, Session)
            rows = torch.tensor([self.request_ids[index] for index in prompt_of])
            cross = self.session.model.encoder.cross_attention(rows)
        return return_cache(self.user_cache, cached_rows, tokens, columns, cross)

    def first_rows(self, counts: Sequence[int]) -> dict[int, int]:
        """The first output row of each request, where each has so many rows."""
        starts = accumulate(counts, initial=0)
        return dict(zip(self.request_ids, starts, strict=False))


def engine_or_model(model: Any, engine: Any) -> Any:
    """The engine of a call where one is given, else its model."""
    if engine is None:
        if model is None or isinstance(model, str | PathLike):
            do = "load it first, for instance with transformers.AutoModelForCausalLM.from_pretrained"
            raise InputError("model", "must be a model", model, do)
        return model
    if model is not None:
        must = "must be None beside `engine`, which has a model of its own"
        raise InputError("model", must, type(model).__name__, "pass None as the model")
    if not is_engine(engine):
        raise InputError("engine", "must be an engine, such as descant.VLLM(...)", engine)
    return engine


def _check_engine(engine: Engine, options: CallOptions) -> None:
    """Raise for what only a session of the call's own can do, and for an engine in use."""
    if len(engine):
        must = f"`engine` must be idle at the start of a call, and has {len(engine)} requests"
        raise SessionBusy(f"{must}: end or close the stream that uses it, or share it by an AsyncEngine")
    for name in ("past_key_values", "trace", "scheduler"):
        value = getattr(options, name)
        if value is not None:
            do = "leave one of them out"
            raise InputError(name, "must be None with `engine`", type(value).__name__, do)


def _requested_cache(config: GenerationConfig, user_cache: UserCache | None) -> RowCache | None:
    """The cache that the call requests explicitly, or None; raises if it requests two."""
    if config.use_cache is False and config.source("use_cache") != "model":
        if user_cache is not None:
            raise ConfigError("use_cache", "must not be False with `past_key_values`", False, "leave one out")
        if config.assistant_early_exit is not None:
            must = "must not be False with `assistant_early_exit`, which reads the cache of its layers"
            raise ConfigError(("use_cache", "assistant_early_exit"), must, False, "leave one out")
        return NoCache()
    if user_cache is None:
        return None
    if config.cache_implementation is not None and config.source("cache_implementation") != "model":
        do = "leave one of them out"
        must = "must not be given with `past_key_values`, which sets the cache type"
        raise ConfigError("cache_implementation", must, config.cache_implementation, do)
    return user_cache.empty_like()


def _apply_max_length_criteria(
    configs: Sequence[GenerationConfig], criteria: Sequence[Any]
) -> list[GenerationConfig]:
    """The configs with their length replaced by that of a user's MaxLengthCriteria, as documented."""
    lengths = [item.max_length for item in criteria if type(item).__name__ == "MaxLengthCriteria"]
    if not lengths:
        return list(configs)
    # Equal configs stay one object.
    replaced = {
        id(config): config.replace(max_length=min(lengths), max_new_tokens=None) for config in configs
    }
    return [replaced[id(config)] for config in configs]


def _pop_recipe(others: dict[str, Any]) -> tuple[Recipe | None, dict[str, Any]]:
    """The recipe in the keyword arguments of a call, bound to its own arguments, and all other arguments."""
    trust = others.pop("trust_remote_code", None)
    aliases = {name: others.pop(name, None) for name in ("recipe", "custom_generate")}
    given = {name: value for name, value in aliases.items() if value is not None}
    if not given:
        if trust:
            raise InputError("trust_remote_code", "has no use without `recipe`", trust, "leave it out")
        return None, others
    if len(given) > 1:
        must = "must not be given with `recipe`, which is the same argument"
        raise InputError("custom_generate", must, given["custom_generate"], "leave it out")
    [reference] = given.values()
    recipe = load_recipe(reference, trust_remote_code=trust)
    return recipe.split_arguments(others) if recipe.kind != "generate" else (recipe, others)


def _as_tuple(name: str, given: Any) -> tuple[Any, ...]:
    """One callable or a list of them as a tuple."""
    if callable(given) and not isinstance(given, list | tuple):
        return (given,)
    if not isinstance(given, list | tuple):
        raise InputError(name, "must be a list of callables", given)
    return tuple(given)


def _num_rows(config: GenerationConfig) -> int:
    """The rows of random noise of a request; all beams of a request share one."""
    return config.num_return_sequences if config.num_beams == 1 else 1


def _validate_shared_fields(configs: Sequence[GenerationConfig]) -> None:
    """Raise for configs of one call that differ in a shared field."""
    for name in _SHARED_FIELDS:
        values = [getattr(config, name) for config in configs]
        different = next((value for value in values if value != values[0]), values[0])
        if different != values[0]:
            must = f"must be the same for every prompt of a call, the first has {values[0]!r}"
            raise ConfigError(name, must, different)
