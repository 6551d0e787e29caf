"""Tiny random models: seeded weights, a few layers, a vocabulary of about a hundred tokens.

Each is written as a folder that transformers 4.52.4 (the reference) and 5.x read alike, so both run the same
weights. Weights are drawn so that the logits have a standard deviation of about three, which keeps greedy
choices well apart in fp32 without making the distribution certain, and the end token's row of the output
matrix is scaled until some rows of a batch end early and others do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    """One tiny architecture: its config, its special tokens and how its weights are drawn."""

    name: str
    config: dict[str, Any]
    bos: int
    eos: int
    pad: int
    start: int | None = None  # first decoder token; encoder-decoder only
    seed: int = 0
    gain: float = 1.5  # scale of every matrix inside the layers, over 1/sqrt(fan in)
    branch: float = 1.0  # further scale of those that write to the residual stream
    cross: float = 1.0  # further scale of what cross-attention writes: it is much the same at every step
    spread: float = 3.0  # standard deviation of the logits, about
    eos_scale: float = 2.0  # how much longer the end token's output row is than the others

    @property
    def encoder_decoder(self) -> bool:
        return self.start is not None

    @property
    def vocab(self) -> int:
        return int(self.config["vocab_size"])


@dataclass(frozen=True)
class Tiny:
    """A tiny model loaded in this process, and the folder from which the reference loads it."""

    arch: Architecture
    folder: Path
    model: Any

    @property
    def name(self) -> str:
        return self.arch.name

    @property
    def encoder_decoder(self) -> bool:
        return self.arch.encoder_decoder

    @property
    def eos(self) -> int:
        return self.arch.eos

    @property
    def pad(self) -> int:
        return self.arch.pad

    @property
    def vocab(self) -> int:
        return self.arch.vocab


_ROPE = {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    **_ROPE,
}

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("llama", _LLAMA, bos=1, eos=2, pad=0, gain=2.0),
        Architecture(
            "gpt2",
            {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "vocab_size": 101,
                "n_positions": 96,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
            },
            bos=100,
            eos=100,
            pad=100,
            seed=1,
            branch=3.0,
            eos_scale=1.7,
        ),
        Architecture(
            "gpt-neox",
            {
                "model_type": "gpt_neox",
                "architectures": ["GPTNeoXForCausalLM"],
                "vocab_size": 103,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "hidden_act": "gelu",
                "rotary_pct": 0.5,
                "partial_rotary_factor": 0.5,
                "rotary_emb_base": 10000,
                "rope_theta": 10000.0,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
                "max_position_embeddings": 128,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "use_parallel_residual": True,
                "tie_word_embeddings": False,
            },
            bos=3,
            eos=2,
            pad=1,
            seed=2,
        ),
        Architecture(
            "mistral",
            # The window is shorter than most prompts, so a cache without it gives other tokens.
            {**_LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5},
            bos=1,
            eos=2,
            pad=0,
        ),
        Architecture(
            "qwen2",
            {
                **_LLAMA,
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "vocab_size": 113,
                "num_hidden_layers": 3,
                "use_sliding_window": False,
                "sliding_window": None,
                "max_window_layers": 3,
                "layer_types": ["full_attention"] * 3,
            },
            bos=110,
            eos=111,
            pad=112,
        ),
        Architecture(
            "gemma",
            {
                **_LLAMA,
                "model_type": "gemma",
                "architectures": ["GemmaForCausalLM"],
                "vocab_size": 107,
                "head_dim": 16,
                "num_key_value_heads": 1,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
            },
            bos=2,
            eos=1,
            pad=0,
            seed=7,
            gain=2.0,
            branch=6.0,
        ),
        Architecture(
            "opt",
            {
                "model_type": "opt",
                "architectures": ["OPTForCausalLM"],
                "vocab_size": 109,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "ffn_dim": 64,
                "max_position_embeddings": 96,
                "do_layer_norm_before": True,
                "word_embed_proj_dim": 32,
                "dropout": 0.0,
                "attention_dropout": 0.0,
                "num_attention_heads": 4,
                "activation_function": "relu",
                "tie_word_embeddings": True,
            },
            bos=2,
            eos=3,
            pad=1,
            seed=5,
            gain=2.0,
            branch=4.0,
            eos_scale=3.0,
        ),
        Architecture(
            "t5",
            {
                "model_type": "t5",
                "architectures": ["T5ForConditionalGeneration"],
                "vocab_size": 99,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_heads": 4,
                "relative_attention_num_buckets": 8,
                "relative_attention_max_distance": 16,
                "dropout_rate": 0.0,
                "feed_forward_proj": "relu",
                "is_encoder_decoder": True,
                "tie_word_embeddings": True,
            },
            bos=0,
            eos=1,
            pad=0,
            start=0,
            seed=1,
            gain=3.0,
            branch=4.0,
            cross=0.5,
        ),
        Architecture(
            "bart",
            {
                "model_type": "bart",
                "architectures": ["BartForConditionalGeneration"],
                "vocab_size": 105,
                "d_model": 32,
                "max_position_embeddings": 96,
                "encoder_layers": 2,
                "encoder_ffn_dim": 64,
                "encoder_attention_heads": 4,
                "decoder_layers": 2,
                "decoder_ffn_dim": 64,
                "decoder_attention_heads": 4,
                "activation_function": "gelu",
                "dropout": 0.0,
                "attention_dropout": 0.0,
                "activation_dropout": 0.0,
                "scale_embedding": False,
                "is_encoder_decoder": True,
                "forced_eos_token_id": None,
                "tie_word_embeddings": True,
            },
            bos=0,
            eos=2,
            pad=1,
            start=2,
            seed=1,
            gain=2.0,
            cross=0.1,
            eos_scale=3.0,
        ),
    )
}


def build(name: str | Architecture, folder: Path) -> Path:
    """Write the tiny model `name` into `folder` (config.json, generation_config.json, model.safetensors)."""
    import transformers

    arch = ARCHITECTURES[name] if isinstance(name, str) else name
    tokens = {"bos_token_id": arch.bos, "eos_token_id": arch.eos, "pad_token_id": arch.pad}
    if arch.start is not None:
        tokens["decoder_start_token_id"] = arch.start
    config = {**arch.config, **tokens, "use_cache": True, "dtype": "float32", "torch_dtype": "float32"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    auto = transformers.AutoModelForSeq2SeqLM if arch.encoder_decoder else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(arch.seed)
        model = auto.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    _draw(model, arch)
    model.save_pretrained(folder)
    # Written last and by hand: what transformers 5 writes lacks the names that 4.52.4 reads.
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({**tokens, "transformers_version": "4.52.4"}, indent=2)
    )
    return folder


def load(name: str | Architecture, folder: Path, **options: Any) -> Tiny:
    """Load the tiny model `name` from `folder` into this process; `options` go to `from_pretrained`."""
    import transformers

    arch = ARCHITECTURES[name] if isinstance(name, str) else name
    auto = transformers.AutoModelForSeq2SeqLM if arch.encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, **options)
    return Tiny(arch, folder, model.eval())


_NORM = re.compile(r"(norm|norm_embedding|ln_[12f])\.weight$")
_BRANCH = re.compile(r"(o_proj|down_proj|c_proj|dense|dense_4h_to_h|out_proj|fc2|wo|\.o)\.weight$")
_SHARP = re.compile(r"(q_proj|k_proj|Attention\.[qk])\.weight$")
_CROSS = re.compile(r"(encoder_attn\.out_proj|EncDecAttention\.o)\.weight$")


@torch.no_grad()
def _draw(model: Any, arch: Architecture) -> None:
    """Fill every parameter from one seeded generator, in the order of their names."""
    generator = torch.Generator().manual_seed(1000 + arch.seed)
    output = model.get_output_embeddings().weight
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is output:
            width = parameter.shape[1]
            # T5 scales its decoder output by 1/sqrt(width) when the embeddings are tied.
            tied_t5 = arch.config["model_type"] == "t5"
            parameter.copy_(noise * arch.spread / (1.0 if tied_t5 else width**0.5))
            parameter[arch.eos] *= arch.eos_scale
        elif parameter.dim() == 1:
            centre = 1.0 if _NORM.search(name) else 0.0
            if arch.config["model_type"] == "gemma":
                centre = 0.0  # its norms multiply by one plus the weight
            parameter.copy_(centre + 0.1 * noise)
        elif "embed" in name or "wte" in name or "wpe" in name or "shared" in name:
            parameter.copy_(noise * 0.5)
        elif "relative_attention_bias" in name:
            parameter.copy_(noise)
        else:
            fan_in = parameter.shape[0] if arch.config["model_type"] == "gpt2" else parameter.shape[1]
            # Sharp attention would amplify rounding errors beyond what parity may differ by.
            scale = 1.0 if _SHARP.search(name) else arch.gain
            scale *= arch.branch if _BRANCH.search(name) else 1.0
            scale *= arch.cross if _CROSS.search(name) else 1.0
            # T5 does not divide its attention logits by the root of the head's width.
            scale *= arch.config["d_kv"] ** -0.5 if name.endswith("Attention.q.weight") else 1.0
            parameter.copy_(noise * scale / fan_in**0.5)


def prompts(arch: Architecture, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random prompts of the given lengths without any special token."""
    special = {arch.bos, arch.eos, arch.pad, arch.start}
    plain = torch.tensor([t for t in range(arch.vocab) if t not in special])
    generator = torch.Generator().manual_seed(seed)
    return [plain[torch.randint(len(plain), (n,), generator=generator)].tolist() for n in lengths]


def pad(rows: Sequence[Sequence[int]], token: int, side: str) -> tuple[Tensor, Tensor]:
    """`(input_ids, attention_mask)`, both [R, longest], of ragged rows padded on the left or the right."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), token)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids, mask
