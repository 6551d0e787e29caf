"""Minimum Bayes risk decoding: the sample with the highest expected utility.

The most probable text of a language model is often atypical of its samples. This draws `samples` texts and
returns the one with the highest expected utility, estimated over the other samples (Kumar & Byrne 2004,
"Minimum Bayes-Risk Decoding for Statistical Machine Translation"; Eikema & Aziz 2020, "Is MAP Decoding All
You Need?", arXiv 2005.10283). Utility is the F-measure of shared token n-grams.

    generate(model, **inputs, recipe="bayes-risk", samples=16, do_sample=True)

A strategy: tokens are sampled as usual; only the result differs. Nothing is streamed before the last sample
has finished, since any sample may be the result until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import descant.parts as parts


class BayesRisk(parts.Sampling):
    """Sampling that returns its samples by expected utility, which is their score, best first."""

    def __init__(
        self,
        noise: parts.NoiseSource,
        stop: parts.StopCondition,
        rank_group: parts.RankGroup | None = None,
        samples: int = 16,
        ngram: int = 2,
    ) -> None:
        super().__init__(noise, stop, rank_group)
        self.samples = parts.check_number("samples", samples, 2, integer=True)
        self.ngram = parts.check_number("ngram", ngram, 1, integer=True)

    @staticmethod
    def params(
        config: parts.GenerationConfig,
        samples: int = 16,
        ngram: int = 2,  # noqa: ARG004 - the arguments of the recipe
    ) -> Mapping[str, Any]:
        """Expand a request to `samples` rows after its prefill."""
        if not config.do_sample:
            raise parts.ConfigError("do_sample", "must be True, or all samples are the same", False)
        return {"num_sequences": samples}

    def select(
        self, rows: parts.Rows, proposal: parts.Proposal, output: parts.ForwardOutput
    ) -> parts.Selection:
        """Sample one token per row, and emit nothing yet."""
        return super().select(rows, proposal, output)._replace(emitted=None)

    def finish(self, request: int) -> list[parts.Hypothesis]:
        """The samples by expected utility, best first."""
        samples = super().finish(request)
        grams = [ngrams(sample.tokens.tolist(), self.ngram) for sample in samples]
        for index, sample in enumerate(samples):
            others = grams[:index] + grams[index + 1 :]
            sample.score = sum(utility(grams[index], other) for other in others) / len(others)
        return sorted(samples, key=lambda sample: -(sample.score or 0.0))


def ngrams(tokens: Sequence[int], max_size: int) -> Counter[tuple[int, ...]]:
    """Counts of all n-grams of up to `max_size` tokens."""
    sizes = range(1, max_size + 1)
    runs = ((start, start + size) for size in sizes for start in range(len(tokens) - size + 1))
    return Counter(tuple(tokens[start:stop]) for start, stop in runs)


def utility(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """The F-measure of shared n-grams, from 0 to 1."""
    return 2 * (one & other).total() / (one.total() + other.total())


strategy = BayesRisk
