"""Models that take sound beside every token: each position has a token and the sound of its time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import GeneratorType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from descant.core.interfaces import KVCache, KVSpan
from descant.core.records import Proposal
from descant.core.rows import Rows
from descant.errors import InputError, UnsupportedModel
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.traits import has_dynamic_rope, traits_of
from descant.models.transformers_model import TransformersModel
from descant.models.wrapping.peft_adapters import ADAPTER_NAME_KEY
from descant.models.wrapping.wrapped_model import decoding_base, shallow_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Positions that one forward of the audio tower encodes: the mask of a long sound would be too large.
_ENCODED_POSITIONS = 256


class SoundStream(NamedTuple):
    """The sound of a request by position, and the inputs that all its forwards have."""

    values: Tensor  # [T, ...]
    constants: Mapping[str, Any]


class SoundEncoder:
    """Turns the sound of a request into one entry per position, and feeds these beside tokens."""

    main_input_name: str  # the input that holds the sound
    applies_window: bool  # whether the model masks what is before the window of its attention
    traits: Mapping[str, Any]  # fields of ModelTraits that differ from what the model's signature tells

    def __init__(self, model: Any) -> None:
        self.model = model

    def max_length(self, inputs: Mapping[str, Any]) -> int:
        """The most tokens of a row with these inputs, prompt included; raises InputError without sound."""
        raise NotImplementedError

    def encode(self, inputs: Mapping[str, Any]) -> SoundStream:
        """The sound in these inputs, by position."""
        raise NotImplementedError

    def silence(self) -> SoundStream:
        """The entry of a position without sound."""
        raise NotImplementedError

    def forward_inputs(self, tokens: Tensor, sound: Tensor) -> dict[str, Any]:
        """The arguments of a forward for tokens [N, T] and the sound of their positions [N, T, ...]."""
        raise NotImplementedError

    def callee(self) -> Any:
        """The callee of a forward: the model, or a copy of it with shared weights."""
        return self.model


# What decides how a model decodes.
_GENERATION_METHODS: Final = (
    "generate", "forward", "prepare_inputs_for_generation", "_prepare_model_inputs", "_sample",
    "_update_model_kwargs_for_generation",
)  # fmt: skip


def is_aligned_sound(model: Any) -> bool:
    """Whether a model takes sound beside every token, with the generation methods of its class."""
    return decoding_base(type(model), _SOUND_ENCODERS, _GENERATION_METHODS) is not None


class AlignedSoundModel(TransformersModel):
    """A model with sound beside every token.

    The sound of a request is encoded once, at its admission. A forward takes the entries of the positions
    that it feeds, so that rows of any lengths share it. Rows that belong to no request, such as the
    unconditional rows of guidance, have no sound.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[str] = ()) -> None:
        name = decoding_base(type(model), _SOUND_ENCODERS, ())
        assert name is not None
        self._sound: SoundEncoder = _SOUND_ENCODERS[name](model)
        self._streams: dict[int, SoundStream] = {}
        # A model that does not prepare its own inputs, since these are prepared here.
        traits = replace(
            traits_of(model),
            prepares_own_inputs=False,
            needs_equal_lengths=has_dynamic_rope(model.config.get_text_config(decoder=True)),
            supports_inputs_embeds=False,
            has_aligned_inputs=True,
            main_input_name=self._sound.main_input_name,
            **self._sound.traits,
        )
        super().__init__(model, states, traits)
        self._callee = self._sound.callee
        windows = [window for window in self.traits.sliding_windows.values() if window is not None]
        self._masked_window = None if self._sound.applies_window else min(windows, default=None)
        if self._masked_window is not None and not self.traits.supports_custom_mask:
            raise UnsupportedModel(
                f"the attention window of {type(model).__name__} needs a mask, which "
                f'{self.traits.attn_implementation!r} does not take: load it with attn_implementation="sdpa"'
            )

    def max_request_length(self, inputs: Mapping[str, Any]) -> int:
        """The most tokens of a row with these inputs, prompt included."""
        return self._sound.max_length(inputs)

    @torch.no_grad()
    def add_requests(self, requests: Sequence[int], inputs: Mapping[str, Sequence[Any]]) -> None:
        """Encode the sound of new requests."""
        known = self.traits.input_names | self.traits.unused_inputs | {ADAPTER_NAME_KEY}
        for name in inputs.keys() - known:
            must = f"must be one of {', '.join(sorted(self.traits.input_names))} for this model"
            raise InputError("inputs", must, name)
        super().add_requests(requests, {name: inputs[name] for name in {ADAPTER_NAME_KEY} & inputs.keys()})
        given = [
            {name: values[index] for name, values in inputs.items() if values[index] is not None}
            for index in range(len(requests))
        ]
        for own in given:  # before any sound is encoded
            self._sound.max_length(own)
        for request, own in zip(requests, given, strict=True):
            with self._adapters.applied([request]):
                self._streams[request] = self._sound.encode(own)

    def remove_requests(self, requests: Sequence[int]) -> None:
        """Drop the sound of finished requests."""
        super().remove_requests(requests)
        for request in requests:
            self._streams.pop(request, None)

    def _stream_of(self, request: int) -> SoundStream:
        """The sound of a row of this request."""
        found = self._streams.get(request)
        if found is not None:
            return found
        conditional = self._streams.get(-1 - request)  # of a request's unconditional rows
        silence = self._sound.silence()
        return silence if conditional is None else silence._replace(constants=conditional.constants)

    def _batch_keys(self, rows: Rows) -> dict[int, object]:
        """The constants of the requests, if they differ: rows that share a forward share these."""
        keys = {
            request: tuple(sorted(self._stream_of(request).constants.items()))
            for request in set(rows.request.tolist())
        }
        return dict(keys) if len(set(keys.values())) > 1 else {}

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The fed tokens [N, T] with the sound of their positions."""
        tokens: Tensor = super()._token_inputs(rows, proposal, batch)["input_ids"]
        requests = (rows.request if batch.rows is None else rows.request[batch.rows]).tolist()
        streams = [self._stream_of(request) for request in requests]
        starts = batch.cached_length.tolist()
        lines = zip(streams, starts, strict=True)
        sound = torch.stack([_entries(stream.values, start, batch.width) for stream, start in lines])
        return {**self._sound.forward_inputs(tokens, sound), **streams[0].constants}

    def _position_inputs(self, cache: KVCache, span: KVSpan, batch: ForwardBatch) -> dict[str, Any]:
        """Position ids and attention mask; a mask also where the model would apply no window."""
        if self._masked_window is not None and batch.read_length > self._masked_window:
            batch = batch._replace(start=None)
        return super()._position_inputs(cache, span, batch)


def _entries(values: Tensor, start: int, width: int) -> Tensor:
    """The entries of `width` positions [width, ...]; beyond the end, where only drafts are, the last one."""
    part = values[min(start, len(values) - 1) : start + width]
    missing = width - len(part)
    return part if not missing else torch.cat((part, part[-1:].expand(missing, *part.shape[1:])))


def _checked_sound(name: str, inputs: Mapping[str, Any], shape: str) -> Tensor:
    """The sound of one request, or an InputError."""
    value = inputs.get(name)
    if isinstance(value, GeneratorType):
        must = f"must be a tensor {shape} with the whole sound, a generator is not supported"
        raise InputError(name, must, type(value).__name__, "pass the sound at once")
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3 and len(value) == 1:
        return value
    raise InputError(name, f"must be the sound of the prompt, a tensor of floats {shape}", value)


class _KyutaiSound(SoundEncoder):
    """The codes of a codec, one set a frame, behind the frame's token (Kyutai speech-to-text)."""

    main_input_name = "input_values"
    applies_window = False  # its cache drops what is before the window

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.traits = {
            "input_names": frozenset({"input_values", "audio_window_size"}),
            # The model reads padding as silence. The others are what its own generate() makes of the sound.
            "unused_inputs": frozenset(
                {"padding_mask", "audio_tokens", "current_window", "encoder_past_key_values", "padding_cache"}
            ),
            "config_inputs": frozenset({"audio_window_size"}),
            # The first token of a prompt is beyond the vocabulary of the text.
            "input_vocab_size": max(model.config.vocab_size, (model.config.bos_token_id or 0) + 1),
        }

    def max_length(self, inputs: Mapping[str, Any]) -> int:
        """One token more than the sound has frames: position `p` hears frame `p - 1`."""
        sound = _checked_sound(self.main_input_name, inputs, "[1, 1, samples]")
        size = int(self.model.config.codec_config.frame_size)
        if sound.shape[-1] < size:
            raise InputError(self.main_input_name, f"must have at least {size} samples, one frame", sound)
        window = inputs.get("audio_window_size")
        if window is not None and (type(window) is not int or window < 1):
            raise InputError("audio_window_size", "must be None or a number of frames >= 1", window)
        return 1 + sound.shape[-1] // size

    def encode(self, inputs: Mapping[str, Any]) -> SoundStream:
        """The codes [T, C], by the methods of the model itself: a window of frames at a time."""
        count = self.max_length(inputs)
        model = self._copy()
        device = self.model.device
        ids = torch.zeros(1, count, dtype=torch.long, device=device)
        kwargs: dict[str, Any] = {
            "input_values": inputs["input_values"].to(device, model.codec_model.dtype),
            "audio_window_size": inputs.get("audio_window_size"),
        }
        *_, kwargs = model._prepare_model_inputs(ids, None, kwargs)
        window = kwargs["audio_window_size"]
        # The model encodes at most one window in a call; position 0 comes before the first.
        ends = [*range(window + 1, count, window), count]
        parts, start = [], 0
        for end in ends:
            positions = torch.arange(start, end, device=device)[None]
            past = SimpleNamespace(get_seq_length=partial(int, start))  # nothing else of the cache is read
            prepared = model.prepare_inputs_for_generation(
                ids[:, start:end], past_key_values=past, position_ids=positions, **kwargs
            )
            parts.append(prepared["input_ids"][0, :, 1:])
            start = end
        return SoundStream(torch.cat(parts), {})

    def _copy(self) -> Any:
        """A copy of the model, whose codec can be changed: the model sets methods and a config on it."""
        codec = self.model.codec_model
        config = copy.deepcopy(codec.generation_config)
        view = shallow_copy(self.model)
        view._modules["codec_model"] = shallow_copy(codec, generation_config=config)
        return view

    def silence(self) -> SoundStream:
        """Padding, which has no embedding."""
        config = self.model.config
        shape, pad = (1, config.num_codebooks), config.audio_pad_token_id
        return SoundStream(torch.full(shape, pad, device=self.model.device), {})

    def forward_inputs(self, tokens: Tensor, sound: Tensor) -> dict[str, Any]:
        """The token and the codes of each position [N, T, 1 + C]."""
        return {"input_ids": torch.cat((tokens[..., None], sound), -1)}


class _VoxtralRealtimeSound(SoundEncoder):
    """Embeddings of an audio tower, which are added to those of the tokens (Voxtral Realtime)."""

    main_input_name = "input_features"
    applies_window = True
    _embeds_name = "encoder_inputs_embeds"  # what its own generate() makes of them before the loop
    _delay_name = "num_delay_tokens"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        names = frozenset({self.main_input_name, self._embeds_name, self._delay_name})
        self.traits = {"input_names": names}

    def max_length(self, inputs: Mapping[str, Any]) -> int:
        """As many tokens as the sound has steps, the last of which may be incomplete."""
        config = self.model.config
        if self.main_input_name not in inputs and self._embeds_name in inputs:
            embeds = _checked_sound(self._embeds_name, inputs, "[1, positions, size]")
            return math.ceil(embeds.shape[1] / int(config.downsample_factor))
        bins = config.audio_config.num_mel_bins
        sound = _checked_sound(self.main_input_name, inputs, f"[1, {bins}, frames]")
        if sound.shape[1] != bins:
            raise InputError(self.main_input_name, f"must have {bins} bins a frame", sound)
        self._num_delay_tokens(inputs)
        return math.ceil(sound.shape[-1] / int(config.audio_length_per_tok))

    def _num_delay_tokens(self, inputs: Mapping[str, Any]) -> int:
        """The delay of a request, in tokens."""
        given = inputs.get(self._delay_name, self.model.config.default_num_delay_tokens)
        value = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
        if type(value) is not int or value < 0:
            raise InputError(self._delay_name, "must be one number of tokens >= 0", given)
        return value

    def encode(self, inputs: Mapping[str, Any]) -> SoundStream:
        """The audio embeddings [T, D], and the delay."""
        network, factor = self.model.model, self.model.config.downsample_factor
        tower = network.audio_tower
        device = self.model.device
        if (embeds := inputs.get(self._embeds_name)) is None:
            embeds = tower.embedder(inputs[self.main_input_name].to(device, tower.dtype))
        # An incomplete step at the end is never fed: its token is the last one.
        embeds = embeds.to(device)[:, : embeds.shape[1] // factor * factor]
        past = DynamicCache(config=tower.config)
        parts = [
            network.get_audio_features(
                encoder_inputs_embeds=part, past_key_values=past, use_cache=True, return_dict=True
            ).pooler_output[0]
            for part in embeds.split(_ENCODED_POSITIONS * factor, 1)
        ]
        return SoundStream(torch.cat(parts), {self._delay_name: self._num_delay_tokens(inputs)})

    def silence(self) -> SoundStream:
        """An embedding of 0."""
        config, table = self.model.config, self.model.get_input_embeddings().weight
        delay = {self._delay_name: config.default_num_delay_tokens}
        return SoundStream(table.new_zeros(1, table.shape[1]), delay)

    def forward_inputs(self, tokens: Tensor, sound: Tensor) -> dict[str, Any]:
        """The tokens [N, T] and the embeddings to add [N, T, D]."""
        return {"input_ids": tokens, self._embeds_name: sound}

    def callee(self) -> Any:
        """A copy of the model that takes encoded sound where the model would encode it."""
        view = shallow_copy(self.model)
        view._modules["model"] = shallow_copy(self.model.model, get_audio_features=_encoded_features)
        return view


def _encoded_features(*, encoder_inputs_embeds: Tensor, **_: Any) -> Any:
    """Sound that is encoded already, as the output of the audio tower."""
    return SimpleNamespace(pooler_output=encoder_inputs_embeds, past_key_values=None, padding_cache=None)


_SOUND_ENCODERS: Final[Mapping[str, Callable[[Any], SoundEncoder]]] = {
    "KyutaiSpeechToTextForConditionalGeneration": _KyutaiSound,
    "VoxtralRealtimeForConditionalGeneration": _VoxtralRealtimeSound,
}
