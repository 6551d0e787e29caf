"""A recipe runs instead of generate() or as a part of its loop, with the arguments of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import descant
from descant.decoding.processors.base import LogitsProcessor
from descant.decoding.strategies.sampling import Sampling
from descant.engine.session import Finished, Request, Session
from descant.errors import ConfigError, InputError, RecipeError, UnsupportedModel
from descant.recipes.recipe import Recipe
from tests.contracts.test_recipes import Again, Colder
from tests.reference.parity.subjects import level
from tests.support import pretrained

DOCUMENTED = Path(__file__).parent / "documented"


class Second(Sampling):
    """Takes the `rank`-th best, an example of a strategy with an argument."""

    def __init__(self, noise, stop, peers=None, *, rank=2):
        super().__init__(noise, stop, peers)
        self.rank = rank

    def select(self, rows, proposal, output):
        scores = output.logits
        least = scores.topk(self.rank, -1).values[..., -1:]
        return super().select(
            rows, proposal, output._replace(logits=scores.masked_fill(scores > least, -torch.inf))
        )


class Best(Sampling):
    """Draws several, keeps the longest: nothing is known before the end."""

    def __init__(self, noise, stop, peers=None, *, samples=3):
        super().__init__(noise, stop, peers)

    @staticmethod
    def params(config, samples=3):
        return {"num_sequences": samples}

    def select(self, rows, proposal, output):
        return super().select(rows, proposal, output)._replace(emitted=None)

    def finish(self, request):
        return sorted(super().finish(request), key=lambda one: -len(one.tokens))


class Without(LogitsProcessor):
    """Never says a token."""

    def __init__(self, *, unwanted):
        self.unwanted = unwanted

    def process(self, context, scores):
        places = torch.full((len(scores), 1), self.unwanted)
        return scores.scatter(1, places, -torch.inf)


class Bare:
    """The same behind the port alone."""

    def __init__(self, *, unwanted):
        self.unwanted = unwanted

    def process(self, context, scores):
        return scores.scatter(1, torch.full((len(scores), 1), self.unwanted), -torch.inf)


class Parrot(Again):
    """Drafts the last token again, and counts."""

    asked = 0

    def draft(self, rows, most, aid):
        self.asked += 1
        return super().draft(rows, most, aid)


@pytest.fixture
def model(tiny):
    return tiny("llama").model


@pytest.fixture
def ids():
    return torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(5))


# ------------------------------------------------------------------------ instead of generate()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [20, 31])
@pytest.mark.parametrize("more", [{}, {"left_padding": 5}])
def test_the_documented_recipe_is_the_references(tiny, reference, name, length, more):
    subject = tiny(name)
    prompts = level(subject).inputs["input_ids"]
    theirs = reference.ask(
        "custom", path=str(DOCUMENTED / "custom_generate" / "generate.py"), model=str(subject.folder),
        config={"max_length": length, "pad_token_id": subject.arch.pad},
        arguments={"input_ids": prompts, **more},
    )  # fmt: skip
    config = descant.GenerationConfig(max_length=length)
    given = {"recipe": str(DOCUMENTED), "trust_remote_code": True, "generation_config": config, **more}
    ours = descant.generate(subject.model, input_ids=prompts, **given)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == length


COMMUNITY = """
import torch
from transformers import GenerationMixin

from .choice import best


def _loop(model, input_ids, logits_processor, stopping_criteria, generation_config, rank=1, **model_kwargs):
    ended = torch.zeros(len(input_ids), dtype=torch.bool)
    while not ended.all():
        logits = model(input_ids, attention_mask=torch.ones_like(input_ids)).logits[:, -1]
        token = best(logits_processor(input_ids, logits), rank)
        token = token.masked_fill(ended, generation_config.pad_token_id)
        input_ids = torch.cat((input_ids, token[:, None]), 1)
        ended = ended | stopping_criteria(input_ids, None)
    return input_ids


def generate(model, *args, **kwargs):
    return GenerationMixin.generate(model, *args, custom_generate=_loop, **kwargs)
"""


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}, {"rank": 2}, {"min_new_tokens": 8}])
def test_a_recipe_in_the_manner_of_the_hubs_runs(model, ids, tmp_path, more):
    # A model's repository with a recipe beside its weights, which hands its own loop to transformers.
    folder = tmp_path / "community"
    (folder / "custom_generate").mkdir(parents=True)
    (folder / "custom_generate" / "generate.py").write_text(COMMUNITY)
    (folder / "custom_generate" / "choice.py").write_text(
        "def best(scores, rank):\n    return scores.topk(rank, -1).indices[:, -1]\n"
    )
    (folder / "custom_generate" / "requirements.txt").write_text("transformers>=5\ntorch\n")
    (folder / "model.safetensors").write_bytes(b"a model's own")
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "x/y--z.W"}}')
    given = {
        "max_new_tokens": 9,
        "trust_remote_code": True,
        "recipe": folder,
        "attention_mask": torch.ones_like(ids),
    }
    said = descant.generate(model, ids, **given, **more)
    other = {"recipe": Second, "rank": 2} if "rank" in more else more
    assert torch.equal(said, descant.generate(model, ids, max_new_tokens=9, **other))


def test_a_function_is_given_the_whole_call(model, ids):
    seen: dict[str, Any] = {}

    def record(first, inputs=None, **given):
        seen.update(given, model=first, inputs=inputs)
        assert not torch.is_grad_enabled()
        return "anything"

    processor, criterion = Without(unwanted=5), descant.MaxLengthCriteria(9)
    mask = torch.ones_like(ids)
    answer = descant.generate(
        model, None, None, [processor], [criterion], streamer="a streamer", input_ids=ids,
        attention_mask=mask, recipe=record, temperature=0.5, mine={"own": 1}, assistant_model=model,
        tokenizer="a tokenizer",
    )  # fmt: skip
    assert answer == "anything"
    assert seen["model"] is model
    assert seen["input_ids"] is ids
    assert seen["attention_mask"] is mask
    assert (seen["logits_processor"], seen["stopping_criteria"]) == ([processor], [criterion])
    assert (seen["streamer"], seen["mine"], seen["tokenizer"]) == ("a streamer", {"own": 1}, "a tokenizer")
    assert seen["assistant_model"] is model
    assert seen["temperature"] == seen["generation_config"].temperature == 0.5
    assert seen["inputs"] is None
    for name in ("prefix_allowed_tokens_fn", "synced_gpus", "negative_prompt_ids"):
        assert seen[name] is None
    assert "recipe" not in seen
    assert "trust_remote_code" not in seen


def test_a_functions_config_is_what_would_count(model, ids):
    def return_config(model, input_ids, generation_config):
        return generation_config

    before = dict(vars(model.generation_config))
    plain = descant.generate(model, ids, recipe=return_config)
    assert (plain.max_length, plain.max_new_tokens) == (20, None)
    assert plain.eos_token_id == model.generation_config.eos_token_id
    assert (plain.num_beams, plain.do_sample, plain.temperature) == (1, False, 1.0)
    short = descant.generate(model, ids, recipe=return_config, max_new_tokens=3)
    assert (short.max_length, short.max_new_tokens) == (None, 3)
    given = descant.GenerationConfig(max_new_tokens=7, top_k=4)
    both = descant.generate(model, ids, given, recipe=return_config, max_length=50)
    assert (both.max_length, both.max_new_tokens, both.top_k) == (50, None, 4)
    assert vars(model.generation_config) == before


def test_a_function_without_a_place_for_an_argument_says_so(model, ids):
    def plain(model, input_ids, generation_config=None):
        return input_ids

    assert descant.generate(model, ids, recipe=plain) is ids
    assert descant.generate(model, ids, recipe=plain, max_new_tokens=4) is ids  # its config has it
    with pytest.raises(RecipeError, match="takes no argument `left_padding`"):
        descant.generate(model, ids, recipe=plain, left_padding=4)
    with pytest.raises(RecipeError, match="takes no argument `streamer`"):
        descant.generate(model, ids, recipe=plain, streamer=print)


def test_the_models_own_generate_is_within_reach(model, ids):
    def twice(model, input_ids, **kwargs):
        first = model.generate(input_ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
        return descant.generate(model, first, max_new_tokens=2, eos_token_id=None)

    said = descant.generate(model, ids, recipe=twice)
    assert torch.equal(said, descant.generate(model, ids, max_new_tokens=4, eos_token_id=None))
    try:
        descant.attach(model)
        assert torch.equal(model.generate(ids, custom_generate=twice), said)
    finally:
        descant.detach(model)


def test_a_function_has_no_place_in_a_session_or_a_stream(model, ids):
    def own(model, input_ids, **kwargs):
        return input_ids

    with pytest.raises(InputError, match=r"not a function with its own loop.*use descant\.generate"):
        Session(model).admit(Request(ids[0], recipe=own))
    with pytest.raises(InputError, match=r"not a function with its own loop.*use descant\.generate"):
        descant.stream(model, ids, recipe=own)


# ------------------------------------------------------------------------ a part of the loop
def test_a_strategy_runs_batched_streamed_and_in_a_mixed_session(model, ids):
    plain = descant.generate(model, ids, max_new_tokens=6, eos_token_id=None)
    assert torch.equal(
        descant.generate(model, ids, max_new_tokens=6, eos_token_id=None, recipe=Second, rank=1), plain
    )
    said = descant.generate(model, ids, max_new_tokens=6, eos_token_id=None, recipe=Second)
    assert (said[:, 6] != plain[:, 6]).all()
    for line in range(3):
        alone = descant.generate(
            model, ids[line : line + 1], max_new_tokens=6, eos_token_id=None, recipe=Second
        )
        assert torch.equal(alone[0], said[line])
    told = [[] for _ in range(3)]
    for event in descant.stream(model, ids, max_new_tokens=6, eos_token_id=None, recipe=Second):
        told[event.row] += event.token_ids
    assert told == said[:, 6:].tolist()

    config = descant.GenerationConfig(max_new_tokens=6, eos_token_id=None)
    second, first = Recipe.from_object(Second), Recipe.from_object(Second)(rank=1)
    session = Session(model)
    asked = [
        Request(ids[0], config, recipe=second), Request(ids[0], config),
        Request(ids[1], config, recipe=first), Request(ids[1], config.replace(num_beams=3)),
        Request(ids[1], config, recipe=Recipe.from_object(Second)(rank=2)),
        Request(ids[2], config, recipe=Recipe.from_object(Colder)(by=-1.0)),
    ]  # fmt: skip
    numbers = session.admit(*asked)
    found = {event.request: event for event in session.drain() if isinstance(event, Finished)}
    said_there = [found[number].hypotheses[0].tokens.tolist() for number in numbers]
    beams = descant.generate(model, ids[1:2], max_new_tokens=6, eos_token_id=None, num_beams=3)
    mirror = descant.generate(model, ids[2:], max_new_tokens=6, eos_token_id=None, recipe=Colder, by=-1.0)
    assert said_there == [
        said[0, 6:].tolist(), plain[0, 6:].tolist(), plain[1, 6:].tolist(), beams[0, 6:].tolist(),
        said[1, 6:].tolist(), mirror[0, 6:].tolist(),
    ]  # fmt: skip


def test_a_strategy_may_make_more_rows_than_it_returns(model, ids):
    shown: list[int] = []

    class Streamer:
        def put(self, value):
            shown.extend(value.flatten().tolist())

        def end(self):
            shown.append(-1)

    said = descant.generate(
        model, ids[:1], max_new_tokens=8, do_sample=True, seed=3, recipe=Best, samples=5, streamer=Streamer()
    )
    drawn = descant.generate(model, ids[:1], max_new_tokens=8, do_sample=True, seed=3, num_return_sequences=5)
    ends = model.generation_config.eos_token_id
    sizes = [(line[6:] == ends).nonzero()[:1].sum() if (line[6:] == ends).any() else 99 for line in drawn]
    assert said[0, 6:].tolist() in [line[6 : 6 + said.shape[1] - 6].tolist() for line in drawn]
    assert len(said) == 1
    assert max(sizes) > 0
    assert shown == [*said[0].tolist(), -1]
    streamed = list(
        descant.stream(model, ids[:1], max_new_tokens=8, do_sample=True, seed=3, recipe=Best, samples=5)
    )
    assert [token for event in streamed for token in event.token_ids] == said[0, 6:].tolist()
    assert len(streamed) == 1
    with pytest.raises(ConfigError, match="output_scores"):
        descant.generate(
            model, ids[:1], recipe=Best, do_sample=True, output_scores=True, return_dict_in_generate=True
        )
    with pytest.raises(RecipeError, match="at least the 4 rows"):
        descant.generate(model, ids[:1], recipe=Best, samples=2, do_sample=True, num_return_sequences=4)


@pytest.mark.parametrize("kind", [Without, Bare])
@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True, "seed": 1}]
)
def test_a_processor_goes_with_every_method(model, ids, kind, how):
    token = int(descant.generate(model, ids[:1], max_new_tokens=1)[0, 6])
    said = descant.generate(model, ids, max_new_tokens=6, recipe=kind, unwanted=token, **how)
    by_hand = descant.generate(model, ids, max_new_tokens=6, logits_processor=[kind(unwanted=token)], **how)
    assert torch.equal(said, by_hand)
    assert token not in said[:, 6:]


def test_a_drafter_drafts_and_changes_nothing(model, ids):
    made: list[Parrot] = []

    def drafter_of():
        made.append(Parrot())
        return made[-1]

    recipe = Recipe("parrot", "drafter", drafter_of)
    for how in ({}, {"do_sample": True, "seed": 7}):
        plain = descant.generate(model, ids, max_new_tokens=8, **how)
        assert torch.equal(descant.generate(model, ids, max_new_tokens=8, recipe=recipe, **how), plain)
    assert len(made) == 2  # one a session
    assert all(one.asked for one in made)
    with pytest.raises(InputError, match="prompt_lookup_num_tokens"):
        descant.generate(model, ids, recipe=recipe, prompt_lookup_num_tokens=2)
    with pytest.raises(InputError, match="num_beams"):
        descant.generate(model, ids, recipe=recipe, num_beams=2)


def test_a_wrapper_is_around_the_rows_that_ask(model, ids):
    plain = descant.generate(model, ids, max_new_tokens=5, eos_token_id=None)
    same = descant.generate(model, ids, max_new_tokens=5, eos_token_id=None, recipe=Colder, by=1.0)
    assert torch.equal(same, plain)
    least = descant.generate(model, ids, max_new_tokens=1, eos_token_id=None, recipe=Colder, by=-1.0)
    logits = model(ids).logits[:, -1]
    assert torch.equal(least[:, 6], logits.argmin(-1))
    beams = descant.generate(
        model, ids, max_new_tokens=5, eos_token_id=None, num_beams=2, recipe=Colder, by=1.0
    )
    assert torch.equal(beams, descant.generate(model, ids, max_new_tokens=5, eos_token_id=None, num_beams=2))


# ------------------------------------------------------------------------ what cannot be
@pytest.mark.parametrize(
    ("more", "named"),
    [({"num_beams": 2}, "num_beams"), ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
     ({"prompt_lookup_num_tokens": 2}, "drafter")],
)  # fmt: skip
def test_a_strategy_takes_the_place_of_another(model, ids, more, named):
    with pytest.raises(ConfigError, match=named) as caught:
        descant.generate(model, ids, recipe=Second, **more)
    assert "recipe" in caught.value.field


def test_wrong_recipes_are_named(model, ids):
    with pytest.raises(InputError, match="`recipe` must be a recipe"):
        descant.generate(model, ids, recipe=3)
    with pytest.raises(InputError, match="trust_remote_code"):
        descant.generate(model, ids, trust_remote_code=True)
    with pytest.raises(InputError, match="custom_generate"):
        descant.generate(model, ids, recipe=Second, custom_generate=Second)
    with pytest.raises(RecipeError, match="generation parameter already"):
        Recipe("x", "processor", lambda *, top_k: None)
    with pytest.raises(RecipeError, match="takes no argument `rnak`: its own are rank"):
        Recipe.from_object(Second)(rnak=1)
    with pytest.raises(RecipeError, match="must have `needs_log_probs`"):
        descant.generate(model, ids, recipe=Recipe("x", "strategy", lambda noise, stop, peers: Bare))
    with pytest.raises(RecipeError, match="must define one of"):
        Recipe.from_namespace("x", {})
    with pytest.raises(RecipeError, match="must define one of"):
        Recipe.from_namespace("x", {"generate": print, "strategy": Second})
    with pytest.raises(RecipeError, match="must be a function or a class"):
        Recipe.from_namespace("x", {"generate": 3})


def test_a_session_is_unharmed_by_a_recipe_that_cannot_be_made(model, ids):
    class Broken(Second):
        def __init__(self, *given):
            raise RuntimeError("broken by intent")

    config = descant.GenerationConfig(max_new_tokens=4)
    session = Session(model)
    number = session.admit(Request(ids[0], config))[0]
    with pytest.raises(RuntimeError, match="by intent"):
        session.admit(Request(ids[1], config), Request(ids[1], config, recipe=Broken))
    assert len(session) == 1
    found = [event for event in session.drain() if isinstance(event, Finished)]
    assert [one.request for one in found] == [number]


def test_a_speech_model_accepts_function_recipes_only():
    whisper = transformers.WhisperForConditionalGeneration.from_pretrained(
        pretrained.folder("whisper-tiny.en")
    )
    features = torch.zeros(1, 80, 3000)
    with pytest.raises((InputError, UnsupportedModel), match="recipe"):
        descant.generate(whisper, input_features=features, recipe=Second)
    assert descant.generate(whisper, input_features=features, recipe=lambda model, **given: 5) == 5


def test_a_function_may_hand_its_config_on(model, ids):
    def again(model, input_ids, generation_config, **given):
        return descant.generate(model, input_ids, generation_config, max_new_tokens=given["max_new_tokens"])

    def hotter(model, input_ids, generation_config, **given):
        generation_config.do_sample = True
        generation_config.top_k = 7
        return descant.generate(model, input_ids, generation_config, seed=4)

    def theirs(model, input_ids, generation_config, **given):
        return model.generate(input_ids, generation_config=generation_config)

    greedy = descant.generate(model, ids, max_new_tokens=5)
    assert torch.equal(descant.generate(model, ids, recipe=again, max_new_tokens=5), greedy)
    assert torch.equal(descant.generate(model, ids, recipe=theirs, max_new_tokens=5), greedy)
    drawn = descant.generate(model, ids, max_new_tokens=5, do_sample=True, top_k=7, seed=4)
    assert torch.equal(descant.generate(model, ids, recipe=hotter, max_new_tokens=5), drawn)
