"""Early exit drafts the output of the truncated network, on the batch's own cache, and leaves it usable."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from descant.core.interfaces import DraftContext
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.core.sampling_noise import SamplingNoise
from descant.decoding.speculative.draft_model import EarlyExit, check_early_exit
from descant.engine.planning.planner import as_model
from descant.errors import ConfigError, UnsupportedModel
from descant.kv_cache.row_views import PairedRowCache
from descant.kv_cache.stores.dense import DenseStore
from descant.models.forward.traits import traits_of
from descant.models.truncated_model import truncate_model
from tests.support.ci_slices import first
from tests.unit.decoding.speculative.rig import (
    VOCAB,
    Course,
    Line,
    greedy,
    logits_of,
    network,
    plainly,
    rows_of,
    tried,
)

KINDS = ["llama", "gpt2", "gpt-neox", "mistral", "gemma3", "qwen2", "gemma", "opt"]


def deep(name: str) -> Any:
    return network(name, 1, layers=4)


def truncated(model: Any, layers: int) -> Any:
    """The same network built with fewer layers, its weights copied."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    cut = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, _ = cut.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    return cut.eval()


class Table:
    """A target with its cache, driven as the loop drives it."""

    def __init__(self, model: Any, cache: Any = None) -> None:
        self.model, self.network = as_model(model), model
        self.cache = DenseStore() if cache is None else cache

    def exit(self, layers: int, noise: Any = None) -> EarlyExit:
        return EarlyExit(as_model(truncate_model(self.network, layers)), noise or SamplingNoise(), VOCAB)

    def verify(self, lines: Sequence[Line], proposal: Proposal) -> None:
        """The verifying forward gives the same as the network without a cache, for every row and draft."""
        rows = rows_of(lines)
        heard = self.model.forward(rows, proposal, self.cache).logits
        drafts = tried(proposal, len(lines))
        for line, tokens, logits in zip(lines, drafts, heard, strict=True):
            expected = logits_of(self.network, line.tokens + tokens)[len(line.tokens) - 1 :]
            torch.testing.assert_close(logits[: len(tokens) + 1], expected, atol=2e-4, rtol=1e-3)

    def settle(self, lines: Sequence[Line], parents: Sequence[int]) -> None:
        """Follow what became of the rows; new ones are the last."""
        old = [at for at in parents if at >= 0]
        lengths = torch.tensor([line.cached for line in lines[: len(old)]], dtype=torch.long)
        self.cache.commit(torch.tensor(old, dtype=torch.long), lengths)
        self.cache.extend(len(parents) - len(old))


# ------------------------------------------------------------------------ the drafts and the cache
@pytest.mark.parametrize("seed", first(1, 2))
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_drafts_equal_the_truncated_network_and_the_cache_stays_usable(name: str, layers: int, seed: int):
    model = deep(name)
    cut = truncated(model, layers)
    target, course = Table(model), Course(seed)
    drafter = target.exit(layers)
    target.cache.extend(len(course.lines))
    guessed = 0
    for _ in range(6):
        most = [course.rng.choice([0, 1, 4]) for _ in course.lines]
        rows = rows_of(course.lines)
        drafter.commit(torch.tensor([line.place for line in course.lines]), rows.length)
        proposal = drafter.draft(rows, torch.tensor(most), DraftContext(plainly, target.cache))
        found = tried(proposal, len(course.lines))
        for line, tokens, count in zip(course.lines, found, most, strict=True):
            assert tokens == (greedy(cut, line.tokens, count) if line.cached else [])
            guessed += len(tokens)
        target.verify(course.lines, proposal)
        course.keep(found)
        for line in course.lines:
            line.cached = len(line.tokens) - 1
        parents = course.move()
        both = sorted(zip(course.lines, parents, strict=True), key=lambda pair: pair[1] < 0)
        course.lines, parents = [line for line, _ in both], [parent for _, parent in both]
        target.settle(course.lines, parents)
    assert guessed > 10


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_rollback_past_the_edge_of_a_window(name: str):
    model = deep(name)
    target, cut = Table(model), truncated(model, 2)
    drafter, line = target.exit(2), Line(list(range(5, 13)), 0)
    target.cache.extend(1)
    target.verify([line], Proposal())
    line.cached, line.tokens = 8, [*line.tokens, 20]
    for accepted in (0, 0, 7, 1, 0):  # seven tokens are longer than the window of five
        proposal = drafter.draft(rows_of([line]), torch.tensor([8]), DraftContext(plainly, target.cache))
        [found] = tried(proposal, 1)
        assert found == greedy(cut, line.tokens, 8)
        target.verify([line], proposal)
        line.tokens += [*found[:accepted], 3 + accepted]
        line.cached = len(line.tokens) - 1
        target.cache.commit(None, torch.tensor([line.cached]))


def _begun(model: Any, lines: Sequence[Line], cache: Any = None) -> Table:
    """A table whose rows have been read, all but a last token."""
    target = Table(model, cache)
    target.cache.extend(len(lines))
    target.verify(lines, Proposal())
    for line in lines:
        line.cached = len(line.tokens)
        line.tokens = [*line.tokens, 20]
    target.cache.commit(None, torch.tensor([line.cached for line in lines]))
    return target


def test_rows_of_a_lane_lie_between_others():
    model = deep("llama")
    lines = [Line(list(range(5 + 9 * at, 8 + 10 * at)), at) for at in range(5)]
    target, cut = _begun(model, lines), truncated(model, 1)
    drafter = target.exit(1)
    for place in ([1, 3], [4], [0, 1, 2, 3, 4]):
        index = torch.tensor(place)
        lane = rows_of(lines).take(index)
        proposal = drafter.draft(
            lane, torch.full((len(place),), 3), DraftContext(plainly, target.cache, index)
        )
        assert tried(proposal, len(place)) == [greedy(cut, lines[at].tokens, 3) for at in place]
        target.verify(lines, Proposal())


def test_rows_that_have_twins():
    model = deep("llama")
    lines = [Line(list(range(5 + 9 * at, 8 + 10 * at)), at) for at in range(3)]
    inner = DenseStore()
    target, cut = Table(model, inner), truncated(model, 1)
    twins = PairedRowCache(inner)
    twins.extend(3)
    twins.add_uncond_rows(torch.tensor([0, 2]), torch.tensor([0, 0]))
    # Rows and twins change places inside: what is row 4 there is row 0 of the table.
    inner.commit(torch.tensor([4, 1, 2, 3, 0]), torch.zeros(5, dtype=torch.long))
    twins.row_index = torch.tensor([4, 1, 2])
    whole = rows_of([lines[2], lines[1], lines[2], lines[1], lines[0]])
    target.model.forward(whole, Proposal(), inner)
    for line in lines:
        line.cached, line.tokens = len(line.tokens), [*line.tokens, 20]
    drafter = target.exit(1)
    proposal = drafter.draft(rows_of(lines), torch.tensor([3, 3, 3]), DraftContext(plainly, twins))
    assert tried(proposal, 3) == [greedy(cut, line.tokens, 3) for line in lines]
    index = torch.tensor([2, 0])
    lane = rows_of(lines).take(index)
    proposal = drafter.draft(lane, torch.tensor([2, 2]), DraftContext(plainly, twins, index))
    assert tried(proposal, 2) == [greedy(cut, lines[at].tokens, 2) for at in (2, 0)]


def test_several_pending_tokens_are_read_first():
    model = deep("llama")
    lines = [Line([5, 6, 7], 0), Line([8, 9], 1)]
    target, cut = _begun(model, lines), truncated(model, 2)
    lines[0].tokens += [21, 22]
    drafter = target.exit(2)
    proposal = drafter.draft(rows_of(lines), torch.tensor([2, 2]), DraftContext(plainly, target.cache))
    assert tried(proposal, 2) == [greedy(cut, line.tokens, 2) for line in lines]
    target.verify(lines, proposal)


def test_a_token_is_read_once():
    model = deep("llama")
    lines = [Line([5, 6, 7, 8], at) for at in range(2)]
    target = _begun(model, lines)
    own = as_model(truncate_model(model, 2))
    drafter = EarlyExit(own, SamplingNoise(), VOCAB)
    rows = rows_of(lines)
    drafter.draft(rows, torch.tensor([3, 3]), DraftContext(plainly, target.cache))
    assert rows.cached_length.tolist() == [4, 4]  # the table's business
    assert own.positions_fed == 2 * 3  # the pending token and all drafts but the last: no prompt
    assert drafter.forwards == 3


def test_prompts_given_as_embeddings():
    model = deep("llama")
    cut, target = truncated(model, 2), as_model(model)
    ids = torch.tensor([5, 6, 7, 8])
    embeds = model.get_input_embeddings()(ids).detach()
    cache = DenseStore()
    cache.extend(1)
    drafter = EarlyExit(as_model(truncate_model(model, 2)), SamplingNoise(), VOCAB)
    for one in (target, drafter):
        one.add_requests([0], {"inputs_embeds": [embeds]})
    rows = rows_of([Line([1], 0)], offset=4).replace(length=torch.tensor([0]))
    target.forward(rows, Proposal(), cache)
    rows = rows_of([Line([20], 0, cached=4)], offset=4)
    proposal = drafter.draft(rows, torch.tensor([3]), DraftContext(plainly, cache))
    assert tried(proposal, 1) == [greedy(cut, [5, 6, 7, 8, 20], 3)]
    drafter.remove_requests([0])


def test_the_last_positions_of_a_table():
    model = deep("gpt2")  # 96 positions
    lines = [Line([5] * size, size) for size in (80, 93, 94)]
    target = _begun(model, lines)  # and a token each
    proposal = target.exit(1).draft(
        rows_of(lines), torch.tensor([4] * 3), DraftContext(plainly, target.cache)
    )
    assert [len(one) for one in tried(proposal, 3)] == [4, 3, 2]


# ------------------------------------------------------------------------ choosing
def test_processors_noise_and_laws_are_the_rows_own():
    model = deep("llama")
    chance = SamplingNoise()
    chance.num_rows = 3
    wants = [{"do_sample": 1}, {}, {"do_sample": 1, "seed": 3, "assistant_confidence_threshold": 1.0}]
    lines = [Line([5, 6, 7], at, params=one) for at, one in enumerate(wants)]
    target, cut = _begun(model, lines), truncated(model, 2)

    def process(rows: Rows, logits: Tensor) -> Tensor:
        return logits.index_fill(1, torch.tensor([0, 1, 2]), -torch.inf) / 2

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        proposal = target.exit(2, chance).draft(
            rows_of(lines), torch.tensor([3, 3, 3]), DraftContext(process, target.cache)
        )
    found, probs = tried(proposal, 3), proposal.draft_probs
    assert probs is not None
    assert [len(one) for one in found] == [3, 3, 1]  # nothing is quite certain
    for at in range(3):
        logits = logits_of(cut, lines[0].tokens + found[0][:at])[-1:]
        law = process(rows_of(lines[:1]), logits).softmax(-1)[0]
        torch.testing.assert_close(probs[0, at], law, atol=1e-5, rtol=1e-4)
        assert probs[1, at].max() == 1.0
        assert int(probs[1, at].argmax()) == found[1][at]


# ------------------------------------------------------------------------ the stand-in
@pytest.mark.parametrize("name", KINDS)
def test_a_stand_in_shares_all_weights_and_leaves_the_model_alone(name: str):
    model = deep(name)
    config, ids = copy.deepcopy(model.config.to_dict()), torch.tensor([[5, 6, 7]])
    parts = [(path, id(part)) for path, part in model.named_modules()]
    said = logits_of(model, [5, 6, 7])
    standing = truncate_model(model, 2)
    assert traits_of(standing).num_layers == 2
    assert len(getattr(standing.config, "layer_types", None) or [0, 1]) == 2
    with torch.no_grad():
        torch.testing.assert_close(standing(ids).logits, truncated(model, 2)(ids).logits)
    mine = {id(one) for one in model.parameters()}
    assert {id(one) for one in standing.parameters()} < mine
    assert model.config.to_dict() == config
    assert [(path, id(part)) for path, part in model.named_modules()] == parts
    assert traits_of(model).num_layers == 4
    torch.testing.assert_close(logits_of(model, [5, 6, 7]), said, atol=0.0, rtol=0.0)


def test_a_stand_in_of_a_model_whose_calls_are_wrapped():
    hooks = pytest.importorskip("accelerate.hooks")
    model = copy.deepcopy(deep("llama"))
    expected = logits_of(truncated(model, 2), [5, 6, 7])
    for part in (model, model.model, *model.model.layers):
        hooks.add_hook_to_module(part, hooks.AlignDevicesHook("cpu", io_same_device=True))
    whole = logits_of(model, [5, 6, 7])
    torch.testing.assert_close(logits_of(truncate_model(model, 2), [5, 6, 7]), expected)
    torch.testing.assert_close(logits_of(model, [5, 6, 7]), whole)


def test_what_stretches_with_a_draft_is_not_the_models():
    config = copy.deepcopy(deep("llama").config)
    config.max_position_embeddings = 8
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with torch.random.fork_rng(devices=[]):
        model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.model.rotary_emb.inv_freq.clone()
    standing: Any = truncate_model(model, 2)
    logits_of(standing, list(range(5, 25)))
    assert not torch.equal(standing.model.rotary_emb.inv_freq, before)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_a_model_without_a_list_of_its_layers_is_refused():
    model = copy.deepcopy(deep("llama"))
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(UnsupportedModel, match="no ModuleList of its 4 layers"):
        truncate_model(model, 2)


# ------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("layers", "change", "says"),
    [
        (0, {}, ">= 1"),
        (4, {}, "below the model's 4 layers"),
        (9, {}, "below the model's 4 layers"),
        (2, {"is_encoder_decoder": True}, "has an encoder"),
        (2, {"cache_type": "recurrent"}, "recurrent state"),
        (2, {"cache_type": "none"}, "no KV cache"),
        (2, {"prepares_own_inputs": True}, "prepares its own inputs"),
    ],
)
def test_an_exit_that_cannot_be(layers: int, change: dict[str, Any], says: str):
    facts = replace(traits_of(deep("llama")), **change)
    with pytest.raises(ConfigError, match=says) as caught:
        check_early_exit(layers, facts)
    assert caught.value.field == "assistant_early_exit"
