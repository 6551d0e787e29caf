"""Run the same call here and on the reference, and compare the outputs for each request.

A *request* is one prompt; its answer is `num_return_sequences` sequences. Sequences are compared up to and
with their first end token: what the reference puts after it depends on the other rows of its batch. There are
three ways to compare, because the reference's batches are not neutral:

- `batched`: one padded batch there, one here (greedy and sampling: the noise is drawn for the whole batch);
- `by_row`: one padded batch here, each row alone and unpadded there (beams stop by their batch mates there,
  and `max_length`, `min_length` and penalties count the padding there);
- `alone`: each row alone on both sides (beam sampling, whose noise a batch mate's early end would shift).

Of diverse and constrained beams the reference's `beam_indices` are no use (counted inside a group and one too
many for a sequence that ended; none at all): ours are held to the sum that `sequences_scores` are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import descant
from tests.reference.process.client import ReferenceClient
from tests.support.tiny_models import pad

TOLERANCE = 1e-4
ROUNDING = 5e-6  # of a large score: some forty units in its last place
DEAD = -1e8  # beams with a lower sum only fill their places: the reference carries them along
TIE = 1e-5  # choices closer than this may fall either way with the machine's rounding
TENSORS = ("sequences", "scores", "logits", "sequences_scores", "beam_indices")


@dataclass(frozen=True)
class Batch:
    """Ragged prompts: decoder-only ones are padded on the left, encoder inputs on the right."""

    rows: Sequence[Sequence[int]]
    pad: int
    side: str = "left"
    negatives: Sequence[Sequence[int]] = ()  # negative prompts, one a row

    @property
    def inputs(self) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, [R, longest], and the same of negative prompts."""
        ids, mask = pad(self.rows, self.pad, self.side)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.negatives:
            ids, mask = pad(self.negatives, self.pad, self.side)
            inputs |= {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}
        return inputs

    def only(self, row: int) -> Batch:
        """The batch of that one row, without padding."""
        return Batch([self.rows[row]], self.pad, self.side, self.negatives[row : row + 1])


def batch(subject: Any, rows: Sequence[Sequence[int]]) -> Batch:
    """A batch padded the way `subject` expects."""
    return Batch(rows, subject.pad, "right" if subject.encoder_decoder else "left")


@dataclass(frozen=True)
class Call:
    """One parity case: the subject, the arguments of `generate`, the seed, and how much to compare."""

    subject: Any
    arguments: Mapping[str, Any]
    seed: int | None = None
    full: bool = True  # also compare scores and logits over the whole vocabulary
    # Objects of the user's, by argument: (class of transformers, its arguments), made on both sides.
    objects: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = field(default_factory=dict)
    ties: bool = False  # allow choices that hang on rounding

    @property
    def eos(self) -> set[int]:
        """Tokens that end a row, the criteria of `objects` included."""
        ids = self.arguments.get("eos_token_id", self.subject.eos)
        more = [values["eos_token_id"] for _, values in self.objects.get("stopping_criteria", ())]
        return ({ids} if isinstance(ids, int) else set(ids)).union(*more)

    @property
    def pad(self) -> int:
        return int(self.arguments.get("pad_token_id", self.subject.pad))

    @property
    def beams(self) -> int:
        return int(self.arguments.get("num_beams", 1))

    @property
    def contrastive(self) -> bool:
        return "penalty_alpha" in self.arguments

    @property
    def scorer(self) -> bool:
        """Whether the reference decodes with one of its beam scorers: diverse and constrained beams."""
        names = {*self.arguments, *self.objects}
        return bool({"num_beam_groups", "constraints", "force_words_ids"} & names)

    @property
    def sequences(self) -> int:
        return int(self.arguments.get("num_return_sequences", 1))

    @property
    def copies(self) -> int:
        """Rows of `scores` per request."""
        return self.beams if self.beams > 1 else self.sequences

    def limit(self, prompt: int) -> int | None:
        """Tokens that `max_length` leaves to a prompt of that many tokens."""
        length = self.arguments.get("max_length")
        return None if length is None else length - (1 if self.subject.encoder_decoder else prompt)

    def width(self, prompts: Batch) -> int:
        """Columns of `sequences` before the first new token."""
        return 1 if self.subject.encoder_decoder else prompts.inputs["input_ids"].shape[1]

    def ours(self, prompts: Batch) -> dict[str, Any]:
        """Run `descant.generate` and collect its output in the reference's terms."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        out = descant.generate(
            self.subject.model,
            **prompts.inputs,
            **self.arguments,
            **{name: [made(*one) for one in some] for name, some in self.objects.items()},
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=self.full,
        )
        said = {name: out.get(name) for name in TENSORS if name in out}
        said["transition_scores"] = descant.compute_transition_scores(
            self.subject.model, out.sequences, out.scores, beam_indices=said.get("beam_indices")
        )
        if self.beams == 1:
            said["logprobs"] = descant.compute_transition_scores(
                self.subject.model, out.sequences, out.scores, normalize_logits=True
            )
        return said

    def theirs(self, reference: ReferenceClient, prompts: Batch) -> dict[str, Any]:
        """Run the reference's `generate`."""
        want = ["sequences", "choices", "margin"] + ([] if self.scorer else ["transition_scores"])
        want += ["sequences_scores", "running"] if self.beams > 1 else ["logprobs"]
        want += ["beam_indices"] if self.beams > 1 and not self.scorer else []
        want += ["scores", "logits"] if self.full else []
        return reference.generate(
            self.subject.folder, prompts.inputs, self.arguments, want, seed=self.seed, objects=self.objects
        )


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    """An object of the class `name` of the transformers installed here, or of ours where it has none."""
    places = (
        transformers,
        transformers.generation.logits_process,
        transformers.generation.stopping_criteria,
        descant,  # constraints, which transformers has no more
    )
    return next(getattr(place, name) for place in places if hasattr(place, name))(**arguments)


@dataclass
class Answer:
    """The output of one side for one request."""

    tokens: list[list[int]]  # per sequence, up to and with its end
    rest: list[list[int]]  # what stands after it
    transition: list[Tensor]  # per sequence, [T]
    logprobs: list[Tensor] = field(default_factory=list)  # the same, normalised; without beams
    sequences_scores: list[float] = field(default_factory=list)
    beam_indices: list[list[int]] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)  # per step, [copies, V]
    logits: list[Tensor] = field(default_factory=list)
    choices: Tensor | None = None  # [copies, T, 2]: the two best scores of each step
    running: Tensor | None = None  # [T, beams]: the sums with which the beams enter each step
    margin: float = float("inf")  # the narrowest choice that the scores do not show


def split(
    call: Call, sequences: Tensor, prompts: Batch, request: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The new tokens of one request's sequences, up to and with their end, and what stands after it."""
    first = request * call.sequences
    rows = sequences[first : first + call.sequences, call.width(prompts) :].tolist()
    limit = call.limit(len(prompts.rows[request]))
    ends = [
        next((i + 1 for i, t in enumerate(row[:limit]) if t in call.eos), len(row[:limit])) for row in rows
    ]
    paired = list(zip(rows, ends, strict=True))
    return [row[:end] for row, end in paired], [row[end:] for row, end in paired]


def read(call: Call, said: Mapping[str, Any], prompts: Batch, request: int) -> Answer:
    """The output for request number `request` of one side's batch."""
    first, count = request * call.sequences, call.sequences
    tokens, rest = split(call, said["sequences"], prompts, request)
    mine = slice(request * call.copies, (request + 1) * call.copies)
    answer = Answer(tokens=tokens, rest=rest, transition=[], margin=said.get("margin", float("inf")))
    if "transition_scores" in said:
        answer.transition = list(said["transition_scores"][first : first + count])
    if call.beams > 1:
        answer.sequences_scores = said["sequences_scores"][first : first + count].tolist()
    if "beam_indices" in said:
        indices = said["beam_indices"][first : first + count].long()
        offset = torch.where(indices >= 0, request * call.beams, 0)
        answer.beam_indices = (indices - offset).tolist()
    if call.beams == 1:
        answer.logprobs = list(said["logprobs"][first : first + count])
    if call.full:
        answer.scores = [step[mine] for step in said["scores"]]
        answer.logits = [step[mine] for step in said["logits"]]
    if said.get("choices") is not None:
        answer.choices = said["choices"][mine]
    if said.get("running") is not None:
        answer.running = said["running"][:, request]
    return answer


def batched(reference: ReferenceClient, call: Call, prompts: Batch) -> list[Answer]:
    """One padded batch on both sides."""
    ours, theirs = call.ours(prompts), call.theirs(reference, prompts)
    _check_prompts(call, ours, prompts)
    answers = []
    for i in range(len(prompts.rows)):
        answers.append(read(call, ours, prompts, i))
        check(call, answers[-1], read(call, theirs, prompts, i), f"request {i}")
    return answers


def by_row(
    reference: ReferenceClient,
    call: Call,
    prompts: Batch,
    has_known_bug: Callable[[Answer, Answer], bool] = lambda *_: False,
) -> list[Answer]:
    """One padded batch here, each row alone there.

    `has_known_bug` says of our and their answer whether they differ by a known bug of the reference.
    """
    ours = call.ours(prompts)
    _check_prompts(call, ours, prompts)
    answers, steps = [], 0
    for i in range(len(prompts.rows)):
        single = prompts.only(i)
        theirs = read(call, call.theirs(reference, single), single, 0)
        steps = max(steps, len(theirs.scores))
        answers.append(read(call, ours, prompts, i))
        if not has_known_bug(answers[-1], theirs):
            check(call, answers[-1], theirs, f"request {i}")
    if call.full:
        assert len(ours["scores"]) == len(ours["logits"]) == steps, "a batch takes its longest row's steps"
    return answers


def alone(reference: ReferenceClient, call: Call, prompts: Batch) -> list[Answer]:
    """Each row alone on both sides, under the same seed."""
    answers: list[Answer] = []
    for i in range(len(prompts.rows)):
        answers += batched(reference, call, prompts.only(i))
    return answers


def check(call: Call, ours: Answer, theirs: Answer, where: str) -> None:
    """Assert that both sides give the same for one request."""
    assert len(ours.tokens) == len(theirs.tokens) == call.sequences
    gap = closest(call, theirs)
    assert call.ties or gap > TIE, (
        f"{where}: near tie, the reference chose by {gap:.1e}: choose other prompts"
    )
    for j in range(call.sequences):
        here = f"{where}, sequence {j}"
        if ours.tokens[j] != theirs.tokens[j]:
            raise AssertionError(f"{here}: {_mismatch(call, ours, theirs, j)}")
        length = len(ours.tokens[j])
        assert set(ours.rest[j]) <= {call.pad}, f"{here}: padded with {set(ours.rest[j])}"
        if not call.scorer:
            close(ours.transition[j][:length], theirs.transition[j][:length], f"{here}: transition scores")
        if call.beams == 1:
            close(ours.logprobs[j][:length], theirs.logprobs[j][:length], f"{here}: log-probabilities")
        else:
            assert not ours.transition[j][length:].any(), f"{here}: transition scores after the end"
            if not call.scorer:
                assert _used(ours.beam_indices[j]) == _used(theirs.beam_indices[j]), f"{here}: beam indices"
            assert len(_used(ours.beam_indices[j])) == length, f"{here}: beam indices and tokens"
    close(_sums(call, ours), _sums(call, theirs), f"{where}: sequences_scores")
    if call.scorer:
        sums = torch.stack([moves.sum() for moves in ours.transition])
        close(sums, _sums(call, ours), f"{where}: transition scores and sequences_scores")
    _check_steps(call, ours, theirs, where)


def closest(call: Call, theirs: Answer) -> float:
    """The narrowest choice the reference made for one request; infinite if unknown."""
    if call.arguments.get("do_sample") or not call.full or call.scorer or call.contrastive:
        return theirs.margin
    if call.beams == 1:
        best = torch.stack([step[0].topk(2).values for step in theirs.scores[: len(theirs.tokens[0])]])
        return min(theirs.margin, float((best[:, 0] - best[:, 1]).min()))
    assert theirs.running is not None
    narrowest, vocab = float("inf"), theirs.scores[0].shape[-1]
    for step, running in zip(theirs.scores, theirs.running, strict=True):
        best = (step + running[:, None]).flatten().topk((len(call.eos) + 1) * call.beams)
        live = [i for i, token in enumerate((best.indices % vocab).tolist()) if token not in call.eos]
        # Candidates in order, down to the first that is not kept; the dead do not count.
        considered = best.values[: live[call.beams] + 1 if len(live) > call.beams else None]
        considered = considered[considered > DEAD]
        narrowest = min([narrowest, *(considered[:-1] - considered[1:]).tolist()])
    return narrowest


def _check_steps(call: Call, ours: Answer, theirs: Answer, where: str) -> None:
    """Scores and logits of every step a row took; without beams, only up to the row's own end."""
    for name in ("scores", "logits") if call.full else ():
        mine, wanted = getattr(ours, name), getattr(theirs, name)
        steps = len(wanted) if call.beams > 1 else max(map(len, ours.tokens))
        assert len(mine) >= steps, f"{where}: {len(mine)} steps of {name}, the reference has {steps}"
        for t in range(steps):
            live = _live(call, theirs, t)
            close(mine[t][live], wanted[t][live], f"{where}: {name} of step {t}")
    if call.full:
        for j in range(call.copies):
            left = len(theirs.scores) if call.beams > 1 else len(ours.tokens[j])
            for step in ours.scores[left:]:
                certain = step[j].softmax(-1)[call.pad]
                assert certain == 1, f"{where}: scores of a row that has left give its pad {certain}"


def _live(call: Call, theirs: Answer, step: int) -> list[int]:
    """The lines of a request that mean something at a step: rows that have not ended, beams that can win."""
    if call.beams == 1:
        return [j for j, tokens in enumerate(theirs.tokens) if step < len(tokens)]
    assert theirs.running is not None
    # Before the first choice all beams are the same prompt, and both sides show it as many times.
    return [j for j in range(call.beams) if step == 0 or theirs.running[step, j] > DEAD]


def close(ours: Tensor, theirs: Tensor, where: str) -> None:
    """Assert equality within TOLERANCE and ROUNDING; infinities must stand in the same places."""
    assert ours.shape == theirs.shape, f"{where}: shape {tuple(ours.shape)}, theirs {tuple(theirs.shape)}"
    odd = ~torch.isclose(ours.float(), theirs.float(), rtol=ROUNDING, atol=TOLERANCE, equal_nan=False)
    if odd.any():
        first = tuple(odd.nonzero()[0].tolist())
        raise AssertionError(
            f"{where}: {int(odd.sum())} of {odd.numel()} differ, first at {first}: "
            f"{ours[first].item():.6f}, theirs {theirs[first].item():.6f}"
        )


def _mismatch(call: Call, ours: Answer, theirs: Answer, j: int) -> str:
    """What is known about two sequences that differ."""
    mine, wanted = ours.tokens[j], theirs.tokens[j]
    step = next(
        (t for t, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), min(len(mine), len(wanted))
    )
    said = f"tokens differ at step {step}\n  ours   {mine}\n  theirs {wanted}\n"
    if call.beams > 1:
        said += f"  scores {ours.sequences_scores[j]:.6f}, theirs {theirs.sequences_scores[j]:.6f}"
    elif call.full and step < min(len(ours.scores), len(theirs.scores)):
        gap = (ours.scores[step][j] - theirs.scores[step][j]).nan_to_num(0.0, 0.0, 0.0).abs().max()
        said += f"  scores of that step differ by at most {gap:.2e} where both are finite"
    elif theirs.choices is not None and step < theirs.choices.shape[1]:
        best, second = theirs.choices[j, step].tolist()
        said += f"  their best two scores: {best:.6f}, {second:.6f}"
        if not call.arguments.get("do_sample") and best - second < TOLERANCE:
            said += " (near tie: choose other prompts)"
    return said


def _sums(call: Call, answer: Answer) -> Tensor:
    """What `sequences_scores` divide by the length penalty: a penalty below 0 would scale rounding up too."""
    penalty = call.arguments.get("length_penalty", 1.0)
    scores = zip(answer.sequences_scores, answer.tokens, strict=False)
    return torch.tensor([score * len(tokens) ** penalty for score, tokens in scores])


def _used(indices: Sequence[int]) -> list[int]:
    return [i for i in indices if i >= 0]


def _check_prompts(call: Call, said: Mapping[str, Any], prompts: Batch) -> None:
    if not call.subject.encoder_decoder:
        ids = prompts.inputs["input_ids"].repeat_interleave(call.sequences, 0)
        assert torch.equal(said["sequences"][:, : ids.shape[1]], ids), "the prompts do not come back as given"
