"""Texts that vLLM writes with a watermark are found by Descant's detectors as often as a session's texts.

The figures of sessions are those of bench/results/detection.json, at 50 and at 200 tokens. All 264 texts of
each scheme are one command: `.vllm/bin/python -m pytest -m slow -s tests/vllm/test_watermark.py`.
"""

from __future__ import annotations

import json
import math

import pytest
from vllm import SamplingParams

from bench.detection import prompts
from bench.detection.marks import marking_config
from bench.detection.texts import SAMPLED
from bench.detection.trial import score_ids
from tests.support import pretrained

MODEL, LENGTHS, LEVEL = "stories15m", (50, 200), 0.01
RESULTS = pretrained.ROOT / "bench" / "results" / "detection.json"


def texts(llm, mark, count):
    """The keys and new tokens of as many texts."""
    tokenizer = pretrained.tokenizer(MODEL)
    configs = [marking_config(mark, MODEL, SAMPLED, index) for index in range(count)]
    params = [
        SamplingParams(
            temperature=1.0,
            top_k=50,
            seed=index,
            max_tokens=LENGTHS[-1],
            ignore_eos=True,
            detokenize=False,
            extra_args={
                "descant": {
                    "watermarking_config": config.to_dict(),
                    "min_new_tokens": LENGTHS[-1],  # no end token, as in the texts of sessions
                }
            },
        )
        for index, config in enumerate(configs)
    ]
    inputs = [{"prompt_token_ids": prompts.story(tokenizer, index)} for index in range(count)]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [(config, list(one.outputs[0].token_ids)) for config, one in zip(configs, outputs, strict=True)]


def found(mark, written, vocab):
    """How many texts are found after 50 tokens and after 200, with their own key and with another."""
    hits, false = [0, 0], [0, 0]
    for index, (config, ids) in enumerate(written):
        other = marking_config(mark, MODEL, "another", index)
        for counts, key in ((hits, config), (false, other)):
            for at, score in enumerate(score_ids(key, vocab, ids, LENGTHS)):
                counts[at] += score.p <= LEVEL
    return hits, false


@pytest.mark.parametrize("count", [20, pytest.param(264, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mark", ["lefthash", "synthid", "gumbel", pytest.param("selfhash", marks=pytest.mark.slow)]
)
def test_detection_rate(engines, mark, count):
    llm = engines(MODEL, max_model_len=256, max_num_seqs=44, kv_cache_memory_bytes=512 << 20)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    hits, false = found(mark, texts(llm, mark, count), vocab)
    expected = json.loads(RESULTS.read_text())["true"][mark]["models"][MODEL]
    for name, number in (("short", hits[0]), ("p", hits[1])):
        rate, size = expected[name]["rate"], expected[name]["count"]
        together = (number + rate * size) / (count + size)
        sigma = math.sqrt(max(together * (1 - together), 0.25 / size) * (1 / count + 1 / size))
        print(f"{mark}, {name}: {number} of {count}, in sessions {expected[name]['hits']} of {size}")
        assert abs(number / count - rate) <= 3 * sigma
    assert max(false) <= 3 + 0.03 * count
