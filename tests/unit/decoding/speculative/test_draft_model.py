"""Drafts of a draft model equal its output alone, after any row operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from descant.core.interfaces import DraftContext
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise, keyed_exponential
from descant.decoding.guidance import ProxyTuning
from descant.decoding.speculative.draft_model import AssistantDrafter
from descant.engine.planning.planner import as_model
from descant.kv_cache.stores.dense import DenseStore
from tests.support.ci_slices import first
from tests.unit.decoding.speculative.rig import (
    VOCAB,
    Course,
    Line,
    draft,
    greedy,
    logits_of,
    network,
    plainly,
    rows_of,
    tried,
)

KEYS = ["llama", "gpt2", "mistral", "gemma3", "opt"]
OTHERS = ["mamba", "rwkv", "openai-gpt"]  # a state, a state for one row at a time, nothing at all


def assistant(model: Any, vocabulary: int = VOCAB, noise: Any = None) -> AssistantDrafter:
    own = as_model(model)
    return AssistantDrafter(own, own.new_cache(), noise or SamplingNoise(), vocabulary)


# ------------------------------------------------------------------------ following the rows
@pytest.mark.parametrize("seed", first(1, 3))
@pytest.mark.parametrize("name", KEYS + OTHERS)
def test_drafts_are_what_the_draft_model_says_alone(name: str, seed: int):
    model = network(name, 3)
    drafter, course = assistant(model), Course(seed)
    for _ in range(8):
        most = [course.rng.choice([0, 1, 2, 4]) for _ in course.lines]
        found = tried(draft(drafter, course.lines, most), len(course.lines))
        for line, tokens, count in zip(course.lines, found, most, strict=True):
            assert tokens == greedy(model, line.tokens, count)
        course.keep(found)
        course.move()


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_rollback_past_the_edge_of_a_window_drops_only_rejected_tokens(name: str):
    model = network(name, 3)
    drafter, line = assistant(model), Line([5, 6, 7, 8, 9, 10, 11, 12], 0)
    for accepted in (0, 0, 7, 1, 0):  # seven tokens are longer than the window of five
        [found] = tried(draft(drafter, [line], 8), 1)
        assert found == greedy(model, line.tokens, 8)
        line.tokens += [*found[:accepted], 3 + accepted]


def test_models_joined_by_arithmetic_draft_as_one():
    parts = [network("llama", 3), network("mamba", 4), network("llama", 5)]
    rule = ProxyTuning(*parts)
    drafter, course = assistant(rule), Course(1)
    for _ in range(5):
        found = tried(draft(drafter, course.lines, 3), len(course.lines))
        for line, tokens in zip(course.lines, found, strict=True):
            whole = list(line.tokens)
            for token in tokens:
                said = rule.combine([logits_of(part, whole)[-1] for part in parts])
                assert token == int(said.argmax())
                whole.append(token)
            assert len(tokens) == 3
        course.keep(found)
        course.move()


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_token_is_read_once(name: str):
    model = network(name, 3)
    own = as_model(model)
    drafter = AssistantDrafter(own, own.new_cache(), SamplingNoise(), VOCAB)
    lines = [Line([5, 6, 7, 8], 0), Line([9, 10, 11, 12], 1)]
    fed = []
    for accepted in (2, 3, 1, 0, 0):
        found = tried(draft(drafter, lines, 3), 2)
        fed.append(own.positions_fed)
        for line, tokens in zip(lines, found, strict=True):
            line.tokens += [*tokens[:accepted], 4]
    # Two rows: four tokens of prompt and two drafts; then the new token and two drafts; where all were
    # accepted the last of them as well, which was not fed before.
    assert fed == [2 * 6, 2 * 9, 2 * 13, 2 * 16, 2 * 19]
    # Where two tokens are missing after a state, the recurrent model has a forward more.
    assert drafter.forwards == own.forwards - (name == "mamba")


def test_rows_that_stay_where_they_are_are_not_copied():
    own = as_model(network("llama", 3))
    cache = DenseStore()
    drafter = AssistantDrafter(own, cache, SamplingNoise(), VOCAB)
    lines = [Line([5, 6, 7, 8 + at], at) for at in range(4)]
    for _ in range(3):
        found = tried(draft(drafter, lines, 3), len(lines))
        for line, tokens in zip(lines, found, strict=True):
            line.tokens += [*tokens[:1], 4]
    lines = lines[:2]
    draft(drafter, lines, 3)
    assert cache.copied_slots == 0
    assert len(cache) == 2
    draft(drafter, [lines[0], lines[1], lines[0]], 3)  # a fork is copied
    assert cache.copied_slots > 0


def test_a_row_that_takes_tokens_back_is_read_again():
    for name in ("llama", "mamba"):
        model = network(name, 3)
        drafter, line = assistant(model), Line([5, 6, 7, 8, 9], 0)
        assert tried(draft(drafter, [line], 2), 1) == [greedy(model, line.tokens, 2)]
        line.tokens = [5, 6, 7]
        assert tried(draft(drafter, [line], 2), 1) == [greedy(model, line.tokens, 2)]


# ------------------------------------------------------------------------ when a row stops
def test_a_row_stops_after_a_token_that_was_unlikely():
    model = network("llama", 3)
    lines = [Line([5 + at, 6, 7], at) for at in range(8)]
    for at, line in enumerate(lines):
        line.params = {"assistant_confidence_threshold": 0.1 * at}
    found = tried(draft(assistant(model), lines, 5), len(lines))
    stopped = 0
    for line, tokens in zip(lines, found, strict=True):
        whole, count = list(line.tokens), 0
        while count < 5:
            law = logits_of(model, whole)[-1].softmax(-1)
            whole.append(int(law.argmax()))
            count += 1
            if float(law.max()) < line.params["assistant_confidence_threshold"]:
                stopped += count < 5
                break
        assert tokens == whole[3:]
    assert 0 < stopped < 8


@pytest.mark.parametrize("column", ["eos_token_ids", "end_token_ids"])
def test_a_row_stops_after_an_end(column: str):
    model = network("llama", 3)
    free = greedy(model, [5, 6, 7], 5)
    ends = {"eos_token_ids": [], column: [96, free[2]]}
    lines = [Line([5, 6, 7], 0, params=ends), Line([5, 6, 7], 1, params={"eos_token_ids": [], column: []})]
    assert tried(draft(assistant(model), lines, 5), 2) == [free[:3], free]


def test_a_row_without_a_possible_token_stops_before_it():
    model = network("llama", 3)

    def process(rows: Rows, logits: Tensor) -> Tensor:
        dead = (rows.request == 0) & (rows.length >= 5)
        return logits.masked_fill(dead[:, None], -torch.inf)

    for sample in (0, 1):
        lines = [Line([5, 6, 7], at, params={"do_sample": sample}) for at in range(2)]
        chance = SamplingNoise()
        chance.num_rows = 2
        proposal = draft(assistant(model, noise=chance), lines, 4, DraftContext(process, DenseStore()))
        assert [len(one) for one in tried(proposal, 2)] == [2, 4]
        assert (proposal.draft_probs is not None) == bool(sample)
        assert proposal.draft_probs is None or not bool(proposal.draft_probs.isnan().any())


def test_processors_see_every_row_with_what_it_has_tried():
    model = network("llama", 3)
    seen = []

    def process(rows: Rows, logits: Tensor) -> Tensor:
        seen.append([row[:n] for row, n in zip(rows.tokens.tolist(), rows.length.tolist(), strict=True)])
        last = torch.tensor([whole[-1] for whole in seen[-1]])
        return logits.scatter(1, last[:, None], -torch.inf)

    lines = [Line([5, 6, 7], 0), Line([8], 1)]
    found = tried(draft(assistant(model), lines, [1, 3], DraftContext(process, DenseStore())), 2)
    assert [len(one) for one in found] == [1, 3]
    wholes = [[5, 6, 7, *found[0]], [8, *found[1]]]
    assert seen == [[wholes[0][: min(3 + at, 4)], wholes[1][: 1 + at]] for at in range(3)]
    for whole, begin in zip(wholes, (3, 1), strict=True):
        for at in range(begin, len(whole)):
            logits = logits_of(model, whole[:at])[-1]
            logits[whole[at - 1]] = -torch.inf
            assert whole[at] == int(logits.argmax())


# ------------------------------------------------------------------------ laws
def test_the_law_is_that_of_the_scores():
    model = network("llama", 3)
    chance = SamplingNoise()
    chance.num_rows = 3
    lines = [
        Line([5, 6, 7], 0, params={"do_sample": 1}),
        Line([8, 9], 1),
        Line([10, 11, 12], 2, params={"do_sample": 1, "seed": 7}),
    ]
    proposal = draft(
        assistant(model, noise=chance), lines, [3, 2, 3], DraftContext(lambda _, x: x / 2, DenseStore())
    )
    found, probs = tried(proposal, 3), proposal.draft_probs
    assert probs is not None
    assert probs.shape == (3, 3, VOCAB)
    for at in range(3):
        law = (logits_of(model, [5, 6, 7, *found[0][:at]])[-1] / 2).softmax(-1)
        torch.testing.assert_close(probs[0, at], law, atol=1e-5, rtol=1e-4)
    for row in (1, 2):  # certain: the likeliest token, or the one that its own noise chooses
        for at, token in enumerate(found[row]):
            assert probs[row, at].tolist() == torch.nn.functional.one_hot(torch.tensor(token), VOCAB).tolist()


def test_rows_with_a_seed_draw_by_the_noise_of_their_place():
    model = network("llama", 3)
    lines = [Line([5, 6, 7], 0, params={"do_sample": 1, "seed": 7}), Line([5, 6], 1)]
    proposal = draft(assistant(model), lines, 4)
    assert proposal.draft_probs is None
    whole = [5, 6, 7]
    for token in tried(proposal, 2)[0]:
        noise = keyed_exponential(
            torch.tensor([7]), torch.tensor([0]), torch.tensor([len(whole)]), VOCAB, torch.device("cpu")
        )
        assert token == int((logits_of(model, whole)[-1].softmax(-1) / noise[0]).argmax())
        whole.append(token)
    assert len(whole) == 7
    assert whole[3:] != greedy(model, [5, 6, 7], 4)


def test_what_is_drawn_is_tried_however_unlikely():
    model = network("llama", 3)
    chance = SamplingNoise()
    chance.num_rows = 64
    wants = {"do_sample": 1, "assistant_confidence_threshold": 0.9, "eos_token_ids": list(range(50))}
    lines = [Line([5, 6, 7], at, params=wants) for at in range(64)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        proposal = draft(
            assistant(model, noise=chance), lines, 3, DraftContext(lambda _, x: x / 4, DenseStore())
        )
    assert {len(one) for one in tried(proposal, 64)} == {1}
    assert len({one[0] for one in tried(proposal, 64)}) > 20


# ------------------------------------------------------------------------ other vocabularies, other lengths
@pytest.mark.parametrize("size", [VOCAB - 20, VOCAB + 20])
def test_a_vocabulary_of_another_size(size: int):
    model = network("llama", 3, size)
    course = Course(0)
    drafter = assistant(model)
    for _ in range(5):
        proposal = draft(drafter, course.lines, 3)
        found = tried(proposal, len(course.lines))
        for line, tokens in zip(course.lines, found, strict=True):
            whole = [min(token, size - 1) for token in line.tokens]
            for token in tokens:
                assert token == int(logits_of(model, whole)[-1][:VOCAB].argmax())
                whole.append(token)
            assert len(tokens) == 3
        course.keep(found)
        course.move()


@pytest.mark.parametrize("size", [VOCAB - 20, VOCAB + 20])
def test_a_law_has_the_size_of_the_target(size: int):
    chance = SamplingNoise()
    chance.num_rows = 1
    model = network("llama", 3, size)
    proposal = draft(assistant(model, noise=chance), [Line([5, 6], 0, params={"do_sample": 1})], 2)
    assert proposal.draft_probs is not None
    law = torch.full((VOCAB,), -torch.inf)
    law[: min(size, VOCAB)] = logits_of(model, [5, 6])[-1][:VOCAB]
    torch.testing.assert_close(proposal.draft_probs[0, 0], law.softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_rows_longer_than_its_table_of_positions_propose_nothing(name: str):
    model = network(name, 3)  # 96 positions
    drafter = assistant(model)
    lines = [Line([5] * size, size) for size in (93, 95, 96, 97, 120)]
    found = tried(draft(drafter, lines, 3), len(lines))
    assert [len(one) for one in found] == [3, 2, 1, 0, 0]
    assert found[0] == greedy(model, lines[0].tokens, 3)
    for line in lines:
        line.tokens += [7]
    assert [len(one) for one in tried(draft(drafter, lines, 3), len(lines))] == [3, 1, 0, 0, 0]


def test_a_prompt_of_embeddings_is_drafted_from_the_tokens_there_are():
    model = network("llama", 3)
    drafter = assistant(model)
    drafter.add_requests([0, 1], {"inputs_embeds": [torch.zeros(4, 8), torch.zeros(4, 8)]})
    rows = rows_of([Line([5, 6, 7], 0), Line([8], 1)], offset=4)
    rows = rows.replace(length=torch.tensor([3, 0]))
    drafter.commit(torch.tensor([-1, -1]), rows.length)
    proposal = drafter.draft(rows, torch.tensor([2, 2]), DraftContext(plainly, DenseStore()))
    assert tried(proposal, 2) == [greedy(model, [5, 6, 7], 2), []]


# ------------------------------------------------------------------------ encoders
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_draft_model_with_an_encoder_reads_what_the_target_reads(name: str):
    model = network(name, 3)
    drafter = assistant(model)
    course = Course(2)
    sources: dict[int, Tensor] = {}
    for _ in range(6):
        new = [line for line in course.lines if line.request not in sources]
        for line in new:
            sources[line.request] = torch.tensor([course.rng.randrange(3, VOCAB) for _ in range(6)])
        if new:
            ids = [sources[line.request] for line in new]
            marks = [torch.ones_like(one) for one in ids]
            given = {"input_ids": ids, "attention_mask": marks}
            drafter.add_requests([line.request for line in new], given)
        found = tried(draft(drafter, course.lines, 3), len(course.lines))
        for line, tokens in zip(course.lines, found, strict=True):
            assert tokens == greedy(model, line.tokens, 3, sources[line.request])
        course.keep(found)
        course.move()
        gone = sources.keys() - {line.request for line in course.lines}
        drafter.remove_requests(sorted(gone))
        for request in gone:
            del sources[request]


def test_an_encoder_of_another_width_cannot_use_the_targets_encoder_output():
    model = network("t5", 3)
    drafter = assistant(model)
    ids = torch.tensor([5, 6, 7])
    given = {"input_ids": [ids, None], "encoder_outputs": [None, torch.zeros(3, 48)]}
    drafter.add_requests([0, 1], given)
    lines = [Line([0], 0), Line([0], 1)]
    assert tried(draft(drafter, lines, 2), 2) == [greedy(model, [0], 2, ids), []]
    drafter.remove_requests([0, 1])


def test_an_encoder_reads_ids_that_it_does_not_know_as_one_that_it_does():
    model = network("t5", 3, VOCAB - 20)
    drafter = assistant(model)
    drafter.add_requests([0], {"input_ids": [torch.tensor([5, 90, 7])]})
    [found] = tried(draft(drafter, [Line([0], 0)], 2), 1)
    assert found == greedy(model, [0], 2, torch.tensor([5, VOCAB - 21, 7]))


# ------------------------------------------------------------------------ nothing else is touched
def test_drafting_leaves_the_generator_and_the_model_alone():
    model = network("llama", 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    proposal = draft(assistant(model), [Line([5, 6], 0), Line([7], 1, params={"do_sample": 1, "seed": 3})], 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert proposal.drafts is not None
    assert not proposal.drafts.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
