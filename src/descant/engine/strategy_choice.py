"""Which strategy a config or a recipe selects, with all that the engine must know of it beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import NoiseSource, RankGroup, StopCondition, Strategy, StrategyTraits
from descant.decoding.constraints import ConstraintListState, parse_force_words
from descant.decoding.processors.pipeline import end_token_ids
from descant.decoding.strategies.banned_phrases import BannedPhraseSampling
from descant.decoding.strategies.beams.beam import BeamSearch, BeamSettings
from descant.decoding.strategies.beams.constrained import ConstrainedBeamSearch
from descant.decoding.strategies.contrastive import ContrastiveSearch, LowMemoryContrastiveSearch
from descant.decoding.strategies.sampling import Sampling
from descant.decoding.strategies.speculative import SpeculativeSampling
from descant.engine.drafter_factory import DrafterSpec
from descant.errors import ConfigError
from descant.recipes.recipe import Recipe

__all__ = ["StrategyChoice", "choose_strategy", "is_constrained", "is_contrastive", "strategy_name"]

StrategyFactory = Callable[[NoiseSource, StopCondition, RankGroup | None], Strategy]


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy to be built: requests with equal keys share one."""

    name: str
    make: StrategyFactory
    traits: StrategyTraits
    settings: tuple[Any, ...] = ()  # equal on all ranks
    local_settings: tuple[Any, ...] = ()  # ids of objects, which differ between ranks
    requested_by: str | None = None  # what selects it: a config field or "a drafter"; None: the default
    rewind_field: str | None = None  # the argument because of which it takes tokens back
    num_candidates: int = 1  # rows that each row becomes while its next token is chosen
    row_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies it in this process."""
        return (self.name, self.settings, self.local_settings)

    @property
    def rank_key(self) -> tuple[Any, ...]:
        """What identifies it on all ranks."""
        return (self.name, self.settings)


def choose_strategy(
    config: GenerationConfig, drafts: DrafterSpec | None = None, recipe: Recipe | None = None
) -> StrategyChoice:
    """The strategy of a recipe, or else of a config."""
    choice = _config_strategy(config, drafts)
    if recipe is None or recipe.kind != "strategy":
        return choice
    if choice.requested_by is not None:
        name = choice.requested_by
        shown = f"`{name}`" if "_" in name else name
        must = f"must be None with {shown}: there can be only one strategy"
        raise ConfigError(("recipe", name), must, recipe, "leave one of them out")
    return StrategyChoice(
        "recipe",
        recipe.build,
        # It is not known whether a recipe feeds tokens that it rejects.
        replace(recipe.strategy_traits, feeds_rejected_tokens=True),
        (recipe.name,),
        recipe.key,
        requested_by="recipe",
        rewind_field="recipe",
        row_params=choice.row_params,
    )


def _config_strategy(config: GenerationConfig, drafts: DrafterSpec | None) -> StrategyChoice:
    if config.num_beams > 1:
        return _beam_strategy(config)
    if config.banned_phrases:
        traits, by = BannedPhraseSampling.traits, "banned_phrases"
        return StrategyChoice("backtracking", BannedPhraseSampling, traits, requested_by=by, rewind_field=by)
    if is_contrastive(config):
        return _contrastive_strategy(config)
    if drafts is not None:
        make_drafter = drafts.make_drafter
        return StrategyChoice(
            "speculative",
            lambda noise, *rest: SpeculativeSampling(make_drafter(noise), noise, *rest),
            SpeculativeSampling.traits,
            drafts.key[:1],
            drafts.key[1:],
            requested_by="a drafter",
        )
    return StrategyChoice("sampling", Sampling, Sampling.traits)


def strategy_name(config: GenerationConfig) -> str:
    """The name of a config's strategy."""
    if config.num_beams == 1:
        single = "sampling" if config.do_sample else "greedy search"
        single += " with backtracking" if config.banned_phrases else ""
        return f"contrastive search, {config.top_k} candidates" if is_contrastive(config) else single
    kind = "beam sampling" if config.do_sample else "beam search"
    kind = f"constrained {kind}" if is_constrained(config) else kind
    groups = f" in {config.num_beam_groups} groups" if config.num_beam_groups > 1 else ""
    return f"{kind}, {config.num_beams} beams{groups}"


def _beam_strategy(config: GenerationConfig) -> StrategyChoice:
    # Enough candidates that `num_beams` remain when the best choices of every beam are all end tokens.
    num_candidates = max(2, 1 + len(end_token_ids(config)))
    settings = BeamSettings(config.num_beams, config.num_beam_groups, num_candidates, config.do_sample)
    constrained = is_constrained(config)
    kind = ConstrainedBeamSearch if constrained else BeamSearch
    return StrategyChoice(
        "constrained" if constrained else "beam",
        partial(kind, settings),
        kind.traits,
        tuple(settings),
        requested_by="num_beams",
        row_params={"constraint_state": _constraint_state(config)} if constrained else {},
    )


def _contrastive_strategy(config: GenerationConfig) -> StrategyChoice:
    low_memory = bool(config.low_memory)
    kind = LowMemoryContrastiveSearch if low_memory else ContrastiveSearch
    return StrategyChoice(
        "low-memory contrastive" if low_memory else "contrastive",
        kind,
        kind.traits,
        requested_by="penalty_alpha",
        rewind_field="low_memory" if low_memory else None,
        num_candidates=1 if low_memory else config.top_k,
        row_params={"penalty_alpha": config.penalty_alpha, "top_k": config.top_k},
    )


def is_constrained(config: GenerationConfig) -> bool:
    """Whether a config has constraints."""
    return config.constraints is not None or config.force_words_ids is not None


def is_contrastive(config: GenerationConfig) -> bool:
    """Whether a config selects contrastive search."""
    return bool(config.penalty_alpha) and config.top_k > 1


def _constraint_state(config: GenerationConfig) -> ConstraintListState:
    """A config's constraints, none of them met."""
    words = parse_force_words(config.force_words_ids) if config.force_words_ids else ()
    constraints = [*(config.constraints or ()), *words]
    return ConstraintListState(constraints, config.ordered_constraints, config.constraint_gap)
