"""The scheduler by hand: order, budgets, chunks, growth, preemption, deadlines and refusals."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from descant.engine.scheduling import ageing_scheduler
from descant.engine.scheduling.ageing_scheduler import AgeingScheduler
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.scheduling.plan import (
    ParkedRequest,
    PrefixHit,
    RequestUsage,
    ScheduledRequest,
    StepPlan,
    StepReport,
)
from descant.errors import ConfigError, EngineFull, InputError


def request(number: int, prompt: int = 4, **fields: Any) -> ScheduledRequest:
    return ScheduledRequest(number=number, prompt_tokens=prompt, **{"max_row_tokens": 64, **fields})


def scheduler(lookup: Any = None, **limits: Any) -> AgeingScheduler:
    defaults = {"block_size": 4, "headroom": 0.0, "preemption": "priority"}
    return AgeingScheduler(SchedulerConfig(**{**defaults, **limits}), lookup)


def step(one: AgeingScheduler, now: float = 0.0, **report: Any) -> StepPlan:
    """One step of which the engine reports that."""
    plan = one.schedule(now)
    one.finish_step(StepReport(**report))
    return plan


def growing(**blocks: tuple[int, int]) -> dict[int, RequestUsage]:
    """Usage by request: `_3=(held, next)`."""
    return {int(name[1:]): RequestUsage(*pair) for name, pair in blocks.items()}


# ------------------------------------------------------------------------ order
def test_requests_run_in_the_order_of_arrival_and_number():
    one = scheduler(max_running_rows=2)
    one.add(request(7), request(3), now=0.0)
    one.add(request(1), now=1.0)
    assert step(one, 1.0).admitted == (3, 7)
    assert step(one, 1.0).decode == (3, 7)
    assert step(one, ended=[3]).admitted == ()
    assert step(one).admitted == (1,)


def test_a_priority_level_is_worth_so_many_seconds():
    one = scheduler(max_running_rows=1, ageing=2.0, preemption="growth")
    one.add(request(0), now=0.0)
    step(one)
    one.add(request(1, priority=1), now=0.0)  # key 2
    one.add(request(2, priority=0), now=1.9)  # earlier: it overtakes
    one.add(request(3, priority=0), now=2.1)  # later: it does not
    step(one, ended=[0])
    order = []
    for _ in range(3):
        order += step(one).admitted
        step(one, ended=order[-1:])
    assert order == [2, 1, 3]


def test_no_request_is_admitted_before_an_earlier_one_that_does_not_fit():
    one = scheduler(max_running_rows=4)
    one.add(request(0, rows=3), request(1, rows=2), request(2, rows=1), now=0.0)
    assert step(one).admitted == (0,)
    assert step(one).admitted == ()
    step(one, ended=[0])
    assert step(one).admitted == (1, 2)


def test_ended_and_cancelled_requests_leave_nothing():
    one = scheduler(num_blocks=8, max_running_rows=2)
    one.add(request(0), request(1), request(2, deadline=5.0), now=0.0)
    step(one)
    one.cancel(1)
    one.cancel(2)
    assert (one.num_running, one.num_waiting, one.reserved_blocks) == (1, 0, 2)
    step(one, ended=[0])
    assert (one.num_running, one.num_waiting, one.reserved_blocks) == (0, 0, 0)
    assert step(one, 9.0) == StepPlan()
    assert StepPlan().is_idle
    with pytest.raises(InputError, match="must be a waiting or running request, got 1"):
        one.cancel(1)


# ------------------------------------------------------------------------ tokens of a step
def test_a_prompt_is_read_in_chunks_beside_decoding():
    one = scheduler(max_step_tokens=8, chunk_tokens=6)
    one.add(request(0, 2), now=0.0)
    assert step(one).read == {0: 2}
    one.add(request(1, 13), now=1.0)
    plans = [step(one, 1.0) for _ in range(4)]
    assert [plan.read for plan in plans] == [{1: 6}, {1: 6}, {1: 1}, {}]
    assert [plan.decode for plan in plans] == [(0,), (0,), (0,), (0, 1)]
    assert plans[0].admitted == (1,)
    assert not plans[0].is_idle
    assert not plans[3].is_idle


def test_chunks_get_shorter_as_their_context_grows():
    one = scheduler(chunk_tokens=12, chunk_half_context=24)
    one.add(request(0, 60), now=0.0)
    sizes = [step(one).read[0] for _ in range(7)]
    assert sizes == [12, 8, 6, 5, 5, 4, 4]  # 12 * 24 // (24 + context)
    one = scheduler(chunk_tokens=2, chunk_half_context=1)
    one.add(request(0, 9), now=0.0)
    assert [step(one).read[0] for _ in range(8)] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_decoding_counts_first_and_prompts_share_the_rest_in_order():
    one = scheduler(max_step_tokens=10)
    one.add(request(0, 1, rows=4), now=0.0)
    step(one)
    one.add(request(1, 5), request(2, 9), now=1.0)
    assert step(one, 1.0).read == {1: 5, 2: 1}
    assert step(one, 1.0).read == {2: 5}


def test_a_step_of_all_running_requests_fits_the_token_limit():
    one = scheduler(max_step_tokens=4)
    one.add(*(request(number, 1, rows=2) for number in range(3)), now=0.0)
    assert step(one).admitted == (0, 1)
    assert step(one).decode == (0, 1)
    assert step(one, ended=[0]).admitted == ()
    assert step(one).admitted == (2,)


def test_a_prompt_of_several_rows_is_read_in_multiples():
    one = scheduler(max_step_tokens=5, chunk_tokens=1)
    one.add(request(0, 6, rows=2, prompt_rows=2), now=0.0)
    assert [step(one).read for _ in range(4)] == [{0: 2}, {0: 2}, {0: 2}, {}]
    two = scheduler(max_step_tokens=5)
    two.add(request(0, 6, rows=2, prompt_rows=2), now=0.0)
    assert [step(two).read for _ in range(3)] == [{0: 4}, {0: 2}, {}]


def test_the_rest_of_a_prompt_need_not_be_a_multiple():
    one = scheduler(max_step_tokens=5)
    one.add(request(0, 5, rows=2, prompt_rows=2), now=0.0)
    assert [step(one).read for _ in range(2)] == [{0: 5}, {}]


def test_a_prompt_that_is_read_at_once_pauses_decoding_in_every_second_step():
    one = scheduler(max_step_tokens=8)
    one.add(request(0, 1), now=0.0)
    step(one)
    one.add(request(1, 8, chunkable=False), request(2, 8, chunkable=False), now=1.0)
    assert step(one, 1.0) == StepPlan(admitted=(1,), read={1: 8})
    assert step(one, 1.0) == StepPlan(decode=(0, 1))
    assert step(one, 1.0) == StepPlan(admitted=(2,), read={2: 8})
    assert step(one, 1.0) == StepPlan(decode=(0, 1, 2))


def test_a_prompt_that_is_read_at_once_runs_beside_decoding_where_it_fits():
    one = scheduler(max_step_tokens=8)
    one.add(request(0, 1), now=0.0)
    step(one)
    one.add(request(1, 7, chunkable=False), now=1.0)
    assert step(one, 1.0) == StepPlan(admitted=(1,), read={1: 7}, decode=(0,))


def test_a_skipped_step_is_planned_again():
    one = scheduler(max_step_tokens=4)
    one.add(request(0, 6), request(1, 1, chunkable=False), now=0.0)
    assert step(one, skipped=[0]).read == {0: 4}
    assert step(one).read == {0: 4}
    assert step(one, skipped=[0, 1]).read == {0: 2, 1: 1}
    plan = step(one)
    assert plan.read == {0: 2, 1: 1}
    assert plan.admitted == ()


# ------------------------------------------------------------------------ blocks
def test_admission_reserves_the_prompt_and_one_step():
    one = scheduler(num_blocks=5)
    one.add(request(0, 7), request(1, 8), request(2, 1), now=0.0)  # 2, 3 and 1 blocks
    assert step(one).admitted == (0, 1)
    assert one.reserved_blocks == 5


def test_rows_share_the_whole_blocks_of_their_prompt():
    config = SchedulerConfig(block_size=4)
    four = request(0, 9, rows=4, max_row_tokens=20)
    assert four.sure_blocks(config) == 2 + 4 * 1
    assert four.max_blocks(config) == 2 + 4 * 3
    assert request(0, 9, max_row_tokens=9).sure_blocks(config) == 3
    assert request(0, 8, max_row_tokens=8).sure_blocks(config) == 2
    assert request(0, 8).sure_blocks(config) == 3
    assert request(0, 9, rows=2, step_tokens=10).sure_blocks(config) == 2 + 2 * 2
    assert request(0, 18, rows=2, prompt_rows=2).sure_blocks(config) == 6
    assert request(0, 9, fixed_blocks=5).sure_blocks(config) == 8
    assert request(0, 9, fixed_blocks=5, paged=False).max_blocks(config) == 5


def test_an_admission_leaves_headroom_while_others_run():
    one = scheduler(num_blocks=10, headroom=0.11)  # two blocks
    one.add(request(0, 20), request(1, 11), request(2, 7), now=0.0)  # 6, 3 and 2 blocks
    assert step(one).admitted == (0,)
    step(one, ended=[0])
    assert step(one).admitted == (1, 2)
    alone = scheduler(num_blocks=10, headroom=0.5)
    alone.add(request(0, 39), now=0.0)
    assert step(alone).admitted == (0,)
    alone.add(request(1, 39, priority=-1), now=0.0)  # it takes the place of all that run
    assert step(alone, parked={0: ParkedRequest(40, 10)}).admitted == (1,)


def test_growth_preempts_the_last_in_order_and_no_more_than_needed():
    one = scheduler(num_blocks=6)
    for number in range(3):
        one.add(request(number, 3), now=float(number))
    step(one, 2.0, usage=growing(_0=(1, 1), _1=(1, 1), _2=(1, 1)))
    assert step(one, 2.0, usage=growing(_0=(2, 0), _1=(2, 0), _2=(2, 1))).preempted == ()
    plan = step(one, 2.0, parked={2: ParkedRequest(9, 3)})
    assert plan == StepPlan(preempted=(2,), decode=(0, 1))
    assert (one.num_waiting, one.num_running, one.reserved_blocks) == (1, 2, 4)
    assert step(one, 2.0).admitted == ()  # it takes three blocks and two are free
    plan = step(one, 2.0, ended=[0])
    assert plan.admitted == ()
    assert step(one, 2.0) == StepPlan(admitted=(2,), read={2: 9}, decode=(1,))
    assert one.reserved_blocks == 5


def test_the_cheapest_of_equal_age_is_preempted_but_never_the_first():
    one = scheduler(num_blocks=9)
    one.add(*(request(number, 3) for number in range(4)), now=0.0)
    step(one, usage=growing(_0=(1, 2), _1=(2, 0), _2=(3, 0), _3=(2, 0)))
    assert step(one, parked={3: ParkedRequest(8, 2)}).preempted == (3,)  # as cheap as 1, and later
    two = scheduler(num_blocks=9)
    two.add(*(request(number, 3) for number in range(3)), now=0.0)
    step(two, usage=growing(_0=(1, 2), _1=(2, 0), _2=(5, 0)))
    parked = {1: ParkedRequest(8, 2)}
    assert step(two, parked=parked).preempted == (1,)  # 0 is cheaper, and the first


def test_an_older_key_is_not_preempted_for_being_cheaper():
    one = scheduler(num_blocks=6)
    for number in range(3):
        one.add(request(number, 3), now=float(number))
    step(one, 2.0, usage=growing(_0=(1, 1), _1=(1, 0), _2=(3, 1)))
    assert step(one, 2.0, parked={2: ParkedRequest(12, 3)}).preempted == (2,)


def test_a_request_that_is_reading_is_preempted_without_a_word_from_the_engine():
    one = scheduler(num_blocks=6, max_step_tokens=4)
    one.add(request(0, 3), request(1, 13), now=0.0)
    assert step(one, usage=growing(_0=(1, 0))).read == {0: 3, 1: 1}
    step(one, usage=growing(_0=(1, 2)))
    assert step(one).preempted == (1,)
    step(one, ended=[0])
    assert step(one).read == {1: 4}


def test_a_request_that_outgrows_the_whole_pool_ends():
    one = scheduler(num_blocks=4)
    one.add(request(0, 3), request(1, 3), now=0.0)
    step(one, usage=growing(_0=(2, 0), _1=(2, 2)))
    assert step(one, parked={1: ParkedRequest(9, 3)}).preempted == (1,)
    step(one, ended=[0])
    assert step(one).admitted == (1,)
    step(one, usage=growing(_1=(4, 1)))
    assert step(one) == StepPlan(exceeded=(1,))
    assert (one.num_running, one.num_waiting, one.reserved_blocks) == (0, 0, 0)


def test_shared_blocks_count_for_what_a_request_outgrows():
    one = scheduler(num_blocks=4)
    one.add(request(0, 3), now=0.0)
    step(one, usage={0: RequestUsage(1, 1, 2)}, shared_blocks=2)
    assert step(one, usage={0: RequestUsage(2, 1, 2)}, shared_blocks=2).exceeded == ()
    assert step(one).exceeded == (0,)


def test_a_parked_request_that_takes_the_whole_pool_is_read_again():
    one = scheduler(num_blocks=4)
    one.add(request(0, 3), request(1, 3), now=0.0)
    step(one, usage=growing(_0=(2, 1), _1=(2, 0)))
    assert step(one, parked={1: ParkedRequest(16, 4)}).preempted == (1,)
    assert step(one, ended=[0]).exceeded == ()
    assert step(one).read == {1: 16}


def test_a_parked_request_that_cannot_be_read_again_ends():
    one = scheduler(num_blocks=4)
    one.add(request(0, 3), request(1, 3), now=0.0)
    step(one, usage=growing(_0=(2, 1), _1=(2, 0)))
    assert step(one, parked={1: ParkedRequest(20, 5)}).preempted == (1,)
    assert step(one).exceeded == (1,)
    assert one.num_waiting == 0


def test_without_preemption_the_largest_size_is_reserved():
    one = scheduler(num_blocks=10, preemption="never")
    one.add(request(0, 3, max_row_tokens=20), request(1, 3, max_row_tokens=24), now=0.0)  # 5 and 6
    assert step(one, usage=growing(_0=(1, 0))).admitted == (0,)
    assert one.reserved_blocks == 5
    two = scheduler(num_blocks=10)
    two.add(request(0, 3, max_row_tokens=20, preemptible=False), now=0.0)
    step(two, usage=growing(_0=(1, 0)))
    assert two.reserved_blocks == 5


def test_a_reservation_does_not_count_shared_blocks_twice():
    one = scheduler(num_blocks=20)
    one.add(request(0, 3, max_row_tokens=20, preemptible=False), request(1, 17), now=0.0)  # 5 each
    step(one, usage={0: RequestUsage(0, 1, 2)}, shared_blocks=2)
    assert one.reserved_blocks == 3 + 2 + 5
    two = scheduler(num_blocks=20, max_step_tokens=8)
    two.add(request(0, 17), now=0.0)
    step(two, usage={0: RequestUsage(0, 0, 2)}, shared_blocks=2)
    assert two.reserved_blocks == 3 + 2


def test_the_first_waits_for_a_later_one_that_cannot_be_preempted():
    one = scheduler(num_blocks=5)
    one.add(request(0, 3), request(1, 3, max_row_tokens=12, preemptible=False), now=0.0)
    step(one, usage=growing(_0=(2, 0), _1=(1, 0)))
    step(one, usage=growing(_0=(2, 1)))
    assert step(one).decode == (1,)
    assert step(one, ended=[1]).decode == (1,)
    assert step(one).decode == (0,)


def test_a_first_that_has_reserved_everything_does_not_wait_for_it():
    """Blocks that count as shared until the next report do not stop it."""
    one = scheduler(num_blocks=6)
    one.add(request(0, 3, max_row_tokens=16, preemptible=False), request(1, 3), now=0.0)
    step(one, usage={0: RequestUsage(1, 0), 1: RequestUsage(1, 0, 1)}, shared_blocks=2)
    assert one.reserved_blocks == 7
    assert step(one, parked={1: ParkedRequest(4, 1)}) == StepPlan(preempted=(1,), decode=(0,))
    two = scheduler(num_blocks=6)
    two.add(request(0, 3, max_row_tokens=20, preemptible=False), now=0.0)
    step(two, shared_blocks=2)
    assert two.reserved_blocks == 7
    assert step(two).decode == (0,)


def test_what_is_read_at_once_is_not_preempted_if_it_could_not_be_read_again():
    one = scheduler(num_blocks=20, max_step_tokens=8)
    one.add(request(0, 3, chunkable=False, max_row_tokens=9), now=0.0)
    one.add(request(1, 3, chunkable=False, max_row_tokens=8), now=0.0)
    step(one)
    assert one.reserved_blocks == 3 + 1


# ------------------------------------------------------------------------ priority preemption
def test_an_earlier_key_preempts_later_ones_and_no_more_than_needed():
    one = scheduler(max_running_rows=3, ageing=10.0)
    for number in range(3):
        one.add(request(number, 1, priority=1), now=float(number))
    step(one, 2.0)
    one.add(request(3, 1, rows=2, priority=0), now=3.0)
    plan = step(one, 3.0, parked={2: ParkedRequest(2, 1), 1: ParkedRequest(2, 1)})
    assert plan == StepPlan(preempted=(2, 1), admitted=(3,), read={3: 1}, decode=(0,))
    assert step(one, 3.0).admitted == ()
    step(one, 3.0, ended=[3])
    assert step(one, 3.0).admitted == (1, 2)


@pytest.mark.parametrize("limits", [{"max_running_rows": 1}, {"max_step_tokens": 1}, {"num_blocks": 1}])
def test_equal_keys_do_not_preempt_each_other_nor_does_growth_alone(limits):
    one = scheduler(**limits)
    one.add(request(1, 1), now=0.0)
    step(one)
    one.add(request(0, 1), now=0.0)
    assert step(one).preempted == ()
    two = scheduler(preemption="growth", **limits)
    two.add(request(1, 1), now=0.0)
    step(two)
    two.add(request(0, 1, priority=-1), now=0.0)
    assert step(two).preempted == ()
    three = scheduler(**limits)
    three.add(request(1, 1), now=0.0)
    step(three)
    three.add(request(0, 1, priority=-1), now=0.0)
    plan = step(three, parked={1: ParkedRequest(2, 1)})
    assert (plan.preempted, plan.admitted, plan.read, plan.decode) == ((1,), (0,), {0: 1}, ())


def test_later_keys_are_found_among_requests_that_came_after_a_search():
    one = scheduler(max_running_rows=2, ageing=1.0)
    one.add(request(0, 1, priority=5), now=0.0)
    one.add(request(1, 1, priority=9), now=0.0)
    assert step(one, ended=[0]).admitted == (0, 1)
    one.add(request(2, 1, rows=2, priority=9), now=1.0)  # no running key is later than its own
    assert step(one).preempted == ()
    one.cancel(2)
    one.add(request(3, 1, priority=20), now=1.0)
    assert step(one).admitted == (3,)
    one.add(request(4, 1, priority=12), now=1.0)
    assert step(one, parked={3: ParkedRequest(2, 1)}).preempted == (3,)


def test_nobody_is_preempted_for_a_request_that_would_still_not_fit():
    one = scheduler(max_running_rows=3)
    one.add(request(0, 1, rows=2, preemptible=False), request(1, 1), now=0.0)
    step(one)
    one.add(request(2, 1, rows=2, priority=-9), now=0.0)
    assert step(one) == StepPlan(decode=(0, 1))


def test_a_chunk_of_an_earlier_key_comes_first():
    one = scheduler(max_step_tokens=4)
    one.add(request(0, 20), now=0.0)
    assert step(one).read == {0: 4}
    one.add(request(1, 3, priority=-5), now=0.0)
    assert step(one).read == {1: 3, 0: 1}


def test_a_preempted_reader_reads_nothing_in_that_step():
    one = scheduler(max_running_rows=1, max_step_tokens=4)
    one.add(request(0, 20), now=0.0)
    step(one)
    one.add(request(1, 3, priority=-5), now=0.0)
    assert step(one) == StepPlan(preempted=(0,), admitted=(1,), read={1: 3})


# ------------------------------------------------------------------------ cached prefixes
def test_a_cached_prefix_is_not_read_and_shared_blocks_cost_nothing():
    one = scheduler(lambda number: PrefixHit(8, 2) if number == 1 else PrefixHit(), num_blocks=5)
    one.add(request(0, 9), request(1, 11), now=0.0)  # three blocks each
    plan = step(one, usage={0: RequestUsage(1, 0, 2), 1: RequestUsage(1, 0, 2)}, shared_blocks=2)
    assert plan.read == {0: 9, 1: 3}
    assert one.reserved_blocks == 4
    step(one, ended=[0], usage={1: RequestUsage(3, 0)})
    assert one.reserved_blocks == 3


def test_what_a_plan_frees_does_not_count_as_shared():
    """The lookup still finds blocks of a request that the same plan removes."""
    one = scheduler(lambda number: PrefixHit(8, 2) if number else PrefixHit(), num_blocks=3)
    one.add(request(0, 9, deadline=1.0), now=0.0)
    step(one)
    one.add(request(1, 11), request(2, 10), now=0.5)
    plan = step(one, 1.0)
    assert (plan.expired, plan.admitted) == ((0,), (1,))
    assert one.reserved_blocks == 3


def test_a_victim_may_hold_the_shared_blocks():
    one = scheduler(lambda number: PrefixHit(8, 2) if number == 1 else PrefixHit(), num_blocks=4)
    one.add(request(0, 13), now=0.0)  # all four
    step(one, usage={0: RequestUsage(4, 0)})
    one.add(request(1, 11, priority=-1), now=0.0)
    plan = step(one, parked={0: ParkedRequest(14, 4)})
    assert (plan.preempted, plan.admitted) == ((0,), (1,))
    assert one.reserved_blocks == 3


def test_the_holder_of_blocks_that_the_same_plan_shares_is_not_preempted():
    one = scheduler(lambda number: PrefixHit(4, 1) if number == 1 else PrefixHit(), num_blocks=6)
    one.add(request(0, 13, priority=5), now=0.0)
    step(one, usage={0: RequestUsage(4, 0)})
    one.add(request(1, 7, priority=-2), request(2, 9, priority=-1), now=0.0)  # two blocks and three
    usage = {0: RequestUsage(3, 0, 1), 1: RequestUsage(1, 0, 1)}
    assert step(one, usage=usage, shared_blocks=1) == StepPlan(admitted=(1,), read={1: 3}, decode=(0,))
    plan = step(one, parked={0: ParkedRequest(14, 4)})
    assert (plan.preempted, plan.admitted) == ((0,), (2,))


def test_blocks_shared_by_preempted_requests_cost_the_first_one_step():
    """Only the next report says that nobody shares them any more."""
    one = scheduler(lambda number: PrefixHit(8, 2) if number == 2 else PrefixHit(), num_blocks=8)
    for number, prompt in enumerate((3, 9, 11)):
        one.add(request(number, prompt), now=float(number))
    usage = {0: RequestUsage(2, 5), 1: RequestUsage(1, 0, 2), 2: RequestUsage(1, 0, 2)}
    step(one, 2.0, usage=usage, shared_blocks=2)
    parked = {1: ParkedRequest(10, 3), 2: ParkedRequest(12, 3)}
    assert step(one, 2.0, parked=parked) == StepPlan(preempted=(2, 1))
    assert step(one, 2.0).decode == (0,)


# ------------------------------------------------------------------------ deadlines, refusals, misuse
def test_deadlines_end_waiting_and_running_requests():
    one = scheduler(max_running_rows=1, num_blocks=8)
    one.add(request(0, deadline=2.0), request(1, deadline=1.0), request(2), now=0.0)
    assert step(one).admitted == (0,)
    assert step(one, 0.99).expired == ()
    assert step(one, 1.0) == StepPlan(expired=(1,), decode=(0,))
    assert step(one, 5.0) == StepPlan(expired=(0,), admitted=(2,), read={2: 4})
    assert step(one, 9.0).expired == ()


def test_a_full_queue_refuses_all_of_a_call():
    one = scheduler(max_waiting=2, max_running_rows=1)
    one.add(request(0), now=0.0)
    with pytest.raises(EngineFull, match="at most max_waiting=2 requests may wait, and 1 do") as caught:
        one.add(request(1), request(2), now=0.0)
    assert (caught.value.waiting, caught.value.limit, one.num_waiting) == (1, 2, 1)
    one.add(request(1), now=0.0)
    step(one)
    one.add(request(2), now=0.0)
    assert one.num_waiting == 2


@pytest.mark.parametrize(
    ("limits", "fields", "match"),
    [
        ({"max_running_rows": 3}, {"rows": 4}, "`rows` must be at most max_running_rows=3, got 4"),
        ({"max_step_tokens": 7}, {"rows": 2, "step_tokens": 8}, "`step_tokens` must be at most max_step_tok"),
        (
            {"max_step_tokens": 3},
            {"chunkable": False},
            "`prompt_tokens` must be at most max_step_tokens=3, s",
        ),
        ({"num_blocks": 1}, {}, "must fit the 1 blocks of the pool with its prompt and one step, got '2 blo"),
        ({"num_blocks": 15, "preemption": "never"}, {}, "with its largest size, which it reserves, got '16 "),
    ],
)
def test_what_can_never_run_is_refused(limits, fields, match):
    one = scheduler(**limits)
    with pytest.raises(InputError, match=match):
        one.add(request(0, 1, max_row_tokens=8), request(1, **fields), now=0.0)
    assert one.num_waiting == 0
    assert step(one).is_idle


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"max_running_rows": 4}, {"rows": 4}),
        ({"max_step_tokens": 8}, {"rows": 2, "step_tokens": 8}),
        ({"max_step_tokens": 4}, {"chunkable": False}),
        ({"num_blocks": 2}, {}),
        ({"num_blocks": 16, "preemption": "never"}, {}),
    ],
)
def test_what_just_fits_runs(limits, fields):
    one = scheduler(**limits)
    one.add(request(0, **fields), now=0.0)
    assert step(one).admitted == (0,)


def test_numbers_are_distinct():
    one = scheduler()
    one.add(request(0), now=0.0)
    for again in ([request(0)], [request(1), request(1)]):
        with pytest.raises(InputError, match="`number` must not be that of another request"):
            one.add(*again, now=0.0)
    assert one.num_waiting == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running_rows", 0), ("max_step_tokens", 0), ("chunk_tokens", True), ("num_blocks", -1),
        ("chunk_half_context", 0), ("chunk_half_context", 64),
        ("block_size", 1.5), ("max_waiting", 0), ("ageing", -1.0), ("ageing", float("inf")),
        ("ageing", "1"), ("preemption", "always"), ("headroom", 1.0), ("headroom", -0.1), ("headroom", True),
    ],
)  # fmt: skip
def test_limits_are_checked(field, value):
    with pytest.raises(ConfigError, match=f"`{field}` must be") as caught:
        SchedulerConfig(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 0.5), ("priority", 10**7), ("deadline", float("nan")),
    ],
)  # fmt: skip
def test_requests_are_checked(field, value):
    fields = {"number": 0, "prompt_tokens": 4, "max_row_tokens": 8, field: value}
    with pytest.raises(ConfigError, match=f"`{field}` must be") as caught:
        ScheduledRequest(**fields)
    assert caught.value.field == field


def test_it_is_host_code_without_tensors():
    """The modules that plan import no more than the standard library, its errors and each other."""
    folder = Path(ageing_scheduler.__file__).parent
    for path in [folder / f"{name}.py" for name in ("ageing_scheduler", "config", "plan", "request_entry")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                own = name.startswith("descant.engine.scheduling.") or name == "descant.errors"
                assert own or name.split(".")[0] in sys.stdlib_module_names, (path.name, name)
