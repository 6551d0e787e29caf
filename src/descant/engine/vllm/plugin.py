"""The code that vLLM runs when it starts: complete checks of requests before they reach a worker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from descant.engine.request import Request
from descant.engine.vllm.batch_sampler import BatchSampler
from descant.engine.vllm.request_config import (
    PLUGIN_KEY,
    check_params,
    check_v2_params,
    read_params,
    uses_text,
)

_Validator = Callable[[SamplingParams], None]

# Bodies of vLLM's server by the module under `vllm.entrypoints` that defines them.
_BODIES: Final = {
    "openai.chat_completion.protocol": "ChatCompletionRequest",
    "openai.completion.protocol": "CompletionRequest",
    "openai.responses.protocol": "ResponsesRequest",
    "speech_to_text.transcription.protocol": "TranscriptionRequest",
    "speech_to_text.translation.protocol": "TranslationRequest",
}


def register() -> None:
    """Check Descant's fields in vLLM's front end, where an error is the request's own.

    vLLM skips installed logits processors without a word if it drafts tokens, and it checks a request before
    it knows vocabulary and tokenizer. Both are known to its input processor, whose check is extended here.
    It is the entry point `vllm.general_plugins`, which vLLM calls in each of its processes.
    """
    if is_registered():
        return
    original = InputProcessor._build_logits_processors_params_validator

    def build(self: InputProcessor) -> _Validator:
        validate: _Validator = original(self)
        sampler = BatchSampler(self.model_config.get_vocab_size())

        def check(params: SamplingParams) -> None:
            validate(params)
            if PLUGIN_KEY not in (params.extra_args or {}):
                return
            try:
                _check_request(self, params, sampler)
            except Exception as error:  # the server answers 500 to all errors but vLLM's own
                raise VLLMValidationError(str(error)) from error

        return check

    build.checks_descant = True  # type: ignore[attr-defined]
    InputProcessor._build_logits_processors_params_validator = build  # type: ignore[method-assign]
    for module, name in _BODIES.items():
        # Only in the process of the server, which has imported them by now.
        if body := getattr(sys.modules.get(f"vllm.entrypoints.{module}"), name, None):
            _check_bodies(body)


def _check_bodies(body: type[Any]) -> None:
    """Refuse Descant's fields in bodies of which vLLM leaves something out without an error."""

    def checked(method: Callable[..., Any], is_beam_search: bool) -> Callable[..., Any]:
        @wraps(method)
        def make_params(self: Any, *args: Any, **options: Any) -> Any:
            if PLUGIN_KEY in (self.vllm_xargs or {}):
                if is_beam_search:
                    raise VLLMValidationError(
                        "`use_beam_search` must be unset beside Descant's fields, which vLLM's beam search "
                        "does not apply: use a Descant session"
                    )
                if self.model_extra:
                    raise VLLMValidationError(
                        f"`{min(self.model_extra)}` must be a field of vLLM: "
                        f"give fields of Descant in vllm_xargs[{PLUGIN_KEY!r}]"
                    )
            return method(self, *args, **options)

        return make_params

    for name, is_beam_search in (("to_sampling_params", False), ("to_beam_search_params", True)):
        if method := getattr(body, name, None):
            setattr(body, name, checked(method, is_beam_search))


def is_registered() -> bool:
    """Whether vLLM has run `register`: VLLM_PLUGINS may leave it out."""
    return getattr(InputProcessor._build_logits_processors_params_validator, "checks_descant", False)


def _check_request(processor: InputProcessor, params: SamplingParams, sampler: BatchSampler) -> None:
    """Raise a ValueError for a request that a worker could not run."""
    if processor.vllm_config.speculative_config is not None:
        raise ValueError(
            f"extra_args[{PLUGIN_KEY!r}] must be unset with speculative decoding, under which vLLM "
            "skips logits processors: unset `speculative_config`, or use a Descant session"
        )
    # As vLLM does after this check: the model's end tokens.
    params = params.clone()
    params.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    check_params(params, sampler)
    if processor.vllm_config.use_v2_model_runner:
        check_v2_params(params)
    found = read_params(params)
    if found is not None and uses_text(found.config):
        # Compiled here once: an error must not reach the worker. Any token will do as a prompt.
        request = Request([0], found.config, tokenizer=processor.tokenizer)
        sampler.remove(sampler.add(request))
