"""transcribe(): what generate() does for a model that hears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from descant.api.call import CallOptions, merge_configs
from descant.api.outputs import GenerateOutput
from descant.api.whisper.alignment import TimestampAligner
from descant.api.whisper.decoder import GenerateFn, WindowDecoder
from descant.api.whisper.fallback import TemperatureFallback, derive_seed
from descant.api.whisper.options import WHISPER_ARGUMENTS, WhisperOptions, parse_options
from descant.api.whisper.output import build_transcript
from descant.api.whisper.prompt import PromptHistory, init_tokens
from descant.api.whisper.segments import TimestampScale
from descant.api.whisper.windows import Audio, LongFormTranscriber
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.engine.planner import pad_token_id
from descant.errors import ConfigError, InputError
from descant.models.whisper import WhisperAdapter

__all__ = ["TranscribeCall", "transcribe"]

_MODEL_INPUTS = ("input_features", "attention_mask", "encoder_outputs", "decoder_input_ids")


@dataclass(frozen=True)
class TranscribeCall:
    """A call of generate() as it was made."""

    inputs: Any
    generation_config: Any
    processors: Sequence[Any]
    criteria: Sequence[Any]
    tokenizer: Any
    has_streamer: bool  # whether somebody watches the tokens come
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # fields of a config, of `Options`, and inputs


def transcribe(listener: WhisperAdapter, run: GenerateFn, spoken: TranscribeCall) -> Tensor | GenerateOutput:
    """Hear a batch of recordings: their tokens [B, L], with segments or a record where that is asked for."""
    call = {name: value for name, value in spoken.kwargs.items() if name in FIELDS}
    given = {name: value for name, value in spoken.kwargs.items() if name in WHISPER_ARGUMENTS}
    inputs = _model_inputs(listener, spoken)
    temperatures, call = _split_temperatures(call)
    # Old checkpoints force the tokens that language and task stand for; they are read, not forced.
    configs = merge_configs(listener.model, spoken.generation_config, {**call, "forced_decoder_ids": None})
    if temperatures is None:
        temperatures = [configs[0].temperature if configs[0].do_sample else 0.0]
    options = parse_options(given, configs[0])
    batch, total = _batch_and_frames(listener, inputs, options)
    configs = [_with_timestamps(config, total > listener.window_frames) for config in configs]
    _validate_call(spoken, configs, options, temperatures)
    config = configs[0]
    asked = CallOptions(configs, spoken.processors, spoken.criteria, spoken.tokenizer)
    decoder = WindowDecoder(run, asked, pad_token_id(config))
    audios = _make_audios(listener, inputs, configs, batch, total)

    def detect(tokens: Sequence[int]) -> list[int]:
        return _detect_languages(listener, decoder, audios, config, tokens)

    for audio, begin in zip(audios, init_tokens(listener, options, config, batch, detect), strict=True):
        audio.init_tokens = begin
    past = PromptHistory(listener, options, config)
    audios = _repeat_audios(audios, config.num_return_sequences)
    fallback = TemperatureFallback(decoder, options, temperatures, listener)
    clock, alignment = _timestamp_scale(listener, options, config), _make_aligner(listener, options, config)
    heard = LongFormTranscriber(listener, options, fallback, clock, alignment).run(audios, past)
    return build_transcript(options, config, audios, heard, decoder.pad_token_id)


# ------------------------------------------------------------------------ what is given
def _model_inputs(listener: WhisperAdapter, spoken: TranscribeCall) -> dict[str, Any]:
    """The model's inputs of a call, checked."""
    given = {
        name: value for name, value in spoken.kwargs.items() if name not in (*FIELDS, *WHISPER_ARGUMENTS)
    }
    given = {name: value for name, value in given.items() if value is not None}
    if spoken.inputs is not None:
        if given.get("input_features") is not None:
            raise InputError("input_features", "must not be given beside `inputs`, which is the same", "both")
        given["input_features"] = spoken.inputs
    unknown = sorted(given.keys() - {*_MODEL_INPUTS})
    if unknown:
        do = (
            f"known are {list(_MODEL_INPUTS)}, {sorted(WHISPER_ARGUMENTS)} and the fields of GenerationConfig"
        )
        must = "is neither a generation parameter nor an input of this model"
        raise InputError(unknown[0], must, given[unknown[0]], do)
    if ("input_features" in given) == ("encoder_outputs" in given):
        must = "must be given, or `encoder_outputs` in its place"
        raise InputError("input_features", must, None if "input_features" not in given else "both")
    features = given.get("input_features")
    if features is not None:
        if not isinstance(features, Tensor) or features.ndim != 3 or not features.is_floating_point():
            raise InputError("input_features", "must be a tensor of floats [batch, bins, frames]", features)
        if features.shape[1] != listener.num_mel_bins or not features.shape[0] or not features.shape[2]:
            raise InputError("input_features", f"must be [batch, {listener.num_mel_bins}, frames]", features)
    return given


def _batch_and_frames(
    listener: WhisperAdapter, inputs: Mapping[str, Any], options: WhisperOptions
) -> tuple[int, int]:
    """How many recordings there are, and how many frames the longest has."""
    asked = options.num_segment_frames
    if asked is not None and asked != listener.window_frames:
        must = f"must be {listener.window_frames}, what the model's encoder takes"
        raise ConfigError("num_segment_frames", must, asked, "leave it out")
    features = inputs.get("input_features")
    if features is None:
        states = _encoder_states(inputs["encoder_outputs"])
        return len(states), states.shape[1] * listener.encoder_stride
    mask = inputs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != features[:, 0].shape):
        raise InputError("attention_mask", f"must be of shape {list(features[:, 0].shape)}", mask)
    if mask is None and len(features) > 1 and features.shape[2] > listener.window_frames:
        do = "pass what the feature extractor gives with return_attention_mask=True"
        must = "must be given with several recordings, some longer than a window"
        raise InputError("attention_mask", must, None, do)
    return features.shape[0], features.shape[2]


def _encoder_states(given: Any) -> Tensor:
    """The hidden states of encoder outputs that the user computed [B, S, D]."""
    states = given if isinstance(given, Tensor) else given[0] if len(given) else None
    if not isinstance(states, Tensor) or states.ndim != 3:
        raise InputError("encoder_outputs", "must hold the encoder's last hidden states", given)
    return states


def _split_temperatures(call: Mapping[str, Any]) -> tuple[list[float] | None, dict[str, Any]]:
    """The temperatures to try, None where the config says, and the call without them."""
    given = call.get("temperature")
    if given is None:
        return None, dict(call)
    several = list(given) if isinstance(given, list | tuple) else [given]
    if not several:
        raise ConfigError("temperature", "must be a number, or several to try one after the other", given)
    tried = [float(FIELDS["temperature"].parse(one)) for one in several]
    drawn = any(one > 0.0 for one in tried)
    if call.get("do_sample") is not None and bool(call["do_sample"]) != drawn:
        must = f"must be {'0' if drawn else 'above 0'} while `do_sample` is {not drawn}"
        raise ConfigError(("temperature", "do_sample"), must, given, "leave do_sample out")
    rest = {name: value for name, value in call.items() if name != "temperature"}
    return tried, {**rest, "do_sample": drawn}


def _with_timestamps(config: GenerationConfig, long: bool) -> GenerationConfig:
    """The config with timestamps where long audio needs them."""
    if not long or config.return_timestamps:
        return config
    if "return_timestamps" in config.given:
        do = "set return_timestamps=True, or pass no more than one window"
        must = "must be True for audio longer than a window, which is cut by timestamps"
        raise ConfigError("return_timestamps", must, config.return_timestamps, do)
    return GenerationConfig.merge({"return_timestamps": True}, config)


def _validate_call(
    spoken: TranscribeCall,
    configs: Sequence[GenerationConfig],
    options: WhisperOptions,
    temperatures: Sequence[float],
) -> None:
    """Raise for what does not go together."""
    config = configs[0]
    single = not config.return_timestamps or options.force_unique_generate_call
    if options.no_speech_threshold is not None and config.no_timestamps_token_id is None:
        must = "needs `no_timestamps_token_id`, which the token for silence stands before"
        raise ConfigError("no_speech_threshold", must, options.no_speech_threshold)
    if spoken.has_streamer and not (single and len(temperatures) == 1):
        must = "must be None where a window may be heard again or in part, for its tokens are not final"
        raise InputError(
            "streamer", must, "one", "leave it out, or ask for no timestamps and one temperature"
        )
    if options.return_token_timestamps and single and config.return_dict_in_generate:
        must = "needs `return_timestamps` beside `return_dict_in_generate`, whose record has no place for it"
        raise ConfigError("return_token_timestamps", must, True, "leave return_dict_in_generate out")
    if config.return_dict_in_generate and single and len(temperatures) > 1:
        must = "must be one number with `return_dict_in_generate`, for each try has a record of its own"
        raise ConfigError("temperature", must, list(temperatures), "or set return_timestamps=True")
    if config.num_return_sequences > 1 and not any(temperatures):
        must = "must be 1 unless sampling: a window that goes on has one best transcript"
        raise ConfigError("num_return_sequences", must, config.num_return_sequences, "set temperature")


def _timestamp_scale(
    listener: WhisperAdapter, options: WhisperOptions, config: GenerationConfig
) -> TimestampScale:
    """What timestamps mean; without a token for them nothing is one."""
    zero = listener.vocab_size if config.no_timestamps_token_id is None else config.no_timestamps_token_id
    return TimestampScale(
        zero + 1, options.time_precision, options.time_precision_features, listener.encoder_stride
    )


def _make_aligner(
    listener: WhisperAdapter, options: WhisperOptions, config: GenerationConfig
) -> TimestampAligner | None:
    """What finds the times of tokens, if these are asked for."""
    if not options.return_token_timestamps:
        return None
    heads = config.extra.get("alignment_heads")
    if not heads:
        must = "needs `alignment_heads`, the attention heads that follow the speaker"
        do = "add them to the model's generation config"
        raise ConfigError("return_token_timestamps", must, True, do)
    if listener.attn_implementation != "eager":
        must = f"needs attention weights, which {listener.attn_implementation!r} does not give"
        do = 'load the model with attn_implementation="eager"'
        raise InputError("return_token_timestamps", must, True, do)
    return TimestampAligner(
        [tuple(pair) for pair in heads], listener.median_filter_width, options.time_precision
    )


# ------------------------------------------------------------------------ the recordings
def _make_audios(
    listener: WhisperAdapter,
    inputs: Mapping[str, Any],
    configs: Sequence[GenerationConfig],
    batch: int,
    total: int,
) -> list[Audio]:
    """The recordings of a call."""
    if len(configs) not in (1, batch):
        raise InputError("generation_config", f"must be one for each of the {batch} recordings", len(configs))
    each = list(configs) * batch if len(configs) == 1 else configs
    audios = [Audio(config, total) for config in each]
    features, mask = inputs.get("input_features"), inputs.get("attention_mask")
    for line, audio in enumerate(audios):
        if features is None:
            audio.states = _encoder_states(inputs["encoder_outputs"])[line].to(listener.device)
            continue
        audio.features = features[line].to(listener.device)
        if mask is not None:
            audio.unpadded_frames = int(mask[line].sum())
            # A recording that fits in a window is heard to the window's end.
            audio.num_frames = audio.unpadded_frames if total > listener.window_frames else total
    prompts = inputs.get("decoder_input_ids")
    if prompts is not None:
        if not isinstance(prompts, Tensor) or prompts.ndim != 2 or len(prompts) != batch:
            raise InputError("decoder_input_ids", f"must be [{batch}, length] of token ids", prompts)
        for audio, prompt in zip(audios, prompts.tolist(), strict=True):
            audio.prompt = prompt
    return audios


def _detect_languages(
    listener: WhisperAdapter,
    decoder: WindowDecoder,
    audios: Sequence[Audio],
    config: GenerationConfig,
    tokens: Sequence[int],
) -> list[int]:
    """The token of the language that each recording most likely begins in."""
    states = [audio.states for audio in audios if audio.states is not None]
    if not states:
        # Padding inside the first window is heard too: it sounds like silence.
        firsts = [
            audio.features[:, : listener.window_frames] for audio in audios if audio.features is not None
        ]
        short = listener.window_frames - firsts[0].shape[1]
        windows = torch.nn.functional.pad(torch.stack(firsts), (0, short))
        states = list(listener.encode(windows))
    start = [[config.decoder_start_token_id]] * len(audios)
    logits = decoder.first_logits(torch.stack(states), start)  # type: ignore[arg-type]
    known = torch.tensor(tokens, device=logits.device)
    found: list[int] = known[logits[:, known].argmax(1)].tolist()
    return found


def _repeat_audios(audios: Sequence[Audio], copies: int) -> list[Audio]:
    """Each recording as often as it is to be heard."""
    made = []
    for audio in audios:
        for copy in range(copies):
            config, seed = audio.config, audio.config.seed
            if seed is not None and copy:
                config = config.replace(seed=derive_seed(seed, 0, copy << 16))
            made.append(replace(audio, config=config, segments=[]))
    return made
