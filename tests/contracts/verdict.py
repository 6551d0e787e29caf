"""The verdict on a random call: a valid result, an error that names its cause, or a violation."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import descant
from descant import ConstraintError, NotEnoughMemory, NotInThisVersion, RowError
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.models.compat.generate_outputs import GenerateOutput
from tests.contracts.configs import HOPELESS, SAMPLING, Case, as_config
from tests.contracts.promises import Promises, Violation, stopped, unmet
from tests.support.tiny_models import Tiny

MOST = 16  # no row gets more new tokens than this: a criterion ends it


def _cap(width: int) -> Any:
    """A criterion that ends every row after so many tokens."""

    def long_enough(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= width)

    return long_enough


def run(case: Case, tiny: Tiny) -> tuple[str, str]:
    """The kind of the answer ("accepted", "later", "refused") and its message; else Violation."""
    before = _surroundings(tiny)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = _called(case, tiny)
    except Warning as warning:
        raise Violation(f"a warning, {warning!r}") from warning
    except ValueError as error:
        _check_error(case, error)
        # What comes up on the way, in a row or in a function of the caller's, comes after some noise.
        underway = isinstance(error, RowError) or callable(case.fields.get("prefix_allowed_tokens_fn"))
        _check_surroundings(before, _surroundings(tiny), random=underway)
        return ("later" if isinstance(error, NotInThisVersion) else "refused"), str(error)
    except NotEnoughMemory as error:
        if not case.fields.keys() & {"max_new_tokens", "max_length"} or error.needed <= error.free:
            raise Violation(f"no room for what anybody would ask for, {error}") from error
        return "refused", str(error)
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}") from error
    if case.odd in HOPELESS:
        raise Violation("accepted, which nobody can have meant")
    effective = GenerationConfig.merge(
        {name: _first(one) if name == "seed" else one for name, one in case.call.items()},
        as_config(case.argument) if case.argument else None,
        GenerationConfig.from_transformers(tiny.model.generation_config),
    )
    _check_surroundings(before, _surroundings(tiny), random=effective.do_sample and effective.seed is None)
    _Answer(case, tiny, effective, answer).check()
    return "accepted", ""


def _first(seed: Any) -> Any:
    """A seed, where there is one for each prompt that of the first."""
    several = isinstance(seed, list | tuple) or (isinstance(seed, Tensor) and seed.ndim)
    return seed[0] if several else seed


def _called(case: Case, tiny: Tiny) -> Any:
    given = dict(case.inputs)
    if case.argument and "generation_config" not in given:
        given["generation_config"] = as_config(case.argument)
    given.setdefault("stopping_criteria", [_cap(_width(case) + MOST)])
    return descant.generate(tiny.model, **given, **case.call)


def _width(case: Case) -> int:
    if case.encoder_decoder:
        return 1
    ids = case.inputs.get("input_ids", case.inputs.get("inputs"))
    return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.ndim == 2 else 1


def _surroundings(tiny: Tiny) -> dict[str, Any]:
    """Everything that a call must leave as it was."""
    return {
        "the random state": torch.get_rng_state(),
        "the model's config": repr(tiny.model.config),
        "the model's generation config": repr(tiny.model.generation_config),
        "the training flag": tiny.model.training,
        "the model's attributes": sorted(vars(tiny.model)),
        "the gradient flag": torch.is_grad_enabled(),
    }


def _check_surroundings(before: Mapping[str, Any], after: Mapping[str, Any], random: bool) -> None:
    for name, old in before.items():
        same = torch.equal(old, after[name]) if isinstance(old, Tensor) else old == after[name]
        if not same and not (random and name == "the random state"):
            raise Violation(f"{name} was changed")


def _check_error(case: Case, error: ValueError) -> None:
    """The message must name something that was given, or an input that had to be."""
    if not isinstance(error, descant.DescantError):
        raise Violation(f"an error not our own, {type(error).__name__}: {error}")
    if isinstance(error, ConstraintError):
        if not error.unmet or not case.fields.keys() & {"constraints", "force_words_ids"}:
            raise Violation(f"an error about constraints that nobody has, {error}")
        return
    names = {*case.fields, *case.inputs, *map(str, _extra_names(case))}
    if case.odd:  # what is missing may be named as well as what is wrong
        names |= {"input_ids", "attention_mask"}
    named = {name for name in names if f"`{name}`" in str(error)}
    if not named:
        raise Violation(f"an error that names nothing given: {error}")
    if not re.search(r"got |no token left", str(error)):
        raise Violation(f"an error that does not say what was got: {error}")
    if len(str(error)) > 400:
        raise Violation(f"an error of {len(str(error))} characters")


def _extra_names(case: Case) -> list[Any]:
    """The names inside `generation_kwargs`, which are arguments of the call."""
    given = case.fields.get("generation_kwargs")
    return list(given) if isinstance(given, Mapping) else []


class _Answer:
    """An accepted call's result, held against every field that was given."""

    def __init__(self, case: Case, tiny: Tiny, config: GenerationConfig, answer: Any) -> None:
        self.case, self.tiny, self.config = case, tiny, config
        self.answer = answer
        self.record = answer if isinstance(answer, GenerateOutput) else None
        self.sequences: Tensor = answer.sequences if self.record is not None else answer

    def check(self) -> None:
        """Raise Violation where a field was not honoured."""
        if self.config.token_healing:  # what the prompt's last tokens become is a matter of its own
            if self.sequences.dtype != torch.long or self.sequences.ndim != 2:
                raise Violation(f"the sequences are {self.sequences!r}")
            self._repeats()
            return
        self._shape()
        if self.record is not None:
            self._outputs()
        elif self.config.return_dict_in_generate:
            raise Violation("`return_dict_in_generate` gave a tensor")
        elif self.config.logprobs is not None:
            raise Violation("`logprobs` was asked for and is nowhere")
        if self.case.odd and self.case.odd not in ("ids as int32", "a mask of bools", "the other name"):
            return  # which tokens count as the prompt is a matter of its own
        for line, new in enumerate(self.new.tolist()):
            prompt = self._prompt(line)
            body = self._line(new, prompt)
            Promises(self.config, self._source(line), prompt, body, self._limit(len(prompt))).check(
                line // self.config.num_return_sequences
            )
            if self.record is not None and self.config.logprobs is not None:
                self._logprobs(line, body)
            if self.config.constraints or self.config.force_words_ids:
                self._constraints(line, body)
        self._repeats()

    @property
    def shown(self) -> Tensor:
        """What the sequences begin with [B, W]."""
        if self.case.encoder_decoder:
            start = self.config.decoder_start_token_id
            start = self.config.bos_token_id if start is None else start
            first = torch.tensor(start).reshape(-1)
            source = next(iter(self.case.inputs.values()))
            return first.expand(len(source))[:, None] if len(first) == 1 else first[:, None]
        ids = self.case.inputs.get("input_ids", self.case.inputs.get("inputs"))
        if ids is None:
            return (
                torch.zeros(1, 0).long()
                if "inputs_embeds" in self.case.inputs
                else torch.tensor([[self.config.bos_token_id]])
            )
        return torch.as_tensor(ids).long()

    @property
    def new(self) -> Tensor:
        return self.sequences[:, self.shown.shape[1] :]

    @property
    def ends(self) -> set[int]:
        """Every token that ends a row."""
        ids = self.config.eos_token_id
        eos = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
        return eos | set(self.config.stop_token_ids or ())

    @property
    def pad(self) -> int:
        if self.config.pad_token_id is not None:
            return int(self.config.pad_token_id)
        ids = self.config.eos_token_id
        return 0 if ids is None else ids if isinstance(ids, int) else ids[0]

    def _prompt(self, line: int) -> list[int]:
        if self.case.encoder_decoder:
            return self.shown[0].tolist()
        return self.case.rows[line // self.config.num_return_sequences]

    def _source(self, line: int) -> list[int]:
        """What the encoder was given, or the prompt where there is none."""
        return self.case.rows[line // self.config.num_return_sequences]

    def _shape(self) -> None:
        each = self.config.num_return_sequences
        if not isinstance(self.sequences, Tensor) or self.sequences.dtype != torch.long:
            raise Violation(f"the sequences are {self.sequences!r}")
        if self.case.odd.startswith("odd ") or self.case.odd == "an odd past":
            return
        lines = self.shown.repeat_interleave(each, 0)
        if self.sequences.ndim != 2 or len(self.sequences) != len(lines):
            raise Violation(f"{list(self.sequences.shape)} sequences for {len(lines)} lines")
        if not torch.equal(self.sequences[:, : lines.shape[1]], lines):
            raise Violation("the sequences do not begin with their prompts")
        if not self.new.shape[1]:
            raise Violation("nothing is new")

    def _line(self, new: list[int], before: list[int]) -> list[int]:
        """One sequence's new tokens against the fields; those up to and with its end."""
        config, prompt = self.config, len(before)
        longest = self._limit(prompt)
        # Beyond the limit there is only padding, which may look like an end.
        end = next((at for at, token in enumerate(new[:longest]) if token in self.ends), None)
        spoken = stopped(config, before, new[:longest])
        if spoken is not None and (end is None or spoken < end):
            end = spoken
        count = min(len(new), longest) if end is None else end + 1
        body = new[:count]
        if any(not 0 <= token < self.tiny.vocab for token in body):
            raise Violation(f"unknown tokens in {body}")
        if any(token != self.pad for token in new[count:]):
            raise Violation(
                f"something after the end of {new}, which is at {count}, other than the pad token {self.pad}"
            )
        if count > longest:
            raise Violation(f"{count} new tokens after {prompt}, at most {longest} are allowed")
        cut = config.max_time is not None or "stopping_criteria" in self.case.inputs
        if end is None and count < min(longest, MOST) and not cut:
            raise Violation(f"{new} ended after {count} tokens without a reason")
        if end is not None and end != spoken:
            least = (
                config.min_new_tokens
                if config.min_new_tokens is not None
                else (config.min_length or 0) - prompt
            )
            forced = config.forced_eos_token_id is not None and count == longest
            # The end of a thought is forced, even if it is an end token.
            forced |= bool(self.ends & set(config.thinking_end or ()))
            if end < least and not forced:
                raise Violation(f"an end after {end} new tokens, {least} were to come first")
        banned = set(map(int, config.suppress_tokens or ()))
        if config.thinking_budget is not None:  # its end is forced, whatever else is ruled out
            banned -= set(config.thinking_end or ())
        if banned & set(body):
            raise Violation(f"suppressed tokens {sorted(banned & set(body))} in {body}")
        first = set(map(int, config.begin_suppress_tokens or ()))
        forced = config.forced_bos_token_id
        if first and not (prompt == 1 and forced is not None) and body[0] in first:
            raise Violation(f"{body[0]} comes first, which `begin_suppress_tokens` rules out")
        # A budget of no thought closes it at once, which comes after the rest.
        if forced is not None and prompt == 1 and body[0] != forced and config.thinking_budget != 0:
            raise Violation(f"{body[0]} comes first, `forced_bos_token_id` is {forced}")
        last = config.forced_eos_token_id
        if (
            last is not None
            and count == longest
            and not (longest == 1 and prompt == 1 and forced is not None)
        ):
            allowed = {last} if isinstance(last, int) else set(last)
            thought = config.thinking_budget is not None
            if body[-1] not in allowed | self.ends and not thought and end != spoken:
                raise Violation(f"{body} reached its limit and does not end with {sorted(allowed)}")
        return body

    def _constraints(self, line: int, body: list[int]) -> None:
        """All are met, or the record lists the others; nothing else is in it."""
        said = () if self.record is None else self.record.unmet_constraints[line]
        if said != unmet(self.config, body):
            raise Violation(
                f"{body} is said not to meet {said}, and does not meet {unmet(self.config, body)}"
            )

    def _logprobs(self, line: int, body: list[int]) -> None:
        """Of every token two numbers, and the requested number of alternatives."""
        assert self.record is not None
        one, count = self.record.logprobs[line], len(body)
        for name in ("raw", "processed"):
            got = getattr(one, name)
            if len(got) != count or not bool((got <= 1e-4).all()):
                raise Violation(f"{name} log-probabilities {got} for {count} tokens")

    def _limit(self, prompt: int) -> int:
        """How many new tokens a row with that prompt may have."""
        config = self.config
        if config.max_new_tokens is not None:
            return int(config.max_new_tokens)
        if "max_length" in config.given:
            return int(config.max_length) - prompt
        return 20

    def _outputs(self) -> None:
        assert self.record is not None
        if not self.config.return_dict_in_generate:
            raise Violation("a record was not asked for")
        steps = None
        for name in ("scores", "logits"):
            got, asked = getattr(self.record, name), bool(getattr(self.config, f"output_{name}"))
            if (got is not None) != asked:
                raise Violation(f"`output_{name}` is {asked}, the record has {list(self.record)}")
            if got is not None:
                steps = len(got)
                width = (
                    self.config.num_beams if self.config.num_beams > 1 else self.config.num_return_sequences
                )
                lines = len(self.sequences) // self.config.num_return_sequences * width
                if any(one.shape != (lines, self.tiny.vocab) for one in got):
                    raise Violation(f"`{name}` of shapes {[list(one.shape) for one in got]}")
        if steps is not None and not self.case.odd and steps < self.new.shape[1]:
            raise Violation(f"{steps} steps of scores for {self.new.shape[1]} new tokens")
        if (self.record.get("logprobs") is not None) != (self.config.logprobs is not None):
            raise Violation(f"`logprobs` is {self.config.logprobs}, the record has {list(self.record)}")
        for name in ("hidden_states", "attentions"):
            asked = bool(getattr(self.config, f"output_{name}"))
            if any(name in key for key in self.record) != asked:
                raise Violation(f"`output_{name}` is {asked}, the record has {list(self.record)}")

    def _repeats(self) -> None:
        """The same call again is the same where nothing is left to chance, and greedy where `top_k` is 1."""
        config = self.config
        if config.max_time is not None or (config.do_sample and config.seed is None and config.top_k != 1):
            return
        again = _called(self.case, self.tiny)
        again = again.sequences if isinstance(again, GenerateOutput) else again
        fixed = not config.do_sample or config.seed is not None
        if fixed and not torch.equal(again, self.sequences):
            raise Violation("the same call gave something else")
        if config.do_sample and config.top_k == 1 and config.num_beams == 1 and not self.case.odd:
            plain = {name: value for name, value in self.case.fields.items() if name not in _SAMPLING}
            greedy = descant.generate(
                self.tiny.model,
                **self.case.inputs,
                **plain,
                stopping_criteria=[_cap(_width(self.case) + MOST)],
            )
            greedy = greedy.sequences if isinstance(greedy, GenerateOutput) else greedy
            if config.processor_order is not None:
                return  # what comes before `top_k` may leave out the likeliest
            if not torch.equal(greedy.repeat_interleave(config.num_return_sequences, 0), self.sequences):
                raise Violation("`top_k` is 1 and the tokens are not the likeliest")


_SAMPLING = (*SAMPLING, "do_sample", "num_return_sequences", "seed", "processor_order")
assert set(_SAMPLING) <= set(FIELDS)
