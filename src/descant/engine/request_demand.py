"""What a request takes: its rows, tokens and blocks as a scheduler counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from descant.core.interfaces import ModelTraits, RowCache
from descant.core.rows import Rows
from descant.decoding.guidance.cfg import NEGATIVE_PROMPT_KEY
from descant.engine.admission import ResolvedRequest
from descant.engine.prompt_reader import common_length
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ParkedRequest
from descant.engine.scheduling.scheduled_request import ScheduledRequest
from descant.errors import ConfigError
from descant.kv_cache.cached_row import is_lossless
from descant.kv_cache.paged import PagedStore

__all__ = ["limit_forced_drafts", "parked_demand", "reads_in_chunks", "request_demand"]

# Fields that say how many tokens are drafted.
_LOOKUP_FIELDS = ("prompt_lookup_num_tokens", "suffix_lookup_num_tokens")
DRAFT_FIELDS = (*_LOOKUP_FIELDS, "num_assistant_tokens")


def reads_in_chunks(traits: ModelTraits, store: RowCache) -> bool:
    """Whether a model can read tokens piece by piece into a cache of the type of `store`."""
    if traits.cache_type != "kv" or traits.is_encoder_decoder:
        return False
    return is_lossless(store) and not (traits.has_own_position_ids or traits.needs_own_cache)


def limit_forced_drafts(
    resolved: Sequence[ResolvedRequest], config: SchedulerConfig
) -> list[ResolvedRequest]:
    """Requests whose grammars draft no more forced tokens than a step has room for.

    No field asks for these drafts, and their number changes no result. Other drafts that are too many are an
    error.
    """
    return [_with_possible_drafts(one, config.max_step_tokens) for one in resolved]


def _with_possible_drafts(one: ResolvedRequest, limit: int | None) -> ResolvedRequest:
    """The request; with fewer drafts if only its grammar drafts and a step of `limit` tokens has no room."""
    plan, request = one.plan, one.request
    drafts, rows = int(plan.method_params.get("draft_tokens", 0)), _num_fed_rows(one)
    given = [plan.config.assistant_early_exit, request.assistant_model, plan.recipe]
    given += [getattr(plan.config, name) for name in _LOOKUP_FIELDS]
    if limit is None or not rows <= limit < rows * (1 + drafts) or any(value is not None for value in given):
        return one
    params = {**plan.method_params, "draft_tokens": limit // rows - 1}
    return one._replace(plan=replace(plan, method_params=params))


def _num_fed_rows(one: ResolvedRequest) -> int:
    """The rows that a step feeds for a request, unconditional ones included."""
    rows = one.plan.num_rows * one.plan.strategy.num_candidates
    return rows * 2 if "guidance" in one.plan.wrappers else rows


def _most_drafts(one: ResolvedRequest, config: SchedulerConfig, rows: int) -> int:
    """The most tokens that a row drafts in one step."""
    drafts = min(
        int(one.plan.method_params.get("draft_tokens", 0)),
        max(one.prompt_params.last_length - len(one.prompt), 0),  # the room after the first new token
    )
    limit = config.max_step_tokens
    if drafts and limit is not None and rows <= limit < rows * (1 + drafts):
        given = [name for name in DRAFT_FIELDS if getattr(one.plan.config, name) is not None]
        must = f"must be at most {limit // rows - 1}: a step has max_step_tokens={limit} tokens"
        raise ConfigError(given[0] if given else "assistant_model", must, drafts, "lower it")
    return drafts


def request_demand(
    number: int,
    one: ResolvedRequest,
    traits: ModelTraits,
    config: SchedulerConfig,
    *,
    store: RowCache,
    now: float,
) -> ScheduledRequest:
    """The demand of a request that arrives now, on a cache of the type of `store`.

    On a paged store it takes the blocks of its positions, on any other those of its largest size at once.
    A preempted request is read again from its tokens. That needs a cache in which reading them at once gives
    the same as reading them one by one, rows that then share what they share now, and inputs that the model
    still has.
    """
    request, plan = one.request, one.plan
    rows = plan.num_rows * plan.strategy.num_candidates
    is_guided = "guidance" in plan.wrappers
    # When they are read again, unconditional rows share nothing.
    fixed_blocks = rows * config.blocks_of(_num_negative_tokens(one)) if is_guided else 0
    if traits.is_encoder_decoder:
        encoder_ids = request.inputs.get(traits.main_input_name)
        fixed_blocks += 0 if encoder_ids is None else config.blocks_of(len(encoder_ids))
    side_inputs = set() if traits.is_encoder_decoder else request.inputs.keys() - {NEGATIVE_PROMPT_KEY}
    positions = len(one.prompt) + one.offset
    max_row_tokens, paged = max(one.max_slots, positions), isinstance(store, PagedStore)
    shares_again = rows == 1 or not paged or reads_in_chunks(traits, store)
    rows = _num_fed_rows(one)
    if not paged:  # a recurrent state does not grow
        fixed_blocks += rows * (1 if traits.cache_type == "recurrent" else config.blocks_of(max_row_tokens))
    drafts = _most_drafts(one, config, rows)
    return ScheduledRequest(
        number=number,
        prompt_tokens=positions,
        max_row_tokens=max_row_tokens,
        rows=rows,
        step_tokens=rows * (1 + drafts) if drafts else None,
        fixed_blocks=fixed_blocks,
        paged=paged,
        priority=request.priority,
        deadline=None if request.deadline is None else now + request.deadline,
        chunkable=reads_in_chunks(traits, store) and not (side_inputs or plan.needs_full_prefill),
        preemptible=side_inputs <= traits.positioned_inputs
        and (is_lossless(store) or traits.cache_type == "recurrent")
        and shares_again,
    )


def parked_demand(
    one: ResolvedRequest, rows: Rows, traits: ModelTraits, config: SchedulerConfig, *, store: RowCache
) -> ParkedRequest:
    """What reading the rows of a preempted request again takes, and the step after it."""
    positions = rows.position
    common = common_length(rows) if reads_in_chunks(traits, store) else 0
    shared = common // config.block_size
    own = [positions + 1 - shared * config.block_size]
    if "guidance" in one.plan.wrappers:
        own.append(_num_negative_tokens(one) + rows.length - rows.prompt_length + 1)
    blocks = shared + sum(config.blocks_of(size) for size in torch.cat(own).tolist())
    return ParkedRequest(common + int((positions - common).sum()), blocks)


def _num_negative_tokens(one: ResolvedRequest) -> int:
    """The tokens of a guided request's negative prompt, by default the prompt's last token."""
    negative = one.request.inputs.get(NEGATIVE_PROMPT_KEY)
    return 1 if negative is None else len(negative)
