"""Custom decoding methods."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import folder, refused
from tests.reference.spec_sentences.sentence import GENERATE, NEWER, page

says, call = page(NEWER), page(GENERATE)

LOCAL = "4.52.4 copies a local folder to a place that does not exist and fails."
NAMED = "4.52.4 calls the argument `custom_generate`."

GREEDY = """
import torch


def generate(model, input_ids, generation_config=None, left_padding=None, **kwargs):
    config = generation_config or model.generation_config
    length = input_ids.shape[1]
    if left_padding is not None:
        if not isinstance(left_padding, int) or left_padding < 0:
            raise ValueError(f"left_padding must be an integer larger than 0, but is {left_padding}")
        pad = torch.full((len(input_ids), left_padding), config.pad_token_id or 0)
        input_ids = torch.cat((pad, input_ids), 1)
    for _ in range(config.max_new_tokens or 4):
        logits = model(input_ids).logits[:, -1]
        input_ids = torch.cat((input_ids, logits.argmax(-1, keepdim=True)), 1)
    return input_ids
"""
OTHER = """
def generate(model, input_ids, generation_config=None, word="none", **kwargs):
    return {"word": word, "has_generate": hasattr(model, "generate"), "width": input_ids.shape[1]}
"""


def run(lib, source, name="recipe", requirements="", layout="", **more):
    """A call with a recipe in a folder."""
    with folder() as path:
        place = path / layout
        place.mkdir(exist_ok=True)
        if source is not None:
            (place / "generate.py").write_text(source)
        if requirements:
            (place / "requirements.txt").write_text(requirements)
        return lib.model().generate(lib.ids(), trust_remote_code=True, **{name: str(path)}, **more)


@says("recipe_name", 326, "A recipe is named by the argument `recipe`.", theirs=NAMED)
def _(lib):
    found = run(lib, GREEDY, max_new_tokens=4)
    assert torch.equal(found, lib.greedy(lib.ids(), 4))


@call("recipe_name2", 2309, "A recipe is named by the argument `custom_generate`.", theirs=LOCAL)
def _(lib):
    found = run(lib, GREEDY, name="custom_generate", layout="custom_generate", max_new_tokens=4)
    assert torch.equal(found, lib.greedy(lib.ids(), 4))


@call("recipe_layout", 2310, "The function is in custom_generate/generate.py of the folder.", theirs=NAMED)
def _(lib):
    found = run(lib, GREEDY, layout="custom_generate", max_new_tokens=4)
    assert torch.equal(found, lib.greedy(lib.ids(), 4))


@says("recipe_left", 348, "A recipe has arguments of its own.", theirs=NAMED)
def _(lib):
    found = run(lib, GREEDY, left_padding=5, max_new_tokens=3)
    assert found.shape[1] == 14
    assert found[0, :5].tolist() == [0] * 5


def failure(lib, **more):
    """The text of the ValueError that a call with the greedy recipe raises."""
    try:
        run(lib, GREEDY, max_new_tokens=3, **more)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


@says("recipe_left_bad", 392, "What a recipe raises reaches the caller.", theirs=NAMED)
def _(lib):
    assert "left_padding must be" in failure(lib, left_padding=-1)


@says("recipe_req", 356, "Missing requirements are an error that lists them.", theirs=NAMED)
def _(lib):
    text = failure(lib, requirements="foo\nbar==0.0.0\ntorch>=99.0\n")
    assert "Missing requirements" in text
    assert "foo (installed: None)" in text
    assert "bar==0.0.0 (installed: None)" in text
    assert "torch>=99.0 (installed: " in text


@says("recipe_model", 375, "The recipe's first argument is the model, with its own generate.", theirs=NAMED)
def _(lib):
    assert run(lib, OTHER, max_new_tokens=2)["has_generate"]


@says("recipe_forward", 377, "All arguments are forwarded, and another type may be returned.", theirs=NAMED)
def _(lib):
    assert run(lib, OTHER, word="hello", max_new_tokens=2) == {
        "word": "hello",
        "has_generate": True,
        "width": 6,
    }


@says("recipe_none", 375, "generate.py must have a function `generate`.")
def _(lib):
    with refused(Exception):
        run(lib, "x = 1\n", name="custom_generate", layout="custom_generate", max_new_tokens=2)


@says("recipe_no_file", 367, "generate.py is required.")
def _(lib):
    with refused(Exception):
        run(lib, None, name="custom_generate", max_new_tokens=2)


@says("recipe_readme", 368, "README.md and requirements.txt are optional.", theirs=NAMED)
def _(lib):
    assert run(lib, OTHER, requirements="torch\n", max_new_tokens=2)["width"] == 6
