"""Roll back: a text that is stuck in a loop returns to where it began to repeat, and goes another way.

Greedy text, above all, falls into saying one thing over and over, each time surer of it (Holtzman et al.
2020, "The Curious Case of Neural Text Degeneration", arXiv 1904.09751; Xu et al. 2022, "Learning to Break
the Loop", arXiv 2206.02369). A penalty on repetition bends every choice, loop or not. This touches nothing
until the same run of up to `period` tokens has been said `repeats` times; then all but the first are taken
back, and the token that began the second is not said there again. At most `most` times for each sequence.

    generate(model, **inputs, recipe="roll-back", repeats=3, most=16)

A strategy, by way of `Rewinding`: that one cuts rows and their caches, bars the token, and holds back from a
stream what may still go. All that is left to say is which tokens those are.
"""

from __future__ import annotations

from collections.abc import Sequence

from descant.parts import Backtracking, NoiseSource, RankGroup, Retraction, StopCondition, check_number


class RollBack(Backtracking):
    """Greedy search and sampling that leave loops."""

    def __init__(
        self,
        noise: NoiseSource,
        stop: StopCondition,
        peers: RankGroup | None = None,
        period: int = 32,
        repeats: int = 3,
        most: int = 16,
    ) -> None:
        super().__init__(noise, stop, peers)
        self.period = check_number("period", period, 1, integer=True)
        self.repeats = check_number("repeats", repeats, 2, integer=True)
        self.most = check_number("most", most, 0, integer=True)

    def inspect(self, written: Sequence[int], cuts: int) -> Retraction:
        """What repeats may go on to be a loop, and goes when it is one."""
        loose = 0
        for period in range(1, self.period + 1 if cuts < self.most else 1):
            again = repeated_suffix_length(written, period)
            if again >= period * (self.repeats - 1):
                return Retraction(backtrack=again)
            loose = max(loose, again)
        return Retraction(loose)


def repeated_suffix_length(tokens: Sequence[int], period: int) -> int:
    """How many of the last tokens are what was said `period` tokens before each."""
    count = 0
    while count + period < len(tokens) and tokens[-1 - count] == tokens[-1 - count - period]:
        count += 1
    return count


strategy = RollBack
