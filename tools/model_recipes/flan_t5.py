"""Flan-T5-small fine-tuned for titles, from an encoder and a decoder exported to ONNX."""

from tokenizers import Tokenizer

from . import archive, onnx_file
from .folder import write_config, write_generation_config, write_tokenizer, write_weights
from .recipe import Job

DATA = "traceforge_title_model/data/span"
CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    # The head differs from the embeddings. Version 5 ties them when a model is made from this config,
    # but leaves them apart when a file holds both and they differ.
    "tie_word_embeddings": False,
}
IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def convert(job: Job) -> None:
    """Write the folder: encoder tensors are exported under `enc.`, all others under `m.`."""
    (package,) = job.archives
    encoder = onnx_file.weights(archive.read(package, f"{DATA}/encoder.onnx"))
    decoder = onnx_file.weights(archive.read(package, f"{DATA}/decoder.onnx"))
    del encoder["enc.embed_tokens.weight"]  # the same matrix as the decoder's `m.shared.weight`
    tensors = {f"encoder.{name.removeprefix('enc.')}": tensor for name, tensor in encoder.items()}
    tensors |= {name.removeprefix("m."): tensor for name, tensor in decoder.items()}
    write_config(job.folder, CONFIG | IDS)
    write_generation_config(job.folder, IDS)
    write_weights(job.folder, tensors)
    tokenizer = Tokenizer.from_buffer(archive.read(package, f"{DATA}/tokenizer.json"))
    write_tokenizer(job.folder, tokenizer, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"})
