"""The script of each of two torchrun processes with a part of a tiny Llama: results as JSON.

`torchrun --nproc-per-node 2 launched.py <folder of the model> <folder for the answers>`
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import descant
from descant.models.distributed import all_ranks_or_none

RANK = int(os.environ.get("RANK", "0"))
PROMPTS = [[11, 12], [21, 22, 23, 24], [31, 32, 33]]
LOOPED = [[11, 12, 11, 12, 11], [21, 22, 21]]
LEVEL = [[11, 12, 13, 14], [21, 22, 23, 24]]
Answer = dict[str, Any]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Ragged rows as a left-padded batch."""
    wide = max(map(len, rows))
    ids = torch.tensor([[0] * (wide - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def outcome_of(run: Callable[[], Any]) -> Answer:
    """What came of a call: its tokens, or the name of its error."""
    torch.manual_seed(100 + RANK)  # other chance on every rank
    try:
        return {"tokens": run()}
    except Exception as error:
        return {"error": type(error).__name__, "rank": getattr(error, "rank", None)}


def tokens(model: Any, rows: list[list[int]] = PROMPTS, **how: Any) -> Answer:
    given = {"max_new_tokens": 8, "eos_token_id": None, **padded(rows), **how}
    return outcome_of(lambda: descant.generate(model, **given).tolist())


def verdict(limit: int) -> Callable[..., bool]:
    return lambda input_ids, scores, **_: bool(input_ids.shape[1] >= limit)


class Failing:
    """A processor, criterion or streamer that fails at its n-th call, on one rank."""

    def __init__(self, rank: int, call: int) -> None:
        self.left = call if rank == RANK else -1

    def __call__(self, input_ids: Any = None, scores: Any = None, **_: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError("as planned")
        return False if scores is None else scores

    def put(self, value: Any) -> None:
        self()

    def end(self) -> None:
        self()


def streamed(model: Any, until: int | None) -> Answer:
    """The tokens of a stream that is closed after so many events."""
    seen: list[int] = []

    def run() -> list[int]:
        with descant.stream(model, max_new_tokens=6, eos_token_id=None, **padded([PROMPTS[0]])) as events:
            for event in events:
                seen.extend(event.token_ids)
                if len(seen) == until:
                    break
        return seen

    return outcome_of(run)


def scored(model: Any) -> Answer:
    """The scores that a call with chance in its processors saw, as a number that tells them apart."""
    how = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": True, "xtc_probability": 0.5}
    how |= {"xtc_threshold": 0.02, "return_dict_in_generate": True, "output_scores": True}

    def run() -> list[float]:
        scores = descant.generate(model, **how, **padded(PROMPTS)).scores
        return [float(one[one.isfinite()].double().sum()) for one in scores]

    return outcome_of(run)


def nested(model: Any, failing: Failing) -> Answer:
    """A call inside a block that no rank leaves alone, as calls inside calls are."""

    def run() -> Any:
        with all_ranks_or_none(model):
            given = {**padded(PROMPTS), "max_new_tokens": 8, "eos_token_id": None}
            return descant.generate(model, **given, logits_processor=[failing]).tolist()

    return outcome_of(run)


def draft(size: int) -> Any:
    """A small model that drafts, the same on every rank."""
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(config).eval()


def alike(model: Any) -> dict[str, Answer]:
    """Calls that every rank makes alike."""
    half = model.dtype != torch.float32
    return {
        "greedy": tokens(model),
        "beams": tokens(model, [LEVEL[0]], num_beams=3),
        "ragged beams": tokens(model, num_beams=3),
        "seeded": tokens(model, do_sample=True, seed=5),
        "by chance": tokens(model, do_sample=True),
        "looked up": tokens(model, LOOPED, prompt_lookup_num_tokens=3),
        "looked up, seeded": tokens(model, suffix_lookup_num_tokens=3, do_sample=True, seed=7),
        "guessed": tokens(
            model, assistant_model=draft(model.config.vocab_size), num_assistant_tokens=3, do_sample=True
        ),
        "beams by chance": tokens(model, do_sample=True, num_beams=2),
        "many by chance": tokens(
            model, [LEVEL[0]], do_sample=True, num_return_sequences=150, max_new_tokens=3
        ),
    } | ({} if half else {"scores": scored(model)})


def apart(model: Any) -> dict[str, Answer]:
    """Calls in which the ranks disagree or one of them fails; after each, a call that must still work."""
    here = [verdict(6), verdict(8)][RANK]
    late = [0.0001, 1000.0]
    calls: dict[str, Callable[[], Answer]] = {
        "other seeds": lambda: tokens(model, do_sample=True, seed=RANK),
        "other verdicts": lambda: tokens(model, LEVEL, stopping_criteria=[here]),
        "verdict of the first": lambda: tokens(model, LEVEL, stopping_criteria=[verdict(6)] * (RANK == 0)),
        "verdict of the second": lambda: tokens(model, LEVEL, stopping_criteria=[verdict(6)] * (RANK == 1)),
        "time of the first": lambda: tokens(model, LEVEL, max_time=late[RANK]),
        "time of the second": lambda: tokens(model, LEVEL, max_time=late[1 - RANK]),
        "beams end by verdict": lambda: tokens(model, LEVEL, num_beams=2, stopping_criteria=[here]),
        "processor fails": lambda: tokens(model, logits_processor=[Failing(1, 3)]),
        "processor fails first": lambda: tokens(model, logits_processor=[Failing(0, 3)]),
        "criterion fails": lambda: tokens(model, stopping_criteria=[Failing(1, 2)]),
        "streamer fails": lambda: tokens(model, streamer=Failing(1, 3) if RANK == 1 else None),
        "streamer fails at the end": lambda: tokens(model, streamer=Failing(0, 10) if RANK == 0 else None),
        "call inside a call fails": lambda: nested(model, Failing(1, 3)),
        "config is wrong": lambda: tokens(model, max_new_tokens=[8, -1][RANK]),
        "prompts differ": lambda: tokens(model, [[11 + RANK, 12]]),
        "lengths differ": lambda: tokens(model, max_new_tokens=8 + RANK),
        "stream": lambda: streamed(model, None),
        "stream closed": lambda: streamed(model, 3),
        "stream closed by one": lambda: streamed(model, [None, 3][RANK]),
    }
    answers = {}
    for name, call in calls.items():
        answers[name] = call()
        answers[f"after: {name}"] = tokens(model, [LEVEL[0]], max_new_tokens=3)
    return answers


def paced(model: Any) -> dict[str, Answer]:
    """Calls in which every rank has prompts of its own and ends when it likes."""
    mine = [PROMPTS, LEVEL][RANK]
    calls: dict[str, dict[str, Any]] = {
        "greedy": {"max_new_tokens": [4, 9][RANK]},
        "the other way": {"max_new_tokens": [9, 4][RANK], "num_beams": 2},
        "asked for": {"max_new_tokens": [4, 9][RANK], "synced_gpus": True},
        "one fails": {"max_new_tokens": [6, -1][RANK]},
        "one fails later": {"logits_processor": [Failing(0, 2)]},
    }
    answers = {}
    for name, how in calls.items():
        answers[name] = tokens(model, mine, **how)
        dist.barrier()  # a rank that came here too early must not find company in the next call
    return answers


def main(folder: str, answers: Path) -> None:
    torch.set_num_threads(1)
    # A rank that waits for ever must fail the test and not hold it up.
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))

    def load(dtype: torch.dtype = torch.float32, **axes: int) -> Any:
        how = DistributedConfig(**axes)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, distributed_config=how
        ).eval()

    cut = load(tp_size=2)
    found = {"tensor": alike(cut), "apart": apart(cut)}
    found["half"] = alike(load(torch.bfloat16, tp_size=2))
    found["pipeline"] = alike(load(pp_size=2))
    found["sharded"] = paced(load(fsdp_size=2))
    # The wrapper that came before, whose root gathers its own weights.
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy, cpu = ModuleWrapPolicy({LlamaDecoderLayer}), torch.device("cpu")
    found["wrapped"] = paced(FullyShardedDataParallel(whole, auto_wrap_policy=policy, device_id=cpu))
    (answers / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
