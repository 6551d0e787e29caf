"""generate() for models that predict a latent in a step."""

from __future__ import annotations

from typing import Any, Final

from descant.api.call import CallOptions
from descant.api.inputs import bind_inputs
from descant.config.generation_config import FIELDS
from descant.errors import InputError, NotInThisVersion
from descant.models.latents.latent_model import is_latent_model

__all__ = ["generate_latents", "match_latents"]

# Arguments of generate() that are for tokens, or that are not supported here -> their names.
_UNSUPPORTED: Final = {
    "processors": "logits_processor",
    "criteria": "stopping_criteria",
    "streamer": "streamer",
    "recipe": "recipe",
    "tracer": "trace",
    "scheduler": "scheduler",
    "progress": "progress",
}


def match_latents(args: Any) -> bool | None:
    """Whether the model of a call of generate() predicts latents; None: it does not."""
    return (is_latent_model(args.model) and not args.is_hf_prepared) or None


def generate_latents(args: Any, _: bool) -> Any:
    """Run a call of generate() whose model predicts latents: what the model's own generate() returns."""
    # Imported here: it imports transformers' models, which takes seconds.
    from descant.engine.latent_requests import decode_latents

    model, name = args.model, type(args.model).__name__
    for attribute, argument in _UNSUPPORTED.items():
        value = getattr(args, attribute)
        if value is not None and value is not False and value != ():
            must = f"is not supported for {name}, which generates latents and not tokens"
            raise NotInThisVersion(argument, must, value, "leave it out")
    if args.use_model_defaults is False:
        raise NotInThisVersion("use_model_defaults", f"is not supported for {name}", False, "leave it out")
    if isinstance(args.generation_config, list | tuple):
        must = f"must be one config for all prompts of {name}"
        raise InputError("generation_config", must, args.generation_config)
    others = dict(args.others)
    fields = {name: others.pop(name) for name in list(others) if name in FIELDS}
    options = CallOptions.from_call(model, args.generation_config, fields, lenient=args.is_method)
    return decode_latents(model, options.configs, bind_inputs(model, args.inputs, others))
