"""The benchmark of the plug-in runs both sides, and leaves vLLM and Descant as they were."""

from __future__ import annotations

from bench import vllm_plugin
from descant.engine.vllm.logits_processor import DescantLogitsProcessor


def test_it_prints_times_and_parts(engines, capsys):
    apply = DescantLogitsProcessor.apply
    vllm_plugin.measure(engines(), [2], new=4, repeats=1)
    printed = capsys.readouterr().out
    for name in ("plug-in / vLLM, whole step", "TopPLogitsWarper", "RepetitionPenaltyLogitsProcessor"):
        assert name in printed
    assert DescantLogitsProcessor.apply is apply
