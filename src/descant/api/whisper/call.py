"""transcribe(): generate() for Whisper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from descant.api.call import CallOptions, merge_configs
from descant.api.whisper.fallback import TemperatureFallback, WindowDecoder, derive_seed
from descant.api.whisper.options import (
    WHISPER_ARGUMENTS,
    PromptHistory,
    WhisperOptions,
    init_tokens,
    parse_options,
)
from descant.api.whisper.windows import (
    Audio,
    LongFormTranscriber,
    TimestampAligner,
    TimestampScale,
    build_transcript,
)
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.engine.planning.planner import pad_token_id
from descant.errors import ConfigError, InputError
from descant.models.audio.whisper import WhisperAdapter
from descant.models.model_output import GenerateOutput

_MODEL_INPUTS = ("input_features", "attention_mask", "encoder_outputs", "decoder_input_ids")


def transcribe(whisper: WhisperAdapter, call: CallOptions) -> Tensor | GenerateOutput:
    """Transcribe a batch of audios: tokens [B, L], with segments or an output object if requested."""
    given = {name: value for name, value in call.others.items() if name in WHISPER_ARGUMENTS}
    inputs = _model_inputs(whisper, call)
    temperatures, fields = _split_temperatures(call.fields)
    # Old checkpoints force the language and task tokens; these become part of the prompt instead.
    configs = merge_configs(whisper.model, call.generation_config, {**fields, "forced_decoder_ids": None})
    if temperatures is None:
        temperatures = [configs[0].temperature if configs[0].do_sample else 0.0]
    options = parse_options(given, configs[0])
    batch, num_frames = _batch_and_frames(whisper, inputs, options)
    configs = [_with_timestamps(config, num_frames > whisper.window_frames) for config in configs]
    _validate_call(call, configs, options, temperatures)
    config = configs[0]
    call = CallOptions(
        configs=configs,
        logits_processor=call.processors,
        stopping_criteria=call.criteria,
        tokenizer=call.tokenizer,
        streamer=call.streamer,
    )
    decoder = WindowDecoder(whisper.model, call, pad_token_id(config))
    audios = _make_audios(whisper, inputs, configs, batch, num_frames)

    def detect(tokens: Sequence[int]) -> list[int]:
        return _detect_languages(whisper, decoder, audios, config, tokens)

    for audio, tokens in zip(audios, init_tokens(whisper, options, config, batch, detect), strict=True):
        audio.init_tokens = tokens
    history = PromptHistory(whisper, options, config)
    audios = _repeat_audios(audios, config.num_return_sequences)
    fallback = TemperatureFallback(decoder, options, temperatures, whisper)
    scale, aligner = _timestamp_scale(whisper, options, config), _make_aligner(whisper, options, config)
    results = LongFormTranscriber(whisper, options, fallback, scale, aligner).run(audios, history)
    return build_transcript(options, config, audios, results, decoder.pad_token_id)


# ------------------------------------------------------------------------ arguments
def _model_inputs(whisper: WhisperAdapter, call: CallOptions) -> dict[str, Any]:
    """The validated model inputs of a call."""
    given = {
        name: value
        for name, value in call.others.items()
        if value is not None and name not in WHISPER_ARGUMENTS
    }
    if call.inputs is not None:
        if given.get("input_features") is not None:
            must = "must not be given with `inputs`, which is the same argument"
            raise InputError("input_features", must, "both")
        given["input_features"] = call.inputs
    unknown = sorted(given.keys() - {*_MODEL_INPUTS})
    if unknown:
        known = [*_MODEL_INPUTS, *sorted(WHISPER_ARGUMENTS)]
        do = f"use one of {known} or a field of GenerationConfig"
        must = "is neither a generation parameter nor an input of this model"
        raise InputError(unknown[0], must, given[unknown[0]], do)
    if ("input_features" in given) == ("encoder_outputs" in given):
        must = "must be given, or else `encoder_outputs`, but not both"
        raise InputError("input_features", must, None if "input_features" not in given else "both")
    features = given.get("input_features")
    if features is not None:
        if not isinstance(features, Tensor) or features.ndim != 3 or not features.is_floating_point():
            raise InputError("input_features", "must be a tensor of floats [batch, bins, frames]", features)
        if features.shape[1] != whisper.num_mel_bins or not features.shape[0] or not features.shape[2]:
            raise InputError("input_features", f"must be [batch, {whisper.num_mel_bins}, frames]", features)
    return given


def _batch_and_frames(
    whisper: WhisperAdapter, inputs: Mapping[str, Any], options: WhisperOptions
) -> tuple[int, int]:
    """The number of audios, and the number of frames of the longest."""
    requested = options.num_segment_frames
    if requested is not None and requested != whisper.window_frames:
        must = f"must be {whisper.window_frames}, the input length of the model's encoder"
        raise ConfigError("num_segment_frames", must, requested, "leave it out")
    features = inputs.get("input_features")
    if features is None:
        states = _encoder_states(inputs["encoder_outputs"])
        return len(states), states.shape[1] * whisper.encoder_stride
    mask = inputs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != features[:, 0].shape):
        raise InputError("attention_mask", f"must be of shape {list(features[:, 0].shape)}", mask)
    if mask is None and len(features) > 1 and features.shape[2] > whisper.window_frames:
        do = "pass the mask of the feature extractor (return_attention_mask=True)"
        must = "must be given for several audios of which one is longer than a window"
        raise InputError("attention_mask", must, None, do)
    return features.shape[0], features.shape[2]


def _encoder_states(given: Any) -> Tensor:
    """The hidden states of encoder outputs that the user computed [B, S, D]."""
    states = given if isinstance(given, Tensor) else given[0] if len(given) else None
    if not isinstance(states, Tensor) or states.ndim != 3:
        raise InputError("encoder_outputs", "must hold the encoder's last hidden states", given)
    return states


def _split_temperatures(fields: Mapping[str, Any]) -> tuple[list[float] | None, dict[str, Any]]:
    """The fallback temperatures, None if the config decides, and the fields without them."""
    given = fields.get("temperature")
    if given is None:
        return None, dict(fields)
    values = list(given) if isinstance(given, list | tuple) else [given]
    if not values:
        raise ConfigError("temperature", "must be a number or a non-empty list of numbers", given)
    temperatures = [float(FIELDS["temperature"].parse(value)) for value in values]
    do_sample = any(temperature > 0.0 for temperature in temperatures)
    if fields.get("do_sample") is not None and bool(fields["do_sample"]) != do_sample:
        must = f"must be {'0' if do_sample else '> 0'} while `do_sample` is {not do_sample}"
        raise ConfigError(("temperature", "do_sample"), must, given, "leave do_sample out")
    others = {name: value for name, value in fields.items() if name != "temperature"}
    return temperatures, {**others, "do_sample": do_sample}


def _with_timestamps(config: GenerationConfig, is_long: bool) -> GenerationConfig:
    """The config, with timestamps for long audio."""
    if not is_long or config.return_timestamps:
        return config
    if "return_timestamps" in config.given:
        do = "set return_timestamps=True, or pass at most one window"
        must = "must be True for audio longer than a window, which is split at timestamps"
        raise ConfigError("return_timestamps", must, config.return_timestamps, do)
    return GenerationConfig.merge({"return_timestamps": True}, config)


def _validate_call(
    call: CallOptions,
    configs: Sequence[GenerationConfig],
    options: WhisperOptions,
    temperatures: Sequence[float],
) -> None:
    """Raise for incompatible options."""
    config = configs[0]
    single = not config.return_timestamps or options.force_unique_generate_call
    if options.no_speech_threshold is not None and config.no_timestamps_token_id is None:
        must = "needs `no_timestamps_token_id`, as the no-speech token is the one before"
        raise ConfigError("no_speech_threshold", must, options.no_speech_threshold)
    if call.streamer is not None and not (single and len(temperatures) == 1):
        must = "must be None with timestamps or several temperatures, as tokens are then not final"
        do = "leave it out, or set return_timestamps=False and one temperature"
        raise InputError("streamer", must, "one", do)
    if options.return_token_timestamps and single and config.return_dict_in_generate:
        must = "needs `return_timestamps` with `return_dict_in_generate`, whose output has no such entry"
        raise ConfigError("return_token_timestamps", must, True, "leave return_dict_in_generate out")
    if config.return_dict_in_generate and single and len(temperatures) > 1:
        must = "must be one number with `return_dict_in_generate`, as each temperature has its own output"
        raise ConfigError("temperature", must, list(temperatures), "or set return_timestamps=True")
    if config.num_return_sequences > 1 and not any(temperatures):
        must = "must be 1 unless sampling, as a window is continued from one transcript"
        raise ConfigError("num_return_sequences", must, config.num_return_sequences, "set temperature")


def _timestamp_scale(
    whisper: WhisperAdapter, options: WhisperOptions, config: GenerationConfig
) -> TimestampScale:
    """The scale of timestamp tokens; without `no_timestamps_token_id` no token is a timestamp."""
    zero = whisper.vocab_size if config.no_timestamps_token_id is None else config.no_timestamps_token_id
    return TimestampScale(
        zero + 1, options.time_precision, options.time_precision_features, whisper.encoder_stride
    )


def _make_aligner(
    whisper: WhisperAdapter, options: WhisperOptions, config: GenerationConfig
) -> TimestampAligner | None:
    """The aligner for token timestamps, if they are requested."""
    if not options.return_token_timestamps:
        return None
    heads = config.extra.get("alignment_heads")
    if not heads:
        must = "needs `alignment_heads` in the generation config"
        do = "add them to the model's generation config"
        raise ConfigError("return_token_timestamps", must, True, do)
    return TimestampAligner(
        [tuple(pair) for pair in heads], whisper.median_filter_width, options.time_precision
    )


# ------------------------------------------------------------------------ audios
def _make_audios(
    whisper: WhisperAdapter,
    inputs: Mapping[str, Any],
    configs: Sequence[GenerationConfig],
    batch: int,
    num_frames: int,
) -> list[Audio]:
    """The audios of a call."""
    if len(configs) not in (1, batch):
        raise InputError("generation_config", f"must be one for each of the {batch} audios", len(configs))
    per_audio = list(configs) * batch if len(configs) == 1 else configs
    audios = [Audio(config, num_frames) for config in per_audio]
    features, mask = inputs.get("input_features"), inputs.get("attention_mask")
    for index, audio in enumerate(audios):
        if features is None:
            audio.states = _encoder_states(inputs["encoder_outputs"])[index].to(whisper.device)
            continue
        audio.features = features[index].to(whisper.device)
        if mask is not None:
            audio.unpadded_frames = int(mask[index].sum())
            # Audio that fits in a window is decoded up to the window's end.
            is_long = num_frames > whisper.window_frames
            audio.num_frames = audio.unpadded_frames if is_long else num_frames
    prompts = inputs.get("decoder_input_ids")
    if prompts is not None:
        if not isinstance(prompts, Tensor) or prompts.ndim != 2 or len(prompts) != batch:
            raise InputError("decoder_input_ids", f"must be [{batch}, length] of token ids", prompts)
        for audio, prompt in zip(audios, prompts.tolist(), strict=True):
            audio.prompt = prompt
    return audios


def _detect_languages(
    whisper: WhisperAdapter,
    decoder: WindowDecoder,
    audios: Sequence[Audio],
    config: GenerationConfig,
    tokens: Sequence[int],
) -> list[int]:
    """The most likely language token of the first window of each audio."""
    states = [audio.states for audio in audios if audio.states is not None]
    if not states:
        # Padding inside the first window is encoded too, as silence.
        features = [
            audio.features[:, : whisper.window_frames] for audio in audios if audio.features is not None
        ]
        missing = whisper.window_frames - features[0].shape[1]
        windows = torch.nn.functional.pad(torch.stack(features), (0, missing))
        states = list(whisper.encode(windows))
    start = [[config.decoder_start_token_id]] * len(audios)
    logits = decoder.first_logits(torch.stack(states), start)  # type: ignore[arg-type]
    language_tokens = torch.tensor(tokens, device=logits.device)
    detected: list[int] = language_tokens[logits[:, language_tokens].argmax(1)].tolist()
    return detected


def _repeat_audios(audios: Sequence[Audio], copies: int) -> list[Audio]:
    """Each audio, once for each returned sequence."""
    repeated = []
    for audio in audios:
        for copy in range(copies):
            config, seed = audio.config, audio.config.seed
            if seed is not None and copy:
                config = config.replace(seed=derive_seed(seed, 0, copy << 16))
            repeated.append(replace(audio, config=config, segments=[]))
    return repeated
