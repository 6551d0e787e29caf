"""Models that share a vocabulary, and a reference that reads everything again for every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

import descant
from descant import ContrastiveDecoding, DExperts, GenerationConfig, ProxyTuning
from tests.support import tiny_models
from tests.support.tiny_models import pad

VOCAB, BOS, EOS, PAD = 97, 1, 2, 0
Formula = Callable[..., Tensor]

_MAMBA = {
    "model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
    "time_step_rank": 4, "use_mambapy": False, "tie_word_embeddings": False,
}  # fmt: skip


def arch(name: str, seed: int) -> tiny_models.Architecture:
    """A tiny architecture with the one vocabulary and the one set of special tokens of these tests."""
    if name == "mamba":
        return tiny_models.Architecture(name, _MAMBA, bos=BOS, eos=EOS, pad=PAD, seed=seed)
    known = tiny_models.ARCHITECTURES[name]
    start = EOS if known.encoder_decoder else None
    config = {**known.config, "vocab_size": VOCAB}
    return replace(known, config=config, bos=BOS, eos=EOS, pad=PAD, start=start, seed=seed)


@cache
def made(name: str, seed: int = 0, **options: Any) -> Any:
    """A tiny model; another seed is another model of the same kind."""
    own = arch(name, seed)
    tokens = {"bos_token_id": own.bos, "eos_token_id": own.eos, "pad_token_id": own.pad}
    if own.start is not None:
        tokens["decoder_start_token_id"] = own.start
    config = {key: value for key, value in own.config.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(own.config["model_type"], **config, **tokens)
    auto = transformers.AutoModelForSeq2SeqLM if own.start is not None else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32, **options)
    tiny_models._draw(model, own)
    return model.eval()


def requests(name: str, configs: Sequence[GenerationConfig], seed: int = 0) -> list[descant.Request]:
    """One request a config, of ragged length, for a model of that kind."""
    own = arch(name, 0)
    texts = tiny_models.prompts(own, [(5, 9, 1, 6)[at % 4] for at in range(len(configs))], seed)
    if own.start is not None:
        return [
            descant.Request([own.start], config, {"input_ids": torch.tensor(text)})
            for config, text in zip(configs, texts, strict=True)
        ]
    return [descant.Request(text, config) for config, text in zip(configs, texts, strict=True)]


# ------------------------------------------------------------------------ the reference
def contrasted(alpha: float = 0.1, beta: float | None = None, tau: float = 1.0) -> Formula:
    """Contrastive decoding as the papers write it, in probabilities and double precision."""

    def formula(expert: Tensor, amateur: Tensor) -> Tensor:
        likely, plain = expert.double().softmax(-1), (amateur.double() / tau).softmax(-1)
        score = (likely / plain).log()
        if beta is not None:
            score = (1 + beta) * expert.double() - beta * amateur.double() / tau
        return torch.where(likely >= alpha * likely.max(), score, -math.inf)

    return formula


def shifted(alpha: float) -> Formula:
    return lambda base, up, down: base.double() + alpha * up.double() - alpha * down.double()


@torch.no_grad()
def logits_of(models: Sequence[Any], sequence: Sequence[int], source: Tensor | None) -> list[Tensor]:
    """The logits of each model after a sequence [V], without a cache."""
    ids = torch.tensor([sequence])
    given = {"input_ids": ids} if source is None else {"input_ids": source[None], "decoder_input_ids": ids}
    return [model(**given, use_cache=False).logits[0, -1] for model in models]


def reference(
    models: Sequence[Any],
    formula: Formula,
    prompt: Sequence[int],
    count: int,
    *,
    source: Tensor | None = None,
    processors: Sequence[Any] = (),
    eos: int = EOS,
) -> list[int]:
    """The new tokens of greedy search over a formula of several models' logits."""
    sequence = list(prompt)
    while len(sequence) < len(prompt) + count:
        scores = formula(*logits_of(models, sequence, source)).float()[None]
        for processor in processors:
            scores = processor(torch.tensor([sequence]), scores)
        sequence.append(int(scores.argmax()))
        if sequence[-1] == eos:
            break
    return sequence[len(prompt) :]


def new_tokens(model: Any, texts: Sequence[Sequence[int]], kind: str, **options: Any) -> list[list[int]]:
    """What generate() adds to a ragged batch, end token included, padding not."""
    encodes = arch(kind, 0).encoder_decoder
    ids, mask = pad(texts, PAD, "right" if encodes else "left")
    whole = descant.generate(model, input_ids=ids, attention_mask=mask, **options)
    lines = whole[:, 1:].tolist() if encodes else whole[:, ids.shape[1] :].tolist()
    return [line[: line.index(EOS) + 1] if EOS in line else line for line in lines]


CASES: dict[str, tuple[str, Callable[..., Any], Formula, tuple[Any, ...]]] = {
    "contrastive": (
        "llama", ContrastiveDecoding, contrasted(), (("llama", 0), ("llama", 3)),
    ),
    "contrastive-wide": (
        "llama", lambda *m: ContrastiveDecoding(*m, alpha=0.01, amateur_temperature=0.5),
        contrasted(0.01, tau=0.5), (("llama", 0), ("gpt2", 1)),
    ),
    "contrastive-beta": (
        "gpt2", lambda *m: ContrastiveDecoding(*m, beta=0.5), contrasted(0.1, 0.5),
        (("gpt2", 1), ("llama", 0)),
    ),
    "contrastive-windowed": (
        "mistral", lambda *m: ContrastiveDecoding(*m, 0.0, 1.0), contrasted(0.0, 1.0),
        (("mistral", 0), ("llama", 3)),
    ),
    "contrastive-recurrent": (
        "llama", ContrastiveDecoding, contrasted(), (("llama", 0), ("mamba", 4)),
    ),
    "contrastive-of-a-recurrent": (
        "mamba", ContrastiveDecoding, contrasted(), (("mamba", 4), ("gpt2", 1)),
    ),
    "proxy": (
        "llama", ProxyTuning, shifted(1.0), (("llama", 0), ("llama", 3), ("llama", 5)),
    ),
    "proxy-mixed": (
        "llama", lambda *m: ProxyTuning(*m, alpha=0.4), shifted(0.4),
        (("llama", 0), ("gpt2", 1), ("mamba", 4)),
    ),
    "dexperts": (
        "gpt2", DExperts, shifted(2.0), (("gpt2", 1), ("llama", 0), ("llama", 3)),
    ),
    "encoders": (
        "t5", ContrastiveDecoding, contrasted(), (("t5", 1), ("t5", 2)),
    ),
    "encoders-mixed": (
        "t5", lambda *m: ProxyTuning(*m, alpha=0.5), shifted(0.5), (("t5", 1), ("bart", 1), ("bart", 2)),
    ),
}  # fmt: skip


def case(name: str) -> tuple[str, Any, Formula, list[Any]]:
    kind, build, formula, which = CASES[name]
    models = [made(*one) for one in which]
    return kind, build(*models), formula, models
