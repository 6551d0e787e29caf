"""Traces without a model: beam search and speculation on artificial scores."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenShift,
    TokenTexts,
    TraceHeader,
    TraceRecord,
)
from descant.trace.trace import Trace

WORDS = (
    "The", " sky", " is", " a", " canvas", " of", " endless", " possibilities", ",", " where", " the",
    " blue", " and", " clouds", ".", " dreams", "\n", " colour", "ing", " with", "<|end|>",
)  # fmt: skip
END = len(WORDS) - 1


def texts(words: Sequence[str] = WORDS) -> TokenTexts:
    return TokenTexts(dict(enumerate(words)), (len(words) - 1,))


def look(
    chance: random.Random, taken: Sequence[int] = (), size: int = len(WORDS), cut: bool = False
) -> ChoiceRecord:
    """A choice with every token of the vocabulary, some of them cut."""
    weights = [chance.random() ** 6 + 1e-4 for _ in range(size)]
    logs = [round(math.log(one / sum(weights)), 4) for one in weights]
    order = sorted(range(size), key=lambda one: -logs[one])
    gone = set(order[size // 2 :]) - set(taken) if cut else set()
    left = math.log(sum(math.exp(logs[one]) for one in range(size) if one not in gone))
    after = [-math.inf if one in gone else round(logs[one] - left, 4) for one in range(size)]
    stages = ()
    if gone:
        moved = tuple(TokenShift(one, logs[one], after[one]) for one in [*order[:4], *sorted(gone)[:2]])
        stages = (ProcessorRecord("TopKWarper", size - len(gone), len(gone), 1 - math.exp(left), moved),)
    entropy = -sum(math.exp(one) * one for one in logs)
    top = tuple(CandidateRecord(one, logs[one], after[one]) for one in order)
    return ChoiceRecord(round(entropy, 4), round(entropy * 0.8, 4), top, stages)


def beams(
    count: int = 4, steps: int = 7, seed: int = 1, words: Sequence[str] = WORDS, groups: int = 1,
    returned: int = 1, demands: int | None = None, requests: int = 1,
) -> Trace:  # fmt: skip
    """Beam search as its trace has it, each group by itself, and one request after the other."""
    chance, size, each = random.Random(seed), len(words), count // groups
    records: list[TraceRecord] = [TraceHeader("0", "Tiny", size, 8, 1 << 20), texts(words)]
    root = 0
    for request in range(requests):
        records.append(
            RequestRecord(
                request, root, (0, 1, 2), f"beam search, {count} beams", {"num_beams": count}, (), count,
                groups, returned, demands=demands,
            )
        )  # fmt: skip
        standing = [(root, 0.0, group * each, 0) for group in range(groups)]  # node, score, slot, met
        ended: list[tuple[float, int, tuple[int, ...], str]] = []
        tokens: dict[int, tuple[int, ...]] = {root: ()}
        number = root + 1
        for step in range(steps):
            looks = {(at, slot): look(chance, size=size) for at, _, slot, _ in standing}
            runs: dict[tuple[int, int], list[RunRecord]] = {row: [] for row in looks}
            going = []
            for group in range(groups):
                options = sorted(
                    (
                        (round(score + one.processed, 4), (at, slot), one.token, met)
                        for at, score, slot, met in standing
                        if slot // each == group
                        for one in looks[at, slot].top
                    ),
                    reverse=True,
                )
                slot = group * each
                for place, (score, row, token, met) in enumerate(options):
                    done = token == size - 1 or step == steps - 1
                    if slot == (group + 1) * each or (token == size - 1 and place >= each):
                        continue
                    tokens[number] = (*tokens[row[0]], token)
                    now = min(met + (chance.random() < 0.4), demands) if demands is not None else None
                    reason = None if not done else "eos" if token == size - 1 else "length"
                    final = round(score / len(tokens[number]), 4) if done else score
                    runs[row].append(RunRecord((token,), (number,), slot, 0, final, now, reason))
                    if done:
                        ended.append((final, number, tokens[number], str(reason)))
                    else:
                        going.append((number, score, slot, now or 0))
                    slot += token != size - 1
                    number += 1
            rows = (
                RowRecord(request, at, slot, (looks[at, slot],), (), tuple(runs[at, slot]))
                for at, _, slot, _ in standing
            )
            records.append(StepRecord(request * steps + step, 0.01, tuple(rows), 1000 * step))
            standing = going
        root = number
        best = sorted(ended, reverse=True)[:returned]
        unmet = None if demands is None else ()
        said = (ReturnedSequence(all_of, reason, node, score, unmet) for score, node, all_of, reason in best)
        records.append(ResultRecord(request, tuple(said)))
    return Trace(records)


def guesses(steps: int = 12, ahead: int = 4, seed: int = 1, words: Sequence[str] = WORDS) -> Trace:
    """Speculation: some of what is drafted is accepted, and then one token is the model's own."""
    chance = random.Random(seed)
    size = len(words)
    asked = RequestRecord(
        0, 0, (0, 1), "greedy search, prompt lookup", {}, ("TopKWarper",), drafter="PromptLookup"
    )
    records: list[TraceRecord] = [TraceHeader("0", "Tiny", size, 8, 1 << 20), texts(words), asked]
    at, number, said = 0, 1, list[int]()
    for step in range(steps):
        drafts = tuple(chance.randrange(size - 1) for _ in range(chance.randint(0, ahead)))
        accepted = chance.randint(0, len(drafts))
        wrong = drafts[accepted : accepted + 1]
        own = chance.choice([one for one in range(size - 1) if one not in wrong])
        run = (*drafts[:accepted], own)
        nodes = tuple(range(number, number + len(run)))
        number += len(run)
        looks = tuple(look(chance, (one,), size, cut=True) for one in run)
        last = step == steps - 1
        row = RowRecord(0, at, 0, looks, drafts, (RunRecord(run, nodes, reason="length" if last else None),))
        records.append(StepRecord(step, 0.02, (row,), 2000 * step))
        at = nodes[-1]
        said += run
    return Trace([*records, ResultRecord(0, (ReturnedSequence(tuple(said), "length", at),))])
