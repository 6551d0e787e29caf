"""Roll back: a text stuck in a loop returns to where the repetition began and continues differently.

Greedy decoding tends to repeat itself with growing confidence (Holtzman et al. 2020, "The Curious Case of
Neural Text Degeneration", arXiv 1904.09751; Xu et al. 2022, "Learning to Break the Loop", arXiv 2206.02369).
A repetition penalty changes every choice, in a loop or not. This changes nothing until the same run of up to
`period` tokens has occurred `repeats` times. Then all but the first are taken back, and the first token of
the second run is masked at its position. At most `most` times per sequence.

    generate(model, **inputs, recipe="roll-back", repeats=3, most=16)

A strategy on top of `Backtracking`, which truncates rows and caches, masks the token, and withholds pending
tokens from a stream. This class only decides which tokens to take back.
"""

from __future__ import annotations

from collections.abc import Sequence

from descant.parts import Backtracking, NoiseSource, RankGroup, Retraction, StopCondition, check_number


class RollBack(Backtracking):
    """Greedy search and sampling that backtrack out of loops."""

    def __init__(
        self,
        noise: NoiseSource,
        stop: StopCondition,
        rank_group: RankGroup | None = None,
        period: int = 32,
        repeats: int = 3,
        most: int = 16,
    ) -> None:
        super().__init__(noise, stop, rank_group)
        self.period = check_number("period", period, 1, integer=True)
        self.repeats = check_number("repeats", repeats, 2, integer=True)
        self.most = check_number("most", most, 0, integer=True)

    def inspect(self, written: Sequence[int], cuts: int) -> Retraction:
        """Repeated tokens are pending, and taken back once they are a loop."""
        pending = 0
        for period in range(1, self.period + 1 if cuts < self.most else 1):
            repeated = repeated_suffix_length(written, period)
            if repeated >= period * (self.repeats - 1):
                return Retraction(backtrack=repeated)
            pending = max(pending, repeated)
        return Retraction(pending)


def repeated_suffix_length(tokens: Sequence[int], period: int) -> int:
    """The number of last tokens that equal the token `period` positions before them."""
    count = 0
    while count + period < len(tokens) and tokens[-1 - count] == tokens[-1 - count - period]:
        count += 1
    return count


strategy = RollBack
