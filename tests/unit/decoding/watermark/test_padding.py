"""Padding is no text: detectors do not score it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import descant
from descant.decoding.watermark.statistics import PaddingTokens

PAD, END, BEGIN, SIZE = 0, 2, 1, 211
CONFIG = SimpleNamespace(vocab_size=SIZE, pad_token_id=PAD, eos_token_id=END, bos_token_id=BEGIN)
NO_PAD = SimpleNamespace(vocab_size=SIZE, pad_token_id=None, eos_token_id=END, bos_token_id=None)
TEXT = [7, 9, 30, 7, 55, 120, 99, 8, 7, 9, 44, 31]


@pytest.mark.parametrize(
    ("config", "row", "span"),
    [
        (CONFIG, [PAD, PAD, 5, 6, PAD], (2, 4)), (CONFIG, [5, 6], (0, 2)), (CONFIG, [PAD, PAD], (0, 0)),
        (CONFIG, [5, END, PAD], (0, 2)), (CONFIG, [5, PAD, 6], (0, 3)),
        (NO_PAD, [END, END, 5, END, END], (2, 4)), (NO_PAD, [5, 6], (0, 2)),
        (SimpleNamespace(), [0, 0], (0, 2)),
        (SimpleNamespace(eos_token_id=[3, 4]), [5, 4, 3], (0, 2)),
    ],
)  # fmt: skip
def test_where_the_text_is(config, row, span):
    assert PaddingTokens.of(config).text_span(np.array(row)) == span


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize("config", [CONFIG, NO_PAD])
def test_the_documented_detector_gives_a_padded_text_its_own_score(config, scheme):
    settings = descant.WatermarkingConfig(hashing_key=77, seeding_scheme=scheme, context_width=2)
    detector = descant.WatermarkDetector(config, "cpu", settings)
    alone = detector(torch.tensor([TEXT]), return_dict=True)
    pad = PAD if config is CONFIG else END
    rows = [[*TEXT, *[pad] * 8], [*[pad] * 8, *TEXT], [*[pad] * 3, *TEXT, *[pad] * 5]]
    if config is NO_PAD:  # the first end token of a run ends the text
        rows = rows[1:2]
    padded = detector(torch.tensor(rows), return_dict=True)
    for name in ("num_tokens_scored", "num_green_tokens", "z_score", "p_value", "prediction"):
        assert set(getattr(padded, name).tolist()) == set(getattr(alone, name).tolist()), name


def test_a_row_of_padding_has_no_score():
    detector = descant.WatermarkDetector(CONFIG, "cpu", descant.WatermarkingConfig(hashing_key=77))
    out = detector(torch.tensor([TEXT, [PAD] * 11 + [5]]), return_dict=True)
    assert out.num_tokens_scored.tolist() == [11, 0]
    assert out.prediction.tolist()[1] is False
    assert np.isnan(out.z_score[1])
    assert out.p_value[1] == 1.0


@pytest.mark.parametrize("pad", [PAD, END])
def test_synthid_scores_no_padding(pad):
    settings = descant.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6, 7])
    processor = settings.construct_processor(SIZE, "cpu")
    tokenizer = SimpleNamespace(eos_token_id=END, pad_token_id=pad)
    masks = []

    def module(g_values, mask):
        masks.append((g_values, mask))

    detector = descant.SynthIDTextWatermarkDetector(module, processor, tokenizer)
    detector(torch.tensor([TEXT]))
    detector(torch.tensor([[*[pad] * 4, *TEXT, *[pad] * 5]]))
    (values, mask), (padded_values, padded_mask) = masks
    assert padded_values[padded_mask].tolist() == values[mask].tolist()
    assert int(mask.sum()) == len(TEXT) - 3, "two tokens without a context, and one repeated context"


def test_the_detector_of_ids_counts_no_padding_on_the_right():
    settings = descant.WatermarkingConfig(hashing_key=77)
    detector = descant.Detector(settings, CONFIG)
    plain, padded = detector.ids(TEXT), detector.ids([*TEXT, *[PAD] * 9])
    assert (padded.tokens, padded.scored, padded.z) == (plain.tokens, plain.scored, plain.z)


def test_update_and_construct_processor_of_settings():
    ids, scores = torch.tensor([[5, 6, 7]]), torch.zeros(1, SIZE)
    green = descant.WatermarkingConfig(hashing_key=77)
    detector = descant.WatermarkDetector(CONFIG, "cpu", green)
    assert green.update(bias=3.5, context_width=2) is None
    assert (green.bias, green.context_width, detector.settings.bias) == (3.5, 2, 2.0)
    marked = green.construct_processor(SIZE, "cpu")(ids, scores)
    wanted = descant.WatermarkLogitsProcessor(SIZE, "cpu", bias=3.5, hashing_key=77, context_width=2)(
        ids, scores
    )
    assert torch.equal(marked, wanted)
    with pytest.raises(descant.ConfigError, match="greenlist_ratio"):
        green.update(greenlist_ratio=2.0)
    with pytest.raises(descant.ConfigError, match="alien"):
        green.update(alien=1)
    assert green.to_dict()["greenlist_ratio"] == 0.25
    synth = descant.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6])
    synth.update(keys=[8, 9, 10])
    processor = synth.construct_processor(vocab_size=SIZE, device="cpu")
    assert isinstance(processor, descant.SynthIDTextWatermarkLogitsProcessor)
    assert processor.watermark == synth
    assert processor.watermark is not synth
    assert isinstance(
        descant.GumbelWatermarkingConfig(key=3).construct_processor(SIZE),
        descant.GumbelWatermarkLogitsProcessor,
    )
