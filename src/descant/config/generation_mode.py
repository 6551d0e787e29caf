"""GenerationMode: the documented names of decoding methods."""

from __future__ import annotations

from enum import StrEnum

from descant.config.parameters import Parameters

__all__ = ["GenerationMode", "select_mode"]


class GenerationMode(StrEnum):
    """The decoding method of a config; equal to the member of transformers' class with the same value."""

    CONTRASTIVE_SEARCH = "contrastive_search"
    GREEDY_SEARCH = "greedy_search"
    SAMPLE = "sample"
    ASSISTED_GENERATION = "assisted_generation"
    DOLA_GENERATION = "dola_generation"
    BEAM_SEARCH = "beam_search"
    BEAM_SAMPLE = "beam_sample"
    CONSTRAINED_BEAM_SEARCH = "constrained_beam_search"
    GROUP_BEAM_SEARCH = "group_beam_search"


def select_mode(config: Parameters, assistant_model: object = None) -> GenerationMode:
    """The method that a config selects, with a draft model or without.

    Drafts and DoLa extend greedy search and sampling; in a config with both, DoLa names the method.
    """
    mode = _base_mode(config)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return mode
    if config.dola_layers is not None:
        return GenerationMode.DOLA_GENERATION
    drafters = (config.prompt_lookup_num_tokens, config.suffix_lookup_num_tokens, config.assistant_early_exit)
    if assistant_model is not None or any(value is not None for value in drafters):
        return GenerationMode.ASSISTED_GENERATION
    return mode


def _base_mode(config: Parameters) -> GenerationMode:
    """The method without drafts and DoLa."""
    if config.constraints is not None or config.force_words_ids is not None:
        return GenerationMode.CONSTRAINED_BEAM_SEARCH
    if config.num_beams > 1:
        if config.num_beam_groups > 1:
            return GenerationMode.GROUP_BEAM_SEARCH
        return GenerationMode.BEAM_SAMPLE if config.do_sample else GenerationMode.BEAM_SEARCH
    if config.do_sample:
        return GenerationMode.SAMPLE
    is_contrastive = bool(config.penalty_alpha) and (config.top_k or 0) > 1
    return GenerationMode.CONTRASTIVE_SEARCH if is_contrastive else GenerationMode.GREEDY_SEARCH
