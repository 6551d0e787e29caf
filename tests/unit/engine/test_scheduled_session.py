"""Sessions with a scheduler: waiting, chunks, order, deadlines, preemption, cancellation in every state."""

from __future__ import annotations

import pytest
import torch
import transformers

from descant import (
    ConfigError,
    DeadlineExceeded,
    EngineFull,
    Failed,
    Finished,
    GenerationConfig,
    InputError,
    PrefixCache,
    Request,
    SchedulerConfig,
    Session,
    Tokens,
)
from descant.testing import outcomes, toy
from tests.support.byte_tokenizer import TEXTS, tokenizer
from tests.support.markov_model import Chain

NEW = 6


@pytest.fixture(scope="module")
def model():
    return toy()


def request(length, new=NEW, **given):
    ids = [3 + (7 * length + 5 * at) % 53 for at in range(length)]
    fields = {name: given.pop(name) for name in ("priority", "deadline", "logits_processor") if name in given}
    return Request(ids, GenerationConfig(max_new_tokens=new, eos_token_id=None, **given), **fields)


def alone(model, one):
    return outcomes(model, [Request(one.prompt, one.generation_config)])[0].tokens


def ended(session):
    return {event.request: event for event in session.drain() if isinstance(event, Finished | Failed)}


def tokens(event):
    return [one.tokens.tolist() for one in event.hypotheses]


def test_requests_wait_for_rows(model):
    session = Session(model, scheduler=SchedulerConfig(max_running_rows=2))
    given = [request(length) for length in (3, 5, 2, 4)]
    numbers = session.admit(*given)
    assert (len(session), session.rows, session.report().waiting) == (4, 0, 4)
    session.step()
    assert (len(session), session.rows, session.report().waiting) == (4, 2, 2)
    found = ended(session)
    assert [tokens(found[number]) for number in numbers] == [alone(model, one) for one in given]


def test_a_long_prompt_is_read_beside_the_steps_of_others(model):
    session = Session(model, scheduler=SchedulerConfig(chunk_tokens=4))
    short, long = request(2, new=20), request(30)
    first = session.admit(short)[0]
    session.step()
    second = session.admit(long)[0]
    steps_with_first = 0
    while True:
        emitted = [
            one for event in session.step() if isinstance(event, Tokens) for one in event.request.tolist()
        ]
        if second in emitted:
            break
        assert first in emitted  # it never waits for the prompt
        steps_with_first += 1
    assert steps_with_first == 7  # 28 of the 30 tokens in chunks of 4, then the rest with the first new token
    found = ended(session)
    assert tokens(found[first]) == alone(model, short)
    assert tokens(found[second]) == alone(model, long)


def test_a_chunk_shares_the_forward_of_the_rows_that_decode(model):
    session = Session(model, scheduler=SchedulerConfig(chunk_tokens=4))
    short, long = request(2, new=12), request(30, do_sample=True, seed=4)
    numbers = session.admit(short)
    session.step()
    numbers += session.admit(long)
    for _ in range(8):  # the last of them ends the prompt
        before = session.model.forwards
        session.step()
        assert session.model.forwards == before + 1
    found = ended(session)
    assert [tokens(found[number]) for number in numbers] == [alone(model, one) for one in (short, long)]


def test_chunks_share_a_forward_where_no_row_decodes(model):
    session = Session(model, scheduler=SchedulerConfig(chunk_tokens=4))
    given = [request(30), request(26), request(21)]
    numbers = session.admit(*given)
    for _ in range(5):
        before = session.model.forwards, session.model.positions_fed
        session.step()
        assert (session.model.forwards, session.model.positions_fed) == (before[0] + 1, before[1] + 3 * 4)
    found = ended(session)
    assert [tokens(found[number]) for number in numbers] == [alone(model, one) for one in given]


def test_a_chunk_that_breaks_a_shared_forward_fails_alone(model, monkeypatch):
    session = Session(model, scheduler=SchedulerConfig(chunk_tokens=4))
    network, bad = session.model.network, request(30).prompt[9]
    good, other = request(2, new=12), request(5, new=8, num_beams=2)
    forward = network.forward

    def breaking(*args, input_ids, **given):
        if bool((input_ids == bad).any()):
            raise RuntimeError("broken")
        return forward(*args, input_ids=input_ids, **given)

    for one in (good, other):
        assert bad not in one.prompt
        assert all(bad not in line for line in alone(model, one))
    monkeypatch.setattr(network, "forward", breaking)
    first, second, broken = session.admit(good, other, request(30))
    found = ended(session)
    monkeypatch.undo()
    assert "broken" in str(found[broken].error)
    assert [tokens(found[first]), tokens(found[second])] == [alone(model, one) for one in (good, other)]
    assert len(session) == session.rows == 0


def test_a_forward_of_guided_rows_is_repeated_beside_a_prompt_in_chunks(model, monkeypatch):
    session = Session(model, scheduler=SchedulerConfig(chunk_tokens=4))
    given = [request(length, new=20, guidance_scale=1.5) for length in (3, 5)]
    numbers = session.admit(*given)
    session.step()
    numbers += session.admit(request(59))
    session.step()
    network, is_broken = session.model.network, [True]
    forward = network.forward

    def broken_once(*args, **given):
        if is_broken:
            raise RuntimeError(is_broken.pop())
        return forward(*args, **given)

    monkeypatch.setattr(network, "forward", broken_once)
    found = ended(session)
    expected = [alone(model, one) for one in (*given, request(59))]
    assert [tokens(found[number]) for number in numbers] == expected


def test_priorities_order_what_waits(model):
    session = Session(model, scheduler=SchedulerConfig(max_running_rows=1, ageing=1000.0))
    numbers = session.admit(request(2, priority=1), request(3, priority=0), request(4, priority=-1))
    order = [event.request for event in session.drain() if isinstance(event, Finished)]
    assert order == numbers[::-1]


def test_a_step_that_fails_early_loses_no_request(model, monkeypatch):
    session = Session(model, scheduler=SchedulerConfig(num_blocks=64))
    scheduled = session._scheduled
    now = [0.0]
    scheduled.clock = lambda: now[0]
    late, other = session.admit(request(2, new=20, deadline=5.0), request(3))
    session.step()
    now[0] = 6.0
    with monkeypatch.context() as patch:
        patch.setattr(scheduled, "_settle_prefixes", lambda _: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                session.step()
    found = ended(session)
    assert isinstance(found[late].error, DeadlineExceeded)
    assert tokens(found[other]) == alone(model, request(3))
    assert (len(session), session.report().blocks) == (0, 0)


def test_a_deadline_ends_a_waiting_and_a_running_request(model):
    session = Session(model, scheduler=SchedulerConfig(max_running_rows=1))
    now = [0.0]
    session._scheduled.clock = lambda: now[0]
    running, waiting, last = session.admit(
        request(2, new=50, deadline=10.0), request(3, deadline=5.0), request(4)
    )
    session.step()
    now[0] = 6.0
    [event] = [one for one in session.step() if isinstance(one, Failed)]
    assert event.request == waiting
    assert isinstance(event.error, DeadlineExceeded)
    now[0] = 11.0
    found = ended(session)
    assert isinstance(found[running].error, DeadlineExceeded)
    assert tokens(found[last]) == alone(model, request(4))
    assert session.report().blocks == session.rows == 0


def test_a_bounded_queue_refuses_all_or_none(model):
    session = Session(model, scheduler=SchedulerConfig(max_waiting=2))
    with pytest.raises(EngineFull):
        session.admit(request(2), request(2), request(2))
    assert len(session) == 0
    session.admit(request(2), request(2))
    assert len(session) == 2


def test_what_needs_a_scheduler_is_refused_without_one(model):
    for field in ({"priority": 1}, {"deadline": 1.0}):
        with pytest.raises(InputError, match="needs a session with a scheduler"):
            Session(model).admit(request(2, **field))
    with pytest.raises(InputError, match="only in a session with a scheduler"):
        Session(model).demand(request(2))


def test_a_request_that_may_outgrow_the_pool_is_refused(model):
    session = Session(model, scheduler=SchedulerConfig(num_blocks=4, block_size=4))
    assert session.demand(request(2)).max_blocks(SchedulerConfig(block_size=4)) == 2
    with pytest.raises(InputError, match="must fit a KV pool of 4 blocks"):
        session.admit(request(12))
    assert len(session) == 0


def tight(model, **given):
    """A session in whose pool two of the requests outgrow each other."""
    return Session(model, scheduler=SchedulerConfig(num_blocks=9, block_size=2, headroom=0.0, **given))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("neighbour", [{}, {"guidance_scale": 2.0}])
def test_rows_that_are_read_again_hold_what_they_held(model, chunk, neighbour):
    """The sequences of a request share its prompt's blocks again: its largest size is that of the pool."""
    limits = SchedulerConfig(
        num_blocks=13, block_size=4, headroom=0.0, max_running_rows=4, chunk_tokens=chunk
    )
    session = Session(model, scheduler=limits)
    both = {"do_sample": True, "seed": 1, "num_return_sequences": 2}
    given = [request(14, 3, **neighbour), request(14, 16, priority=1, **both), request(5, 24)]
    numbers = session.admit(*given)
    found = ended(session)
    assert session.report().preemptions > 0
    assert [tokens(found[number]) for number in numbers] == [alone(model, one) for one in given]


def test_a_request_can_be_cancelled_in_every_state(model):
    """Waiting, reading in chunks, running and preempted."""
    config = SchedulerConfig(num_blocks=12, block_size=2, chunk_tokens=2, headroom=0.0)
    given = [request(4, new=12), request(5, new=10), request(9, new=4), request(3, new=6)]
    expected = [alone(model, one) for one in given]
    for steps in range(25):
        for victim in range(len(given)):
            session = Session(model, scheduler=config)
            numbers, found = session.admit(*given), {}
            for _ in range(steps):
                found |= {event.request: event for event in session.step() if isinstance(event, Finished)}
            if numbers[victim] not in found:
                session.cancel(numbers[victim])
            found |= ended(session)
            for at, number in enumerate(numbers):
                if at != victim:
                    assert tokens(found[number]) == expected[at], (steps, victim)
            report = session.report()
            assert (report.requests, report.rows, report.blocks, report.waiting) == (0, 0, 0, 0)


def test_an_interrupted_step_is_planned_again(model):
    interrupts = [2, 5, 9, 10]
    calls = [0]

    def interrupting(ids, scores):
        calls[0] += 1
        if calls[0] in interrupts:
            raise KeyboardInterrupt
        return scores

    config = SchedulerConfig(num_blocks=16, block_size=2, chunk_tokens=3, headroom=0.0)
    session = Session(model, scheduler=config)
    given = [request(4, new=8, logits_processor=[interrupting]), request(11), request(5, new=9)]
    numbers, found = session.admit(*given), {}
    while len(session):
        try:
            events = session.step()
        except KeyboardInterrupt:
            continue
        found |= {event.request: event for event in events if isinstance(event, Finished | Failed)}
    assert calls[0] > max(interrupts)
    assert [tokens(found[number]) for number in numbers] == [alone(model, one) for one in given]
    assert session.report().blocks == 0


def test_a_prompt_whose_forward_raises_fails_alone():
    model = Chain.chance(61, 3)
    session = Session(model, scheduler=SchedulerConfig(chunk_tokens=4))
    forward, bad = session.model.forward, torch.tensor(request(20).prompt[:8])

    def breaking(rows, proposal, cache):
        if any(torch.equal(line[:8], bad) for line in rows.tokens if len(line) >= 8):
            raise RuntimeError("broken")
        return forward(rows, proposal, cache)

    session.model.forward = breaking
    good, broken = session.admit(request(3), request(20))
    found = ended(session)
    session.model.forward = forward
    assert "broken" in str(found[broken].error)
    assert tokens(found[good]) == alone(model, request(3))
    assert len(session) == session.rows == 0


def test_a_request_that_waits_is_looked_up_once_in_the_statistics(model):
    prefixes = PrefixCache(block=4)
    session = Session(model, prefix_cache=prefixes, scheduler=SchedulerConfig(max_running_rows=1))
    session.admit(request(22), request(22), request(9))
    ended(session)
    report = prefixes.report()
    assert (report.hits, report.misses, report.tokens_read, report.tokens_found) == (1, 2, 53, 20)


def test_a_request_that_waits_holds_no_blocks(model):
    """The prefix of the first that waits may be evicted."""
    config = SchedulerConfig(num_blocks=12, block_size=2, headroom=0.0)
    prefixes = PrefixCache(block=2)
    session = Session(model, prefix_cache=prefixes, scheduler=config)
    first = session.admit(request(12, new=2))[0]
    assert tokens(ended(session)[first]) == alone(model, request(12, new=2))
    given = [request(5, new=14), request(12, new=3)]
    numbers = session.admit(*given)
    pool, found = next(session.tables).cache.pool, {}
    while len(session):
        found |= {event.request: event for event in session.step() if isinstance(event, Finished)}
        assert int((pool.ref_counts > 0).sum()) <= 12
    assert [tokens(found[number]) for number in numbers] == [alone(model, one) for one in given]


def test_a_lossy_cache_is_never_preempted(model):
    lossy = request(
        6, new=8, cache_implementation="sink", cache_config={"window_length": 8, "num_sink_tokens": 2}
    )
    session = tight(model)
    numbers = session.admit(request(4, new=8), lossy, request(4, new=8))
    found = ended(session)
    assert tokens(found[numbers[1]]) == alone(model, lossy)
    assert tokens(found[numbers[0]]) == tokens(found[numbers[2]]) == alone(model, request(4, new=8))


def test_drafts_are_counted_by_the_room_of_their_row(model):
    session = Session(model, scheduler=SchedulerConfig(max_step_tokens=16))
    one = request(5, prompt_lookup_num_tokens=10**9)
    [number] = session.admit(one)
    assert tokens(ended(session)[number]) == alone(model, one)
    with pytest.raises(
        ConfigError, match=r"`prompt_lookup_num_tokens` must be at most 15: .*got 38: lower it"
    ):
        session.admit(request(5, new=39, prompt_lookup_num_tokens=10**9))


def test_a_recurrent_request_that_is_read_again_takes_a_block_for_each_row():
    """A state does not grow, however long the rows are by then: beside guidance there are four of them."""
    torch.manual_seed(0)
    settings = transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2)
    recurrent = transformers.MambaForCausalLM(settings).eval()
    limits = SchedulerConfig(num_blocks=7, block_size=4, headroom=0.01, preemption="priority")
    session = Session(recurrent, scheduler=limits)
    sampled = {"do_sample": True, "seed": 1, "num_return_sequences": 2, "guidance_scale": 1.5}
    given = [request(17, 9, priority=2, **sampled), request(16, 15), request(18, 4)]
    numbers = list(session.admit(given[0]))
    session.step()
    numbers += session.admit(*given[1:])
    found = ended(session)
    assert session.report().preemptions > 0
    assert [tokens(found[number]) for number in numbers] == [alone(recurrent, one) for one in given]


@pytest.mark.parametrize("limit", [24, 4])
def test_forced_tokens_are_fewer_where_a_step_has_no_room(limit):
    """No field asks for drafts of a grammar, so none is refused because of their number."""
    model, spec = toy(len(TEXTS)), {"regex": "[a-c]{3}: ship"}
    fields = {"num_return_sequences": 3, "do_sample": True, "seed": 2, "grammar": spec}
    config = GenerationConfig(max_new_tokens=16, eos_token_id=tokenizer().eos_token_id, **fields)
    one = Request([5, 6, 7], config, tokenizer=tokenizer())
    session = Session(model, scheduler=SchedulerConfig(max_step_tokens=limit))
    number = session.admit(one)[0]
    plain = outcomes(model, [one])[0].tokens
    assert tokens(ended(session)[number]) == plain
