"""The kinds of model for a decoding loop, and one representative of each."""

from __future__ import annotations

from tools.sweep.catalogue import entries
from tools.sweep.subject import Entry

__all__ = ["KINDS", "representative"]

# Kinds differ in their inputs and their cache, not in their training task.
KINDS = {
    "rotary positions": "LlamaForCausalLM",
    "learned positions": "GPT2LMHeadModel",
    "positions counted from a padding line": "RobertaForCausalLM",
    "ALiBi, no positions": "BloomForCausalLM",
    "sliding window everywhere": "MistralForCausalLM",
    "sliding and full attention by layer": "Gemma3ForCausalLM",
    "sliding and full attention by layer, eager": "Gemma2ForCausalLM",
    "layers that read the keys of others": "Gemma3nForCausalLM",
    "chunked attention": "Llama4ForCausalLM",
    "rotary frequencies that change with length": "Phi3ForCausalLM",
    "a triangle of its own": "GPTNeoForCausalLM",
    "mixture of experts": "MixtralForCausalLM",
    "latent attention (MLA)": "DeepseekV3ForCausalLM",
    "indexed attention": "DeepseekV32ForCausalLM",
    "recurrent": "MambaForCausalLM",
    "recurrent and attention by layer": "JambaForCausalLM",
    "recurrent and attention in one layer": "FalconH1ForCausalLM",
    "linear attention": "Qwen3NextForCausalLM",
    "state on its modules": "RecurrentGemmaForCausalLM",
    "a cache class of its own": "MiniMaxForCausalLM",
    "state under another name": "xLSTMForCausalLM",
    "rows one by one": "RwkvForCausalLM",
    "no memory at all": "OpenAIGPTLMHeadModel",
    "memory along another dimension": "XLNetLMHeadModel",
    "a prefix of its own in the cache": "CpmAntForCausalLM",
    "encoder-decoder, relative positions": "T5ForConditionalGeneration",
    "encoder-decoder, learned positions": "BartForConditionalGeneration",
    "experts in encoder and decoder": "SwitchTransformersForConditionalGeneration",
    "speech, fixed windows": "WhisperForConditionalGeneration",
    "speech, any length": "Speech2TextForConditionalGeneration",
    "speech in a prompt": "Qwen2AudioForConditionalGeneration",
    "codes of sound beside every token": "KyutaiSpeechToTextForConditionalGeneration",
    "sound added to every token": "VoxtralRealtimeForConditionalGeneration",
    "images in a prompt": "LlavaForConditionalGeneration",
    "images seen both ways": "Gemma3ForConditionalGeneration",
    "images by cross-attention": "MllamaForConditionalGeneration",
    "images before the prompt": "GitForCausalLM",
    "multimodal positions (M-RoPE)": "Qwen2VLForConditionalGeneration",
    "image to text": "VisionEncoderDecoderModel",
    "image and text in the encoder": "Florence2ForConditionalGeneration",
    "a generate of its own around a text model": "Blip2ForConditionalGeneration",
}


def representative(kind: str) -> Entry:
    """The class that represents a kind."""
    return next(entry for entry in entries() if entry.name == KINDS[kind])
