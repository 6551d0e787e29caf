"""Minimum Bayes risk: of several samples, the one that the others bear out best.

The likeliest text of a language model is often an odd one; what most of its samples agree on is not. So draw
`samples` texts and return the one whose expected utility is highest, the samples standing for the model's
whole distribution (Kumar & Byrne 2004, "Minimum Bayes-Risk Decoding for Statistical Machine Translation";
Eikema & Aziz 2020, "Is MAP Decoding All You Need?", arXiv 2005.10283). Utility is the F-measure of the token
n-grams that two texts share.

    generate(model, **inputs, recipe="bayes-risk", samples=16, do_sample=True)

A strategy: sampling chooses the tokens as ever, and only what is returned, and when, is another. Nothing is
told before the last sample has ended, since until then any of them may be the one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from descant.parts import (
    ConfigError,
    ForwardOutput,
    GenerationConfig,
    Hypothesis,
    NoiseSource,
    Proposal,
    RankGroup,
    Rows,
    Sampling,
    Selection,
    StopCondition,
    check_number,
)


class BayesRisk(Sampling):
    """Returns the samples by expected utility, best first, which is their score."""

    def __init__(
        self,
        noise: NoiseSource,
        stop: StopCondition,
        peers: RankGroup | None = None,
        samples: int = 16,
        ngram: int = 2,
    ) -> None:
        super().__init__(noise, stop, peers)
        self.samples = check_number("samples", samples, 2, integer=True)
        self.ngram = check_number("ngram", ngram, 1, integer=True)

    @staticmethod
    def params(config: GenerationConfig, samples: int = 16, ngram: int = 2) -> Mapping[str, Any]:  # noqa: ARG004
        """A request becomes so many rows after its prompt was read, once for all of them."""
        if not config.do_sample:
            raise ConfigError("do_sample", "must be True, or all samples are the same", False)
        return {"num_sequences": samples}

    def select(self, rows: Rows, proposal: Proposal, output: ForwardOutput) -> Selection:
        """What sampling chooses, of which nobody is told yet."""
        return super().select(rows, proposal, output)._replace(emitted=None)

    def finish(self, request: int) -> list[Hypothesis]:
        """The samples, the one first that the others bear out best."""
        drawn = super().finish(request)
        grams = [ngrams(one.tokens.tolist(), self.ngram) for one in drawn]
        for place, one in enumerate(drawn):
            others = grams[:place] + grams[place + 1 :]
            one.score = sum(utility(grams[place], other) for other in others) / len(others)
        return sorted(drawn, key=lambda one: -(one.score or 0.0))


def ngrams(tokens: Sequence[int], most: int) -> Counter[tuple[int, ...]]:
    """How often each run of up to `most` tokens occurs."""
    runs = ((at, at + size) for size in range(1, most + 1) for at in range(len(tokens) - size + 1))
    return Counter(tuple(tokens[start:stop]) for start, stop in runs)


def utility(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """The F-measure of what two texts share, from 0 to 1."""
    return 2 * (one & other).total() / (one.total() + other.total())


strategy = BayesRisk
