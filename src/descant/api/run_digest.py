"""The facts that decide the results of a run, as data to digest: model, tokenizer, settings, recipe.

A watermark key is represented by its fingerprint, which does not identify it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from descant.config.generation_config import GenerationConfig
from descant.config.grammar_spec import GrammarSpec
from descant.config.watermarking_config import as_watermarking_config
from descant.decoding.watermark.keys import fingerprint as key_fingerprint
from descant.errors import DescantError
from descant.models.wrapping.fingerprint import fingerprint as model_fingerprint
from descant.recipes.recipe import Recipe

WATERMARK: Final = "watermarking_config"
GRAMMAR: Final = "grammar"


def run_settings(
    model: Any, tokenizer: Any, fingerprint: Mapping[str, str] | None = None, **settings: Any
) -> bytes:
    """A model, its defaults, its chat template and further settings, as JSON in a fixed order.

    `fingerprint` is that of a model whose weights are not loaded.
    """
    parts = {
        "model": model_fingerprint(model) if fingerprint is None else dict(fingerprint),
        "defaults": _plain_value(GenerationConfig.from_transformers(model.generation_config)),
        "template": str(getattr(tokenizer, "chat_template", None)),
        **{name: _plain_value(value) for name, value in settings.items()},
    }
    return json.dumps(parts, sort_keys=True, default=repr).encode()


def _plain_value(value: Any) -> Any:
    """A setting as JSON values."""
    if isinstance(value, GenerationConfig):
        return _plain_value({name: getattr(value, name) for name in sorted(value.given)})
    if isinstance(value, Recipe):
        contents = None if value.contents is None else value.contents.digest
        return [value.name, value.kind, contents, _plain_value(dict(value.arguments))]
    if hasattr(value, "named_parameters"):
        return model_fingerprint(value)
    if isinstance(value, Mapping):
        plain = {WATERMARK: plain_watermark, GRAMMAR: plain_grammar}
        return {str(name): plain.get(name, _plain_value)(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | None) else repr(value)


def plain_grammar(grammar: Any) -> str:
    """A grammar as text: the order of a schema's properties decides the results."""
    return grammar.text if isinstance(grammar, GrammarSpec) else json.dumps(grammar, default=repr)


def plain_watermark(settings: Any) -> Any:
    """Watermark settings with the fingerprint of their key."""
    if settings is None:
        return None
    try:
        parsed = as_watermarking_config(settings)
    except (DescantError, TypeError, ValueError):
        return type(settings).__name__
    return [repr(parsed), key_fingerprint(parsed)]
