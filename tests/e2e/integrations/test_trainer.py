"""Trainers of transformers evaluate an attached model: the same metrics as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import Dataset

import descant
from descant.testing import toy
from tests.support.random_t5 import random_t5

PAD = 0


class Pairs(Dataset[dict[str, list[int]]]):
    """Sources and targets of random tokens, of different lengths."""

    def __init__(self, count: int, *, is_causal: bool) -> None:
        generator = np.random.default_rng(3)
        self._items = []
        for _ in range(count):
            source = generator.integers(3, 61, generator.integers(3, 9)).tolist()
            target = generator.integers(3, 61, generator.integers(3, 9)).tolist()
            labels = source if is_causal else target
            self._items.append({"input_ids": source, "attention_mask": [1] * len(source), "labels": labels})

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._items[index]


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch padded on the left; labels with -100."""
    batch: dict[str, torch.Tensor] = {}
    for name, pad in (("input_ids", PAD), ("attention_mask", 0), ("labels", -100)):
        rows = [item[name] for item in items]
        size = max(map(len, rows))
        batch[name] = torch.tensor([[pad] * (size - len(row)) + row for row in rows])
    return batch


def metrics(prediction: Any) -> dict[str, float]:
    """How many tokens a prediction has in common with its label."""
    pairs = zip(prediction.predictions, prediction.label_ids, strict=True)
    found = [len({*map(int, ids)} & {*map(int, labels)}) for ids, labels in pairs]
    return {"common": float(sum(found)), "checksum": float(np.abs(prediction.predictions).sum())}


def causal() -> Any:
    """A tiny random Llama that pads with its end token, as transformers 5 pads beams if the pad is 0."""
    model = toy()
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    return model


def evaluate(model: Any, folder: Path, **generation: Any) -> tuple[dict[str, float], Any]:
    """The metrics and predictions of a loop with `predict_with_generate`."""
    is_causal = not model.config.is_encoder_decoder
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder),
        predict_with_generate=True,
        per_device_eval_batch_size=3,
        report_to=[],
        use_cpu=True,
        **generation,
    )
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=args,
        eval_dataset=Pairs(8, is_causal=is_causal),
        data_collator=collate,
        compute_metrics=metrics,
    )
    predicted = trainer.predict(Pairs(5, is_causal=is_causal))
    kept = {name: value for name, value in trainer.evaluate().items() if "_per_second" not in name}
    kept.pop("eval_runtime", None)
    kept.pop("eval_model_preparation_time", None)
    return kept, predicted.predictions


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`:UserWarning")
@pytest.mark.parametrize("kind", ["encoder-decoder", "causal"])
@pytest.mark.parametrize("generation", [{"generation_max_length": 14}, {"generation_num_beams": 3}], ids=str)
def test_seq2seq_trainer_evaluates_alike(tmp_path: Path, kind: str, generation: dict[str, Any]) -> None:
    make = random_t5 if kind == "encoder-decoder" else causal
    theirs, their_tokens = evaluate(make(), tmp_path, **generation)
    calls = []
    model = descant.attach(make())
    run = model.generate
    model.generate = lambda *args, **kwargs: calls.append(kwargs) or run(*args, **kwargs)
    ours, our_tokens = evaluate(model, tmp_path, **generation)
    assert ours == theirs
    assert np.array_equal(our_tokens, their_tokens)
    assert calls
    assert all("labels" in call for call in calls)


def test_trainer_evaluates_an_attached_model(tmp_path: Path) -> None:
    """Its loop computes losses; the attached method changes nothing."""

    def losses(model: Any) -> dict[str, float]:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True
        )
        data = Pairs(8, is_causal=True)
        found = transformers.Trainer(
            model=model, args=args, eval_dataset=data, data_collator=collate
        ).evaluate()
        return {name: value for name, value in found.items() if name == "eval_loss"}

    assert losses(descant.attach(toy())) == losses(toy())
