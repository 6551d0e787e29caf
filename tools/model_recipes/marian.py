"""opus-mt-en-fr from four consecutive pieces of a larger zip file whose directory lies elsewhere."""

import io
import json
import struct
import zlib
from collections.abc import Iterator

import torch

from . import archive
from .errors import ModelError
from .folder import write_config, write_generation_config, write_json, write_weights
from .recipe import Job

LOCAL_HEADER = b"PK\x03\x04"
STORED, DEFLATED = 0, 8


def local_files(data: bytes, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Files under a folder, found by the local headers of a zip file that may be cut at both ends."""
    at = data.find(LOCAL_HEADER)
    while at >= 0:
        following = at + len(LOCAL_HEADER)
        if at + 30 <= len(data):
            (method,) = struct.unpack_from("<H", data, at + 8)
            crc, packed, size, name_length, extra_length = struct.unpack_from("<IIIHH", data, at + 14)
            name = data[at + 30 : at + 30 + name_length].decode("utf-8", "replace")
            if name.startswith(prefix) and not name.endswith("/"):
                start = at + 30 + name_length + extra_length
                content = data[start : start + packed]
                if method == DEFLATED:
                    content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content)
                elif method != STORED:
                    raise ModelError(f"{name}: zip method must be stored or deflated, got {method}")
                if len(content) != size or zlib.crc32(content) != crc:
                    raise ModelError(
                        f"{name}: should have {size} bytes, crc {crc:#x}; got {len(content)} bytes"
                    )
                yield name.removeprefix(prefix), content
                following = start + packed
        at = data.find(LOCAL_HEADER, following)


def convert(job: Job) -> None:
    """Write the folder: the files are already transformers' own, but for the weights' container."""
    pieces = [archive.read(path, archive.find(path, "*/aait_store.zip.*")) for path in job.archives]
    files = dict(local_files(b"".join(pieces), "aait_store/Models/NLP/helsinki_en_fr/"))
    missing = {"config.json", "pytorch_model.bin", "source.spm", "target.spm", "vocab.json"} - files.keys()
    if missing:
        raise ModelError(f"opus-mt-en-fr: the pieces should hold {sorted(missing)}, got {sorted(files)}")
    config = json.loads(files["config.json"])
    for key in ("bad_words_ids", "max_length", "num_beams", "transformers_version", "torch_dtype"):
        config.pop(key, None)  # generation settings belong to the other file
    state = torch.load(io.BytesIO(files["pytorch_model.bin"]), map_location="cpu", weights_only=True)
    tied = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    sinusoids = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
    write_config(job.folder, config)
    write_weights(job.folder, {k: v for k, v in state.items() if k not in tied + sinusoids})
    generation = json.loads(files["generation_config.json"])
    generation.pop("transformers_version", None)
    write_generation_config(job.folder, generation)
    write_json(job.folder / "tokenizer_config.json", json.loads(files["tokenizer_config.json"]))
    for name in ("source.spm", "target.spm", "vocab.json"):
        (job.folder / name).write_bytes(files[name])
