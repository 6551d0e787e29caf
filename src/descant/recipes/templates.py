"""What a new recipe of each kind begins with: a small method that works and is worth something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["RECIPE_TEMPLATES", "RecipeTemplate"]


@dataclass(frozen=True)
class RecipeTemplate:
    """What one kind of recipe begins with."""

    code: str
    test: str
    description: str
    arguments: Mapping[str, str]  # name and default -> what it is
    example_arguments: str  # in a call


_STRATEGY: Final = '''\
"""Sampling on a budget of surprise."""

from types import MappingProxyType

import torch

from descant.parts import Output, Proposal, Rows, Sampling, Selection, number, pick


class Budget(Sampling):
    """Sampling until a row has spent its surprise, greedy search from there on.

    A token costs what it surprises: -log p, in nats. `columns` is the state that lives
    per row; it follows its row wherever the loop takes it, so that batches, several
    sequences and sessions need no code of their own.
    """

    columns = MappingProxyType({"spent": torch.zeros(1)})  # what a new row starts with

    def __init__(self, noise, stop, peers=None, *, budget: float = 20.0):
        super().__init__(noise, stop, peers)
        self.budget = number("budget", budget, 0)

    def select(self, rows: Rows, proposal: Proposal, output: Output) -> Selection:
        """One token a row, the likeliest where nothing is left to spend."""
        logprobs = output.logits[:, 0].log_softmax(-1)  # [R, V], after the processors
        broke = (rows.column("spent") >= self.budget).to(logprobs.device)[:, None]
        unlikely = logprobs < logprobs.max(-1, keepdim=True).values
        left = logprobs.masked_fill(broke & unlikely, -torch.inf)[:, None]
        chosen = super().select(rows, proposal, output._replace(logits=left))
        # Rows end, and at its first choice a request becomes as many as it returns: new
        # row `i` continues row `parents[i]`.
        parents = torch.arange(len(rows)) if chosen.parents is None else chosen.parents
        logprob = pick(logprobs, parents).gather(1, chosen.tokens[:, None])
        spent = rows.column("spent")[parents] - logprob.squeeze(1).cpu()
        return chosen._replace(columns={**chosen.columns, "spent": spent})


strategy = Budget
'''

_STRATEGY_TEST: Final = """\
def test_a_budget_lies_between_greedy_search_and_sampling(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14]])
    asked = {"min_new_tokens": 16, "max_new_tokens": 16}
    greedy = descant.generate(model, prompt, **asked)
    asked |= {"do_sample": True, "seed": 1}
    drawn = descant.generate(model, prompt, **asked)
    none, some, much = (
        descant.generate(model, prompt, **asked, recipe=recipe, budget=budget)
        for budget in (0.0, 5.0, 1000.0)
    )
    assert torch.equal(none, greedy)
    assert torch.equal(much, drawn)
    assert not torch.equal(some, greedy)
    assert not torch.equal(some, drawn)
"""

_PROCESSOR: Final = '''\
"""A temperature that falls as the text grows."""

from torch import Tensor

from descant.parts import Context, LogitsProcessor, number


class CoolDown(LogitsProcessor):
    """Scores over a temperature that goes from `first` to `last` in `span` new tokens.

    Bold beginnings, careful ends. A processor is pure: it judges each line by itself,
    keeps nothing, and returns a new tensor.
    """

    def __init__(self, *, first: float = 1.5, last: float = 0.7, span: int = 20):
        self.first = number("first", first, 0.01, 100)
        self.last = number("last", last, 0.01, 100)
        self.span = number("span", span, 1, whole=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """New scores [N, V]; `context` knows where each line stands."""
        done = (context.generated / self.span).clamp(max=1.0)  # [N, 1]
        return scores / (self.first + (self.last - self.first) * done)


processor = CoolDown
'''

_PROCESSOR_TEST: Final = """\
def test_scores_cool_down(recipe):
    processor = recipe(first=2.0, last=1.0, span=4).processor
    scores = torch.tensor([[0.0, 6.0]])
    for new, temperature in ((0, 2.0), (2, 1.5), (4, 1.0), (9, 1.0)):
        ids = torch.zeros(1, new, dtype=torch.long)  # by hand, all tokens count as new
        assert torch.allclose(processor(ids, scores), scores / temperature)
"""

_DRAFTER: Final = '''\
"""Guesses from the pairs of tokens that a text has had."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from descant.parts import Aid, Proposal, Rows, number


class Pairs:
    """A drafter that guesses after each token what followed it the last time.

    The model looks at all guesses in one forward and keeps those that it would have
    chosen itself: good ones save time, bad ones cost little, and the text is the same.
    """

    cheap = True  # no network is asked

    def __init__(self, *, ahead: int = 4):
        self.ahead = number("ahead", ahead, 1, whole=True)

    def open(self, requests: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """Nothing is kept of a request."""

    def close(self, requests: Sequence[int]) -> None:
        """Nothing is kept of a request."""

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """Nothing is kept of a row: its tokens say all."""

    def draft(self, rows: Rows, most: Tensor, aid: Aid) -> Proposal:
        """Up to `ahead` tokens after each row, and never more than `most` [R]."""
        guesses = [
            self._guess(rows.tokens[row, : rows.length[row]].tolist(), limit)
            for row, limit in enumerate(most.clamp(max=self.ahead).tolist())
        ]
        width = max(map(len, guesses), default=0)
        if not width:
            return Proposal()
        drafts = [[*guess, *[0] * (width - len(guess))] for guess in guesses]
        return Proposal(
            drafts=torch.tensor(drafts, device=rows.tokens.device),  # [R, K]
            n=torch.tensor([len(guess) for guess in guesses]),  # [R] how many are meant
        )

    def _guess(self, tokens: list[int], limit: int) -> list[int]:
        """What may follow one row."""
        follows = dict(pairwise(tokens))  # the latest of several pairs stays
        guess = tokens[-1:]
        while len(guess) <= limit and guess and guess[-1] in follows:
            guess.append(follows[guess[-1]])
        return guess[1:]


drafter = Pairs
'''

_DRAFTER_TEST: Final = """\
def test_guesses_save_forwards_and_change_nothing(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14] * 4])
    # A bias to the prompt's own tokens makes for a text that repeats itself.
    asked = {"max_new_tokens": 24, "logit_bias": {5: 20.0, 9: 20.0, 14: 20.0}}
    plain = descant.generate(model, prompt, **asked)
    found = descant.generate(
        model, prompt, **asked, recipe=recipe, return_dict_in_generate=True
    )
    assert torch.equal(found.sequences, plain)
    assert found.speculation[0].saved > 0
"""

_WRAPPER: Final = '''\
"""A model that likes the words of its prompt."""

from math import log, log1p
from typing import Any

import torch

from descant.parts import Cache, Output, Proposal, Rows, Wrapped, number, pick


class FromPrompt(Wrapped):
    """A model whose law is mixed with the frequencies of the prompt's own tokens.

    A wrapper stands around the model, before all processors, and changes what it says
    of the rows that ask for it; all others share the forward and are left alone.
    """

    def __init__(self, inner: Any, *, share: float = 0.1):
        super().__init__(inner)
        self.share = number("share", share, 0.001, 0.999)

    def forward(self, rows: Rows, proposal: Proposal, cache: Cache) -> Output:
        """What the model says, mixed where a row asks for it."""
        output = self.inner.forward(rows, proposal, cache)
        mine = self.mine(rows)  # [N]
        if not len(mine):
            return output
        # [N, K + 1, V]: what it says after the row, and after each guess.
        said = pick(output.logits, mine).log_softmax(-1)
        tokens, prompt = pick(rows.tokens, mine), rows.prompt[mine].to(said.device)
        place = torch.arange(tokens.shape[1], device=said.device)
        # But for the first, which is seldom a word and often the mark of a beginning.
        words = (place > 0) & (place < prompt[:, None])
        counts = said.new_zeros(len(mine), said.shape[-1])
        counts.scatter_add_(1, tokens, words.to(said.dtype))
        law = counts / words.sum(1, keepdim=True).clamp(min=1)
        theirs = law.log()[:, None]  # [N, 1, V]
        mixed = torch.logaddexp(said + log1p(-self.share), theirs + log(self.share))
        logits = output.logits.index_copy(0, mine.to(said.device), mixed)
        # What the network itself says, for whoever asks for its log-probabilities.
        plain = output.logits if output.plain is None else output.plain
        return output._replace(logits=logits, plain=plain)


wrapper = FromPrompt
'''

_WRAPPER_TEST: Final = """\
def test_it_keeps_to_the_words_of_the_prompt(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14, 5]])
    asked = {"min_new_tokens": 8, "max_new_tokens": 8}
    plain = descant.generate(model, prompt, **asked)
    mixed = descant.generate(model, prompt, **asked, recipe=recipe, share=0.999)
    assert set(mixed[0, 4:].tolist()) <= {5, 9, 14}
    assert not set(plain[0, 4:].tolist()) <= {5, 9, 14}
"""

_GENERATE: Final = '''\
"""The likeliest of several samples."""

import torch

import descant
from descant.parts import number


def generate(model, input_ids=None, *, tries: int = 4, seed: int = 0, **arguments):
    """Draw `tries` continuations of each prompt, and return the likeliest of them.

    That is the one whose tokens have the highest log-probability on average. A function
    stands in the place of `generate`: it is given all arguments of the call and returns
    token ids. `descant.generate` itself is there for it, as often as it likes.
    """
    tries = number("tries", tries, 1, whole=True)
    # With a seed it says the same every time, and leaves torch's generator to others.
    drawn = descant.generate(
        model,
        input_ids=input_ids,
        do_sample=True,
        seed=seed,
        num_return_sequences=tries,
        logprobs=0,
        return_dict_in_generate=True,
        **arguments,
    )
    likely = torch.tensor([float(one.raw.mean()) for one in drawn.logprobs])
    likely = likely.view(-1, tries)  # [B, tries]
    best = (likely.argmax(1) + torch.arange(len(likely)) * tries).tolist()
    # Without the padding that only the others need.
    new = [len(one.raw) for one in drawn.logprobs]
    padding = max(new) - max(new[place] for place in best)
    return drawn.sequences[best, : drawn.sequences.shape[1] - padding]
'''

_GENERATE_TEST: Final = """\
def test_more_tries_are_never_less_likely(recipe):
    model, prompt = toy(), torch.tensor([[5, 9, 14]])

    asked = {"recipe": recipe, "min_new_tokens": 8, "max_new_tokens": 8}

    def likely(tries):
        ids = descant.generate(model, prompt, **asked, tries=tries)
        with torch.no_grad():
            logprobs = model(ids).logits[:, 2:-1].log_softmax(-1)
        return float(logprobs.gather(2, ids[:, 3:, None]).mean())

    one, some, many = (likely(tries) for tries in (1, 4, 16))
    assert one <= some + 1e-5
    assert some <= many + 1e-5
"""

RECIPE_TEMPLATES: Final[Mapping[str, RecipeTemplate]] = {
    "strategy": RecipeTemplate(
        _STRATEGY,
        _STRATEGY_TEST,
        "Sampling on a budget: a text may surprise so much, and goes on greedily when that is spent.",
        {"budget=20.0": "how much a text may surprise, in nats"},
        "do_sample=True, seed=1, budget=10.0",
    ),
    "processor": RecipeTemplate(
        _PROCESSOR,
        _PROCESSOR_TEST,
        "A temperature that falls as the text grows: bold beginnings, careful ends.",
        {
            "first=1.5": "the temperature of the first new token",
            "last=0.7": "the temperature after `span` tokens",
            "span=20": "over how many new tokens it falls",
        },
        "do_sample=True, seed=1, first=2.0",
    ),
    "drafter": RecipeTemplate(
        _DRAFTER,
        _DRAFTER_TEST,
        "The same text sooner: after each token it guesses what followed that token the last time.",
        {"ahead=4": "how many tokens are guessed at the most"},
        "ahead=6",
    ),
    "wrapper": RecipeTemplate(
        _WRAPPER,
        _WRAPPER_TEST,
        "A model that likes the words of its prompt: its law is mixed with their frequencies.",
        {"share=0.1": "how much of the law is the prompt's, from 0.001 to 0.999"},
        "share=0.2",
    ),
    "generate": RecipeTemplate(
        _GENERATE,
        _GENERATE_TEST,
        "Several samples of each prompt, of which the one is returned whose tokens are likeliest.",
        {
            "tries=4": "how many samples are drawn for each prompt",
            "seed=0": "what they are drawn from: the same seed gives the same text",
        },
        "tries=8",
    ),
}
