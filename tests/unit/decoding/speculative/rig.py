"""Drafters run by hand: tiny models, tables, and schedules of row operations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from descant.core.context import RowParams, columns_from_rows
from descant.core.interfaces import DraftContext, Drafter
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.kv_cache.stores.dense import DenseStore
from tests.support import tiny_models
from tests.unit.decoding.guidance.pairs import arch

VOCAB, EOS = 97, 2

_GEMMA3 = {
    **tiny_models.ARCHITECTURES["llama"].config,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("sliding_attention", "full_attention")
    },
}
_GPT = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
_RWKV = {"model_type": "rwkv", "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
_GPTJ = {**_GPT, "model_type": "gptj", "rotary_dim": 4}  # its table of positions is computed, not learned
_OTHERS = {"gemma3": _GEMMA3, "openai-gpt": _GPT, "rwkv": _RWKV, "gptj": _GPTJ}


@cache
def network(name: str, seed: int = 0, vocab: int = VOCAB, layers: int | None = None) -> Any:
    """A tiny network; another seed is another network of the same kind."""
    if name in _OTHERS:
        own = tiny_models.Architecture(name, _OTHERS[name], bos=1, eos=EOS, pad=0, seed=seed)
    else:
        own = arch(name, seed)
    given = {**own.config, "vocab_size": vocab}
    if layers is not None:
        given["num_hidden_layers"] = layers
        given.pop("n_layer", None)
        if "layer_types" in given:
            given["layer_types"] = (given["layer_types"] * layers)[:layers]
    kind = given.pop("model_type")
    given.pop("architectures", None)
    start = {} if own.start is None else {"decoder_start_token_id": own.start}
    config = transformers.AutoConfig.for_model(
        kind, **given, bos_token_id=1, eos_token_id=EOS, pad_token_id=0, **start
    )
    auto = transformers.AutoModelForCausalLM if own.start is None else transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
    # Its end token is as likely as others: a row that says nothing else tells little.
    tiny_models._draw(model, replace(own, eos_scale=1.0, config={**own.config, "vocab_size": vocab}))
    return model.eval()


@torch.no_grad()
def logits_of(model: Any, sequence: Sequence[int], source: Tensor | None = None) -> Tensor:
    """What a network says after each token of a sequence, read as a whole and without a cache [L, V]."""
    ids = torch.tensor([list(sequence)])
    given = {"input_ids": ids} if source is None else {"input_ids": source[None], "decoder_input_ids": ids}
    if model.config.model_type != "openai-gpt":
        given["use_cache"] = False
    return model(**given).logits[0].float()


def greedy(model: Any, sequence: Sequence[int], count: int, source: Tensor | None = None) -> list[int]:
    """How a network goes on by itself."""
    whole = list(sequence)
    for _ in range(count):
        whole.append(int(logits_of(model, whole, source)[-1].argmax()))
    return whole[len(sequence) :]


@dataclass
class Line:
    """The expected state of a row."""

    tokens: list[int]
    request: int
    place: int = -1  # where it stood at the last draft
    cached: int = 0  # what the table's cache holds of it
    params: dict[str, Any] = field(default_factory=dict)


def rows_of(lines: Sequence[Line], vocab: int = VOCAB, offset: int = 0) -> Rows:
    """The lines as a table."""
    length = torch.tensor([len(line.tokens) for line in lines])
    tokens = torch.full((len(lines), int(length.max()) + 2), vocab - 1)
    for at, line in enumerate(lines):
        tokens[at, : len(line.tokens)] = torch.tensor(line.tokens)
    default = {
        "eos_token_ids": [],
        "do_sample": 0,
        "seed": -1,
        "noise_row": 0,
        "assistant_confidence_threshold": 0.0,
    }
    params = [{**default, "noise_row": at, **line.params} for at, line in enumerate(lines)]
    return Rows(
        tokens,
        length=length,
        cached_length=torch.tensor([line.cached for line in lines]),
        offset=torch.full_like(length, offset),
        prompt_length=length.clone(),
        request=torch.tensor([line.request for line in lines]),
        slot=torch.zeros_like(length),
        columns={"params": RowParams(columns_from_rows(params))},
    )


def plainly(_: Rows, logits: Tensor) -> Tensor:
    """No processor at all."""
    return logits


def draft(
    drafter: Drafter, lines: Sequence[Line], most: Sequence[int] | int, aid: DraftContext | None = None
) -> Proposal:
    """What a strategy does: commit, then draft; the lines know their places after it."""
    rows = rows_of(lines)
    most = [most] * len(lines) if isinstance(most, int) else most
    drafter.commit(torch.tensor([line.place for line in lines]), rows.length)
    for at, line in enumerate(lines):
        line.place = at
    return drafter.draft(rows, torch.tensor(most), aid or DraftContext(plainly, DenseStore()))


def tried(proposal: Proposal, count: int) -> list[list[int]]:
    """The drafts of each row."""
    if proposal.drafts is None:
        return [[] for _ in range(count)]
    assert proposal.num_drafts is not None
    assert proposal.width == int(proposal.num_drafts.max())
    return [line[:n] for line, n in zip(proposal.drafts.tolist(), proposal.num_drafts.tolist(), strict=True)]


def copied(found: Proposal, rows: Rows, most: Tensor) -> list[list[int]]:
    """The drafts of a lookup for each row, after checks of the proposal."""
    assert found.parents is None
    assert found.draft_probs is None
    if found.drafts is None:
        assert found == (None, None, None, None)
        return [[] for _ in range(len(rows))]
    assert found.num_drafts is not None
    assert found.drafts.shape == (len(rows), int(found.num_drafts.max()))
    assert found.drafts.dtype == rows.tokens.dtype
    assert (found.num_drafts <= most).all()
    return [line[:n].tolist() for line, n in zip(found.drafts, found.num_drafts.tolist(), strict=True)]


class Course:
    """Rows that keep some drafts and one more token, and then move, fork, leave and join at random."""

    def __init__(self, seed: int, longest: int = 9, vocab: int = VOCAB) -> None:
        self.rng = random.Random(seed)
        self.longest, self.vocab = longest, vocab
        self._requests = 0
        self.lines = [self.fresh() for _ in range(3)]

    def fresh(self) -> Line:
        self._requests += 1
        tokens = [self.rng.randrange(3, self.vocab) for _ in range(self.rng.randint(1, self.longest))]
        return Line(tokens, self._requests)

    def keep(self, drafts: Sequence[Sequence[int]]) -> list[int]:
        """Accept some drafts of each row, and add a token; how many stood."""
        stood = []
        for line, tokens in zip(self.lines, drafts, strict=True):
            accepted = self.rng.choice([0, len(tokens), self.rng.randint(0, len(tokens))])
            stood.append(accepted)
            line.tokens += [*tokens[:accepted], self.rng.randrange(3, self.vocab)]
        return stood

    def move(self) -> list[int]:
        """Now and then reorder, fork, drop and add rows; the old row that each goes on with, -1 for none."""
        parents = list(range(len(self.lines)))
        kind = self.rng.choice(["stay", "stay", "reorder", "fork", "leave", "join", "all"])
        if kind in ("reorder", "all"):
            self.rng.shuffle(parents)
        if kind in ("fork", "all"):
            parents.insert(self.rng.randint(0, len(parents)), self.rng.choice(parents))
        if kind in ("leave", "all") and len(parents) > 1:
            parents.pop(self.rng.randrange(len(parents)))
        if kind in ("join", "all") and len(parents) < 6:
            parents.insert(self.rng.randint(0, len(parents)), -1)
        self.lines = [
            self.fresh() if at < 0 else replace(self.lines[at], tokens=list(self.lines[at].tokens))
            for at in parents
        ]
        return parents
