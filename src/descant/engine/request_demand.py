"""What a request takes: its rows, tokens and blocks as a scheduler counts them."""

from __future__ import annotations

import torch

from descant.core.interfaces import ModelTraits, RowCache
from descant.core.rows import Rows
from descant.decoding.guidance.cfg import NEGATIVE_PROMPT_KEY
from descant.engine.admission import ResolvedRequest
from descant.engine.prompt_reader import common_length
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import ParkedRequest
from descant.engine.scheduling.scheduled_request import ScheduledRequest
from descant.kv_cache.cached_row import is_lossless
from descant.kv_cache.paged import PagedStore

__all__ = ["parked_demand", "reads_in_chunks", "request_demand"]


def reads_in_chunks(traits: ModelTraits, store: RowCache) -> bool:
    """Whether a model can read tokens piece by piece into a cache of the type of `store`."""
    if traits.cache_type != "kv" or traits.is_encoder_decoder:
        return False
    return is_lossless(store) and not (traits.has_own_position_ids or traits.needs_own_cache)


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
    rows *= 2 if is_guided else 1
    if not paged:  # a recurrent state does not grow
        fixed_blocks += rows * (1 if traits.cache_type == "recurrent" else config.blocks_of(max_row_tokens))
    drafts = int(plan.method_params.get("draft_tokens", 0))
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
