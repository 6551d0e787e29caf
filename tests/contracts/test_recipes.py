"""Contracts of recipes: those of the cookbook fulfil them, and each violation is found."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import pytest
import torch

from descant import ConfigError, InputError, RecipeError
from descant.parts import (
    Backtracking,
    LogitsProcessor,
    ModelWrapper,
    Proposal,
    Retraction,
    Sampling,
    index_rows,
    vocab_mask,
)
from descant.parts import ConfigError as PartsConfigError
from descant.recipes.cookbook import bayes_risk, keep_thinking, roll_back
from descant.recipes.loading import load_recipe
from descant.testing import check_recipe
from descant.testing.recipe import toy
from tests.support.markov_model import Chain

SLOW = pytest.mark.slow  # many seconds each; the checks that find them find others like them in seconds


# ------------------------------------------------------------------------ the cookbook
@pytest.mark.usefixtures("extent")
@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        pytest.param(keep_thinking, {}, marks=pytest.mark.slow),
        (keep_thinking, {"above": 0.3, "wait": 7, "most": 3}),
        pytest.param(roll_back, {}, marks=pytest.mark.slow),
        (roll_back, {"period": 6, "repeats": 2, "most": 50}),
        pytest.param(bayes_risk, {"samples": 4}, marks=pytest.mark.slow),
        (bayes_risk, {"samples": 3, "ngram": 1}),
    ],
    ids=["keep-thinking", "keep-thinking-wait", "roll-back", "roll-back-often", "bayes-risk", "bayes-risk-3"],
)
def test_the_cookbook_fulfils_the_contracts(recipe, arguments):
    check_recipe(recipe, arguments=arguments)


@pytest.mark.parametrize("name", ["keep-thinking", "roll-back", "bayes-risk"])
def test_they_are_found_by_name(name):
    assert load_recipe(name).name == name  # where it is not: `pip install -e .` once more


# ------------------------------------------------------------------------ others that keep them
class Second(Sampling):
    """The second best token, if there are two."""

    def _choose_tokens(self, rows, scores):
        best = scores.topk(2, -1)
        lone = best.values[:, 1] == -torch.inf
        return super()._choose_tokens(
            rows, scores.scatter(1, best.indices[:, :1], -torch.inf).where(~lone[:, None], scores)
        )


class Colder(ModelWrapper):
    """Sharper logits, for the rows that ask."""

    def __init__(self, inner, by=2.0):
        super().__init__(inner)
        self.by = by

    def forward(self, rows, proposal, cache):
        output = self.inner.forward(rows, proposal, cache)
        mine = self.active_rows(rows)
        shaped = index_rows(output.logits, mine) * self.by
        return output._replace(logits=output.logits.index_copy(0, mine, shaped), base_logits=output.logits)


class Again:
    """A drafter that drafts a row's last token again, with probability 1."""

    is_model_free = True

    def __init__(self, size=2):
        self.size = size

    def add_requests(self, requests, inputs):
        pass

    def remove_requests(self, requests):
        pass

    def commit(self, parents, lengths):
        pass

    def draft(self, rows, most, aid):
        last = rows.tokens.gather(1, rows.length[:, None] - 1)
        return Proposal(None, last.expand(-1, self.size), most.clamp(max=self.size))


def greedy(model, input_ids, generation_config=None, left_padding=None, **kwargs):
    """The documented minimal example, in our words."""
    config = generation_config or model.generation_config
    if left_padding is not None:
        fill = torch.full((len(input_ids), left_padding), config.pad_token_id)
        input_ids = torch.cat((fill, input_ids), 1)
    for _ in range(8):
        best = model(input_ids).logits[:, -1].argmax(-1)
        input_ids = torch.cat((input_ids, best[:, None]), 1)
    return input_ids


def lucky(model, input_ids, **kwargs):
    """Draws, which is its own affair."""
    return torch.cat((input_ids, torch.randint(9, (len(input_ids), 3))), 1)


@pytest.mark.usefixtures("extent")
@pytest.mark.parametrize("recipe", [Second, Colder, Again, greedy, lucky], ids=lambda one: one.__name__)
def test_a_right_one_passes(recipe):
    check_recipe(recipe)


def test_arguments_are_its_own():
    check_recipe(greedy, arguments={"left_padding": 2})
    with pytest.raises(RecipeError, match="takes no argument `tweak`"):
        check_recipe(Second, arguments={"tweak": 1})


@pytest.mark.usefixtures("extent")
def test_a_model_of_ones_own():
    check_recipe(Second, model=Chain.chance(17, seed=3))
    with pytest.raises(AssertionError):
        check_recipe(Neighbourly, model=Chain.chance(17, seed=3))


def test_a_model_with_an_encoder_is_refused(tiny):
    with pytest.raises(InputError, match="`model` must be a decoder-only model"):
        check_recipe(Second, model=tiny("t5").model)


def test_it_leaves_torch_alone():
    before = torch.get_rng_state()
    one, two = toy(), toy()
    assert torch.equal(before, torch.get_rng_state())
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name])


# ------------------------------------------------------------------------ strategies that break them
class Neighbourly(Sampling):
    """Takes the second best token while it has company."""

    def _choose_tokens(self, rows, scores):
        if len(set(rows.request.tolist())) > 1:
            scores = scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf)
        return super()._choose_tokens(rows, scores)


class Dicing(Sampling):
    """Draws from torch's generator, though its requests have a seed."""

    def _sample(self, rows, scores):
        return scores.max(-1).values, torch.multinomial(scores.softmax(-1), 1)[:, 0]


class Deaf(Sampling):
    """Samples, and does not read the seed."""

    def _sample(self, rows, scores):
        return scores.max(-1)


class Boasting(Sampling):
    """Streams what it does not return."""

    def select(self, rows, proposal, output):
        chosen = super().select(rows, proposal, output)
        told = chosen.emitted
        return chosen._replace(emitted=told._replace(token=told.token.clamp(max=7)))


class Untelling(Backtracking):
    """Retracts emitted tokens."""

    def inspect(self, written, cuts):
        return Retraction(backtrack=3) if len(written) == 6 and cuts < 1 else Retraction()


class Fussy(Sampling):
    """Refuses everybody."""

    @staticmethod
    def params(config):
        raise PartsConfigError("do_sample", "must be something else", config.do_sample)


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        (Neighbourly, "other tokens"),
        (Dicing, "torch|other tokens"),
        pytest.param(Deaf, "is the seed read", marks=SLOW),
        (Boasting, "streamed"),
        (Fussy, "refuses every request"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_broken_strategy_is_found(recipe, found):
    with pytest.raises(AssertionError, match=found):
        check_recipe(recipe)


def test_emitted_tokens_cannot_be_retracted():
    with pytest.raises(ValueError, match=r"must remove at most the 0 pending tokens"):
        check_recipe(Untelling)


# ------------------------------------------------------------------------ processors that break them


class Attributed(LogitsProcessor):
    """Keeps its state in an attribute that only choices change: two calls give the same."""

    state = MappingProxyType({"unused": 0.0})

    def __init__(self):
        self.last = torch.tensor([[0]])

    def process(self, context, scores):
        return scores.masked_fill(vocab_mask(scores.shape, self.last[:1]), -torch.inf)

    def advance(self, context, before, after, tokens):
        self.last = tokens[:, None].clone()
        return {"unused": context.state("unused")[:, 0]}


class Forgetful(LogitsProcessor):
    """Rules out every second choice by a column that drafts do not bring forward."""

    state = MappingProxyType({"turn": 0.0})

    def process(self, context, scores):
        odd = (context.state("turn") % 2 == 1) & (context.generated > 0)
        return torch.where(odd, scores.scatter(1, scores.argmax(-1, keepdim=True), -torch.inf), scores)

    def advance(self, context, before, after, tokens):
        self.seen = len(tokens) if not hasattr(self, "seen") else self.seen + 1
        return {"turn": torch.full((len(tokens),), float(self.seen))}


class Averaging(LogitsProcessor):
    """Looks at the other lines."""

    def process(self, context, scores):
        return scores + 0.5 * scores.nan_to_num(0.0, 0.0, 0.0).mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        pytest.param(Attributed, "other tokens|masked in one|a row had", marks=SLOW),
        (Forgetful, "other tokens|a row had"),
        (Averaging, "differ"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_broken_processor_is_found(recipe, found):
    with pytest.raises(AssertionError, match=found):
        check_recipe(recipe)


# ------------------------------------------------------------------------ drafters, wrappers, functions
class Liar(Again):
    """Says that its drafts are drawn evenly, and always drafts the last token again."""

    def draft(self, rows, most, aid):
        guess = super().draft(rows, most, aid)
        return guess._replace(draft_probs=torch.full((len(rows), self.size, 61), 1 / 61))


class Everybody(Colder):
    """Changes the rows that do not ask, too."""

    def forward(self, rows, proposal, cache):
        output = self.inner.forward(rows, proposal, cache)
        return output._replace(logits=output.logits * self.by, base_logits=output.logits)


class Shortsighted(Colder):
    """Forgets what follows the drafts."""

    def forward(self, rows, proposal, cache):
        output = self.inner.forward(rows, proposal, cache)
        mine, logits = self.active_rows(rows), output.logits.clone()
        logits[mine, 0] = logits[mine, 0].roll(1, -1)
        return output._replace(logits=logits, base_logits=output.logits)


calls = itertools.count()


def fickle(model, input_ids, **kwargs):
    """Never gives the same twice."""
    return torch.cat((input_ids, torch.full((len(input_ids), 1), next(calls) % 50)), 1)


def wasteful(model, input_ids, **kwargs):
    """Draws for nothing."""
    torch.rand(1)
    return greedy(model, input_ids, **kwargs)


def training(model, input_ids, **kwargs):
    """Changes a weight."""
    with torch.no_grad():
        model.lm_head.weight[5] += 0.01
    return input_ids


def configuring(model, input_ids, **kwargs):
    """Changes the config."""
    model.generation_config.max_length = 7
    return input_ids


def shy(model, input_ids, **kwargs):
    """Says something else in company."""
    return greedy(model, input_ids.roll(len(input_ids) - 1, 1), **kwargs)


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        pytest.param(Liar, "must be sampled from `draft_probs`", marks=SLOW),
        (Everybody, "other tokens|differ"),
        (Shortsighted, "with drafts"),
        (fickle, "two results"),
        (wasteful, "used torch's generator"),
        (training, "changed the model: .*weight"),
        (configuring, "changed the model: .*generation_config"),
        (shy, "in a batch row"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_another_broken_recipe_is_found(recipe, found):
    with pytest.raises(AssertionError, match=found):
        check_recipe(recipe)


def test_untrusted_is_not_run(tmp_path):
    (tmp_path / "generate.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(RecipeError, match="trust_remote_code"):
        check_recipe(tmp_path)


def test_a_recipe_that_refuses_greedy_is_tried_with_the_rest():
    with pytest.raises(ConfigError, match="do_sample"):
        bayes_risk.BayesRisk.params(type("Greedy", (), {"do_sample": False}))
