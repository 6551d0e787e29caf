"""Where transformers 4.52.4 is wrong: each test shows theirs, then ours."""

from __future__ import annotations

import contextlib

import pytest
import torch

import descant
from tests.reference.parity import compare
from tests.reference.parity.compare import Call
from tests.reference.parity.subjects import TINY, level, ragged
from tests.support.tiny_models import prompts


@contextlib.contextmanager
def tokens_fed(model):
    """The number of tokens of every forward."""
    fed = []

    def count(_module, _arguments, keywords):
        ids = keywords.get("decoder_input_ids", keywords.get("input_ids"))
        fed.append(ids.numel())

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield fed
    finally:
        hook.remove()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_finished_rows_keep_computing(name, do_sample, tiny, reference):
    model = tiny(name)
    rows = level(model)
    arguments = {"max_new_tokens": 24, "do_sample": do_sample}
    width = 1 if model.encoder_decoder else 6
    call = Call(model, arguments, seed=4)
    torch.manual_seed(4)
    with tokens_fed(model.model) as fed:
        sequences = descant.generate(model.model, **rows.inputs, **arguments)
    lengths = [len(compare.split(call, sequences, rows, i)[0][0]) for i in range(len(rows.rows))]
    longest, count = max(lengths), len(lengths)
    assert len(set(lengths)) > 1, "all rows end together: nothing to see"

    theirs = reference.generate(model.folder, rows.inputs, arguments, ["fed"], seed=4)["fed"]
    assert theirs == [count * width] + [count] * (longest - 1)

    # The last token of a row is never fed, and a row that has ended is not there.
    alive = [sum(n > t for n in lengths) for t in range(1, longest)]
    assert fed == [count * width, *alive]
    assert sum(fed) < sum(theirs)


@pytest.mark.parametrize("name", [n for n in TINY if n not in ("t5", "bart")])
def test_beams_read_the_prompt_once_each(name, tiny, reference):
    model = tiny(name)
    one = ragged(model).only(0)
    arguments = {"num_beams": 4, "max_new_tokens": 4}
    theirs = reference.generate(model.folder, one.inputs, arguments, ["fed"])["fed"]
    assert theirs[0] == 4 * len(one.rows[0])
    with tokens_fed(model.model) as fed:
        descant.generate(model.model, **one.inputs, **arguments)
    assert fed[0] == len(one.rows[0])


def generated(sequences, width):
    return sequences[:, width:].tolist()


def run(model, inputs, **arguments):
    return generated(
        descant.generate(model.model, **inputs, max_new_tokens=8, **arguments), inputs["input_ids"].shape[1]
    )


def ask(reference, model, inputs, **arguments):
    said = reference.generate(model.folder, inputs, {"max_new_tokens": 8, **arguments})
    return generated(said["sequences"], inputs["input_ids"].shape[1])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma", "opt", "qwen2", "gpt-neox"])
def test_a_pad_token_inside_the_prompt_is_a_token(name, tiny, reference):
    """Without a mask the reference hides every pad token; ours only the run that begins a row."""
    model = tiny(name)
    first, second = prompts(model.arch, (8, 8), seed=300)
    first[4] = second[5] = model.pad
    ids = torch.tensor([first, second])
    expected = ask(
        reference, model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, min_new_tokens=8
    )

    assert ask(reference, model, {"input_ids": ids}, min_new_tokens=8) != expected
    assert run(model, {"input_ids": ids}, min_new_tokens=8) == expected

    padded, mask = torch.tensor([first, [model.pad] * 3 + second[3:]]), torch.ones_like(ids)
    mask[1, :3] = 0
    expected = ask(reference, model, {"input_ids": padded, "attention_mask": mask}, min_new_tokens=8)
    assert run(model, {"input_ids": padded}, min_new_tokens=8) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_that_equals_the_end_token(name, tiny, reference):
    """Without a mask the reference attends the padding; ours requires the mask."""
    model = tiny(name)
    pad = {"pad_token_id": model.eos}
    rows = prompts(model.arch, (8, 5), seed=301)
    inputs = compare.Batch(rows, model.eos).inputs
    ids = {"input_ids": inputs["input_ids"]}
    expected = ask(reference, model, inputs, min_new_tokens=8, **pad)

    assert ask(reference, model, ids, min_new_tokens=8, **pad) != expected
    with pytest.raises(descant.InputError, match="attention_mask") as caught:
        run(model, ids, min_new_tokens=8, **pad)
    assert isinstance(caught.value, ValueError)
    assert run(model, inputs, min_new_tokens=8, **pad) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_end_token_inside_the_prompt_is_a_token(name, tiny, reference):
    """The mask many make themselves, `ids != pad`, hides a real end token; ours without a mask does not."""
    model = tiny(name)
    pad = {"pad_token_id": model.eos}
    rows = prompts(model.arch, (8, 8), seed=302)
    rows[0][4] = rows[1][2] = model.eos
    ids = torch.tensor(rows)
    expected = ask(
        reference, model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, min_new_tokens=8, **pad
    )

    hidden = {"input_ids": ids, "attention_mask": (ids != model.eos).long()}
    assert ask(reference, model, hidden, min_new_tokens=8, **pad) != expected
    assert run(model, {"input_ids": ids}, min_new_tokens=8, **pad) == expected
