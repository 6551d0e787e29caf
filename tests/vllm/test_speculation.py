"""Under speculative decoding vLLM runs no logits processors: Descant's fields are refused, not ignored."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import build_logitsprocs

from descant.engine.vllm.logits_processor import DescantLogitsProcessor

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def drafting(engines):
    """The engine with a drafter, after the one without: see conftest.py."""
    engines()
    return engines(speculative_config=NGRAM)


def test_a_request_with_fields_is_refused(raises_for, drafting):
    message = raises_for(SamplingParams(extra_args={"descant": {"top_h": 0.5}}), speculative_config=NGRAM)
    assert "speculative" in message
    assert "`speculative_config`" in message


def test_a_request_without_fields_is_served(engines, drafting):
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": [7, 8, 9, 7, 8, 9, 7, 8]}]
    tokens, expected = (
        [list(one.outputs[0].token_ids) for one in llm.generate(prompts, [params], use_tqdm=False)]
        for llm in (drafting, engines())
    )
    assert tokens == expected


def test_the_class_is_refused(drafting):
    """By vLLM, where an engine names it, and by its constructor."""
    config, device = drafting.llm_engine.vllm_config, torch.device("cpu")
    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(config, device, False, False, [DescantLogitsProcessor])
    with pytest.raises(ValueError, match="speculative_config"):
        DescantLogitsProcessor(config, device)
