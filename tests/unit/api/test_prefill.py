"""Prompt reuse: caches that calls are given, what they hold afterwards, prefill, and caches on disk."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

import descant
from descant import ConfigError, Finished, GenerationConfig, InputError, Request, Session, UnsupportedModel
from descant.api.prefill import _digest
from descant.kv_cache.row_views import CachedRow, read_layers
from descant.models.compat.hf_caches.dynamic import DynamicCache, PagedCache
from tests.support import tiny_models as tinies

SLOW = pytest.mark.slow
NEW = {"max_new_tokens": 8}
METHODS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "sampling": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "contrastive, sparing": {"penalty_alpha": 0.6, "top_k": 3, "low_memory": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "guidance": {"guidance_scale": 1.5},
    "dola": {"dola_layers": "low"},
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
kinds = pytest.mark.parametrize("kind", ["dynamic", "paged"])


@pytest.fixture
def llama(tiny):
    return tiny("llama")


def texts(model, count=5, shared=40):
    """Prompts that begin alike: the beginning [L], and all of them padded at the left."""
    beginning = tinies.prompts(model.arch, [shared], 0)[0]
    ends = tinies.prompts(model.arch, [1 + line % 7 for line in range(count)], 3)
    whole = [beginning + end for end in ends]
    return torch.tensor(beginning), whole, tinies.pad(whole, model.pad, "left")


def snapshot(cache):
    """All that a cache holds, byte by byte."""
    return {name: part.clone() for name, part in cache.commit_store().state().items()}


def assert_unharmed(cache, before):
    after = snapshot(cache)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@contextmanager
def counted(model):
    """How many positions the model is fed, in a list."""
    fed = []

    def note(module, args, kwargs):
        fed.append(kwargs["input_ids"].numel())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield fed
    finally:
        handle.remove()


# ------------------------------------------------------------------------ one prefix, many continuations
@kinds
def test_64_continuations_of_one_prefix_equal_64_cold_calls(kind, llama):
    beginning, whole, (ids, mask) = texts(llama, 64)
    cache = descant.prefill(llama.model, beginning, cache=kind)
    before = snapshot(cache)
    with counted(llama.model) as fed:
        found = descant.generate(llama.model, ids, attention_mask=mask, past_key_values=cache, **NEW)
    assert fed[0] <= 64 * 7  # the ends of the prompts, and not their beginning
    assert_unharmed(cache, before)
    for line, text in enumerate(whole):
        cold = descant.generate(llama.model, torch.tensor([text]), **NEW)[0, len(text) :]
        new = found[line, ids.shape[1] :]
        assert new[: len(cold)].tolist() == cold.tolist()
        assert new[len(cold) :].eq(llama.pad).all()


@methods
@kinds
@pytest.mark.parametrize("name", ["llama", *(pytest.param(one, marks=SLOW) for one in ("mistral", "gpt2"))])
def test_every_method_goes_on_from_a_past(name, kind, method, tiny):
    model = tiny(name)
    beginning, _, (ids, mask) = texts(model, 4)
    call = {"attention_mask": mask, **NEW, **method}
    cold = descant.generate(model.model, ids, **call)
    cache = descant.prefill(model.model, beginning, cache=kind)
    before = snapshot(cache)
    assert torch.equal(descant.generate(model.model, ids, past_key_values=cache, **call), cold)
    assert_unharmed(cache, before)


@pytest.mark.parametrize("name", ["opt", "gpt-neox", "gemma", "qwen2"])
def test_other_architectures_go_on_from_a_past(name, tiny):
    model = tiny(name)
    beginning, _, (ids, mask) = texts(model, 4)
    cold = descant.generate(model.model, ids, attention_mask=mask, **NEW)
    cache = descant.prefill(model.model, beginning)
    with counted(model.model) as fed:
        found = descant.generate(model.model, ids, attention_mask=mask, past_key_values=cache, **NEW)
    assert torch.equal(found, cold)
    assert fed[0] < ids.shape[1]


def test_a_cache_as_long_as_the_prompt_or_longer_is_cut(llama):
    beginning, _, _ = texts(llama)
    cache = descant.prefill(llama.model, beginning)
    for size in (1, 2, 17, 39, 40):
        prompt = beginning[None, :size]
        cold = descant.generate(llama.model, prompt, **NEW)
        with counted(llama.model) as fed:
            assert torch.equal(descant.generate(llama.model, prompt, past_key_values=cache, **NEW), cold)
        assert fed[0] == 1
    assert cache.lengths.tolist() == [40]


def test_each_prompt_has_a_row_of_its_own(llama):
    rows = tinies.prompts(llama.arch, [11, 6, 9], 1)
    ids, mask = tinies.pad(rows, llama.pad, "left")
    cache = descant.prefill(llama.model, ids, attention_mask=mask)
    assert cache.lengths.tolist() == [11, 6, 9]
    longer = [row + end for row, end in zip(rows, tinies.prompts(llama.arch, [2, 5, 1], 2), strict=True)]
    ids, mask = tinies.pad(longer, llama.pad, "left")
    cold = descant.generate(llama.model, ids, attention_mask=mask, **NEW)
    with counted(llama.model) as fed:
        found = descant.generate(llama.model, ids, attention_mask=mask, past_key_values=cache, **NEW)
    assert torch.equal(found, cold)
    assert sum(fed[:1]) <= 3 * 5


# ------------------------------------------------------------------------ what a cache holds afterwards
@methods
@kinds
def test_a_conversation_on_one_cache_equals_cold_calls(kind, method, llama):
    """Three turns, each with the whole text; what a turn leaves is what the next begins with."""
    cache = {"dynamic": DynamicCache, "paged": PagedCache}[kind]()
    text = torch.tensor(tinies.prompts(llama.arch, [9], 4))
    method = {**method, "num_return_sequences": 1}
    for turn in range(3):
        cold = descant.generate(llama.model, text, **NEW, **method)
        with counted(llama.model) as fed:
            found = descant.generate(llama.model, text, past_key_values=cache, **NEW, **method)
        assert torch.equal(found, cold)
        assert cache.lengths.tolist() == [found.shape[1] - 1]
        if turn and "penalty_alpha" not in method:
            assert fed[0] <= 2 * (4 + 3)  # the last token, what is new, what is drafted; and a twin's
        text = torch.cat((found, torch.tensor(tinies.prompts(llama.arch, [3], 5 + turn))), 1)


@methods
@kinds
def test_a_cache_holds_every_returned_sequence_in_order(kind, method, llama):
    _, whole, (ids, mask) = texts(llama, 3, shared=6)
    cache = {"dynamic": DynamicCache, "paged": PagedCache}[kind]()
    call = {"attention_mask": mask, "return_dict_in_generate": True, "logprobs": 0, **NEW, **method}
    out = descant.generate(llama.model, ids, past_key_values=cache, **call)
    assert out.past_key_values is cache
    copies = method.get("num_return_sequences", 1)
    expected = []
    for line, laws in enumerate(out.logprobs):
        new = out.sequences[line, ids.shape[1] :][: len(laws.raw)]
        expected.append(whole[line // copies] + new[:-1].tolist())
    assert [one.tolist() for one in cache.tokens] == expected
    assert cache.lengths.tolist() == [len(one) for one in expected]
    for line, tokens in enumerate(expected):
        cold = descant.prefill(llama.model, torch.tensor(tokens), cache="dynamic")
        mine = read_layers(cache.commit_store(), torch.tensor([line]))
        for layer, pair in read_layers(cold.commit_store(), torch.tensor([0])).items():
            for got, want in zip(mine[layer], pair, strict=True):
                torch.testing.assert_close(got[:, :, : len(tokens)], want[:, :, : len(tokens)])


def test_a_record_has_the_cache_where_it_is_asked_for(llama):
    beginning, _, (ids, mask) = texts(llama, 2)
    call = {"attention_mask": mask, "return_dict_in_generate": True, **NEW}
    assert descant.generate(llama.model, ids, **call).past_key_values is None
    out = descant.generate(llama.model, ids, use_cache=True, **call)
    assert out.past_key_values.lengths.max() == out.sequences.shape[1] - 1
    frozen = descant.prefill(llama.model, beginning)
    out = descant.generate(llama.model, ids, past_key_values=frozen, **call)
    assert out.past_key_values is not frozen
    assert len(out.past_key_values.lengths) == 2
    assert frozen.lengths.tolist() == [40]
    assert list(out) == ["sequences", "past_key_values"]


def test_a_legacy_cache_is_nested_tuples(llama):
    ids = torch.tensor(tinies.prompts(llama.arch, [7], 0))
    call = {"return_dict_in_generate": True, "return_legacy_cache": True, **NEW}
    out = descant.generate(llama.model, ids, **call)
    past = out.past_key_values
    assert isinstance(past, tuple)
    assert len(past) == 2
    assert all(part.shape == (1, 2, out.sequences.shape[1] - 1, 8) for pair in past for part in pair)
    more = torch.cat((out.sequences, torch.tensor([[5, 6]])), 1)
    cold = descant.generate(llama.model, more, **NEW)
    assert torch.equal(descant.generate(llama.model, more, past_key_values=past, **NEW), cold)


def test_a_cache_that_was_changed_by_hand_does_not_claim_to_know_its_tokens(llama):
    ids = torch.tensor(tinies.prompts(llama.arch, [7, 7], 0))
    cache = DynamicCache()
    out = descant.generate(llama.model, ids, past_key_values=cache, **NEW, min_new_tokens=8)
    assert len(cache.tokens) == 2
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.tokens is None
    cold = descant.generate(llama.model, out.flip(0), **NEW)
    assert torch.equal(descant.generate(llama.model, out.flip(0), past_key_values=cache, **NEW), cold)


def test_a_call_that_fails_leaves_the_cache_as_it_was(llama):
    ids = torch.tensor(tinies.prompts(llama.arch, [7], 0))
    cache = DynamicCache()
    out = descant.generate(llama.model, ids, past_key_values=cache, **NEW)
    before = snapshot(cache)

    def broken(tokens, scores):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        descant.generate(llama.model, out, past_key_values=cache, logits_processor=[broken], **NEW)
    assert_unharmed(cache, before)


def test_a_stream_fills_the_cache_it_was_given(llama):
    ids = torch.tensor(tinies.prompts(llama.arch, [7], 0))
    cache = DynamicCache()
    events = descant.stream(llama.model, ids, past_key_values=cache, **NEW)
    said = [token for event in events for token in event.token_ids]
    assert cache.lengths.tolist() == [7 + len(said) - 1]
    assert cache.tokens[0].tolist() == ids[0].tolist() + said[:-1]


def test_states_are_those_of_what_was_fed(tiny):
    model = tiny("llama", attn_implementation="eager")
    beginning, _, (ids, mask) = texts(model, 3)
    call = {
        "attention_mask": mask, "return_dict_in_generate": True, "output_hidden_states": True,
        "output_attentions": True, **NEW,
    }  # fmt: skip
    cold = descant.generate(model.model, ids, **call)
    cache = descant.prefill(model.model, beginning)
    out = descant.generate(model.model, ids, past_key_values=cache, **call)
    assert torch.equal(out.sequences, cold.sequences)
    fed = ids.shape[1] - len(beginning)
    for layer, whole in zip(out.hidden_states[0], cold.hidden_states[0], strict=True):
        assert layer.shape[1] == fed
        torch.testing.assert_close(layer[2], whole[2, -fed:])
    assert out.attentions[0][0].shape[2:] == (fed, ids.shape[1])
    torch.testing.assert_close(out.hidden_states[1], cold.hidden_states[1])


# ------------------------------------------------------------------------ caches that others made
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "opt"])
@pytest.mark.parametrize("make", [transformers.DynamicCache, DynamicCache, PagedCache])
def test_a_cache_that_a_forward_filled_with_padding(make, name, tiny):
    """What a model read of left-padded prompts goes on without the padding."""
    model = tiny(name)
    ids, mask = tinies.pad(tinies.prompts(model.arch, [9, 4, 13, 6], 2), model.pad, "left")
    cold = descant.generate(model.model, ids, attention_mask=mask, **NEW)
    cache, size = make(), 10
    given = {"input_ids": ids[:, :size], "attention_mask": mask[:, :size], "past_key_values": cache}
    if name != "opt":
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, :size]
    with torch.no_grad():
        model.model(**given, use_cache=True)
    with counted(model.model) as fed:
        found = descant.generate(model.model, ids, attention_mask=mask, past_key_values=cache, **NEW)
    assert torch.equal(found, cold)
    assert fed[0] == 4 * 3


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_cache_of_transformers_is_filled_in_place(name, tiny):
    """As their own generate() fills it, which can go on from it."""
    model = tiny(name)
    theirs = {
        "growing": transformers.DynamicCache(),
        "of the config": transformers.DynamicCache(config=model.model.config),
        "static": transformers.StaticCache(config=model.model.config, max_cache_len=80),
    }
    if name == "mistral":  # of these, windows evict
        theirs = {"growing": theirs["growing"]}
    for cache in theirs.values():
        text = torch.tensor(tinies.prompts(model.arch, [9], 4))
        for turn in range(3):
            cold = descant.generate(model.model, text, **NEW)
            record = descant.generate(
                model.model, text, past_key_values=cache, return_dict_in_generate=True, **NEW
            )
            assert torch.equal(record.sequences, cold)
            assert record.past_key_values is cache
            assert cache.get_seq_length() == cold.shape[1] - 1
            text = torch.cat((cold, torch.tensor(tinies.prompts(model.arch, [3], 5 + turn))), 1)
        mine = descant.generate(model.model, text, **NEW)
        assert torch.equal(model.model.generate(text, past_key_values=cache, do_sample=False, **NEW), mine)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_of_transformers_keeps_the_columns_of_a_padded_batch(name, tiny):
    """Rows that ended early leave holes, and prompts are padded; the mask says which columns count."""
    model, cache = tiny(name), transformers.DynamicCache()
    ids, mask = tinies.pad(tinies.prompts(model.arch, [9, 4, 7], 4), model.pad, "left")
    uneven = False
    for turn in range(3):
        call = {"attention_mask": mask, "return_dict_in_generate": True, "logprobs": 0, **NEW}
        cold = descant.generate(model.model, ids, **call)
        with counted(model.model) as fed:
            found = descant.generate(model.model, ids, past_key_values=cache, **call)
        assert torch.equal(found.sequences, cold.sequences)
        assert not turn or fed[0] < ids.numel()
        said = torch.zeros(3, found.sequences.shape[1] - ids.shape[1], dtype=torch.long)
        for line, laws in enumerate(found.logprobs):
            said[line, : len(laws.raw)] = 1
        uneven |= not bool(said.all())
        more = torch.tensor(tinies.prompts(model.arch, [3, 3, 3], 5 + turn))
        ids = torch.cat((found.sequences, more), 1)
        mask = torch.cat((mask, said, torch.ones_like(more)), 1)
    assert uneven


def documented(config):
    """Caches by their documented names, with room for all that these tests read."""
    return {
        "offloaded": descant.OffloadedCache,
        "static": lambda: descant.StaticCache(config, batch_size=8, max_cache_len=120),
        "offloaded, static": lambda: descant.OffloadedStaticCache(config, 8, 120, device="cpu"),
        "sliding": lambda: descant.SlidingWindowCache(config, batch_size=8, max_cache_len=120),
        "hybrid": lambda: descant.HybridCache(config, batch_size=8, max_cache_len=120),
        "sink": lambda: descant.SinkCache(window_length=100, num_sink_tokens=4),
        "snapkv": lambda: descant.SnapKVCache(budget=100, window=8),
        "h2o": lambda: descant.H2OCache(budget=100),
    }


@pytest.mark.parametrize(
    "method", ["greedy", *(pytest.param(one, marks=SLOW) for one in ("beams", "lookup", "contrastive"))]
)
@pytest.mark.parametrize("kind", documented(None))
def test_a_conversation_on_every_documented_cache(kind, method, tiny):
    model = tiny("mistral" if kind in ("sliding", "hybrid") else "llama")
    cache = documented(model.model.config)[kind]()
    text = torch.tensor(tinies.prompts(model.arch, [9], 4))
    call = {**NEW, **METHODS[method], "num_return_sequences": 1}
    for turn in range(3):
        cold = descant.generate(model.model, text, **call)
        with counted(model.model) as fed:
            assert torch.equal(descant.generate(model.model, text, past_key_values=cache, **call), cold)
        assert cache.lengths.tolist() == [cold.shape[1] - 1]
        assert not turn or method == "contrastive" or fed[0] <= 4 + 3
        text = torch.cat((cold, torch.tensor(tinies.prompts(model.arch, [3], 5 + turn))), 1)


@pytest.mark.parametrize("method", ["greedy", "beams", "sampling"])
def test_a_state_goes_on_from_where_it_was(method):
    """A recurrent model reads on token by token, and cannot take anything back."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.MambaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    text = torch.tensor([[5, 6, 7, 8, 9, 10]])
    call = {**NEW, **METHODS[method], "num_return_sequences": 1}
    record = descant.generate(model, text, use_cache=True, return_dict_in_generate=True, **call)
    cache, text = record.past_key_values, torch.cat((record.sequences, torch.tensor([[11, 12]])), 1)
    for turn in range(2):
        cold = descant.generate(model, text, **call)
        with counted(model) as fed:
            assert torch.equal(descant.generate(model, text, past_key_values=cache, **call), cold)
        assert fed[0] == 1
        assert cache.lengths.tolist() == [cold.shape[1] - 1]
        text = torch.cat((cold, torch.tensor([[13, 14 + turn]])), 1)
    assert "a state cannot be cut" in refusal_of(model, text[:, :9], cache)
    assert "with one returned sequence" in refusal_of(
        model, text, cache, do_sample=True, num_return_sequences=2
    )


def test_an_empty_cache_of_transformers_is_taken(tiny):
    for name in ("llama", "t5"):
        model = tiny(name)
        ids = torch.tensor(tinies.prompts(model.arch, [7], 0))
        cold = descant.generate(model.model, ids, **NEW)
        past = transformers.DynamicCache()
        if name == "t5":
            past = transformers.EncoderDecoderCache(past, transformers.DynamicCache())
        assert torch.equal(descant.generate(model.model, ids, past_key_values=past, **NEW), cold)


# ------------------------------------------------------------------------ what cannot be
def refusal_of(model, ids, past, **call):
    with pytest.raises((InputError, ConfigError)) as error:
        descant.generate(model, ids, past_key_values=past, **NEW, **call)
    return str(error.value)


def test_a_prompt_with_another_beginning_is_refused_with_the_position(llama):
    beginning, _, _ = texts(llama)
    cache = descant.prefill(llama.model, beginning)
    other = beginning[None].clone()
    other[0, 17] = (other[0, 17] + 1) % llama.vocab
    told = refusal_of(llama.model, other, cache)
    assert f"has token {int(other[0, 17])} at 17" in told
    assert f"got 'token {int(beginning[17])}'" in told


def test_a_past_that_does_not_fit_is_refused(llama, tiny):
    ids = torch.tensor(tinies.prompts(llama.arch, [7, 7, 7], 0))
    two = descant.prefill(llama.model, ids[:2])
    assert "one row, or one for each of 3 prompts" in refusal_of(llama.model, ids, two)
    deeper = descant.prefill(tiny("qwen2").model, ids[0])
    assert "must be made by this model, whose kind is 'LlamaForCausalLM'" in refusal_of(
        llama.model, ids[:1], deeper
    )
    deeper.model_fingerprint = {}  # a cache whose maker is not known
    assert "must have been made by this model, which has 2 layers" in refusal_of(llama.model, ids[:1], deeper)
    one = descant.prefill(llama.model, ids[0])
    assert "use_cache" in refusal_of(llama.model, ids[:1], one, use_cache=False)
    assert "cache_implementation" in refusal_of(llama.model, ids[:1], one, cache_implementation="dynamic")
    assert "inputs_embeds" in refusal_of(
        llama.model, ids[:1], one, inputs_embeds=llama.model.get_input_embeddings()(ids[:1])
    )
    assert "past_key_values" in refusal_of(llama.model, ids, "a cache")
    stranger = one.copy()
    stranger.tokens = None
    assert "encoder" in refusal_of(tiny("t5").model, ids[:1], stranger)


def test_a_frozen_cache_is_not_written_to(llama):
    cache = descant.prefill(llama.model, torch.tensor([5, 6, 7]))
    with pytest.raises(InputError, match="frozen"):
        llama.model(input_ids=torch.tensor([[8]]), past_key_values=cache)
    copy = cache.copy()
    llama.model(input_ids=torch.tensor([[8]]), past_key_values=copy)
    assert (cache.lengths.tolist(), copy.lengths.tolist()) == ([3], [4])


# ------------------------------------------------------------------------ prefill
def test_prefill_takes_ids_masks_and_text(llama):
    class Words:
        def __call__(self, text):
            return {"input_ids": [int(word) for word in text.split()]}

    one = descant.prefill(llama.model, [5, 6, 7])
    for cache in (
        descant.prefill(llama.model, torch.tensor([[5, 6, 7]])),
        descant.prefill(llama.model, torch.tensor([0, 5, 6, 7]), attention_mask=torch.tensor([0, 1, 1, 1])),
        descant.prefill(llama.model, "5 6 7", tokenizer=Words()),
        descant.prefill(llama.model, [5, 6, 7], chunk=2),
    ):
        assert [tokens.tolist() for tokens in cache.tokens] == [[5, 6, 7]]
        for layer, pair in read_layers(one.commit_store(), torch.tensor([0])).items():
            for got, want in zip(
                read_layers(cache.commit_store(), torch.tensor([0]))[layer], pair, strict=True
            ):
                torch.testing.assert_close(got[:, :, :3], want[:, :, :3])
    two = descant.prefill(llama.model, ["5 6 7", "8"], tokenizer=Words(), cache=DynamicCache())
    assert two.lengths.tolist() == [3, 1]
    assert type(two.commit_store()) is type(DynamicCache().commit_store())


def test_prefill_in_parts_feeds_parts(llama):
    prompt = torch.tensor(tinies.prompts(llama.arch, [40], 0)[0])
    with counted(llama.model) as fed:
        descant.prefill(llama.model, prompt, chunk=16)
    assert fed == [16, 16, 8]


def test_prefill_refuses_what_it_cannot_read(llama, tiny):
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration"):
        descant.prefill(tiny("t5").model, [5, 6])
    for given, name in (
        ({"prompt": []}, "input_ids"),
        ({"prompt": object()}, "prompt"),
        ({"prompt": [5], "cache": "granite"}, "cache"),
        ({"prompt": [5], "cache": 3}, "cache"),
        ({"prompt": [5], "chunk": 0}, "chunk"),
        ({"prompt": "text"}, "tokenizer"),
        ({"prompt": [llama.vocab]}, "input_ids"),
    ):
        with pytest.raises(InputError) as error:
            descant.prefill(llama.model, **given)
        assert error.value.field == name


# ------------------------------------------------------------------------ files
@kinds
def test_a_cache_written_and_read_is_the_same(kind, llama, tmp_path):
    ids, mask = tinies.pad(tinies.prompts(llama.arch, [21, 5], 0), llama.pad, "left")
    cache = descant.prefill(llama.model, ids, attention_mask=mask, cache=kind)
    path = tmp_path / "prompt.safetensors"
    cache.save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["prompt.safetensors"]
    back = descant.load_cache(path, llama.model)
    assert (back.read_only, type(back.commit_store())) == (True, type(cache.commit_store()))
    assert [one.tolist() for one in back.tokens] == [one.tolist() for one in cache.tokens]
    rows = torch.arange(2)
    for layer, pair in read_layers(cache.commit_store(), rows).items():
        for got, want in zip(read_layers(back.commit_store(), rows)[layer], pair, strict=True):
            for row, size in enumerate((21, 5)):
                assert torch.equal(got[row, :, :size], want[row, :, :size])
    call = {"attention_mask": mask, **NEW}
    cold = descant.generate(llama.model, ids, **call)
    assert torch.equal(descant.generate(llama.model, ids, past_key_values=back, **call), cold)
    back.save(path)  # over the file it came from
    assert descant.load_cache(path).lengths.tolist() == [21, 5]


@pytest.fixture
def saved(llama, tmp_path):
    """A cache on disk: its path, its tensors and what the file says of them."""
    path = tmp_path / "prompt.safetensors"
    descant.prefill(llama.model, [5, 6, 7, 8]).save(path)
    with safe_open(path, "pt") as file:
        return path, {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def load_refused(path, model=None):
    with pytest.raises(InputError) as error:
        descant.load_cache(path, model)
    return error.value


def test_a_cache_of_another_model_is_refused(saved, llama, tiny):
    path, _, _ = saved
    assert load_refused(path, tiny("qwen2").model).field == "model"
    other = transformers.AutoModelForCausalLM.from_pretrained(llama.folder, dtype=torch.float32).eval()
    assert descant.load_cache(path, other).lengths.tolist() == [4]
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    error = load_refused(path, other)
    assert (error.field, "weights" in str(error)) == ("model", True)
    half = transformers.AutoModelForCausalLM.from_pretrained(llama.folder, dtype=torch.bfloat16).eval()
    assert "dtype" in str(load_refused(path, half))


def test_a_file_that_is_none_of_ours_is_refused(saved):
    path, tensors, told = saved
    assert load_refused(path.with_name("absent")).field == "path"
    whole = path.read_bytes()
    for wrong in (b"", b"no tensors", whole[: len(whole) // 2], b"\x80\x04" + whole):
        path.write_bytes(wrong)
        assert load_refused(path).field == "path"
    for part in (*range(0, len(whole), len(whole) // 40), len(whole) - 1):
        path.write_bytes(whole[:part] + bytes([whole[part] ^ 1]) + whole[part + 1 :])
        assert load_refused(path).field == "path"
    save_file(tensors, path)
    assert "format" in str(load_refused(path))
    save_file(tensors, path, metadata={**told, "format": "descant cache 99"})
    assert "format" in str(load_refused(path))
    assert json.loads(told["model"])["kind"] == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": torch.tensor([5])},
        {"lengths": torch.tensor([-1])},
        {"lengths": torch.tensor([4, 4])},
        {"lengths": torch.tensor([4.0])},
        {"lengths": None},
        {"tokens": None},
        {"tokens": torch.tensor([[5, 6, -7, 8]])},
        {"tokens": torch.zeros(2, 4, dtype=torch.long)},
        {"keys.0": None},
        {"values.1": None},
        {"keys.0": torch.zeros(1, 2, 3, 8)},
        {"keys.0": torch.zeros(2, 4, 8)},
        {"keys.0": torch.zeros(1, 2, 4, 8, dtype=torch.long)},
        {"keys.x": torch.zeros(1, 2, 4, 8)},
        {"more": torch.zeros(1)},
    ],
    ids=str,
)
def test_tensors_that_do_not_go_together_are_refused(wrong, saved):
    path, tensors, told = saved
    tensors = {name: part for name, part in {**tensors, **wrong}.items() if part is not None}
    save_file(tensors, path, metadata={**told, "digest": _digest(tensors, told)})
    assert load_refused(path).field == "path"


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "pickle"}, {"settings": "{"}, {"settings": "[]"}, {"settings": '{"blok": 3}'},
        {"settings": '{"block_size": "many"}'}, {"model": "1"}, {"digest": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_words_that_make_no_sense_are_refused(wrong, saved):
    path, tensors, told = saved
    told = {**told, **wrong}
    save_file(tensors, path, metadata={"digest": _digest(tensors, told), **told, **wrong})
    assert load_refused(path).field == "path"


# ------------------------------------------------------------------------ sessions
def ended(events):
    return {event.request: event for event in events if isinstance(event, Finished)}


@kinds
def test_a_request_with_a_past_is_admitted_mid_flight(kind, llama):
    beginning, whole, _ = texts(llama, 4)
    cache = descant.prefill(llama.model, beginning, cache=kind)
    config = GenerationConfig(**NEW)
    session = Session(llama.model)
    numbers = session.admit(Request(whole[0], config), Request(whole[1], config, past_key_values=cache))
    ends = ended(session.step())
    numbers += session.admit(
        Request(whole[2], config, past_key_values=CachedRow(cache.commit_store())), Request([5, 6, 7], config)
    )
    ends |= ended(session.step())
    numbers += session.admit(Request(whole[3], config, past_key_values=cache.commit_store()))
    ends |= ended(session.drain())
    for number, text in zip(numbers, [*whole[:3], [5, 6, 7], whole[3]], strict=True):
        cold = descant.generate(llama.model, torch.tensor([text]), **NEW)[0, len(text) :]
        assert ends[number].hypotheses[0].tokens.tolist() == cold.tolist()


def test_what_a_request_keeps_is_the_past_of_the_next(llama):
    session = Session(llama.model)
    prompt = tinies.prompts(llama.arch, [9], 0)[0]
    config = GenerationConfig(num_return_sequences=3, do_sample=True, seed=1, **NEW)
    number = session.admit(Request(prompt, config, return_past_key_values=True))[0]
    session.admit(Request(prompt, config))
    ends = ended(session.drain())
    assert [end.past_key_values == () for end in ends.values()] == [False, True]
    mine = ends[number]
    for one, past in zip(mine.hypotheses, mine.past_key_values, strict=True):
        text = [*prompt, *one.tokens.tolist(), 7, 8]
        assert past.length == 9 + len(one.tokens) - 1
        next_one = session.admit(Request(text, GenerationConfig(**NEW), past_key_values=past))[0]
        cold = descant.generate(llama.model, torch.tensor([text]), **NEW)[0, len(text) :]
        assert ended(session.drain())[next_one].hypotheses[0].tokens.tolist() == cold.tolist()


def test_what_a_beam_search_throws_out_takes_no_room(llama):
    session = Session(llama.model)
    config = GenerationConfig(num_beams=4, max_new_tokens=30)
    session.admit(Request(tinies.prompts(llama.arch, [9], 0)[0], config, return_past_key_values=True))
    archive, most = session._tables.default.prefix_reuse._finished_kv, 0
    ends = []
    while len(session):
        ends += [event for event in session.step() if isinstance(event, Finished)]
        most = max(most, len(archive))
    assert 0 < most <= 4 + 4  # a pool, and what has just ended
    assert len(ends[0].past_key_values) == 1
    ends.clear()
    assert len(archive) == 0


def test_a_past_must_be_one(llama):
    for wrong in (3, [1, 2], descant.prefill(llama.model, torch.tensor([[5, 6], [7, 8]]))):
        with pytest.raises(InputError, match="`past_key_values` must be a `CachedRow`"):
            Session(llama.model).admit(Request([5, 6, 7], GenerationConfig(**NEW), past_key_values=wrong))


# ------------------------------------------------------------------------ without a cache, and in parts
@methods
@pytest.mark.parametrize("name", ["llama", *(pytest.param(one, marks=SLOW) for one in ("mistral", "t5"))])
def test_decoding_without_a_cache_gives_the_same_tokens(name, method, tiny):
    model = tiny(name)
    if name == "t5" and method.keys() & {"guidance_scale", "dola_layers"}:
        return
    if "assistant_early_exit" in method:
        with pytest.raises(ConfigError):
            descant.generate(model.model, torch.tensor([[5, 6]]), use_cache=False, **method)
        return
    ids, mask = tinies.pad(tinies.prompts(model.arch, [9, 4, 13], 2), model.pad, "left")
    call = {"attention_mask": mask, **NEW, **method}
    cold = descant.generate(model.model, ids, **call)
    assert torch.equal(descant.generate(model.model, ids, use_cache=False, **call), cold)


def test_without_a_cache_everything_is_fed_again(llama):
    ids = torch.tensor(tinies.prompts(llama.arch, [9], 0))
    with counted(llama.model) as fed:
        out = descant.generate(llama.model, ids, use_cache=False, **NEW)
    assert fed == list(range(9, out.shape[1]))
    session = Session(llama.model)
    with pytest.raises(ConfigError, match="use_cache"):
        session.admit(Request([5, 6], GenerationConfig(use_cache=False, **NEW)))
    embeds = llama.model.get_input_embeddings()(ids)
    with pytest.raises(ConfigError, match="inputs_embeds"):
        descant.generate(llama.model, inputs_embeds=embeds, use_cache=False, **NEW)


@methods
@pytest.mark.parametrize("size", [4, *(pytest.param(one, marks=SLOW) for one in (1, 100))])
def test_a_prompt_read_in_parts_gives_the_same_tokens(size, method, llama):
    ids, mask = tinies.pad(tinies.prompts(llama.arch, [19, 4, 13], 2), llama.pad, "left")
    call = {"attention_mask": mask, **NEW, **method}
    cold = descant.generate(llama.model, ids, **call)
    if "penalty_alpha" in method:
        with pytest.raises(ConfigError, match="prefill_chunk_size"):
            descant.generate(llama.model, ids, prefill_chunk_size=size, **call)
        return
    with counted(llama.model) as fed:
        assert torch.equal(descant.generate(llama.model, ids, prefill_chunk_size=size, **call), cold)
    assert fed[0] <= 3 * size or size == 100
