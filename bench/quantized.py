"""`python -m bench.quantized`: memory, perplexity and time of quantised caches.

A text is prefilled and then fed in small steps, as in decoding; each token is scored with the cache.
"x smaller" is the size of a dense cache after a prompt of `--long` tokens / the size of this one. "change" is
the change of the perplexity against the dense cache. "x time" is the CPU time of the steps / that of the
dense cache in the same run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.prompts import PROMPTS
from bench.scenarios import load_model
from descant.core.interfaces import KVCache, KVSpan
from descant.errors import MissingExtra
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.quantized import QuantizedStore
from descant.kv_cache.stores.quantizers import HQQ, Quantizer, Quanto
from descant.models.forward.encoder import SelfAttentionView

__all__ = ["main"]

# Written for this project: not in any training data.
TEXT = "\n\n".join(one.text for one in PROMPTS if one.kind in ("edit", "summarise"))
DENSE = "dense"
QUANTIZERS: Mapping[str, Callable[[], Quantizer] | None] = {
    DENSE: None,
    **{f"quanto {bits}": partial(Quanto, bits) for bits in (4, 2)},
    # As in the paper: keys in groups over positions, values in groups over channels.
    **{f"quanto {bits}, keys -1": partial(Quanto, bits, axis_key=-1) for bits in (4, 2)},
    **{f"hqq {bits}": partial(HQQ, bits, axis_key=1, axis_value=1) for bits in (8, 4, 3, 2, 1)},
    **{f"hqq {bits}, keys 0": partial(HQQ, bits, axis_key=0, axis_value=1) for bits in (4, 2)},
}
_COLUMNS = (
    ("cache", 18),
    ("bytes", 11),
    ("x smaller", 10),
    ("perplexity", 11),
    ("change", 12),
    ("x time", 7),
)


@dataclass(frozen=True)
class Measurement:
    """Memory, loss and time of one cache."""

    nbytes: int  # after the long prompt
    loss: float  # mean over the fed tokens, in nats
    seconds: float  # for feeding them

    def line(self, name: str, dense: Measurement) -> str:
        """Its row of the table."""
        change = math.exp(self.loss - dense.loss) - 1
        cells = [
            name,
            f"{self.nbytes:,}",
            f"{dense.nbytes / self.nbytes:.2f}",
            f"{math.exp(self.loss):.3f}",
            f"{change:+.2%}",
            f"{self.seconds / dense.seconds:.2f}",
        ]
        return _row(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each cache; the exit status of the process."""
    options = _options(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = load_model(options.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    text = list(tokenizer(TEXT)["input_ids"])
    need = options.prompt + options.fed + 1
    if len(text) < need:
        raise SystemExit(
            f"the text has {len(text)} tokens, of which {need} are needed: lower --prompt or --fed"
        )
    print(
        f"{options.model.name}, a prompt of {options.prompt} tokens and {options.fed} more, {options.step} "
        f"at a time, residual {options.residual}; bytes after a prompt of {options.long}"
    )
    print(_row([name for name, _ in _COLUMNS]))
    dense = _measure(model, DENSE, torch.tensor(text), options)
    print(dense.line(DENSE, dense), flush=True)
    for name in options.way or list(QUANTIZERS)[1:]:
        try:
            print(_measure(model, name, torch.tensor(text), options).line(name, dense), flush=True)
        except MissingExtra as error:
            print(f"{name}: {error}")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="a model's folder")
    parser.add_argument(
        "--way", action="append", choices=list(QUANTIZERS)[1:], help="only this cache; may be repeated"
    )
    parser.add_argument("--prompt", type=int, default=256, help="prefilled tokens")
    parser.add_argument("--fed", type=int, default=256, help="tokens fed and scored after them")
    parser.add_argument("--step", type=int, default=4, help="tokens per step")
    parser.add_argument("--long", type=int, default=1024, help="length of the prompt for the size")
    parser.add_argument("--residual", type=int, default=128, help="positions that are not quantised")
    return parser.parse_args(argv)


@torch.no_grad()
def _measure(model: Any, name: str, text: Tensor, options: argparse.Namespace) -> Measurement:
    """Feed the text through a cache, and measure the size after the long prompt."""
    cache = _cache(name, options)
    logits = _feed(model, cache, text[: options.prompt])
    losses, last = [], logits[-1:]
    stop = options.prompt + options.fed
    began = time.process_time()
    for start in range(options.prompt, stop, options.step):
        tokens = text[start : min(start + options.step, stop)]
        logits = torch.cat((last, _feed(model, cache, tokens)))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1].double(), tokens, reduction="none"))
        last = logits[-1:]
    seconds = time.process_time() - began
    large = _cache(name, options)
    _feed(model, large, text.repeat(-(-options.long // len(text)))[: options.long])
    return Measurement(large.nbytes, float(torch.cat(losses).mean()), seconds)


def _cache(name: str, options: argparse.Namespace) -> KVCache:
    """A cache with an empty row."""
    quantizer = QUANTIZERS[name]
    cache: KVCache = DenseStore() if quantizer is None else QuantizedStore(quantizer(), options.residual)
    cache.extend(1)
    return cache


def _feed(model: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    """The logits [T, V] after each of some tokens, which are appended to the only row of the cache."""
    start, width = int(cache.lengths[0]), len(tokens)
    view = SelfAttentionView(cache, KVSpan(None, start, width, start + width))
    logits: Tensor = model(input_ids=tokens[None], past_key_values=view, use_cache=True).logits[0]
    cache.commit(None, torch.tensor([start + width]))
    return logits


def _row(cells: Sequence[str]) -> str:
    (_, first), *rest = _COLUMNS
    return f"{cells[0]:{first}}" + "".join(
        f"{cell:>{size}}" for cell, (_, size) in zip(cells[1:], rest, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
