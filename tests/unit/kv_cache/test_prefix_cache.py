"""The prefix cache: prefixes are computed once, found by hash, and evicted in order."""

from __future__ import annotations

import pytest
import torch

import descant
from descant import Finished, GenerationConfig, InputError, PrefixCache, Request, Session
from descant.core.interfaces import KVSpan
from descant.kv_cache.row_views import CachedRow
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.paged import PagedStore
from tests.support import tiny_models as tinies

NEW = {"max_new_tokens": 8}


@pytest.fixture
def llama(tiny):
    return tiny("llama")


def run(session, *requests):
    """What became of requests: the tokens of all sequences, and how many positions were fed for them."""
    before = session.model.positions_fed
    numbers = session.admit(*requests)
    ends = {event.request: event for event in session.drain() if isinstance(event, Finished)}
    found = [[one.tokens.tolist() for one in ends[number].hypotheses] for number in numbers]
    return found, session.model.positions_fed - before


def cold(model, prompt, config):
    found, fed = run(Session(model), Request(prompt, config))
    return found[0], fed


def prompts(model, shared=40, count=4):
    beginning = tinies.prompts(model.arch, [shared], 0)[0]
    return [beginning + end for end in tinies.prompts(model.arch, [3 + line for line in range(count)], 1)]


# ------------------------------------------------------------------------ in a session
@pytest.mark.parametrize("store", [DenseStore, PagedStore])
@pytest.mark.parametrize(
    "method",
    [
        {}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "seed": 5},
        {"prompt_lookup_num_tokens": 3}, {"penalty_alpha": 0.6, "top_k": 3}, {"guidance_scale": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_requests_share_what_their_prompts_begin_with(method, store, llama):
    config = GenerationConfig(**NEW, **method)
    session = Session(llama.model, cache=store(), prefix_cache=PrefixCache(block=8))
    rereads = "penalty_alpha" in method
    for place, prompt in enumerate(prompts(llama)):
        expected, whole = cold(llama.model, prompt, config)
        found, fed = run(session, Request(prompt, config))
        assert found == [expected]
        if not method.keys() & {"prompt_lookup_num_tokens", "guidance_scale"}:
            assert fed == whole - (40 if place and not rereads else 0)
        elif place:
            assert fed <= whole - 40
    report = session.report().prefixes
    if not rereads:
        assert (report.hits, report.misses) == (3, 1)
        assert report.tokens_found == 3 * 40
        assert report.tokens_read == sum(40 + 3 + line for line in range(4))
    assert report.bytes == session._tables.default.prefix_reuse._prefix_cache.nbytes > 0


def test_answers_are_prefixes_too(llama):
    """The second turn of a talk begins with the first one and its answer."""
    config = GenerationConfig(max_new_tokens=24, min_new_tokens=24)
    session = Session(llama.model, prefix_cache=PrefixCache(block=8))
    prompt = tinies.prompts(llama.arch, [8], 0)[0]
    (first,), _ = run(session, Request(prompt, config))
    text = [*prompt, *first[0], 5, 6, 7]
    expected, whole = cold(llama.model, text, config)
    found, fed = run(session, Request(text, config))
    assert found == [expected]
    assert fed == whole - 24  # of the 31 that were fed of 32


def test_a_prompt_is_shared_while_its_first_request_still_runs(llama):
    config = GenerationConfig(max_new_tokens=20, min_new_tokens=20)
    session = Session(llama.model, prefix_cache=PrefixCache(block=8))
    texts = prompts(llama)
    numbers = session.admit(Request(texts[0], config), Request(texts[1], config))
    session.step()
    before = session.model.positions_fed
    numbers += session.admit(Request(texts[2], config))
    ends = {event.request: event for event in session.step() if isinstance(event, Finished)}
    assert session.model.positions_fed - before < 40
    ends |= {event.request: event for event in session.drain() if isinstance(event, Finished)}
    for number, text in zip(numbers, texts[:3], strict=True):
        assert [one.tokens.tolist() for one in ends[number].hypotheses] == cold(llama.model, text, config)[0]


def test_another_salt_shares_nothing(llama):
    config = GenerationConfig(**NEW)
    prefixes = PrefixCache(block=8)
    session = Session(llama.model, prefix_cache=prefixes)
    prompt = prompts(llama)[0]
    expected, whole = cold(llama.model, prompt, config)
    for salt, hits in ((b"a", 0), (b"b", 0), (b"", 0), (b"a", 1), (b"b", 2), (b"c", 2)):
        found, fed = run(session, Request(prompt, config, cache_salt=salt))
        assert found == [expected]
        assert prefixes.report().hits == hits
        assert (fed == whole) == (salt == b"c" or not hits)
    with pytest.raises(InputError, match="salt"):
        session.admit(Request(prompt, config, cache_salt="text"))


def test_it_is_off_by_default(llama):
    session = Session(llama.model)
    run(session, Request([5, 6, 7], GenerationConfig(**NEW)))
    report = session.report()
    assert report.prefixes is None
    assert (report.requests, report.rows) == (0, 0)
    assert report.steps > 0
    assert report.cache_bytes > 0


def test_what_is_more_than_tokens_is_not_shared(llama, tiny):
    config = GenerationConfig(**NEW)
    embeds = llama.model.get_input_embeddings()(torch.tensor(prompts(llama)[0])).detach()
    prefixes = PrefixCache(block=8)
    session = Session(llama.model, prefix_cache=prefixes)
    for _ in range(2):
        run(session, Request([], config, {"inputs_embeds": embeds}))
    t5 = Session(tiny("t5").model, prefix_cache=PrefixCache(block=1))
    for _ in range(2):
        run(t5, Request([0], config, {"input_ids": torch.tensor([5, 6, 7])}))
    for one in (session, t5):
        assert one.report().prefixes.hits == one.report().prefixes.blocks == 0


def test_a_cache_belongs_to_one_model(llama, tiny):
    prefixes = PrefixCache(block=8)
    session = Session(llama.model, prefix_cache=prefixes)
    run(session, Request(prompts(llama)[0], GenerationConfig(**NEW)))
    other = Session(llama.model, prefix_cache=prefixes)
    assert run(other, Request(prompts(llama)[1], GenerationConfig(**NEW)))[1] < 40
    with pytest.raises(InputError, match="another model"):
        Session(tiny("qwen2").model, prefix_cache=prefixes)
    prefixes.clear()
    Session(tiny("qwen2").model, prefix_cache=prefixes)
    assert len(prefixes) == prefixes.nbytes == 0


def test_little_room_costs_time_and_nothing_else(llama):
    """Blocks come and go while requests run, and every result is that of a call alone."""
    config = GenerationConfig(**NEW)
    room = 2 * 2 * 2 * 8 * 8 * 4 * 7  # seven blocks of eight tokens
    prefixes = PrefixCache(room, block=8)
    session = Session(llama.model, prefix_cache=prefixes)
    texts = [text for seed in range(3) for text in _family(llama, seed)]
    for text in [*texts, *reversed(texts)]:
        assert run(session, Request(text, config))[0] == [cold(llama.model, text, config)[0]]
        assert prefixes.nbytes <= room
    report = prefixes.report()
    assert report.evicted > 0
    assert report.hits > 0


def _family(model, seed):
    beginning = tinies.prompts(model.arch, [24], seed)[0]
    return [beginning + end for end in tinies.prompts(model.arch, [9, 17], 100 + seed)]


# ------------------------------------------------------------------------ by itself
def past(length, first=0, store=None):
    """A row whose key at position `p` is `first + p`, of two layers."""
    store = DenseStore() if store is None else store
    store.extend(1)
    key = (first + torch.arange(length).float())[None, None, :, None].expand(1, 2, length, 3)
    for layer in range(2):
        store.update(layer, key + 100 * layer, -key, KVSpan(None, 0, length, length))
    store.commit(None, torch.tensor([length]))
    return CachedRow(store)


def ids(*tokens):
    return torch.tensor(tokens)


BLOCK = 2 * 2 * 2 * 2 * 3 * 4  # bytes: layers, keys and values, tokens, heads, size, of float32


def test_the_longest_known_beginning_is_found():
    prefixes = PrefixCache(block=2)
    text = ids(1, 2, 3, 4, 5, 6, 7)
    prefixes.insert(text, past(7))
    assert (len(prefixes), prefixes.nbytes) == (3, 3 * BLOCK)
    for tokens, length in (
        (ids(1, 2, 3, 4, 5, 6, 7), 6),
        (ids(1, 2, 3, 4, 5, 6), 4),  # the last token is always fed
        (ids(1, 2, 3, 9, 5, 6, 7), 2),
        (ids(1, 2), 0),
        (ids(2, 1, 3, 4), 0),
        (ids(3, 4, 5, 6, 7), 0),  # a block is known by what comes before it, too
    ):
        found = prefixes.lookup(tokens)
        assert (0 if found is None else found.length) == length
        if found is not None:
            key, value = found.store.read(1, torch.tensor([0, 0]))
            assert key[1, 1, :, 2].tolist() == [100 + place for place in range(length)]
            assert value[0, 0, :, 0].tolist() == [-place for place in range(length)]


def test_only_what_the_row_holds_is_taken():
    prefixes = PrefixCache(block=2)
    prefixes.insert(ids(1, 2, 3, 4, 5), past(3))
    assert len(prefixes) == 1
    prefixes.insert(ids(1, 2, 3, 4, 5), past(5, first=50))
    assert prefixes.lookup(ids(1, 2, 3, 4, 5)).store.read(0, ids(0))[0][0, 0, :, 0].tolist() == [0, 1, 52, 53]


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    prefixes = PrefixCache(4 * BLOCK, block=2)
    first, second, third = ids(1, 2, 3, 4, 0), ids(5, 6, 7, 8, 0), ids(9, 10, 11, 12, 0)
    prefixes.insert(first, past(4))
    prefixes.insert(second, past(4))
    prefixes.lookup(first)
    prefixes.insert(third, past(4))
    assert [prefixes.lookup(one) is not None for one in (first, second, third)] == [True, False, True]
    prefixes.insert(ids(20, 21), past(2))  # one block more: the end of the one used longest ago goes
    assert [prefixes.lookup(one).length for one in (third, first)] == [4, 2]
    assert prefixes.report().evicted == 3
    assert prefixes.nbytes == 4 * BLOCK


def test_a_text_larger_than_all_room_keeps_its_beginning():
    prefixes = PrefixCache(2 * BLOCK, block=2)
    prefixes.insert(torch.arange(20), past(20))
    assert prefixes.lookup(torch.arange(20)).length == 4
    tiny_room = PrefixCache(1, block=2)
    tiny_room.insert(torch.arange(20), past(20))
    assert len(tiny_room) == tiny_room.nbytes == 0


def test_salts_do_not_run_into_each_other():
    names = set()
    for own, salt in ((b"", b"ab"), (b"a", b"b"), (b"ab", b""), (b"", b"")):
        prefixes = PrefixCache(block=2, salt=own)
        names.add(tuple(prefixes._digests(ids(1, 2, 3, 4), salt)))
    assert len(names) == 4
    assert all(len(one) == 32 for pair in names for one in pair)


def test_a_block_outlives_the_row_it_came_from():
    prefixes = PrefixCache(block=2)
    row = past(4, store=PagedStore())
    prefixes.insert(ids(1, 2, 3, 4, 5), row)
    for arena in row.store.pool.slabs.values():
        for block in (*arena.keys.values(), *arena.values.values()):
            block.zero_()
    assert prefixes.lookup(ids(1, 2, 3, 4, 5)).store.read(0, ids(0))[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]


def test_arguments_are_checked():
    for wrong in ({"max_bytes": 0}, {"block": 0}, {"max_bytes": 1.5}, {"salt": "text"}, {"block": True}):
        with pytest.raises(InputError) as error:
            PrefixCache(**wrong)
        assert error.value.field == next(iter(wrong))
    assert descant.PrefixCache is PrefixCache
