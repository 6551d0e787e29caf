"""Writing a model folder that transformers 4.52 and 5.x read alike.

Configs use the older field names (`rope_theta`, `torch_dtype`): version 5 still reads them, while
version 4.52 silently ignores the newer ones and would decode with a default rotary base.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

FORMAT_VERSION = "4.52.4"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, keys sorted, so that equal content gives equal bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_config(folder: Path, config: Mapping[str, Any], dtype: str = "float32") -> None:
    """Write `config.json`."""
    # The version selects the config format; without one, version 5 warns about large tokenizers.
    write_json(
        folder / "config.json", {**config, "torch_dtype": dtype, "transformers_version": FORMAT_VERSION}
    )


def write_generation_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `generation_config.json`, without fields that are None."""
    write_json(folder / "generation_config.json", {k: v for k, v in config.items() if v is not None})


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> None:
    """Write `model.safetensors` in one data type."""
    kind, path = DTYPES[dtype], folder / "model.safetensors"
    ready = {name: tensors[name].to(kind).contiguous() for name in sorted(tensors)}
    save_file(ready, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by its owner only


def write_tokenizer(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Write `tokenizer.json` and a config with a class that both versions have."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    shared = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # Without this, 4.52 returns token_type_ids, which no decoder here accepts.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", {**shared, **settings})
