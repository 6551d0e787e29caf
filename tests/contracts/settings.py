"""Settings under which windows of tokens are drawn: the model, the drafter, and the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

import descant.engine.request
from descant import GenerationConfig, Request
from descant.core.interfaces import DraftContext, Drafter, ModelTraits, NoiseSource, RowCache
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.engine.planning.drafter_factory import DrafterSpec
from descant.engine.request import CallPlace
from descant.kv_cache.stores.dense import DenseStore
from tests.support import tiny_models

VOCAB, EOS = 10, 9
PROMPT = (8, 3, 4, 6, 5, 2, 8, 3)
_ROOM = 32  # new tokens that rows may have: more than any gets


# ------------------------------------------------------------------------ models
class Pair:
    """Logits by the last two tokens [V, V, V] behind the Model port: nothing to cache, nothing to encode."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.traits = ModelTraits(
            is_encoder_decoder=False,
            supports_position_ids=True,
            supports_logits_to_keep=False,
            supports_inputs_embeds=False,
            vocab_size=logits.shape[-1],
            num_layers=0,
            attn_implementation="eager",
            sliding_windows={},
            max_positions=None,
            context_length=None,
        )

    network = None
    rank_group = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def new_cache(self) -> RowCache:
        return DenseStore()

    def set_output_states(self, states: Sequence[str]) -> None:
        pass

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        pass

    def remove_requests(self, requests: Sequence[int]) -> None:
        pass

    def forward(self, rows: Rows, proposal: Proposal, cache: RowCache) -> ForwardOutput:
        at = rows.length[:, None] + torch.tensor([-2, -1])
        tail = rows.tokens.gather(1, at.clamp(min=0))
        if proposal.drafts is not None:
            tail = torch.cat((tail, proposal.drafts), 1)
        return ForwardOutput(self.logits[tail[:, :-1], tail[:, 1:]])


def _table(seed: int, size: int = VOCAB) -> Tensor:
    return torch.randn(size, size, size, generator=torch.Generator().manual_seed(seed))


@cache
def pair() -> Pair:
    """The target of most settings."""
    return Pair(1.2 * _table(1))


@cache
def near() -> Pair:
    """Its draft model: much like it, and sure of other things."""
    return Pair(1.1 * _table(1) + 0.7 * _table(2))


@cache
def network(seed: int = 0, layers: int = 2) -> Any:
    """A tiny network of the same vocabulary; another seed is another network."""
    known = tiny_models.ARCHITECTURES["llama"]
    config = {
        **known.config,
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    config.pop("architectures")
    made = transformers.AutoConfig.for_model(
        config.pop("model_type"), **config, bos_token_id=1, eos_token_id=EOS, pad_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    plain = replace(known, seed=seed, eos=EOS, spread=1.5, eos_scale=1.0)
    tiny_models._draw(model, plain)
    model.generation_config.eos_token_id = None
    return model.eval()


@cache
def letters(other: bool = False) -> Any:
    """A tokenizer of letters; the other one counts them in another order, lacks some and joins some."""
    known = "abcdefghij"
    words = ["f", "j", "a", "c", "b", "e", "g", "h", "?", "ca", "ha"] if other else list(known)
    merges = [("c", "a"), ("h", "a")] if other else []
    unknown = "?" if other else None
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, merges, unk_token=unknown))
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


@cache
def stranger() -> Pair:
    """A draft model with the other tokenizer."""
    return Pair(_table(5, 11))


# ------------------------------------------------------------------------ drafters by script
class Script:
    """A scripted drafter, given in place of a draft model."""

    is_model_free = False
    noise: NoiseSource

    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        pass

    def remove_requests(self, requests: Sequence[int]) -> None:
        pass

    def commit(self, parents: Tensor, lengths: Tensor) -> None:
        pass

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        raise NotImplementedError


def _last(rows: Rows) -> Tensor:
    return rows.tokens.gather(1, rows.length[:, None] - 1)[:, 0]


class Certain(Script):
    """Always the same token after a token, as many as it may or fewer."""

    def __init__(self, follow: Sequence[int], ragged: bool = False) -> None:
        self.follow, self.ragged = torch.tensor(follow), ragged

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        n = torch.minimum(most, (rows.slot + rows.length) % 5) if self.ragged else most
        tokens, last = [], _last(rows)
        for _ in range(int(n.max())):
            last = self.follow[last]
            tokens.append(last)
        return Proposal(None, torch.stack(tokens, 1), n) if tokens else Proposal()


class Weighted(Script):
    """Draws from a distribution that depends on the last token [V, V]; the reported one may be wrong."""

    def __init__(self, law: Tensor, reported: Tensor | None = None) -> None:
        self.law, self.reported = law, law if reported is None else reported

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        tokens, laws, last = [], [], _last(rows)
        for ahead in range(int(most.max())):
            noise = self.noise.draw(rows.replace(length=rows.length + ahead), VOCAB)
            laws.append(self.reported[last])
            last = (self.law[last] / noise).argmax(-1)
            tokens.append(last)
        return Proposal(None, torch.stack(tokens, 1), most, torch.stack(laws, 1)) if tokens else Proposal()


class Knowing(Script):
    """Draws by the target's own law: it is right whenever that hangs on nothing but the tokens."""

    def draft(self, rows: Rows, most: Tensor, aid: DraftContext) -> Proposal:
        tokens, laws, grown = [], [], rows
        for _ in range(int(most.max())):
            law = aid.process(grown, pair().forward(grown, Proposal(), aid.cache).logits[:, 0]).softmax(-1)
            tokens.append((law / self.noise.draw(grown, VOCAB)).argmax(-1))
            laws.append(law)
            grown = grown.append(tokens[-1][:, None], grown.length + 1)
        return Proposal(None, torch.stack(tokens, 1), most, torch.stack(laws, 1)) if tokens else Proposal()


def _law(seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(VOCAB, VOCAB, generator=generator)).softmax(-1)


# What a last token is followed by most often, under the pair's law.
_USUAL = (9, 4, 5, 4, 6, 5, 5, 9, 3, 9)
SCRIPTS: dict[str, Script] = {
    "certain": Certain(_USUAL),
    "certain, ragged": Certain(_USUAL, ragged=True),
    "weighted": Weighted(_law(3)),
    "knowing": Knowing(),
    "rounding": Weighted(_law(3), reported=0.85 * _law(3) + 0.15 / VOCAB),
}


_drafted = descant.engine.request.drafter_spec


def _scripted(config: GenerationConfig, model: Any, given: Any) -> DrafterSpec | None:
    """The drafter of a request that brings a script, else the usual one."""
    script = given.model
    if not isinstance(script, Script):
        return _drafted(config, model, given)

    def build(noise: NoiseSource) -> Drafter:
        script.noise = noise
        return script

    values = {"draft_tokens": config.num_assistant_tokens, "draft_schedule": 0}
    return DrafterSpec(("script", id(script)), build, values)


@contextmanager
def scripts() -> Iterator[None]:
    """Requests may bring a script for a draft model."""
    with patch("descant.engine.request.drafter_spec", _scripted):
        yield


# ------------------------------------------------------------------------ settings
@dataclass(frozen=True)
class Setting:
    """How a window is drawn: fields of a config, the drafter and how many tokens."""

    fields: Mapping[str, Any]
    drafter: str
    tokens: int = 3
    processors: Sequence[Any] = ()
    prompt: Sequence[int] = PROMPT
    schedule: str = "constant"
    network: bool = False  # a real one and not the pair

    @property
    def model(self) -> Any:
        return network() if self.network else pair()

    @property
    def dear(self) -> bool:
        """Whether a draw costs much more than with others."""
        return self.network or self.drafter in ("suffix", "intersection")

    def request(self, drafts: bool = True) -> Request:
        """The setting as a request, with what drafts or without."""
        fields = {"max_new_tokens": _ROOM, "do_sample": True, "top_k": 0, **self.fields}
        given = DRAFTERS[self.drafter](self) if drafts and self.drafter != "none" else {}
        brought = {
            name: given.pop(name)
            for name in ("assistant_model", "tokenizer", "assistant_tokenizer")
            if name in given
        }
        config = GenerationConfig(**fields, **given)
        return Request(
            list(self.prompt),
            config,
            logits_processor=self.processors,
            _call=CallPlace(noise_row=0),
            **brought,
        )


def _draft_fields(setting: Setting, **others: Any) -> dict[str, Any]:
    """The fields of a setting for which a network drafts."""
    return {
        "num_assistant_tokens": setting.tokens,
        "num_assistant_tokens_schedule": setting.schedule,
        "assistant_confidence_threshold": 0.0,
        **others,
    }


DRAFTERS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "lookup": lambda one: {
        "prompt_lookup_num_tokens": one.tokens,
        "num_assistant_tokens_schedule": one.schedule,
    },
    "suffix": lambda one: {
        "suffix_lookup_num_tokens": one.tokens,
        "num_assistant_tokens_schedule": one.schedule,
    },
    "draft model": lambda one: _draft_fields(one, assistant_model=network(7, 1) if one.network else near()),
    "unsure": lambda one: _draft_fields(
        one, assistant_model=network(7, 1) if one.network else near(), assistant_confidence_threshold=0.3
    ),
    "early exit": lambda one: _draft_fields(one, assistant_early_exit=1),
    "intersection": lambda one: _draft_fields(
        one, assistant_model=stranger(), tokenizer=letters(), assistant_tokenizer=letters(True)
    ),
    **{
        name: lambda one, script=script: {"assistant_model": script, "num_assistant_tokens": one.tokens}
        for name, script in SCRIPTS.items()
    },
}
