"""Models packed as GGUF (Llama, Qwen2, Gemma 3): weights dequantised, config and tokenizer rebuilt."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer

from . import archive
from .bpe import SPACE, Kind, Vocabulary, begin_with, byte_level_bpe, sentencepiece_bpe
from .errors import ModelError
from .folder import DTYPES, write_config, write_generation_config, write_tokenizer, write_weights
from .recipe import Job
from .rotary import half_split_rotary

THIS = Path(__file__).name
NON_BLOCK = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has a norm on both sides of attention and of the feed-forward part.
GEMMA3_BLOCK = BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
}


class Gguf:
    """A GGUF file: its metadata by key and its tensors under transformers' names."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path.name}: architecture must be one of {sorted(ARCHITECTURES)}, "
                f"got {self.architecture!r}; add its tensor names to {THIS}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; without a default the key must exist."""
        field = self.reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelError(f"GGUF metadata lack {key!r}; the file is not what the recipe expects")
            return default
        return field.contents()

    def arch_value(self, key: str, default: Any = None) -> Any:
        """A metadata value of this architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding matrix."""
        return all(tensor.name != "output.weight" for tensor in self.reader.tensors)

    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        heads, hidden = self.arch_value("attention.head_count"), self.arch_value("embedding_length")
        head_dim = self.arch_value("attention.key_length", hidden // heads)
        config: dict[str, Any] = ARCHITECTURES[self.architecture] | {
            "vocab_size": len(self.get("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": self.arch_value("feed_forward_length"),
            "num_hidden_layers": self.arch_value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.arch_value("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.arch_value("context_length"),
            # Stored as a 32-bit float: 9.99999974e-06 was 1e-05.
            "rms_norm_eps": float(f"{self.arch_value('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(self.arch_value("rope.freq_base", 10000.0)),
            "tie_word_embeddings": self.tied,
            **self.special_ids(),
        }
        if self.architecture == "gemma3":
            config["query_pre_attn_scalar"] = head_dim
            config["sliding_window"] = self.arch_value("attention.sliding_window")
        return config

    def special_ids(self) -> dict[str, int]:
        """Ids of the tokens that generation must know."""
        keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {name: int(self.get(f"tokenizer.ggml.{key}_token_id")) for name, key in keys.items()}

    def weights(self, job: Job, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Every tensor, dequantised."""
        tensors = {}
        total = len(self.reader.tensors)
        for index, tensor in enumerate(self.reader.tensors):
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            name = self._name(tensor.name)
            tensors[name] = torch.tensor(self._undo_conversion(tensor.name, values)).to(dtype)
            job.report(index + 1, total)
        return tensors

    def _name(self, name: str) -> str:
        stem, _, ending = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        parts = GEMMA3_BLOCK if self.architecture == "gemma3" else BLOCK
        try:
            if block is None:
                return f"{NON_BLOCK[stem]}.{ending}"
            return f"model.layers.{block[1]}.{parts[block[2]]}.{ending}"
        except KeyError as error:
            raise ModelError(
                f"unknown GGUF tensor {name!r} for {self.architecture}; add it to {THIS}"
            ) from error

    def _undo_conversion(self, name: str, values: np.ndarray) -> np.ndarray:
        """Undo the changes of the GGUF converter to some tensors."""
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return values - 1  # transformers multiplies by 1 + weight
        if self.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = self.arch_value("attention.head_count_kv" if "attn_k" in name else "attention.head_count")
            return half_split_rotary(values, heads)
        return values

    def tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        """The tokenizer and the settings that go with it."""
        pieces, kinds = self.get("tokenizer.ggml.tokens"), self.get("tokenizer.ggml.token_type")
        model = self.get("tokenizer.ggml.model")
        if model == "gpt2":
            vocabulary = Vocabulary(pieces, kinds)
            tokenizer = byte_level_bpe(
                vocabulary, self.get("tokenizer.ggml.merges"), self.get("tokenizer.ggml.pre")
            )
        elif model == "llama":
            # User-defined runs of spaces are stored as spaces; the merges use sentencepiece's character.
            for index in Vocabulary(pieces, kinds).of_kind(Kind.USER_DEFINED):
                pieces[index] = pieces[index].replace(" ", SPACE)
            vocabulary = Vocabulary(pieces, kinds)
            prefix = bool(self.get("tokenizer.ggml.add_space_prefix", True))
            tokenizer = sentencepiece_bpe(vocabulary, self.get("tokenizer.ggml.scores"), prefix)
        else:
            raise ModelError(f"GGUF tokenizer must be 'gpt2' or 'llama', got {model!r}; add it to {THIS}")
        ids = self.special_ids()
        settings: dict[str, Any] = {
            "bos_token": pieces[ids["bos_token_id"]],
            "eos_token": pieces[ids["eos_token_id"]],
            "pad_token": pieces[ids["pad_token_id"]],
        }
        unknown = self.reader.get_field("tokenizer.ggml.unknown_token_id")
        if unknown is not None:
            settings["unk_token"] = pieces[unknown.contents()]
        template = self.reader.get_field("tokenizer.chat_template")
        if template is not None:
            settings["chat_template"] = template.contents()
        if self.get("tokenizer.ggml.add_bos_token", model == "llama"):
            begin_with(tokenizer, settings["bos_token"])
        return tokenizer, settings


def convert(job: Job) -> None:
    """Join the parts of the file, then write the folder; `options` may set dtype and eos_token_id."""
    options = job.recipe.options
    parts = [(path, archive.find(path, options["member"])) for path in job.archives]
    gguf = Gguf(archive.join(parts, job.scratch / "model.gguf"))
    dtype = options.get("dtype", "float32")
    write_config(job.folder, gguf.config(), dtype)
    ids = gguf.special_ids()
    stops = options.get("eos_token_id", ids["eos_token_id"])
    write_generation_config(job.folder, ids | {"eos_token_id": stops})
    write_tokenizer(job.folder, *gguf.tokenizer())
    write_weights(job.folder, gguf.weights(job, DTYPES[dtype]), dtype)
