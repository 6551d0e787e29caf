"""Small configs of multimodal models: sizes by field name, exceptions by model type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .subject import Entry

__all__ = ["SPECIAL", "VOCABULARY", "Ids", "overrides", "shrink"]

VOCABULARY = 160
SPECIAL = 100  # special ids outside the vocabulary are moved to this id and above; text ids are below

# One size wherever a field of that name occurs, in any sub-configuration.
_BY_SIZE = {
    32: """
        hidden_size d_model embed_dim out_hidden_size output_dim encoder_hidden_size decoder_hidden_size
        cross_hidden_size hidden_dim projection_dim text_hidden_size vision_hidden_size
        image_text_hidden_size word_embed_proj_dim projector_hidden_size output_hidden_size
        pooler_output_size audio_hidden_size projector_input_dim projector_output_dim vision_output_dim
        image_token_embed_dim emb_dim output_channels decoder_dim thinker_hidden_size embedding_size
        backbone_hidden_size patch_embed_hidden_size hidden_size_per_layer_input moe_hidden_size
        condition_dim projection_hidden_size downsample_hidden_size merged_hidden_size
        subsampling_conv_channels conv_channels latent_channels num_embeddings base_channels num_filters
        codebook_dim vector_quantization_hidden_dimension upsample_groups
    """,
    48: """
        intermediate_size ffn_dim d_ff mlp_dim encoder_ffn_dim decoder_ffn_dim intermediate_size_mlp
        dense_intermediate_size alignment_intermediate_size projection_intermediate_size
        speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim
    """,
    16: """
        moe_intermediate_size shared_expert_intermediate_size share_expert_dim shared_intermediate_size
        moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank laurel_rank image_size
        max_source_positions
    """,
    2: """
        num_hidden_layers num_layers num_decoder_layers depth encoder_layers decoder_layers layers
        n_layers num_blocks encoder_num_hidden_layers decoder_num_hidden_layers resampler_depth
        num_global_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers
        num_timestamp_prediction_layers conf_num_hidden_layers num_experts_per_tok moe_topk moe_k
        linear_num_key_heads swa_num_key_value_heads aligner_num_add_layers
    """,
    4: """
        num_attention_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        encoder_num_attention_heads decoder_num_attention_heads cross_num_attention_heads
        speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
        swa_num_attention_heads num_sliding_attention_heads linear_num_heads resampler_n_heads
        resampler_heads conf_num_attention_heads linear_num_value_heads index_n_heads mamba_num_heads
        num_conv_pos_embedding_groups encoder_num_key_value_heads decoder_num_key_value_heads
        cross_num_key_value_heads num_experts num_local_experts n_routed_experts moe_num_experts
        patch_size resampler_n_latents resampler_num_latents num_query_tokens latent_query_num
        chunk_size
    """,
    8: """
        head_dim d_kv cross_head_dim swa_head_dim resampler_head_dim resampler_dim_head dim_head
        qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim linear_key_head_dim
        linear_value_head_dim linear_head_dim mamba_head_dim query_pre_attn_scalar ssm_state_size
        rotary_dim input_dim num_mel_bins mel_dim input_feat_per_channel
    """,
    1: """
        n_group topk_group n_groups n_shared_experts moe_num_shared_experts
    """,
    6: """
        sliding_window attention_chunk_size sliding_window_size index_topk
    """,
    256: """
        max_position_embeddings
    """,
}
SIZES: dict[str, int] = {
    **{name: size for size, names in _BY_SIZE.items() for name in names.split()},
    "vocab_size": VOCABULARY,
}
# Tuples of layer indices: the vision tower has two layers.
TUPLES: dict[str, tuple[int, ...]] = {
    "deepstack_visual_indexes": (0,),
    "fullatt_block_indexes": (1,),
    "global_attn_indexes": (1,),
}
DERIVED = frozenset({"per_layer_config"})  # computed from the layer types
ID = re.compile(r"(token_ids?|token_index|_id|_idx)$")


class Ids:
    """Moves ids outside the small vocabulary; equal ids stay equal."""

    def __init__(self) -> None:
        self.moved: dict[int, int] = {}

    def __call__(self, value: Any) -> Any:
        """The new id, or the list of new ids; any other value unchanged."""
        if isinstance(value, (list, tuple)):
            return type(value)(self(item) for item in value)
        if isinstance(value, bool) or not isinstance(value, int) or value < SPECIAL:
            return value
        return self.moved.setdefault(value, SPECIAL + len(self.moved))


def layers(fields: Mapping[str, Any]) -> tuple[int, list[int]]:
    """The number of layers and which to keep: two kinds twice each, more once each, one kind twice."""
    name = next((n for n in ("num_hidden_layers", "n_layers", "num_layers", "depth") if fields.get(n)), None)
    count = fields[name] if name else 0
    lists = [v for v in fields.values() if isinstance(v, (list, tuple)) and len(v) == count > 2]
    lists = [v for v in lists if list(v) != list(range(count))]
    kinds: dict[Any, int] = {}
    for index in range(count if lists else 0):
        kinds.setdefault(tuple(str(each[index]) for each in lists), index)
    found = sorted(kinds.values())
    return count, found * 2 if len(found) == 2 else found if len(found) > 2 else [0, 1]


def sections(total: int, parts: int) -> list[int]:
    """A rotary dimension split over `parts` axes, the first the largest."""
    return [total - (parts - 1) * (total // parts)] + [total // parts] * (parts - 1)


def shrink(fields: Mapping[str, Any], ids: Ids) -> dict[str, Any]:
    """The fields of a configuration (and of those inside it) at sizes that build within a second."""
    count, keep = layers(fields)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in DERIVED:
            continue
        if name == "tie_word_embeddings":
            small[name] = False  # a tied model with random weights repeats its last token
        elif isinstance(value, Mapping) and (
            name.endswith(("config", "encoder", "decoder")) or "model_type" in value
        ):
            small[name] = shrink(value, ids)
        elif isinstance(value, Mapping):
            small[name] = rope(value) if name.startswith("rope") else value
        elif isinstance(value, (list, tuple)) and len(value) == count > 2:
            numbered = list(value) == list(range(count))
            small[name] = list(range(len(keep))) if numbered else [value[index] for index in keep]
        elif name in ("num_hidden_layers", "n_layers", "depth") and value:
            small[name] = len(keep)
        elif name in TUPLES and value:
            small[name] = TUPLES[name]
        elif ID.search(name):
            small[name] = ids(value)
        elif name == "num_key_value_heads" and value:
            heads = fields.get("num_attention_heads", value)
            small[name] = 4 if heads == value else 2
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value:
            small[name] = min(value, SIZES[name]) if name == "max_position_embeddings" else SIZES[name]
        else:
            small[name] = value
    return small


def rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections add up to half of the small head."""
    small = {k: rope(v) if isinstance(v, Mapping) else v for k, v in value.items()}
    for name, each in value.items():
        if name.endswith("_section") and each:
            small[name] = sections(4, len(each))
    return small


# Exceptions by model type: dotted field -> value, set last.
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
SECTIONS = "text_config.rope_parameters.mrope_section"
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
}
IMAGE = SPECIAL + 50
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CODES = {
    f"IMGIMG{chr(65 + n // 10)}{chr(65 + n % 10)}Z": SPECIAL + 15 + n for n in range(32)
}  # Chameleon's names
VISUAL = {f"<|visual token {n:06d}|>": SPECIAL + 15 + n for n in range(32)}  # Emu3's
ENCODEC = {
    "num_filters": 4,
    "upsampling_ratios": [2, 2],
    "num_lstm_layers": 1,
    "codebook_size": 64,
    "sampling_rate": 400,
}
MIMI = {
    "num_filters": 4,
    "upsampling_ratios": [2, 2],
    "codebook_size": 64,
    "num_quantizers": 4,
    "sampling_rate": 400,
    "frame_rate": 50.0,
    "sliding_window": 16,
    "hidden_size": 32,
    "upsample_groups": 32,
}
MUSIC = {f"audio_encoder.{name}": value for name, value in ENCODEC.items()} | {
    "decoder.vocab_size": 64,
    "decoder.pad_token_id": 64,
    "decoder.bos_token_id": 64,
}
VOICE = {
    "t2u_vocab_size": 64,
    "unit_hifi_gan_vocab_size": 64,
    "vocoder_offset": 0,  # else a random model generates invalid units
    "unit_embed_dim": 8,
    "lang_embed_dim": 8,
    "spkr_embed_dim": 8,
    "upsample_initial_channel": 32,
    "upsample_rates": [2, 2],
    "upsample_kernel_sizes": [4, 4],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "csm": {f"codec_config.{name}": value for name, value in MIMI.items()}
    | {
        "num_codebooks": 4,
        "vocab_size": 67,
        "text_vocab_size": VOCABULARY,
        "codebook_pad_token_id": 66,
        "depth_decoder_config.num_codebooks": 4,
        "depth_decoder_config.vocab_size": 67,
    },
    "dia": {
        "delay_pattern": [0, 2, 3],
        "decoder_config.num_channels": 3,
        "decoder_config.vocab_size": 68,
        "decoder_config.eos_token_id": 64,
        "decoder_config.pad_token_id": 65,
        "decoder_config.bos_token_id": 66,
    },
    "higgs_audio_v2": {
        "num_codebooks": 3,
        "codebook_size": 66,
        "audio_stream_bos_id": 64,
        "audio_stream_eos_id": 65,
    },
    "kyutai_speech_to_text": {f"codec_config.{name}": value for name, value in MIMI.items()}
    | {
        "num_codebooks": 4,
        "codebook_vocab_size": 65,
        "audio_bos_token_id": 64,
        "audio_pad_token_id": VOCABULARY + 4 * 65,
        "bos_token_id": VOCABULARY,
        "vocab_size": VOCABULARY,
        "frame_size": 8,
    },
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC | {"chroma_length": 4},
    "SeamlessM4TForTextToSpeech": VOICE,
    "SeamlessM4Tv2ForTextToSpeech": VOICE
    | {
        "char_vocab_size": 64,
        "t2u_variance_predictor_embed_dim": 32,
        "t2u_variance_predictor_hidden_dim": 16,
    },
    "qwen2_5_omni": {  # its generate() needs the voice even without speech output
        "token2wav_config.dit_config.enc_channels": [8, 8, 8, 8, 24],
        "token2wav_config.dit_config.enc_attention_channels": 8,
        "token2wav_config.dit_config.enc_se_channels": 8,
        "token2wav_config.dit_config.enc_dim": 8,
        "token2wav_config.dit_config.enc_emb_dim": 8,
        "token2wav_config.dit_config.num_embeds": 64,
        "token2wav_config.dit_config.look_ahead_layers": [1],
        "token2wav_config.dit_config.look_backward_layers": [0],
        "token2wav_config.bigvgan_config.upsample_initial_channel": 64,
        "thinker_config.vision_start_token_id": 150,
        "thinker_config.vision_end_token_id": 151,
        "thinker_config.text_config.rope_parameters.mrope_section": [2, 1, 1],
    },
    "qwen3_omni_moe": {
        "enable_audio_output": False,
        "thinker_config.vision_start_token_id": 150,
        "thinker_config.vision_end_token_id": 151,
    },
    "bark": {f"codec_config.{name}": value for name, value in ENCODEC.items()}
    | {
        f"{stage}_config.{name}": 256 if name.endswith("size") else 2
        for stage in ("semantic", "coarse_acoustics", "fine_acoustics")
        for name in ("input_vocab_size", "output_vocab_size", "block_size")
    },
    "musicflamingo": {"head_dim": 32},
    "vibevoice": {
        f"{side}.{name}": value
        for side in ("audio_config", "semantic_model_config")
        for name, value in {"num_filters": 4, "downsampling_ratios": [4, 4], "depths": [1, 1, 1]}.items()
    }
    | {"diffusion_head_config.latent_size": 32},
    "phi4_multimodal": {
        "original_max_position_embeddings": 256,
        "vision_config.crop_size": 16,
        "audio_config.ext_pw_out_channel": 32,
        "audio_config.depthwise_separable_out_channel": 32,
        "audio_config.nemo_conv_channels": 32,
    },
    "nemo_speechlm": {
        "text_config.layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "word_timestamp_config.blank_token_id": 3,
        "word_timestamp_config.vocab_size": 4,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip": {"text_config.sep_token_id": None},
    "blip-2": {"image_token_index": IMAGE},
    "chameleon": {
        "vq_config.channel_multiplier": [1, 1, 2],
        "vq_config.resolution": 8,
        "vq_config.num_res_blocks": 1,
        "vocabulary_map": {"<image>": IMAGE} | CODES,
        "image_token_id": IMAGE,
    },
    "cohere_compass": {
        "text_config.rope_parameters": {"full_attention": DEFAULT_ROPE | {"mrope_section": [2, 1, 1]}},
        "vision_config.num_position_embeddings": 64,
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "vision_config.sam_config.downsample_channels": [16, 32],
    },
    "emu3": {
        "vq_config.channel_multiplier": [1, 1, 1],
        "vq_config.num_res_blocks": 1,
        "vq_config.codebook_size": 32,
        "vq_config.num_attention_heads": 1,
        "vq_config.embed_dim": 32,
        "vocabulary_map": {"<image>": IMAGE, "<|extra_200|>": IMAGE + 1} | VISUAL,
        "image_token_id": IMAGE,
    },
    "ernie4_5_vl_moe": {SECTIONS: [1, 1, 2], "text_config.moe_intermediate_size": [16, 8]},
    "instructblip": {"image_token_index": IMAGE},
    "instructblipvideo": {"video_token_index": IMAGE},
    "florence2": {
        "vision_config.embed_dim": [8, 8, 16, 16],
        "vision_config.num_heads": [2, 2, 2, 2],
        "vision_config.num_groups": [2, 2, 2, 2],
        "vision_config.depths": [1, 1, 1, 1],
        "vision_config.window_size": 2,
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {
        "text_config.global_head_dim": 16,
        "text_config.vocab_size_per_layer_input": VOCABULARY,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "patch_size": 4,
            "position_embedding_size": 64,
        },
    },
    "diffusion_gemma": {
        "text_config.global_head_dim": 16,
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 16,
        "vision_config.pooling_kernel_size": 2,
        "vision_config.position_embedding_size": 64,
        "canvas_length": 8,
    },
    "gemma4_unified": {
        "text_config.global_head_dim": 16,
        "vision_config": {
            "patch_size": 4,
            "pooling_kernel_size": 1,
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        },
    },
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "glm46v": {SECTIONS: [2, 1, 1]},
    "glm4v": {SECTIONS: [2, 1, 1]},
    "glm4v_moe": {SECTIONS: [2, 1, 1], "text_config.head_dim": 16},
    "glm5_next": {"text_config.index_kpool": 2},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "glm_ocr": {SECTIONS: [2, 1, 1]},
    "granite4_vision": {
        "image_grid_pinpoints": PINPOINTS,
        "vision_config.hidden_size": 64,
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [0, 1, 2, 3],
        "text_config.num_hidden_layers": 4,
    },
    "granite_docling": {"vision_config.deepstack_visual_indexes": [0]},
    "hunyuan_vl": {"text_config.head_dim": 8, SECTIONS: [1, 1, 1, 1]},
    "idefics": {"cross_layer_interval": 2, "use_resampler": False, "alpha_initializer": "ones"},
    "internvl": {"vision_config.image_size": [16, 16], "vision_config.patch_size": [4, 4]},
    "qianfan_ocr": {"vision_config.image_size": [16, 16], "vision_config.patch_size": [4, 4]},
    "kimi_k25": {"text_config.first_k_dense_replace": 1},
    "lfm2_vl": {
        "text_config.layer_types": ["conv", "full_attention"] * 2,
        "text_config.full_attn_idxs": [1, 3],
        "text_config.num_hidden_layers": 4,
        "text_config.block_auto_adjust_ff_dim": False,
        "vision_config.num_patches": 16,
    },
    "llama4": {"vision_config.intermediate_size": 128},
    "llava_next": {"image_grid_pinpoints": PINPOINTS},
    "llava_next_video": {"image_grid_pinpoints": PINPOINTS},
    "llava_onevision": {"image_grid_pinpoints": PINPOINTS},
    "minicpm_ocr": {"image_token_id": IMAGE, "insert_layer_id": 0, "vision_config.insert_layer_id": 0},
    "minicpmv4_6": {"image_token_id": IMAGE, "insert_layer_id": 0, "vision_config.insert_layer_id": 0},
    "minicpmv4_7": {
        "image_token_id": IMAGE,
        "insert_layer_id": 0,
        "vision_config.insert_layer_id": 0,
        "image_start_id": IMAGE + 1,
        "image_end_id": IMAGE + 2,
        "slice_start_id": IMAGE + 3,
        "slice_end_id": IMAGE + 4,
        "newline_id": IMAGE + 5,
    },
    "mllama": {
        "vision_config.intermediate_layers_indices": [0, 1],
        "vision_config.vision_output_dim": 96,
        "text_config.cross_attention_layers": [1, 3],
        "text_config.num_hidden_layers": 4,
    },
    "molmo2": {
        "adapter_config.vision_feature_layer": [1, 0],
        "vision_config.image_size": [16, 16],
        "vision_config.num_position_embeddings": 16,
        "text_config.additional_vocab_size": 16,
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {
        "out_hidden_size": 128,
        "audio_config.hidden_sizes": [8, 8, 16, 16],
        "audio_config.depths": [1, 1, 1, 1],
    },
    "nemotron_h_omni": {"image_token_id": IMAGE, "vision_config.max_img_size": 32},
    "paddleocr_vl": {SECTIONS: [2, 1, 1]},
    "pp_formulanet": {
        "vision_config.post_conv_in_channels": 32,
        "vision_config.post_conv_mid_channels": 32,
        "vision_config.post_conv_out_channels": 32,
        "vision_config.window_size": 2,
    },
    "qwen2_vl": {SECTIONS: [2, 1, 1]},
    "qwen2_5_vl": {SECTIONS: [2, 1, 1]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 150, "vision_end_token_id": 151, SECTIONS: [2, 1, 1]},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 150, "vision_end_token_id": 151},
    "qwen4_exp": {
        "text_config.indexer_n_heads": 4,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 8,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 2,
        "text_config.hc_lowrank": 8,
    },
    "step3p7": {
        "text_config.sliding_window": 6,
        "text_config.layer_types": ["full_attention", "sliding_attention"] * 2,
        "text_config.rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE},
    },
    "udop": {"max_2d_position_embeddings": 64},
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [16, 32]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "vision-encoder-decoder": {"decoder.is_decoder": True, "decoder.add_cross_attention": True},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config.sliding_windows": [[4, 2], [4, 0]] * 2},
    "speech-encoder-decoder": {f"encoder.{name}": value for name, value in CONVOLUTIONS.items()}
    | {"encoder.feat_extract_norm": "layer", "decoder.is_decoder": True, "decoder.add_cross_attention": True},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "granite_speech": {"has_lora_adapter": False, "encoder_config.context_size": 8},
    "granite_speech_plus": {"has_lora_adapter": False, "encoder_config.context_size": 8},
    "whisper": {  # its generate() strips padding at the end, so no token may equal it
        "pad_token_id": SPECIAL,
        "bos_token_id": SPECIAL,
        "eos_token_id": SPECIAL,
        "decoder_start_token_id": SPECIAL + 1,
        "begin_suppress_tokens": [40, 41],
        "suppress_tokens": [50, 51, SPECIAL],
    },
    "voxtral": {"audio_token_id": IMAGE, "audio_config.intermediate_size": 128},
    "glmasr": {"audio_config.intermediate_size": 128},
    "vibevoice_asr": {
        f"{side}_tokenizer_encoder_config.{name}": value
        for side in ("acoustic", "semantic")
        for name, value in {
            "num_filters": 4,
            "downsampling_ratios": [4, 4],
            "depths": [1, 1, 1],
            "vae_std": 0.0,
        }.items()
    },
    "speecht5": CONVOLUTIONS | {"feat_extract_norm": "layer"},
}


def overrides(fields: dict[str, Any], entry: Entry) -> None:
    """Apply the exceptions of this architecture."""
    for path, value in EXCEPTIONS.get(entry.name, EXCEPTIONS.get(entry.model_type, {})).items():
        *way, last = path.split(".")
        place = fields
        for step in way:
            place = place[step]
        place[last] = value
