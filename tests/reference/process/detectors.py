"""Detectors of the reference: the Bayesian scores of g-values, and the folder that it writes."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers


@torch.no_grad()
def bayesian(
    *,
    calls: Sequence[Mapping[str, Any]],
    folder: str | None = None,
    config: Mapping[str, Any] | None = None,
    information: Sequence[Any] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """The outputs of a BayesianDetectorModel, from a `folder` or of a `config` with a `state`, for each call.

    `information` goes to the config's `set_detector_information`; `save` names a folder to save it in.
    """
    if folder is not None:
        model = transformers.BayesianDetectorModel.from_pretrained(folder)
    else:
        made = transformers.BayesianDetectorConfig(**(config or {}))
        if information is not None:
            made.set_detector_information(*information)
        model = transformers.BayesianDetectorModel(made)
        model.load_state_dict(dict(state or {}))
    if save is not None:
        model.save_pretrained(save)
    known = ("watermarking_depth", "base_rate", "model_name", "watermarking_config")
    outputs = [tuple(model(**{"return_dict": False, **one})) for one in calls]
    return {"outputs": outputs, "config": {name: getattr(model.config, name) for name in known}}


@torch.no_grad()
def synthid(
    *,
    arguments: Mapping[str, Any],
    questions: Sequence[tuple[str, Mapping[str, Any]]] = (),
    texts: torch.Tensor | None = None,
    end: int | None = None,
) -> dict[str, Any]:
    """What a SynthID processor's methods answer, and what its detector would ask a module about `texts`."""
    processor = transformers.SynthIDTextWatermarkLogitsProcessor(**arguments)
    answers = [getattr(processor, name)(**given) for name, given in questions]
    asked = None
    if texts is not None:
        tokenizer = types.SimpleNamespace(eos_token_id=end)
        detector = transformers.SynthIDTextWatermarkDetector(
            lambda g_values, mask: (g_values, mask), processor, tokenizer
        )
        asked = detector(texts)
    return {"answers": answers, "table": processor.sampling_table, "asked": asked}


def marking(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`, with the settings of a watermark as the object that its names tell of."""
    given = arguments.get("watermarking_config")
    if given is None:
        return dict(arguments)
    kind = (
        transformers.SynthIDTextWatermarkingConfig
        if "ngram_len" in given
        else transformers.WatermarkingConfig
    )
    return {**arguments, "watermarking_config": kind(**given)}


@torch.no_grad()
def green_detector(
    *,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]],
    **options: Any,
) -> list[dict[str, list[float]]]:
    """The output of a WatermarkDetector of a model's `config` for each call's ids, by field."""
    model = transformers.PretrainedConfig(**config)
    detector = transformers.WatermarkDetector(model, "cpu", dict(settings), **options)
    said = [detector(**one, return_dict=True) for one in calls]
    return [{name: value.tolist() for name, value in vars(one).items()} for one in said]


OPERATIONS = (bayesian, green_detector, synthid)  # what requests may name
