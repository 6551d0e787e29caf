"""Other inputs: long prompts, decoder prompts, embeddings, and processors and criteria of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

import descant
from tests.reference.parity import compare
from tests.reference.parity.compare import Batch, Call, batch
from tests.reference.parity.subjects import ENCODER_DECODER, TINY, ragged
from tests.support.tiny_models import prompts

DECODER_ONLY = tuple(name for name in TINY if name not in ENCODER_DECODER)
NEW = 10


@pytest.mark.parametrize("lengths", [(2, 75, 40, 70), (66, 66, 66), (1, 1, 80)], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_long_prompts(name, lengths, tiny, reference):
    """Long enough that rows of very different length are worth prefilling apart."""
    model = tiny(name)
    rows = batch(model, prompts(model.arch, lengths, seed=401))
    compare.batched(reference, Call(model, {"max_new_tokens": NEW}), rows)
    compare.batched(reference, Call(model, {"max_new_tokens": NEW, "do_sample": True}, seed=1), rows)
    compare.by_row(reference, Call(model, {"max_new_tokens": NEW, "num_beams": 3}), rows)


def test_encoder_inputs_padded_on_the_left(tiny, reference):
    model = tiny("t5")
    rows = Batch(ragged(model).rows, model.pad, "left")
    compare.batched(reference, Call(model, {"max_new_tokens": NEW}), rows)
    compare.by_row(reference, Call(model, {"max_new_tokens": NEW, "num_beams": 3}), rows)


@dataclass(frozen=True)
class DecoderPrompts(Batch):
    """Encoder inputs with the beginnings of the answers."""

    begun: Sequence[Sequence[int]] = field(default_factory=list)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {**super().inputs, "decoder_input_ids": torch.tensor(self.begun)}

    def only(self, row: int) -> Batch:
        return DecoderPrompts([self.rows[row]], self.pad, self.side, begun=[self.begun[row]])


@dataclass(frozen=True)
class BegunCall(Call):
    """A call whose sequences begin with four given tokens."""

    def width(self, prompts: Batch) -> int:
        return 4


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_decoder_prompts(name, arguments, tiny, reference):
    model = tiny(name)
    rows = ragged(model).rows
    begun = [[model.arch.start, *row] for row in prompts(model.arch, [3] * len(rows), seed=402)]
    call = BegunCall(model, {"max_new_tokens": NEW, **arguments}, seed=3)
    how = compare.by_row if "num_beams" in arguments else compare.batched
    how(reference, call, DecoderPrompts(rows, model.pad, "right", begun=begun))


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", DECODER_ONLY)
def test_embeddings(name, arguments, tiny, reference):
    """Only the new tokens come back, and they are those of the tokens that were embedded."""
    model = tiny(name)
    inputs = batch(model, prompts(model.arch, (6, 6, 6), seed=403)).inputs
    with torch.no_grad():
        embedded = {
            "inputs_embeds": model.model.get_input_embeddings()(inputs["input_ids"]),
            "attention_mask": inputs["attention_mask"],
        }
    given = dict(embedded)
    if name == "gemma":  # 4.52.4 scales what it is given by the root of its width; 5.x what it embeds
        given["inputs_embeds"] = embedded["inputs_embeds"] / model.model.config.hidden_size**0.5
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, **arguments}
    theirs = reference.generate(model.folder, given, fixed, seed=4)["sequences"]
    torch.manual_seed(4)
    assert torch.equal(descant.generate(model.model, **embedded, **fixed), theirs)
    torch.manual_seed(4)
    assert torch.equal(descant.generate(model.model, **inputs, **fixed)[:, 6:], theirs)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_a_processor_of_the_user(name, arguments, tiny, reference):
    """It gets only `(input_ids, scores)`, with the running hypotheses of every strategy."""
    model = tiny(name)
    # Both show it padded ids; where no row has the pad token, the padding matters to no n-gram.
    fixed = {"max_new_tokens": 16, **arguments}
    if model.pad != model.eos:
        fixed["suppress_tokens"] = [model.pad]
    objects = {"logits_processor": [("NoRepeatNGramLogitsProcessor", {"ngram_size": 2})]}
    how = compare.by_row if "num_beams" in arguments else compare.batched
    answers = how(reference, Call(model, fixed, seed=1, objects=objects), ragged(model))
    if name in ("gpt2", "opt", "t5", "bart") and not arguments:  # these repeat themselves
        assert [a.tokens for a in answers] != [
            a.tokens for a in how(reference, Call(model, fixed), ragged(model))
        ]


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_a_criterion_of_the_user(name, arguments, tiny, reference):
    model = tiny(name)
    how = compare.by_row if "num_beams" in arguments else compare.batched
    fixed = {"max_new_tokens": 16, **arguments}
    plain = how(reference, Call(model, fixed, seed=1), ragged(model))
    longest = max((a.tokens[0] for a in plain), key=len)
    # With the model's own end token: the reference drops its own criterion for one of the same class.
    ids = [model.eos, longest[len(longest) // 2], longest[1]]
    objects = {"stopping_criteria": [("EosTokenCriteria", {"eos_token_id": ids})]}
    answers = how(reference, Call(model, fixed, seed=1, objects=objects), ragged(model))
    assert [a.tokens for a in answers] != [a.tokens for a in plain]
