"""The contracts of recipes: a recipe and other requests do not affect each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from descant.api.generate import generate
from descant.api.stream import stream
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import DraftContext
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.decoding.speculative.draft_model import padded_drafts
from descant.engine.planning.planner import as_model, make_plan
from descant.engine.session import Request
from descant.errors import ConfigError, InputError
from descant.models.loading.tiny_llama import toy
from descant.recipes.loading import load_recipe
from descant.recipes.recipe import Recipe
from descant.testing.drafter import check_drafter
from descant.testing.outcome import (
    TOLERANCE,
    Outcome,
    check_admission,
    check_batch,
    check_seed,
    compare,
    outcomes,
)
from descant.testing.processor import check_processor

_PROMPT_LENGTHS: Final = (3, 7, 1, 5, 4, 6, 2)
_NUM_NEW_TOKENS: Final = 20  # per request, about
_NUM_SCHEDULES: Final = 3
_LARGE_VOCABULARY: Final = 1000  # from this size on, random lines are slow to create
# Configs that a recipe is run with, unless it refuses them.
_REQUEST_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "top_k": 12},
    "two sampled": {"do_sample": True, "seed": 5, "num_return_sequences": 2, "temperature": 1.2},
    "penalised": {"repetition_penalty": 1.2, "logprobs": 2},
}
_BEAM_CONFIG: Final = {"num_beams": 3, "num_return_sequences": 2}
# Configs of requests in the same batch that do not use the recipe.
_NEIGHBOUR_CONFIGS: Final[Sequence[Mapping[str, Any]]] = ({}, {"do_sample": True, "seed": 9}, _BEAM_CONFIG)


def check_recipe(
    recipe: Any,
    model: Any = None,
    arguments: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """A recipe fulfils the contracts of its kind: strategy, drafter, processor, wrapper or function.

    `recipe` is a `Recipe`, a class that implements an interface, a function, a module, or what `load_recipe`
    accepts. The default model is a toy with random weights. Parts of the engine are run with every config
    that they do not refuse with a ConfigError, together with requests that do not use them: every request
    must have the same result as alone, whenever it is admitted, and a stream must equal the result of
    `generate`. A function must not change the model, nor torch's generator unless it samples, and each row
    must have the same result as alone.
    """
    loaded = load_recipe(recipe, trust_remote_code=trust_remote_code)
    loaded = loaded(**arguments) if arguments else loaded
    checker = _RecipeChecker(loaded, toy() if model is None else model, tolerance)
    {
        "strategy": checker.check_strategy,
        "processor": checker.check_processor_recipe,
        "wrapper": checker.check_wrapper,
        "drafter": checker.check_drafter_recipe,
        "generate": checker.check_function,
    }[loaded.kind]()


class _RecipeChecker:
    """Checks a recipe on a model, by kind."""

    def __init__(self, recipe: Recipe, model: Any, tolerance: float) -> None:
        self.recipe, self.model, self.tolerance = recipe, model, tolerance
        self.traits = as_model(model).traits
        if self.traits.is_encoder_decoder:
            requirement = "must be a decoder-only model"
            raise InputError("model", requirement, type(model).__name__, "leave it out, for a toy")
        generation_config = getattr(model, "generation_config", None)
        eos = getattr(generation_config, "eos_token_id", None)
        self.stop_token_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        generator = torch.Generator().manual_seed(len(_PROMPT_LENGTHS))
        ordinary = torch.tensor(
            [token for token in range(self.traits.vocab_size) if token not in (0, *self.stop_token_ids)]
        )
        self.prompts = [
            ordinary[torch.randint(len(ordinary), (length,), generator=generator)].tolist()
            for length in _PROMPT_LENGTHS
        ]

    # -------------------------------------------------------------------- kinds
    def check_strategy(self) -> None:
        """Requests with the recipe, alone and together with others."""
        requests = self._requests(_REQUEST_CONFIGS)
        self._check_streams(requests)
        self._check_sessions(requests)

    def check_processor_recipe(self) -> None:
        """The processor alone, line by line, then in the engine, also with drafts."""
        values = [
            make_plan(self._config(0, fields), self.traits).base_params
            for fields in _REQUEST_CONFIGS.values()
        ]
        size = self.traits.vocab_size
        check_processor(self.recipe.processor, values, size, examples=20 if size < _LARGE_VOCABULARY else 2)
        self._check_in_loop()

    def check_wrapper(self) -> None:
        """In the engine, also with drafts."""
        self._check_in_loop()

    def check_drafter_recipe(self) -> None:
        """Drafts do not change the output."""
        without_recipe = [replace(request, recipe=None) for request in self._requests(_REQUEST_CONFIGS)]
        single = [
            request for request in without_recipe if request.generation_config.num_return_sequences == 1
        ]
        check_drafter(self.model, self.recipe.build, single, sizes=(1, 4), tolerance=self.tolerance)
        for index, request in enumerate(without_recipe):
            [alone], [actual] = (
                outcomes(self.model, [variant]) for variant in (request, replace(request, recipe=self.recipe))
            )
            _check_same_tokens(alone, actual, f"request {index} with {self.recipe.name}")

    def check_function(self) -> None:
        """A function that replaces generate()."""
        ids = torch.tensor([prompt * 2 for prompt in self._equal_length_prompts()])
        call = partial(generate, self.model, recipe=self.recipe, max_new_tokens=_NUM_NEW_TOKENS // 2)
        before = _model_fingerprint(self.model)
        first, again, other = (_call_seeded(call, ids, seed) for seed in (0, 0, 1))
        after = _model_fingerprint(self.model)
        changed = [name for name in before if before[name] != after.get(name)]
        changed += sorted(after.keys() - before.keys())
        self._require(not changed, f"changed the model: its {changed[:1]} is not what it was")
        self._require(
            _has_same_result(first.result, again.result),
            "called twice under the same seed, returned two results",
        )
        if not _has_same_result(first.result, other.result):
            return  # it samples: rows cannot be compared
        self._require(
            not (first.used_rng or other.used_rng),
            "used torch's generator, though its result does not depend on it",
        )
        self._check_row_independence(
            first.result, [_call_seeded(call, ids[row : row + 1], 0).result for row in range(len(ids))]
        )

    # -------------------------------------------------------------------- requests
    def _equal_length_prompts(self) -> list[list[int]]:
        """Prompts of one length."""
        return [prompt[:4] for prompt in self.prompts if len(prompt) >= 4]

    def _config(self, index: int, fields: Mapping[str, Any]) -> GenerationConfig:
        defaults = {
            "max_new_tokens": _NUM_NEW_TOKENS + index % 3,
            "eos_token_id": self.stop_token_ids or None,
            "pad_token_id": 0,
        }
        return GenerationConfig(**{**defaults, **fields})

    def _requests(self, configs: Mapping[str, Mapping[str, Any]]) -> list[Request]:
        """Requests with those configs that the recipe accepts."""
        accepted, errors = [], []
        for index, fields in enumerate(configs.values()):
            request = Request(self.prompts[index], self._config(index, fields), recipe=self.recipe)
            try:
                [alone] = outcomes(self.model, [request])
                cause = None if alone.error is None else alone.error.__cause__
                if isinstance(cause, ConfigError):  # refused at its end: it has fewer sequences
                    raise cause
            except ConfigError as error:
                errors.append(error)
            else:
                accepted.append(request)
        if not accepted:
            raise AssertionError(f"{self.recipe.name} refuses every request: {errors[0]}") from errors[0]
        return accepted

    def _other_requests(self) -> list[Request]:
        """Requests that do not use the recipe."""
        numbered = list(reversed(list(enumerate(self.prompts))))
        return [
            Request(prompt, self._config(index, fields))
            for (index, prompt), fields in zip(numbered, _NEIGHBOUR_CONFIGS, strict=False)
        ]

    # -------------------------------------------------------------------- checks
    def _check_in_loop(self) -> None:
        """A part that combines with every strategy and with drafts."""
        requests = self._requests({**_REQUEST_CONFIGS, "beams": _BEAM_CONFIG})
        self._check_streams(requests)
        self._check_with_drafts(requests)
        self._check_sessions(requests)

    def _check_sessions(self, requests: Sequence[Request]) -> None:
        """Every request has the same result as alone, in any order and whenever it is admitted."""
        all_requests = [*requests, *self._other_requests()]
        check_batch(self.model, all_requests, self.tolerance)
        check_admission(self.model, all_requests, _NUM_SCHEDULES, tolerance=self.tolerance)
        if any(request.generation_config.do_sample for request in requests):
            check_seed(self.model, requests, _NUM_SCHEDULES, self.tolerance)

    def _check_with_drafts(self, requests: Sequence[Request]) -> None:
        """Speculative decoding gives the same tokens."""
        for index, request in enumerate(requests):
            config = request.generation_config
            if config.num_beams > 1 or config.num_return_sequences > 1:
                continue
            [alone] = outcomes(self.model, [request])
            if alone.error is not None:
                continue
            [actual] = outcomes(
                self.model,
                [replace(request, assistant_model=_KnownTextDrafter(request.prompt, alone.tokens[0]))],
            )
            _check_same_tokens(alone, actual, f"request {index} with drafts")

    def _check_streams(self, requests: Sequence[Request]) -> None:
        """A stream equals the result of generate()."""
        for index, request in enumerate(requests):
            config = request.generation_config.replace(logprobs=None)
            ids = torch.tensor([request.prompt])
            streamed: dict[int, list[int]] = {}
            for event in stream(self.model, ids, generation_config=config, recipe=self.recipe):
                streamed.setdefault(event.sequence, []).extend(event.token_ids)
            returned: Any = generate(self.model, ids, config, recipe=self.recipe)
            for sequence, tokens in sorted(streamed.items()):
                expected = returned[sequence, len(request.prompt) :].tolist()
                if tokens != expected[: len(tokens)] or any(expected[len(tokens) :]):
                    pair = f"streamed {tokens}\n  returned {expected}"
                    raise AssertionError(f"request {index}, sequence {sequence}: other tokens\n  {pair}")

    def _check_row_independence(self, batch: Any, singles: Sequence[Any]) -> None:
        """Each row of a batch has the same result as alone, except for padding."""
        ids, alone = _sequences_of(batch), [_sequences_of(alone_row) for alone_row in singles]
        if ids is None or any(alone_row is None for alone_row in alone):
            return  # the result has no rows
        self._require(len(ids) == len(alone), f"returned {len(ids)} rows for {len(alone)} prompts")
        for index, (row, alone_row) in enumerate(zip(ids, alone, strict=True)):
            assert alone_row is not None
            self._require(len(alone_row) == 1, f"returned {len(alone_row)} rows for one prompt")
            size = min(len(row), alone_row.shape[1])
            padding = set(torch.cat((row[size:], alone_row[0, size:])).tolist())
            same = torch.equal(row[:size], alone_row[0, :size]) and padding <= {0, *self.stop_token_ids}
            self._require(
                same, f"in a batch row {index} is\n  {row.tolist()}, alone\n  {alone_row[0].tolist()}"
            )

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise AssertionError(f"{self.recipe.name} {message}")


class _KnownTextDrafter:
    """A drafter that knows the continuation, with every third token wrong."""

    is_model_free = True

    def __init__(self, prompt: Any, tokens: Sequence[int]) -> None:
        self._prompt_length, self._tokens = len(prompt), list(tokens)

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """No state per request."""

    def remove_requests(self, requests: Sequence[int]) -> None:
        """No state per request."""

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        """No state per row."""

    def draft(self, rows: Rows, max_drafts: Tensor, context: DraftContext) -> Proposal:  # noqa: ARG002
        """The next tokens, for a table of one request."""
        vocabulary, drafts = max(self._tokens) + 1, []
        for row in range(len(rows)):
            start = int(rows.length[row]) - self._prompt_length
            draft = [
                token if (start + step) % 3 else (token + 1) % vocabulary
                for step, token in enumerate(self._tokens[start : start + int(max_drafts[row])])
            ]
            drafts.append(draft)
        return padded_drafts(drafts, rows.tokens.device)


class _SeededResult(NamedTuple):
    """The result of a seeded call, and whether it used torch's generator."""

    result: Any
    used_rng: bool


def _call_seeded(call: Callable[..., Any], ids: Tensor, seed: int) -> _SeededResult:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        result = call(input_ids=ids.clone())
        return _SeededResult(result, not torch.equal(before, torch.get_rng_state()))


def _sequences_of(result: Any) -> Tensor | None:
    """The sequences of a result [R, L], if it has any."""
    sequences = getattr(result, "sequences", result)
    return sequences if isinstance(sequences, Tensor) and sequences.ndim == 2 else None


def _has_same_result(result: Any, other: Any) -> bool:
    """Whether two results are equal, by their sequences or else by `repr`."""
    sequences, other_sequences = _sequences_of(result), _sequences_of(other)
    if sequences is not None and other_sequences is not None:
        return torch.equal(sequences, other_sequences)
    return repr(result) == repr(other)


def _model_fingerprint(model: Any) -> dict[str, Any]:
    """All that a call must not change: weights, configs, modes, hooks and attributes of a model."""
    fingerprint: dict[str, Any] = {
        f"weight `{name}`": (
            weight.dtype,
            weight.shape,
            float(weight.double().sum()),
            float(weight.double().abs().sum()),
        )
        for name, weight in model.state_dict().items()
    }
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        fingerprint[f"module `{name}`"] = (module.training, hooks, sorted(vars(module)))
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        fingerprint[f"`{name}`"] = None if config is None else repr(config.to_dict())
    return fingerprint


def _check_same_tokens(alone: Outcome, actual: Outcome, label: str) -> None:
    """Compare tokens and finish reasons, without logits and scores."""
    compare(replace(alone, logits={}), replace(actual, logits={}), label, float("inf"))
