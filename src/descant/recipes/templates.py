"""Templates of new recipes, one per kind: a small method that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["RECIPE_TEMPLATES", "RecipeTemplate"]


@dataclass(frozen=True)
class RecipeTemplate:
    """The files of a new recipe of one kind."""

    code: str
    test: str
    description: str
    arguments: Mapping[str, str]  # "name=default" -> description
    example_arguments: str  # of a call


_STRATEGY: Final = '''\
"""Sampling with a budget of surprisal."""

from types import MappingProxyType

import torch

from descant.parts import (
    ForwardOutput,
    Proposal,
    Rows,
    Sampling,
    Selection,
    check_number,
    index_rows,
)


class Budget(Sampling):
    """Samples until a row has used up its budget of surprisal, then searches greedily.

    The surprisal of a token is -log p, in nats. `columns` declares state per row; the
    engine moves it with its row, so that batches, several sequences per request and
    sessions need no code here.
    """

    columns = MappingProxyType({"spent": torch.zeros(1)})  # initial value of a row

    def __init__(self, noise, stop, rank_group=None, *, budget: float = 20.0):
        super().__init__(noise, stop, rank_group)
        self.budget = check_number("budget", budget, 0)

    def select(
        self, rows: Rows, proposal: Proposal, output: ForwardOutput
    ) -> Selection:
        """Select one token per row, the likeliest if the budget is used up."""
        logprobs = output.logits[:, 0].log_softmax(-1)  # [R, V], processed
        used_up = (rows.column("spent") >= self.budget).to(logprobs.device)[:, None]
        unlikely = logprobs < logprobs.max(-1, keepdim=True).values
        allowed = logprobs.masked_fill(used_up & unlikely, -torch.inf)[:, None]
        selection = super().select(rows, proposal, output._replace(logits=allowed))
        # Rows finish, and the first step expands a request to the sequences that it
        # returns: new row `i` continues row `parents[i]`.
        parents = selection.parents
        if parents is None:
            parents = torch.arange(len(rows))
        logprob = index_rows(logprobs, parents).gather(1, selection.tokens[:, None])
        spent = rows.column("spent")[parents] - logprob.squeeze(1).cpu()
        return selection._replace(columns={**selection.columns, "spent": spent})


strategy = Budget
'''

_STRATEGY_TEST: Final = """\
def test_budget_interpolates_between_greedy_and_sampling(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14]])
    config = {"min_new_tokens": 16, "max_new_tokens": 16}
    greedy = descant.generate(model, prompt, **config)
    config |= {"do_sample": True, "seed": 1}
    sampled = descant.generate(model, prompt, **config)
    zero, small, large = (
        descant.generate(model, prompt, **config, recipe=recipe, budget=budget)
        for budget in (0.0, 5.0, 1000.0)
    )
    assert torch.equal(zero, greedy)
    assert torch.equal(large, sampled)
    assert not torch.equal(small, greedy)
    assert not torch.equal(small, sampled)
"""

_PROCESSOR: Final = '''\
"""A temperature that decreases with the length of the text."""

from torch import Tensor

from descant.parts import Context, LogitsProcessor, check_number


class CoolDown(LogitsProcessor):
    """Divides scores by a temperature going from `first` to `last` in `span` tokens.

    A processor is pure: it treats each line separately, keeps no state in `self`, and
    returns a new tensor.
    """

    def __init__(self, *, first: float = 1.5, last: float = 0.7, span: int = 20):
        self.first = check_number("first", first, 0.01, 100)
        self.last = check_number("last", last, 0.01, 100)
        self.span = check_number("span", span, 1, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Return new scores [N, V]; `context` describes each line."""
        progress = (context.generated / self.span).clamp(max=1.0)  # [N, 1]
        return scores / (self.first + (self.last - self.first) * progress)


processor = CoolDown
'''

_PROCESSOR_TEST: Final = """\
def test_temperature_decreases(recipe):
    processor = recipe(first=2.0, last=1.0, span=4).processor
    scores = torch.tensor([[0.0, 6.0]])
    for new, temperature in ((0, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)):
        ids = torch.zeros(1, new, dtype=torch.long)  # all of them new
        assert torch.allclose(processor(ids, scores), scores / temperature)
"""

_DRAFTER: Final = '''\
"""Drafts from the token pairs of the text so far."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from descant.parts import DraftContext, Proposal, Rows, check_number


class Pairs:
    """A drafter that proposes after each token what followed it the last time.

    The model verifies all draft tokens in one forward and keeps those that it would
    have chosen: good drafts save time, bad ones cost little, and the text is the same.
    """

    is_model_free = True  # runs no model

    def __init__(self, *, ahead: int = 4):
        self.ahead = check_number("ahead", ahead, 1, integer=True)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """No state per request."""

    def remove_requests(self, requests: Sequence[int]) -> None:
        """No state per request."""

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """No state per row: the tokens are enough."""

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:
        """Propose up to `ahead` tokens per row, and at most `max_drafts` [R]."""
        drafts = [
            self._draft_row(rows.tokens[row, : rows.length[row]].tolist(), limit)
            for row, limit in enumerate(max_drafts.clamp(max=self.ahead).tolist())
        ]
        width = max(map(len, drafts), default=0)
        if not width:
            return Proposal()
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        return Proposal(
            drafts=torch.tensor(padded, device=rows.tokens.device),  # [R, K]
            num_drafts=torch.tensor([len(draft) for draft in drafts]),  # [R]
        )

    def _draft_row(self, tokens: list[int], limit: int) -> list[int]:
        """Return the draft tokens of one row."""
        followers = dict(pairwise(tokens))  # the latest pair wins
        draft = tokens[-1:]
        while len(draft) <= limit and draft and draft[-1] in followers:
            draft.append(followers[draft[-1]])
        return draft[1:]


drafter = Pairs
'''

_DRAFTER_TEST: Final = """\
def test_drafts_save_forwards_and_keep_the_output(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14] * 4])
    # A bias towards the prompt's tokens makes the text repeat itself.
    config = {"max_new_tokens": 24, "logit_bias": {5: 20.0, 9: 20.0, 14: 20.0}}
    expected = descant.generate(model, prompt, **config)
    output = descant.generate(
        model, prompt, **config, recipe=recipe, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert output.speculation[0].saved_forwards > 0
"""

_WRAPPER: Final = '''\
"""A model that prefers the tokens of its prompt."""

from math import log, log1p
from typing import Any

import torch

from descant.parts import (
    ForwardOutput,
    ModelWrapper,
    Proposal,
    RowCache,
    Rows,
    check_number,
    index_rows,
)


class FromPrompt(ModelWrapper):
    """A model whose distribution is mixed with the token frequencies of the prompt.

    A wrapper runs before all processors and changes the logits of the rows that request
    it; other rows share the forward and keep their logits.
    """

    def __init__(self, inner: Any, *, share: float = 0.1):
        super().__init__(inner)
        self.share = check_number("share", share, 0.001, 0.999)

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        """Run the model, and mix the distribution of active rows."""
        output = self.inner.forward(rows, proposal, cache)
        active = self.active_rows(rows)  # [N]
        if not len(active):
            return output
        # [N, K + 1, V]: after the row, and after each draft token.
        logprobs = index_rows(output.logits, active).log_softmax(-1)
        tokens = index_rows(rows.tokens, active)
        prompt_length = rows.prompt_length[active].to(logprobs.device)
        position = torch.arange(tokens.shape[1], device=logprobs.device)
        # The first token is left out: it is often a beginning-of-text token.
        in_prompt = (position > 0) & (position < prompt_length[:, None])
        counts = logprobs.new_zeros(len(active), logprobs.shape[-1])
        counts.scatter_add_(1, tokens, in_prompt.to(logprobs.dtype))
        frequency = counts / in_prompt.sum(1, keepdim=True).clamp(min=1)
        prompt_logprobs = frequency.log()[:, None]  # [N, 1, V]
        mixed = torch.logaddexp(
            logprobs + log1p(-self.share), prompt_logprobs + log(self.share)
        )
        logits = output.logits.index_copy(0, active.to(logprobs.device), mixed)
        # The model's own logits, for requests that return its log-probabilities.
        base = output.logits if output.base_logits is None else output.base_logits
        return output._replace(logits=logits, base_logits=base)


wrapper = FromPrompt
'''

_WRAPPER_TEST: Final = """\
def test_output_keeps_to_the_tokens_of_the_prompt(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14, 5]])
    config = {"min_new_tokens": 8, "max_new_tokens": 8}
    unmixed = descant.generate(model, prompt, **config)
    mixed = descant.generate(model, prompt, **config, recipe=recipe, share=0.999)
    assert set(mixed[0, 4:].tolist()) <= {5, 9, 14}
    assert not set(unmixed[0, 4:].tolist()) <= {5, 9, 14}
"""

_GENERATE: Final = '''\
"""The likeliest of several samples."""

import torch

import descant
from descant.parts import check_number


def generate(model, input_ids=None, *, tries: int = 4, seed: int = 0, **arguments):
    """Sample `tries` continuations of each prompt, and return the likeliest of them.

    That is the one with the highest mean log-probability per token. A function replaces
    `generate`: it gets all arguments of the call and returns token ids. It may call
    `descant.generate` as often as needed.
    """
    tries = check_number("tries", tries, 1, integer=True)
    # With a seed the output is reproducible, and torch's global generator is not used.
    output = descant.generate(
        model,
        input_ids=input_ids,
        do_sample=True,
        seed=seed,
        num_return_sequences=tries,
        logprobs=0,
        return_dict_in_generate=True,
        **arguments,
    )
    means = torch.tensor([float(one.raw.mean()) for one in output.logprobs])
    means = means.view(-1, tries)  # [B, tries]
    best = (means.argmax(1) + torch.arange(len(means)) * tries).tolist()
    # Cut the padding that only the other sequences need.
    lengths = [len(one.raw) for one in output.logprobs]
    padding = max(lengths) - max(lengths[index] for index in best)
    return output.sequences[best, : output.sequences.shape[1] - padding]
'''

_GENERATE_TEST: Final = """\
def test_more_tries_are_never_less_likely(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14]])

    config = {"recipe": recipe, "min_new_tokens": 8, "max_new_tokens": 8}

    def mean_logprob(tries):
        ids = descant.generate(model, prompt, **config, tries=tries)
        with torch.no_grad():
            logprobs = model(ids).logits[:, 2:-1].log_softmax(-1)
        return float(logprobs.gather(2, ids[:, 3:, None]).mean())

    one, four, sixteen = (mean_logprob(tries) for tries in (1, 4, 16))
    assert one <= four + 1e-5
    assert four <= sixteen + 1e-5
"""

RECIPE_TEMPLATES: Final[Mapping[str, RecipeTemplate]] = {
    "strategy": RecipeTemplate(
        _STRATEGY,
        _STRATEGY_TEST,
        "Sampling with a budget of surprisal; when it is used up, decoding continues greedily.",
        {"budget=20.0": "the budget of surprisal (-log p), in nats"},
        "do_sample=True, seed=1, budget=10.0",
    ),
    "processor": RecipeTemplate(
        _PROCESSOR,
        _PROCESSOR_TEST,
        "A temperature that decreases with the length of the text.",
        {
            "first=1.5": "the temperature of the first new token",
            "last=0.7": "the temperature after `span` tokens",
            "span=20": "the number of new tokens over which it decreases",
        },
        "do_sample=True, seed=1, first=2.0",
    ),
    "drafter": RecipeTemplate(
        _DRAFTER,
        _DRAFTER_TEST,
        "Speculative decoding that drafts after each token what followed that token the last time.",
        {"ahead=4": "the maximum number of draft tokens"},
        "ahead=6",
    ),
    "wrapper": RecipeTemplate(
        _WRAPPER,
        _WRAPPER_TEST,
        "A model whose distribution is mixed with the token frequencies of its prompt.",
        {"share=0.1": "the weight of the prompt's frequencies, from 0.001 to 0.999"},
        "share=0.2",
    ),
    "generate": RecipeTemplate(
        _GENERATE,
        _GENERATE_TEST,
        "Several samples of each prompt, of which the likeliest is returned.",
        {
            "tries=4": "the number of samples for each prompt",
            "seed=0": "the seed: the same seed gives the same text",
        },
        "tries=8",
    ),
}
