"""Bayesian detector of the SynthID watermark: the posterior that a text is watermarked, from its g-values."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.generic import ModelOutput

from descant.config.fields import RedactedMap
from descant.core.atomic_file import write_files, write_text
from descant.errors import InputError, first_line
from descant.models.loading.loading import silence_transformers
from descant.models.loading.weight_files import WeightFiles

_INITIAL_BETA: Final = -2.5  # initial `beta`: few tournament rounds are between two different tokens
_PROBABILITY_EPS: Final = 1e-5  # priors and posteriors in a loss are clamped to [eps, 1 - eps]


class BayesianDetectorConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Config of a Bayesian detector: depth, prior, and the model and key it was trained for.

    `key_fingerprint` identifies the key if `watermarking_config`, which holds it, is not stored. `threshold`
    is the posterior that 1 % of unwatermarked texts exceed. `validation_metrics` are the validation results.
    """

    def __init__(self, watermarking_depth: int | None = None, base_rate: float = 0.5, **kwargs: Any) -> None:
        self.watermarking_depth = watermarking_depth
        self.base_rate = base_rate
        self.model_name: str | None = None
        self.watermarking_config: dict[str, Any] | None = None
        self.key_fingerprint: str | None = None
        self.threshold: float | None = None
        self.validation_metrics: dict[str, Any] | None = None
        super().__init__(**kwargs)

    def set_detector_information(self, model_name: str | None, watermarking_config: Any) -> None:
        """Set the model name and the watermark settings (an object or a dict); keys are saved with them."""
        self.model_name = model_name
        if watermarking_config is not None and not isinstance(watermarking_config, Mapping):
            watermarking_config = watermarking_config.to_dict()
        self.watermarking_config = watermarking_config

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the config to a file, whole or not at all; one with keys is only its owner's."""
        text = self.to_json_string(use_diff=use_diff)
        write_text(json_file_path, text, private=self.watermarking_config is not None)

    def __repr__(self) -> str:
        # A config is logged with its model; the keys must not be.
        shown = self.to_diff_dict()
        if isinstance(self.watermarking_config, Mapping):
            shown["watermarking_config"] = RedactedMap(self.watermarking_config).without_secrets()
        return f"{type(self).__name__} {json.dumps(shown, indent=2, sort_keys=True, default=str)}\n"


@dataclass
class BayesianWatermarkDetectorModelOutput(ModelOutput):
    """The posteriors [B] that texts are watermarked, and the loss if labels were given."""

    loss: Tensor | None = None
    posterior_probabilities: Tensor | None = None


class _WatermarkedLikelihood(nn.Module):
    """Probability that a tournament round is between two different tokens, given the earlier g-values."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.full((1, 1, depth), _INITIAL_BETA))
        self.delta = nn.Parameter(
            torch.zeros(1, 1, depth, depth)
        )  # weight of an earlier round (column) on a round (row)

    def forward(self, g_values: Tensor) -> Tensor:
        """Probabilities [..., D] for g-values [..., D]."""
        earlier = self.delta[0, 0].tril(-1).to(g_values.dtype)
        return torch.sigmoid(F.linear(g_values, earlier, self.beta[0, 0].to(g_values.dtype)))


class BayesianDetectorModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The posterior that a text is watermarked, given its g-values (Dathathri et al. 2024, Nature 634).

    In unwatermarked text g-values are 0 or 1 with equal probability. In watermarked text the winner's g-value
    is 1 with probability 3/4 if the round is between two different tokens, and 1/2 otherwise. The probability
    of different tokens is learned per round, from the g-values of earlier rounds.
    """

    config_class = BayesianDetectorConfig
    base_model_prefix = "model"

    def __init__(self, config: BayesianDetectorConfig) -> None:
        super().__init__(config)
        depth, rate = config.watermarking_depth, config.base_rate
        if type(depth) is not int or depth < 1:
            raise InputError(
                "watermarking_depth", "must be an integer >= 1", depth, "set it to the number of keys"
            )
        if not 0.0 < rate < 1.0:
            raise InputError("base_rate", "must be > 0 and < 1", rate)
        self.watermarking_depth, self.base_rate = depth, rate
        self.likelihood_model_watermarked = _WatermarkedLikelihood(depth)
        self.prior = nn.Parameter(torch.tensor([float(rate)]))
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Deterministic: a logistic regression has no symmetry to break, so no random generator is used.
        if isinstance(module, _WatermarkedLikelihood):
            initialization.constant_(module.beta, _INITIAL_BETA)
            initialization.zeros_(module.delta)
        elif module is self:
            initialization.constant_(self.prior, float(self.base_rate))

    def forward(
        self,
        g_values: Tensor,
        mask: Tensor,
        labels: Tensor | None = None,
        loss_batch_weight: float = 1,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...] | BayesianWatermarkDetectorModelOutput:
        """Posteriors [B] for g-values [B, L, D] of 0 or 1, at the positions where the mask [B, L] is 1.

        With `labels` [B] also the loss: cross entropy plus `loss_batch_weight` times the squares of `delta`.
        """
        posterior = torch.sigmoid(self.log_odds(g_values, mask))
        loss = None
        if labels is not None:
            entropy = F.binary_cross_entropy(
                posterior.clamp(_PROBABILITY_EPS, 1 - _PROBABILITY_EPS), labels.to(posterior.dtype)
            )
            loss = entropy + loss_batch_weight * self.likelihood_model_watermarked.delta.square().sum()
        if return_dict:
            return BayesianWatermarkDetectorModelOutput(loss=loss, posterior_probabilities=posterior)
        return (posterior,) if loss is None else (posterior, loss)

    def log_odds(self, g_values: Tensor, mask: Tensor) -> Tensor:
        """Logits of the posteriors [B], which still differ where the posteriors round to 1."""
        if g_values.ndim != 3 or g_values.shape[2] != self.watermarking_depth:
            must = f"must be [texts, tokens, {self.watermarking_depth}], one value per round"
            raise InputError("g_values", must, g_values)
        if mask.shape != g_values.shape[:2]:
            raise InputError("mask", f"must be {list(g_values.shape[:2])}, to match `g_values`", mask)
        values = g_values.to(torch.promote_types(self.prior.dtype, torch.float32))
        # Likelihood ratio to the 1/2 of unwatermarked text: 3/4 or 1/4 if the tokens differ, else 1/2.
        odds = torch.log1p((values - 0.5) * self.likelihood_model_watermarked(values))  # [B, L, D]
        prior = torch.logit(self.prior.to(values.dtype), eps=_PROBABILITY_EPS)
        return prior + (odds.sum(-1) * mask.to(values.dtype)).sum(-1)


def load_detector(folder: str | os.PathLike[str]) -> BayesianDetectorModel:
    """Load a trained detector from a folder."""
    must = "must be the folder of a trained Bayesian detector"
    name = os.fspath(folder)
    try:
        with silence_transformers():
            weights = WeightFiles.locate(name)
            with weights.limit_model_size():
                loaded: Any = BayesianDetectorModel.from_pretrained(
                    folder, output_loading_info=True, use_safetensors=True
                )
    except Exception as error:  # libraries raise many types for malformed files
        raise InputError("bayes", f"{must} ({first_line(error)})", name) from error
    model, info = loaded
    # transformers would initialise missing weights without an error.
    if missing := sorted(info["missing_keys"]):
        raise InputError("bayes", f"{must}, and lacks {', '.join(missing)}", name)
    if not all(bool(torch.isfinite(weight).all()) for weight in model.parameters()):
        raise InputError("bayes", f"{must}, and has weights that are not finite", name)
    detector: BayesianDetectorModel = model.eval()
    return detector


def save_detector(detector: BayesianDetectorModel, folder: str | os.PathLike[str]) -> None:
    """Save a detector to a folder, both files whole or not at all; one with keys is only its owner's."""
    config = copy.deepcopy(detector.config)
    config.architectures = [type(detector).__name__]
    config.dtype = str(detector.dtype).removeprefix("torch.")
    state = {name: weight.detach().cpu().contiguous() for name, weight in detector.state_dict().items()}
    os.makedirs(folder, exist_ok=True)
    contents = {
        SAFE_WEIGHTS_NAME: save(state, {"format": "pt"}),
        CONFIG_NAME: config.to_json_string(use_diff=True).encode("utf-8"),
    }
    write_files(folder, contents, private=config.watermarking_config is not None)
