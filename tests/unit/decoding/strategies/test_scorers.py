"""The scorers in a loop written by hand: the same as the reference's scorers and as `generate`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import descant
from descant.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint
from descant.decoding.processors.guidance import HammingDiversityLogitsProcessor
from descant.decoding.strategies.beams.scorers import (
    BeamScorer,
    BeamSearchScorer,
    ConstrainedBeamSearchScorer,
)
from descant.errors import InputError, RowError
from tests.support.ci_slices import first
from tests.support.tiny_models import prompts

EARLY = (False, True, "never")
MET = {"broken": False, "boost": 3.0}  # what the constrained cases need to be met, and the same there
WORDS = [  # places in a list of tokens that no prompt holds
    [[0]],
    [[0, 1]],
    [[0, 1, 2]],
    [[0], [1, 2]],
    [[[0], [1, 2]]],
    [[[0, 1], [2, 3, 7], [4]], [5, 6]],
]


@dataclass
class Case:
    """One search: its model, its prompts and its settings."""

    model: Any
    ids: torch.Tensor  # [B, L]
    beams: int
    new: int
    eos: list[int]
    penalty: float = 1.0
    early: bool | str = False
    kept: int = 1
    groups: int = 1
    diversity: float = 0.0
    words: list[Any] = field(default_factory=list)
    broken: bool = True  # whether a phrase may begin where another breaks off
    boost: float = 0.0  # of the end tokens' logits

    @classmethod
    def chance(cls, model, seed, grouped=False, constrained=False):
        rng = random.Random(seed)
        length, batch = rng.randint(1, 6), rng.randint(1, 4)
        rows = prompts(model.arch, [length] * batch, seed)
        groups = rng.choice((2, 3)) if grouped else 1
        beams = groups * rng.randint(1, 3) if grouped else rng.randint(2, 6)
        special = {model.eos, model.pad, model.arch.bos, 0}
        free = [
            t for t in range(model.vocab - 1, 0, -1) if t not in special and not any(t in r for r in rows)
        ]
        rng.shuffle(free)
        tokens, ends = free[:8], free[8 : 8 + rng.choice((2, 6) if constrained else (0, 0, 2))]
        return cls(
            model,
            torch.tensor(rows),
            beams,
            rng.randint(4, 12) + 4 * constrained,
            [model.eos, *ends],
            rng.choice((-1.0, 0.0, 0.7, 1.0, 2.0)),
            rng.choice(EARLY),
            rng.randint(1, max(1, beams // 3) if constrained else beams),
            groups,
            rng.choice((0.5, 1.0, 2.5)) if grouped else 0.0,
            _filled(rng.choice(WORDS), tokens) if constrained else [],
        )

    @property
    def limit(self):
        return self.ids.shape[1] + self.new

    @property
    def settings(self):
        """The scorer's arguments."""
        return {
            "batch_size": len(self.ids),
            "num_beams": self.beams,
            "length_penalty": self.penalty,
            "do_early_stopping": self.early,
            "num_beam_hyps_to_keep": self.kept,
            "num_beam_groups": self.groups,
            "max_length": self.limit,
        }

    @property
    def constraints(self):
        """The constraints as class and arguments."""
        return [
            ("DisjunctiveConstraint", {"nested_token_ids": word})
            if isinstance(word[0], list)
            else ("PhrasalConstraint", {"token_ids": word})
            for word in self.words
        ]

    def scorer(self):
        if not self.words:
            return BeamSearchScorer(device="cpu", **self.settings)
        return ConstrainedBeamSearchScorer(
            device="cpu", constraints=[_constraint(word) for word in self.words], **self.settings
        )

    def logprobs(self, ids):
        """The scores of the next token [R, V]; never the pad token."""
        with torch.no_grad():
            logits = self.model.model(ids).logits[:, -1].float()
        logits[:, self.eos] += self.boost
        said = logits.log_softmax(-1)
        said[:, self.model.pad] = -torch.inf
        if not self.broken:
            phrases = [
                phrase for word in self.words for phrase in (word if isinstance(word[0], list) else [word])
            ]
            begun = torch.isin(
                ids[:, -1], torch.tensor([token for phrase in phrases for token in phrase[:-1]])
            )
            firsts = torch.tensor([phrase[0] for phrase in phrases])
            said[begun[:, None] & torch.isin(torch.arange(said.shape[1]), firsts)] -= 30
        return said

    def generated(self):
        """The same by `generate`."""
        more = {"constraints": [_constraint(word) for word in self.words]} if self.words else {}
        if self.groups > 1:
            more |= {"num_beam_groups": self.groups, "diversity_penalty": self.diversity}
        return descant.generate(
            self.model.model,
            input_ids=self.ids,
            attention_mask=torch.ones_like(self.ids),
            num_beams=self.beams,
            num_return_sequences=self.kept,
            max_new_tokens=self.new,
            eos_token_id=self.eos,
            pad_token_id=self.model.pad,
            suppress_tokens=[self.model.pad],
            length_penalty=self.penalty,
            early_stopping=self.early,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )


def _filled(part, tokens):
    return tokens[part] if isinstance(part, int) else [_filled(one, tokens) for one in part]


def _constraint(word):
    return DisjunctiveConstraint(word) if isinstance(word[0], list) else PhrasalConstraint(word)


@dataclass
class Run:
    """A loop as a user writes it, with all calls and results."""

    case: Case
    with_prompt_length: bool = True  # whether the scorer gets the prompt length
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    done: list[torch.Tensor] = field(default_factory=list)  # [B * groups] after each call
    last: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        case = self.case
        scorer, batch, size = case.scorer(), len(case.ids), case.beams // case.groups
        ids = case.ids.repeat_interleave(case.beams, 0)
        sums = torch.full((batch, case.groups, size), -1e9)
        sums[..., 0] = 0
        sums = sums.flatten()
        trails = [()] * len(ids)
        hamming = None
        if case.groups > 1:
            hamming = HammingDiversityLogitsProcessor(case.diversity, case.beams, case.groups)
        while True:
            said = case.logprobs(ids)
            tokens = torch.zeros(len(ids), dtype=torch.long)
            whence = torch.zeros(len(ids), dtype=torch.long)
            for group in range(case.groups):
                mine = torch.arange(len(ids)).view(batch, case.groups, size)[:, group].flatten()
                scores = said[mine]
                if hamming is not None:
                    scores = hamming(ids[mine], scores, tokens, group)
                whole = scores + sums[mine, None]
                best, at = whole.view(batch, -1).topk(max(2, 1 + len(case.eos)) * size)
                asked = {
                    "input_ids": ids[mine],
                    "next_scores": best,
                    "next_tokens": at % whole.shape[1],
                    "next_indices": at // whole.shape[1],
                    "pad_token_id": case.model.pad,
                    "eos_token_id": case.eos,
                    "beam_indices": tuple(trails[row] for row in mine.tolist()),
                    **({"decoder_prompt_len": case.ids.shape[1]} if self.with_prompt_length else {}),
                    **({"group_index": group} if case.groups > 1 else {}),
                    **({"scores_for_all_vocab": whole} if case.words else {}),
                }
                self.calls.append(asked)
                answer = scorer.process(**asked)
                self.answers.append(answer)
                self.done.append(torch.from_numpy(scorer._done.flatten().copy()))
                sums[mine], tokens[mine] = answer["next_beam_scores"], answer["next_beam_tokens"]
                local = answer["next_beam_indices"]
                whence[mine] = mine[local]
                before = [trails[row] for row in mine.tolist()]
                for row, source in zip(mine.tolist(), local.tolist(), strict=True):
                    trails[row] = (*before[source], source)
            ids = torch.cat((ids[whence], tokens[:, None]), 1)
            if scorer.is_done or ids.shape[1] == case.limit:
                break
        self.last = {
            "input_ids": ids,
            "final_beam_scores": sums,
            "final_beam_tokens": tokens,
            "final_beam_indices": whence,
            "max_length": case.limit,
            "pad_token_id": case.model.pad,
            "eos_token_id": case.eos,
            "beam_indices": tuple(trails),
            **({"decoder_prompt_len": case.ids.shape[1]} if self.with_prompt_length else {}),
        }
        self.end = scorer.finalize(**self.last)

    def met(self, ids):
        """Whether the new tokens of a line meet all constraints."""
        line = ids[self.case.ids.shape[1] :].tolist()

        def holds(word):
            if isinstance(word[0], list):
                return any(map(holds, word))
            return any(line[at : at + len(word)] == word for at in range(len(line)))

        return all(map(holds, self.case.words))

    @property
    def crowded(self):
        """Whether some open request has fewer beams that meet the constraints than sequences to return.

        The reference then lets the others compete with those that do.
        """
        open_ids = self.last["input_ids"].view(len(self.case.ids), self.case.beams, -1)
        return any(
            not done and sum(map(self.met, rows)) < self.case.kept
            for done, rows in zip(self.done[-1].tolist(), open_ids, strict=True)
        )


def same_as_the_reference(reference, run, compare_end=True):
    case = run.case
    name = type(case.scorer()).__name__
    theirs = reference.ask(
        "scorer",
        name=name,
        arguments=case.settings,
        constraints=case.constraints,
        calls=run.calls,
        last=run.last if compare_end else None,
    )
    before = torch.zeros_like(run.done[0])
    for mine, their, done, asked in zip(run.answers, theirs["steps"], run.done, run.calls, strict=True):
        group = asked.get("group_index", 0)
        live = ~before.view(len(case.ids), case.groups)[:, group]
        for key, value in mine.items():
            # Of requests that are done the reference's rows are those of the batch's first.
            shown, said = (one.view(len(case.ids), -1)[live] for one in (value, their[key]))
            assert torch.equal(shown, said), key
        assert torch.equal(done, their["done"])
        before = done
    if not compare_end:
        return
    end = theirs["end"]
    width = case.ids.shape[1]
    mine = run.end["sequences"].clone()
    # Whichever token ended it, the reference writes the first.
    mine[:, width:][torch.isin(mine[:, width:], torch.tensor(case.eos))] = case.eos[0]
    assert torch.equal(mine, end["sequences"])
    assert torch.allclose(run.end["sequence_scores"], end["sequence_scores"], rtol=1e-6, atol=0)
    assert torch.equal(run.end["beam_indices"], end["beam_indices"])


KINDS = {"plain": {}, "groups": {"grouped": True}, "constraints": {"constrained": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", first(10, 64))
def test_as_the_reference(seed, kind, tiny, reference):
    """But for what the reference misses of its constraints: see
    `tests/unit/decoding/constraints/test_known_bugs.py`.

    Its copies of a begun disjunction share what they read, so no two alternatives begin alike; it misses a
    phrase that begins where another breaks off, so none does.
    """
    case = Case.chance(tiny("llama"), seed, **KINDS[kind])
    run = Run(replace(case, **MET) if case.words else case)
    same_as_the_reference(reference, run, kind != "constraints" or not run.crowded)


@pytest.mark.ci_cases("plain")
@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_are_varied(kind, tiny):
    """Precondition of the tests above: requests that end apart, by themselves and at the limit."""
    cases = [Case.chance(tiny("llama"), seed, **KINDS[kind]) for seed in range(64)]
    runs = [Run(replace(case, **MET) if case.words else case) for case in cases]
    figures = [
        sum(run.done[-1].all().item() for run in runs),
        sum((~run.done[-1]).any().item() for run in runs),
        sum(any(one.any() and not one.all() for one in run.done) for run in runs),
    ]
    if kind == "constraints":
        figures.append(sum(not run.crowded for run in runs))
    assert min(figures) >= 3
    assert {case.early for case in cases} == set(EARLY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", first(24, 40))
def test_as_generate(seed, kind, tiny):
    """Two things depend on who writes the loop, with neither groups nor constraints.

    A scorer asks whether the best candidate can still win, `generate` whether the best that goes on can: by
    the rule of `early_stopping=False` the scorer may search longer. And at the limit `generate` takes what
    is cut off together with what ends, where a scorer that stops early at that step takes only the latter.
    With constraints `generate` does not let go of the last text that has met them where there is no time to
    begin again: it may meet more than a scorer, never less.
    """
    seed += 100
    case = Case.chance(tiny(("llama", "gpt-neox", "qwen2")[seed % 3]), seed, **KINDS[kind])
    run, whole = Run(case, with_prompt_length=False), case.generated()
    shape = len(case.ids), case.kept
    mine, theirs = (one.view(shape) for one in (run.end["sequence_scores"], whole.sequences_scores))
    same = torch.isclose(mine, theirs, rtol=1e-5, atol=1e-4).all(1)
    if case.words and run.end["unmet_constraints"] != whole.unmet_constraints:
        pairs = zip(run.end["unmet_constraints"], whole.unmet_constraints, strict=True)
        assert all(len(kept) <= len(lost) for lost, kept in pairs)
        return
    texts, others = (one.view(*shape, -1) for one in (run.end["sequences"], whole.sequences))
    if texts.shape == others.shape:
        assert torch.equal(texts[same], others[same])
    if kind == "plain" and case.early is False and case.penalty > 0:
        assert (mine.mean(1)[~same] > theirs.mean(1)[~same]).all()
    elif kind == "plain" and case.early is True and run.last["input_ids"].shape[1] == case.limit:
        late = run.done[-1] & ~run.done[-2]
        assert (same | late).all()
        assert (mine.mean(1)[~same] < theirs.mean(1)[~same]).all()
    else:
        assert same.all()
        assert texts.shape == others.shape
        if kind != "groups":
            count = whole.beam_indices.shape[1]
            assert torch.equal(run.end["beam_indices"][:, :count], whole.beam_indices.long())


# ------------------------------------------------------------------- what the reference has wrong, and bounds
def candidates(rows):
    """`next_scores`, `next_tokens` and `next_indices` of `(score, token, beam)`, for each request."""
    scores, tokens, beams = (
        torch.tensor(part) for part in zip(*(zip(*row, strict=True) for row in rows), strict=True)
    )
    return {"next_scores": scores.float(), "next_tokens": tokens, "next_indices": beams}


def one_request(score=BeamSearchScorer, **settings):
    return score(**{"batch_size": 1, "num_beams": 2, "device": "cpu", **settings})


FOUR = [(-1.0, 5, 0), (-2.0, 9, 0), (-3.0, 6, 0), (-4.0, 7, 0)]  # 9 ends
IDS = torch.tensor([[3, 4], [3, 4]])
LAST = {"final_beam_tokens": None, "final_beam_indices": None, "max_length": None, "pad_token_id": 0}


def finished(scorer, ids, scores=(-1.0, -3.0), **more):
    return scorer.finalize(torch.tensor(ids), torch.tensor(scores), **{**LAST, **more})


def test_a_step_by_hand():
    scorer = one_request(num_beam_hyps_to_keep=2)
    step = scorer.process(IDS, **candidates([FOUR]), eos_token_id=9, pad_token_id=0)
    assert step["next_beam_scores"].tolist() == [-1.0, -3.0]
    assert step["next_beam_tokens"].tolist() == [5, 6]
    assert step["next_beam_indices"].tolist() == [0, 0]
    assert scorer.is_done is False
    end = finished(scorer, [[3, 4, 5], [3, 4, 6]])
    assert end["sequences"].tolist() == [[3, 4, 5], [3, 4, 9]], "what was cut off has no end token"
    assert end["sequence_scores"].tolist() == [-1.0, -2.0], "the prompt does not count"
    assert end["beam_indices"] is None
    assert torch.equal(finished(scorer, [[3, 4, 5], [3, 4, 6]])["sequences"], end["sequences"]), "asked again"


def test_the_prompt_is_what_stood_there_first():
    with_prompt_length, found = one_request(), one_request()
    for scorer, more in ((with_prompt_length, {"decoder_prompt_len": 2}), (found, {})):
        scorer.process(IDS, **candidates([FOUR]), eos_token_id=9, **more)
        more_ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
        scorer.process(
            more_ids, **candidates([[(-2.0, 9, 0), (-3.0, 6, 0), (-9.0, 7, 1), (-9.5, 8, 1)]]), eos_token_id=9
        )
    ends = [
        finished(scorer, [[3, 4, 5, 6], [3, 4, 6, 7]], (-3.0, -9.0)) for scorer in (with_prompt_length, found)
    ]
    assert ends[0]["sequence_scores"].tolist() == ends[1]["sequence_scores"].tolist() == [-1.0]
    assert found.is_done, "nothing is left open"


def test_the_token_that_ended_it_is_kept():
    scorer = one_request(num_beam_hyps_to_keep=2)
    rows = [[(-1.0, 8, 0), (-2.0, 9, 0), (-3.0, 6, 0), (-4.0, 7, 0)]]
    scorer.process(IDS, **candidates(rows), eos_token_id=torch.tensor([9, 8]), beam_indices=((), ()))
    end = finished(scorer, [[3, 4, 6], [3, 4, 7]], (-3.0, -4.0), beam_indices=((0,), (0,)))
    assert end["sequences"].tolist() == [[3, 4, 8], [3, 4, 9]]
    assert end["beam_indices"].tolist() == [[0, -1, -1], [0, -1, -1]]


def test_rows_of_a_done_request_stay_its_own():
    scorer = one_request(batch_size=2, do_early_stopping=True)
    ends = [(-1.0, 9, 0), (-2.0, 8, 0), (-3.0, 6, 0), (-4.0, 7, 0)]
    ids = IDS.repeat(2, 1)
    scorer.process(ids, **candidates([FOUR, ends]), eos_token_id=[8, 9])
    with pytest.raises(InputError, match="`pad_token_id` must be given"):
        scorer.process(ids, **candidates([FOUR, FOUR]), eos_token_id=[8, 9])
    step = scorer.process(ids, **candidates([FOUR, FOUR]), eos_token_id=[8, 9], pad_token_id=torch.tensor(1))
    assert step["next_beam_indices"].tolist() == [0, 0, 2, 3]
    assert step["next_beam_tokens"].tolist() == [5, 6, 1, 1]
    assert step["next_beam_scores"].tolist() == [-1.0, -3.0, 0.0, 0.0]


def test_impossible_candidates_fill_the_beams_and_are_never_returned():
    scorer = one_request(num_beam_hyps_to_keep=2)
    low = float("-inf")
    step = scorer.process(
        IDS, **candidates([[(-1.0, 5, 0), (low, 9, 0), (low, 6, 0), (low, 7, 0)]]), eos_token_id=9
    )
    assert step["next_beam_tokens"].tolist() == [5, 6]
    assert step["next_beam_scores"].tolist() == [-1.0, low]
    with pytest.raises(RowError, match="must have 2 possible sequences, got 1"):
        finished(scorer, [[3, 4, 5], [3, 4, 6]], (-1.0, low))


def constrained(words, **settings):
    return one_request(
        ConstrainedBeamSearchScorer, constraints=[_constraint(word) for word in words], **settings
    )


def test_beams_are_led_to_a_constraint():
    scorer = constrained([[2]])
    whole = torch.full((2, 10), -50.0)
    whole[0, 2] = -20.0
    step = scorer.process(IDS, **candidates([FOUR]), scores_for_all_vocab=whole, eos_token_id=9)
    assert step["next_beam_tokens"].tolist() == [2, 5]
    assert step["next_beam_scores"].tolist() == [-20.0, -1.0]


def test_what_meets_its_constraints_is_returned_first():
    """Also where the rest is likelier; and the prompt meets none."""
    scorer = constrained([[4]], num_beam_hyps_to_keep=2)
    scorer.process(IDS, **candidates([FOUR]), scores_for_all_vocab=torch.full((2, 10), -50.0), eos_token_id=9)
    end = finished(scorer, [[3, 4, 4], [3, 4, 5]], (-50.0, -1.0))
    assert end["sequences"].tolist() == [[3, 4, 4], [3, 4, 5]]
    assert end["sequence_scores"].tolist() == [-50.0, -1.0]
    assert end["unmet_constraints"] == ((), (0,))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_beams": 1}, "num_beams"),
        ({"num_beams": 2.0}, "num_beams"),
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups"),
        ({"num_beam_groups": 0}, "num_beam_groups"),
        ({"num_beam_groups": 4}, "num_beam_groups"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_beam_hyps_to_keep": 3}, "num_beam_hyps_to_keep"),
        ({"do_early_stopping": "never"}, "max_length"),
        ({"do_early_stopping": "always"}, "do_early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_settings_that_are_refused(settings, name):
    with pytest.raises(InputError, match=f"`{name}` must") as caught:
        one_request(**settings)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"input_ids": torch.tensor([[3, 4]] * 3)}, "input_ids"),
        ({"next_scores": torch.zeros(2, 4)}, "next_scores"),
        ({"next_scores": torch.full((1, 4), float("nan"))}, "next_scores"),
        ({"next_tokens": torch.zeros(1, 3, dtype=torch.long)}, "next_tokens"),
        ({"next_indices": torch.full((1, 4), 2)}, "next_indices"),
        ({"eos_token_id": [5, 6, 9]}, "next_tokens"),
        ({"group_index": 1}, "group_index"),
        ({"beam_indices": ((), (), ())}, "beam_indices"),
        ({"decoder_prompt_len": 3}, "decoder_prompt_len"),
        ({"eos_token_id": "9"}, "eos_token_id"),
    ],
)
def test_steps_that_are_refused(change, name):
    scorer = one_request()
    given = {"input_ids": IDS, **candidates([FOUR]), "eos_token_id": 9}
    with pytest.raises(InputError, match=f"`{name}` must"):
        scorer.process(**{**given, **change})
    assert scorer.process(**given)["next_beam_tokens"].tolist() == [5, 6], "and nothing has changed"


def test_ends_that_are_refused():
    ids = [[3, 4, 5], [3, 4, 6]]
    with pytest.raises(InputError, match="`decoder_prompt_len` must be given if `process` was never called"):
        finished(one_request(), ids)
    scorer = one_request(num_beam_hyps_to_keep=2)
    scorer.process(IDS, **candidates([FOUR]), eos_token_id=9)
    with pytest.raises(InputError, match="`final_beam_scores` must"):
        finished(scorer, ids, (-1.0,))
    with pytest.raises(InputError, match="`max_length` must be at least the longest sequence, 3"):
        finished(scorer, ids, max_length=2)
    longer = one_request(num_beam_hyps_to_keep=2)
    longer.process(IDS, **candidates([FOUR]), eos_token_id=9)
    with pytest.raises(InputError, match="`pad_token_id` must be given"):
        finished(longer, [[3, 4, 5, 5], [3, 4, 6, 6]], (-1.0, -9.0), pad_token_id=None)


def test_constraints_that_are_refused():
    with pytest.raises(InputError, match="`constraints` must be a non-empty list"):
        one_request(ConstrainedBeamSearchScorer, constraints=[])
    scorer = constrained([[12]])
    with pytest.raises(InputError, match="`constraints` must advance by tokens below the vocabulary size 10"):
        scorer.process(IDS, **candidates([FOUR]), scores_for_all_vocab=torch.zeros(2, 10), eos_token_id=9)
    with pytest.raises(InputError, match="`scores_for_all_vocab` must"):
        scorer.process(IDS, **candidates([FOUR]), scores_for_all_vocab=torch.zeros(3, 10), eos_token_id=9)


def test_a_scorer_of_ones_own_needs_both_methods():
    class Half(BeamScorer):
        def process(self, *given, **named):
            return {}

    with pytest.raises(TypeError, match="finalize"):
        Half()
    assert issubclass(BeamSearchScorer, BeamScorer)
    assert issubclass(ConstrainedBeamSearchScorer, BeamScorer)


def test_constraints_in_groups():
    """Each group is led, and has a pool, of its own."""
    scorer = constrained([[2]], num_beams=4, num_beam_groups=2, num_beam_hyps_to_keep=4)
    whole = torch.full((2, 10), -50.0)
    for group, cost in enumerate((-20.0, -30.0)):
        whole[0, 2] = cost
        step = scorer.process(
            IDS, **candidates([FOUR]), scores_for_all_vocab=whole, eos_token_id=9, group_index=group
        )
        assert step["next_beam_scores"].tolist() == [cost, -1.0]
    ids = [[3, 4, 2], [3, 4, 5], [3, 4, 2], [3, 4, 5]]
    end = finished(scorer, ids, (-20.0, -1.0, -30.0, -1.0))
    assert end["sequence_scores"].tolist() == [-20.0, -30.0, -1.0, -1.0]
    assert end["unmet_constraints"] == ((), (), (0,), (0,))
