"""The laws of recipes: whatever somebody's method does, nobody else notices, and it notices nobody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from descant.api.generate import generate
from descant.api.stream import stream
from descant.config.generation_config import GenerationConfig
from descant.core.records import DraftContext, Proposal
from descant.core.rows import Rows
from descant.engine.planner import as_model, make_plan
from descant.engine.session import Request
from descant.errors import ConfigError, InputError
from descant.models.tiny_llama import toy
from descant.recipes.loading import load_recipe
from descant.recipes.recipe import Recipe
from descant.testing.drafter import check_drafter
from descant.testing.outcome import TOLERANCE, Outcome, compare, outcomes
from descant.testing.processor import check_processor
from descant.testing.requests import check_admission, check_batch, check_seed

__all__ = ["check_recipe"]

_PROMPT_LENGTHS: Final = (3, 7, 1, 5, 4, 6, 2)  # of the prompts
_NUM_NEW_TOKENS: Final = 20  # tokens, about
_NUM_SCHEDULES: Final = 3
_LARGE_VOCABULARY: Final = 1000  # a vocabulary of so many tokens takes long to be drawn by chance
# What is asked of a recipe, where it does not refuse it; names are for messages.
_REQUEST_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "top_k": 12},
    "two sampled": {"do_sample": True, "seed": 5, "num_return_sequences": 2, "temperature": 1.2},
    "penalised": {"repetition_penalty": 1.2, "logprobs": 2},
}
_BEAM_CONFIG: Final = {"num_beams": 3, "num_return_sequences": 2}
# Whoever else is in the table, none of whom asks for the recipe.
_NEIGHBOUR_CONFIGS: Final[Sequence[Mapping[str, Any]]] = ({}, {"do_sample": True, "seed": 9}, _BEAM_CONFIG)


def check_recipe(
    recipe: Any,
    model: Any = None,
    arguments: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """A recipe keeps the laws that fit its kind: strategy, drafter, processor, wrapper or function.

    `recipe` is a `Recipe`, a class of one of the ports, a function, a module, or what `load_recipe` takes.
    Without a model it is tried on a toy with random weights. The parts of the loop are run by requests of
    every kind that they do not refuse with a ConfigError, beside others that do not ask for them: all must
    have what they have alone, whenever they come, and a stream must tell what `generate` returns. A function
    must leave the model alone, and torch's generator too where it draws nothing, and give each row the same
    as by itself.
    """
    loaded = load_recipe(recipe, trust_remote_code=trust_remote_code)
    loaded = loaded(**arguments) if arguments else loaded
    subject = _RecipeChecker(loaded, toy() if model is None else model, tolerance)
    {
        "strategy": subject.check_strategy,
        "processor": subject.check_processor_recipe,
        "wrapper": subject.check_wrapper,
        "drafter": subject.check_drafter_recipe,
        "generate": subject.check_function,
    }[loaded.kind]()


class _RecipeChecker:
    """A recipe on a model, and how each kind is tried."""

    def __init__(self, recipe: Recipe, model: Any, tolerance: float) -> None:
        self.recipe, self.model, self.tolerance = recipe, model, tolerance
        self.traits = as_model(model).traits
        if self.traits.is_encoder_decoder:
            must = "must have no encoder: the laws are tried on prompts alone"
            raise InputError("model", must, type(model).__name__, "leave it out, for a toy")
        own = getattr(model, "generation_config", None)
        ends = getattr(own, "eos_token_id", None)
        self.stop_token_ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        generator = torch.Generator().manual_seed(len(_PROMPT_LENGTHS))
        plain = torch.tensor(
            [one for one in range(self.traits.vocab_size) if one not in (0, *self.stop_token_ids)]
        )
        self.prompts = [
            plain[torch.randint(len(plain), (length,), generator=generator)].tolist()
            for length in _PROMPT_LENGTHS
        ]

    # -------------------------------------------------------------------- the kinds
    def check_strategy(self) -> None:
        """Requests of it, and of others beside them."""
        mine = self._requests(_REQUEST_CONFIGS)
        self._check_streams(mine)
        self._check_sessions(mine)

    def check_processor_recipe(self) -> None:
        """By itself, line by line, then in the loop, under guesses too."""
        values = [
            make_plan(self._config(0, given), self.traits).base_params for given in _REQUEST_CONFIGS.values()
        ]
        size = self.traits.vocab_size
        check_processor(self.recipe.processor, values, size, examples=20 if size < _LARGE_VOCABULARY else 2)
        self._check_in_loop()

    def check_wrapper(self) -> None:
        """In the loop, under guesses too."""
        self._check_in_loop()

    def check_drafter_recipe(self) -> None:
        """Whatever it guesses, requests say what they would say."""
        plain = [replace(one, recipe=None) for one in self._requests(_REQUEST_CONFIGS)]
        single = [one for one in plain if one.generation_config.num_return_sequences == 1]
        check_drafter(self.model, self.recipe.build, single, sizes=(1, 4), tolerance=self.tolerance)
        for place, one in enumerate(plain):
            [alone], [found] = (
                outcomes(self.model, [given]) for given in (one, replace(one, recipe=self.recipe))
            )
            _check_same_tokens(alone, found, f"request {place} with {self.recipe.name}")

    def check_function(self) -> None:
        """In the place of generate()."""
        ids = torch.tensor([prompt * 2 for prompt in self._equal_length_prompts()])
        call = partial(generate, self.model, recipe=self.recipe, max_new_tokens=_NUM_NEW_TOKENS // 2)
        before = _model_fingerprint(self.model)
        one, two, three = (_call_seeded(call, ids, seed) for seed in (0, 0, 1))
        after = _model_fingerprint(self.model)
        odd = [name for name in before if before[name] != after.get(name)]
        odd += sorted(after.keys() - before.keys())
        self._require(not odd, f"changed the model: its {odd[:1]} is not what it was")
        self._require(
            _has_same_result(one.result, two.result), "called twice under the same seed, returned two results"
        )
        if not _has_same_result(one.result, three.result):
            return  # it draws, and what it draws is its own affair
        self._require(
            not (one.used_rng or three.used_rng),
            "moved torch's generator, though nothing that it returned was drawn from it",
        )
        self._check_row_independence(
            one.result, [_call_seeded(call, ids[row : row + 1], 0).result for row in range(len(ids))]
        )

    # -------------------------------------------------------------------- what is asked
    def _equal_length_prompts(self) -> list[list[int]]:
        """Some prompts of one length."""
        return [prompt[:4] for prompt in self.prompts if len(prompt) >= 4]

    def _config(self, place: int, given: Mapping[str, Any]) -> GenerationConfig:
        own = {
            "max_new_tokens": _NUM_NEW_TOKENS + place % 3,
            "eos_token_id": self.stop_token_ids or None,
            "pad_token_id": 0,
        }
        return GenerationConfig(**{**own, **given})

    def _requests(self, asked: Mapping[str, Mapping[str, Any]]) -> list[Request]:
        """Those of a few requests that the recipe does not refuse."""
        found, why = [], []
        for place, given in enumerate(asked.values()):
            one = Request(self.prompts[place], self._config(place, given), recipe=self.recipe)
            try:
                outcomes(self.model, [one])
            except ConfigError as error:
                why.append(error)
            else:
                found.append(one)
        if not found:
            raise AssertionError(f"{self.recipe.name} refuses every request: {why[0]}") from why[0]
        return found

    def _other_requests(self) -> list[Request]:
        """Requests that do not ask for the recipe."""
        lines = list(reversed(list(enumerate(self.prompts))))
        return [
            Request(prompt, self._config(place, given))
            for (place, prompt), given in zip(lines, _NEIGHBOUR_CONFIGS, strict=False)
        ]

    # -------------------------------------------------------------------- how it is tried
    def _check_in_loop(self) -> None:
        """What composes with every strategy and with guesses."""
        mine = self._requests({**_REQUEST_CONFIGS, "beams": _BEAM_CONFIG})
        self._check_streams(mine)
        self._check_with_drafts(mine)
        self._check_sessions(mine)

    def _check_sessions(self, mine: Sequence[Request]) -> None:
        """All have what they have alone, in any order and whenever they come."""
        whole = [*mine, *self._other_requests()]
        check_batch(self.model, whole, self.tolerance)
        check_admission(self.model, whole, _NUM_SCHEDULES, tolerance=self.tolerance)
        if any(one.generation_config.do_sample for one in mine):
            check_seed(self.model, mine, _NUM_SCHEDULES, self.tolerance)

    def _check_with_drafts(self, mine: Sequence[Request]) -> None:
        """Tokens that are tried all at once come to what they come to one by one."""
        for place, one in enumerate(mine):
            config = one.generation_config
            if config.num_beams > 1 or config.num_return_sequences > 1:
                continue
            [alone] = outcomes(self.model, [one])
            if alone.error is not None:
                continue
            [found] = outcomes(
                self.model, [replace(one, assistant_model=_KnownTextDrafter(one.prompt, alone.tokens[0]))]
            )
            _check_same_tokens(alone, found, f"request {place} with tokens tried ahead")

    def _check_streams(self, mine: Sequence[Request]) -> None:
        """A stream tells what generate() returns."""
        for place, one in enumerate(mine):
            config = one.generation_config.replace(logprobs=None)
            ids = torch.tensor([one.prompt])
            told: dict[int, list[int]] = {}
            for event in stream(self.model, ids, generation_config=config, recipe=self.recipe):
                told.setdefault(event.sequence, []).extend(event.token_ids)
            returned: Any = generate(self.model, ids, config, recipe=self.recipe)
            for sequence, tokens in sorted(told.items()):
                whole = returned[sequence, len(one.prompt) :].tolist()
                if tokens != whole[: len(tokens)] or any(whole[len(tokens) :]):
                    pair = f"streamed {tokens}\n  returned {whole}"
                    raise AssertionError(f"request {place}, sequence {sequence}: other tokens\n  {pair}")

    def _check_row_independence(self, whole: Any, single: Sequence[Any]) -> None:
        """Each row of a batch is what it is by itself, but for padding."""
        ids, alone = _sequences_of(whole), [_sequences_of(one) for one in single]
        if ids is None or any(one is None for one in alone):
            return  # what it returns has no rows
        self._require(len(ids) == len(alone), f"returned {len(ids)} rows for {len(alone)} prompts")
        for place, (row, one) in enumerate(zip(ids, alone, strict=True)):
            assert one is not None
            self._require(len(one) == 1, f"returned {len(one)} rows for one prompt")
            size = min(len(row), one.shape[1])
            rest = set(torch.cat((row[size:], one[0, size:])).tolist())
            alike = torch.equal(row[:size], one[0, :size]) and rest <= {0, *self.stop_token_ids}
            self._require(alike, f"in a batch row {place} is\n  {row.tolist()}, alone\n  {one[0].tolist()}")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise AssertionError(f"{self.recipe.name} {otherwise}")


class _KnownTextDrafter:
    """A drafter that knows how a text goes on, and gets every third token wrong."""

    is_model_free = True

    def __init__(self, prompt: Any, tokens: Sequence[int]) -> None:
        self._prompt_length, self._tokens = len(prompt), list(tokens)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """It knows enough."""

    def remove_requests(self, requests: Sequence[int]) -> None:
        """It keeps nothing."""

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """It has no rows."""

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:  # noqa: ARG002
        """What comes next, for a table of one request."""
        width, vocabulary = int(most.max()), max(self._tokens) + 1
        lines, n = [], []
        for row in range(len(rows)):
            at = int(rows.length[row]) - self._prompt_length
            known = [
                one if (at + step) % 3 else (one + 1) % vocabulary
                for step, one in enumerate(self._tokens[at : at + int(most[row])])
            ]
            lines.append([*known, *[0] * (width - len(known))])
            n.append(len(known))
        if not max(n):
            return Proposal()
        wide = max(n)
        drafts = torch.tensor(lines, device=rows.tokens.device)[:, :wide]
        return Proposal(None, drafts, torch.tensor(n))


class _SeededResult:
    """What a call returned under a seed, and whether it drew from torch's generator."""

    def __init__(self, result: Any, moved: bool) -> None:
        self.result, self.used_rng = result, moved


def _call_seeded(call: Callable[..., Any], ids: Tensor, seed: int) -> _SeededResult:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        result = call(input_ids=ids.clone())
        return _SeededResult(result, not torch.equal(before, torch.get_rng_state()))


def _sequences_of(result: Any) -> Tensor | None:
    """The sequences of what a function returned [R, L], if it has any."""
    found = getattr(result, "sequences", result)
    return found if isinstance(found, Tensor) and found.ndim == 2 else None


def _has_same_result(one: Any, other: Any) -> bool:
    """Whether two results are the same, as far as they can be looked into."""
    first, second = _sequences_of(one), _sequences_of(other)
    if first is not None and second is not None:
        return torch.equal(first, second)
    return repr(one) == repr(other)


def _model_fingerprint(model: Any) -> dict[str, Any]:
    """What must be as it was after a call: weights, configs, modes, hooks and attributes of a model."""
    found: dict[str, Any] = {
        f"weight `{name}`": (one.dtype, one.shape, float(one.double().sum()), float(one.double().abs().sum()))
        for name, one in model.state_dict().items()
    }
    for name, part in model.named_modules():
        hooks = len(part._forward_hooks) + len(part._forward_pre_hooks)
        found[f"module `{name}`"] = (part.training, hooks, sorted(vars(part)))
    for name in ("config", "generation_config"):
        one = getattr(model, name, None)
        found[f"`{name}`"] = None if one is None else repr(one.to_dict())
    return found


def _check_same_tokens(alone: Outcome, found: Outcome, where: str) -> None:
    """The same tokens and ends, by whatever way."""
    compare(replace(alone, logits={}), replace(found, logits={}), where, float("inf"))
