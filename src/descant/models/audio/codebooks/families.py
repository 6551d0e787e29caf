"""The families of codebook models: CSM, Dia, Higgs Audio and MusicGen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from descant.core.records import Proposal
from descant.core.rows import Rows, index_rows
from descant.errors import NotInThisVersion
from descant.models.audio.codebooks.frames import (
    SAMPLING_PROCESSORS,
    CodebookFamily,
    CrossAttentionMask,
    FrameInputs,
    LoopChanges,
    StepInputs,
    row_seed,
)
from descant.models.compat.custom_generate import PreparedLoop
from descant.models.forward.batches import ForwardBatch
from descant.models.forward.traits import traits_of
from descant.models.transformers_model import TransformersModel


class CsmFamily(CodebookFamily):
    """A backbone that predicts the first code of a frame, and a depth decoder for the others."""

    codes_name = "input_ids"
    num_rows = 1
    reads_hidden = True
    has_guidance = False
    processors = SAMPLING_PROCESSORS

    def __init__(self, model: Any) -> None:
        self.network = model
        self.num_codebooks: int = model.config.num_codebooks
        self.num_known_codes: int = model.config.vocab_size

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        embedded: Tensor = self.network.backbone_model.embed_tokens(codes[None])[0]
        return embedded

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The embeddings of text and sound."""
        return {
            "inputs_embeds": pad_sequence([prompt["inputs_embeds"] for prompt in prompts], batch_first=True)
        }

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """A first code [B, 1, 1], and the prompts."""
        ids, kwargs = loop.input_ids, loop.model_kwargs
        if ids.ndim != 2 or kwargs.get("inputs_embeds") is not None:
            must = "must be None for this model, whose prompts are text and sound"
            raise NotInThisVersion("inputs_embeds", must, "embeddings", "pass input_ids and input_values")
        embeds = self.network._merge_input_ids_with_input_values(
            ids, kwargs.get("input_values"), kwargs.get("input_values_cutoffs")
        )["inputs_embeds"]
        mask, pad = kwargs.get("attention_mask"), self.network.config.codebook_pad_token_id
        frames = []
        for row, embedded in enumerate(embeds):
            prompt = {"inputs_embeds": embedded if mask is None else embedded[mask[row].bool()]}
            length = len(prompt["inputs_embeds"])
            frames.append(FrameInputs({}, pad, prompt=prompt, prompt_length=length))
        return ids.new_zeros(len(ids), 1, 1), frames

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:
        """The depth decoder runs where a step checks its end: after the first code is chosen."""
        end = self.network.config.codebook_eos_token_id
        depth = _DepthDecoder(loop.model.depth_decoder, frames, end)
        fields = {"eos_token_id": None, "pad_token_id": self.network.config.codebook_pad_token_id}
        return LoopChanges((), (depth,), fields)

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:  # noqa: ARG002
        """The frames [B, T, C], or an output that has them."""
        sequences = output if isinstance(output, Tensor) else output.sequences
        first = sequences[:, 1:]
        codes = first.new_full((*first.shape, self.num_codebooks), self.network.config.codebook_pad_token_id)
        for row, sequence in enumerate(frames):
            more = torch.stack(sequence.state.more_codes[: first.shape[1]])
            codes[row, : len(more), 0] = first[row, : len(more)]
            codes[row, : len(more), 1:] = more.to(codes.device)
        if isinstance(output, Tensor):
            return codes
        output.sequences = codes
        return output


class DepthModel(TransformersModel):
    """The depth decoder of one step: request `i` continues the frame of hidden state `i`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, traits=replace(traits_of(model), prepares_own_inputs=False))
        self._packed.off_reason = "the first position holds a hidden state"
        self.hidden: Tensor | None = None  # [B, D]

    def _token_inputs(self, rows: Rows, proposal: Proposal, batch: ForwardBatch) -> dict[str, Any]:
        """The fed codes, and the hidden states in place of the first one."""
        inputs = {**super()._token_inputs(rows, proposal, batch), "logits_to_keep": 1}
        if batch.start == 0:
            assert self.hidden is not None
            request = rows.request if batch.rows is None else rows.request[batch.rows]
            inputs["backbone_last_hidden_state"] = index_rows(self.hidden, request)
        return inputs


class _DepthDecoder:
    """Decodes the other codes of each frame once its first is chosen; ends rows whose frame is the end.

    It is called as a stopping criterion with all rows of a call, ended ones included.
    """

    def __init__(self, model: Any, frames: Sequence[FrameInputs], end: int) -> None:
        self._model, self._config = DepthModel(model), model.generation_config
        self._frames, self._end = frames, end
        self._last_frame: list[int | None] = [None] * len(frames)  # of sequences that have ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        states = [sequence.state for sequence in self._frames]
        hidden = torch.stack([state.hidden for state in states if state.hidden is not None])
        first = input_ids[:, -1:].to(hidden.device)
        # A place before the first code stands for the hidden state.
        prompts = torch.nn.functional.pad(first, (1, 0))
        frame = input_ids.shape[1] - 2  # the first code of all stands for the prompt
        decode, seeds = states[0].decode, None
        assert decode is not None
        if states[0].seed is not None:  # the same sequence has the same codes, alone and in a batch
            seeds = [row_seed(state.seed or 0, 1 + frame) for state in states]
        self._model.hidden = hidden
        codes = decode(self._model, self._config, prompts, seeds)[:, 1:]  # [B, C]
        is_end = (codes[:, :-1] == self._end).all(1)
        for row, state in enumerate(states):
            last = self._last_frame[row]
            if last is None or last >= frame:  # a step that was interrupted is made again
                state.more_codes[frame:] = [codes[row, 1:]]
                self._last_frame[row] = frame if bool(is_end[row]) else None
        return is_end.to(input_ids.device)


# They allow the end token in the first channel only, and force it in the others after their delays.
_END_PROCESSORS: Final = ("DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor")


class DiaFamily(CodebookFamily):
    """A decoder that attends to an encoded text and predicts all channels in parallel."""

    codes_name = "decoder_input_ids"
    processes_forced = True
    changed_traits: ClassVar[Mapping[str, Any]] = {"needs_equal_lengths": True}

    def __init__(self, model: Any) -> None:
        self.network = model
        config = model.config.decoder_config
        self.num_codebooks = self.num_rows = config.num_channels
        self.num_known_codes: int = config.vocab_size
        self._pad: int = config.pad_token_id
        self._text_mask = CrossAttentionMask()

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        embedded: Tensor = self.network.model.decoder.embeddings(codes[None])[0]
        return embedded

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The network, its model, and the stack of layers."""
        return [self.network, self.network.model, self.network.model.decoder]

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        decoder, states = self.network.model.decoder, inputs.encoder_states
        hidden = decoder.embeddings(inputs.codes)
        positions = torch.tensor([[inputs.position]], device=hidden.device)
        rotary = decoder.rotary_emb(hidden, position_ids=positions)
        assert states is not None
        assert inputs.encoder_mask is not None
        mask = self._text_mask.of(decoder.config, hidden, states, inputs.encoder_mask)
        for layer in decoder.layers:
            hidden = layer(
                hidden,
                rotary,
                None,
                states,
                encoder_attention_mask=mask,
                past_key_values=inputs.past,
                position_ids=positions,
            )
        logits: Tensor = self.network.logits_dense(decoder.norm(hidden))
        return logits

    def guide(self, cond: Tensor, uncond: Tensor, scales: Tensor, frames: Sequence[FrameInputs]) -> Tensor:
        """The conditional logits [N, C, V] of the `top_k` codes that guided logits prefer."""
        guided = cond + (cond - uncond) * scales[:, None, None]
        for row, sequence in enumerate(frames):
            top_k = sequence.options.get("top_k")
            if top_k is not None:
                best = guided[row].topk(top_k, dim=-1).indices
                is_dropped = torch.ones_like(guided[row], dtype=torch.bool).scatter(-1, best, False)
                guided[row] = cond[row].masked_fill(is_dropped, -torch.inf)
        return guided

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L] and its encoded text."""
        kwargs, config = loop.model_kwargs, loop.generation_config
        codes = self.first_codes(loop)
        delayed = kwargs["decoder_delay_mask"].transpose(1, 2)
        forced = torch.where(delayed == self._pad, -1, delayed).cpu()
        frames = []
        for own, (text, *uncond) in zip(forced, self.encoded_texts(loop, len(codes)), strict=True):
            frames.append(
                FrameInputs(
                    text,
                    int(config._pad_token_tensor),
                    own,
                    guidance_scale=float(config.guidance_scale or 1.0),
                    uncond_inputs=uncond[0] if uncond else None,
                    options={"top_k": config.top_k},
                )
            )
        return codes, frames

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:  # noqa: ARG002
        """The processors of the end token, and the temperature, which is at least 1."""
        own = [
            processor for processor in loop.logits_processor if type(processor).__name__ in _END_PROCESSORS
        ]
        config = loop.generation_config
        temperature = config.temperature
        fields = {} if temperature is None else {"temperature": float(temperature)}
        return LoopChanges(tuple(own), fields=fields if config.do_sample else {})


_DELAY_PROCESSOR: Final = "HiggsAudioV2DelayPatternLogitsProcessor"
_NO_WARPERS: Final = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


class HiggsAudioFamily(CodebookFamily):
    """A decoder that reads text and sound, and predicts all codebooks of sound in parallel."""

    codes_name = "audio_input_ids"
    has_guidance = False
    processors = frozenset({"remove_invalid_values", "temperature", "top_k", "top_p"})

    def __init__(self, model: Any) -> None:
        self.network = model
        config = model.config
        self.num_codebooks = self.num_rows = config.num_codebooks
        self.num_known_codes: int = config.codebook_size
        self._begin: int = config.audio_stream_bos_id
        self._end: int = config.audio_stream_eos_id

    def embed(self, codes: Tensor) -> Tensor:
        """The embeddings of frames [T, C] -> [T, D]."""
        embedded: Tensor = self.network.model.embed_audio_tokens(codes)
        return embedded

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The network and the stack of layers."""
        return [self.network, self.network.model]

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        decoder = self.network.model
        hidden = decoder.embed_audio_tokens(inputs.codes)
        positions = torch.tensor([[inputs.position]], device=hidden.device)
        rotary = decoder.rotary_emb(hidden, positions)
        for layer in decoder.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                audio_token_mask=None,  # a frame of sound
                position_ids=positions,
                past_key_values=inputs.past,
                position_embeddings=rotary,
            )
        logits: Tensor = self.network.audio_lm_head(decoder.norm(hidden))
        return logits

    def prompt_inputs(self, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The tokens of the prompts, and the codes of the sound in them."""
        inputs: dict[str, Any] = {
            "input_ids": pad_sequence([prompt["input_ids"] for prompt in prompts], batch_first=True)
        }
        sounds = [prompt["audio_input_ids"] for prompt in prompts]
        if any(len(sound) for sound in sounds):
            lengths = torch.tensor([len(sound) for sound in sounds], device=sounds[0].device)
            inputs["audio_input_ids"] = pad_sequence(sounds, batch_first=True)
            width = inputs["audio_input_ids"].shape[1]
            inputs["audio_input_ids_mask"] = torch.arange(width, device=lengths.device) < lengths[:, None]
        return inputs

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """A first code of each codebook [B, C, 1], and the prompts."""
        ids, kwargs = loop.input_ids, loop.model_kwargs
        mask, sound = kwargs.get("attention_mask"), kwargs.get("audio_input_ids")
        sound_mask = kwargs.get("audio_input_ids_mask")
        frames = []
        for row, tokens in enumerate(ids):
            prompt = {
                "input_ids": tokens if mask is None else tokens[mask[row].bool()],
                "audio_input_ids": ids.new_zeros(0, self.num_codebooks),
            }
            if sound is not None:
                is_known = slice(None) if sound_mask is None else sound_mask[row].bool()
                prompt["audio_input_ids"] = sound[row][is_known]
            length = len(prompt["input_ids"])
            frames.append(FrameInputs({}, self._end, prompt=prompt, prompt_length=length))
        return ids.new_full((len(ids), self.num_codebooks, 1), self._begin), frames

    def loop_changes(self, loop: PreparedLoop, frames: Sequence[FrameInputs]) -> LoopChanges:
        """The delay pattern, the end of all codebooks at once, and sampling that avoids repetition."""
        config, own = loop.generation_config, loop.logits_processor
        [delay] = [processor for processor in own if type(processor).__name__ == _DELAY_PROCESSOR]
        processor = _FrameProcessor(delay, self.network.config, loop.input_ids, frames)
        fields: dict[str, Any] = {"eos_token_id": None, "pad_token_id": self._end}
        window = getattr(config, "ras_win_len", None)
        repeats = getattr(config, "ras_win_max_num_repeat", None)
        if window is not None and repeats is not None:
            if not config.do_sample:
                must = "must be None without `do_sample`: it replaces repeated codes by sampled ones"
                raise NotInThisVersion("ras_win_len", must, window, "set do_sample=True")
            processor.window, processor.max_repeats = window, repeats
            processor.warpers = [processor for processor in own if processor is not delay]
            fields |= _NO_WARPERS
        ends_early = self.network.config.eos_token_id is not None and config.eos_token_id is not None
        criteria = (_AllEnded(self._end, self.num_codebooks),) if ends_early else ()
        return LoopChanges((processor,), criteria, fields)

    def loop_result(self, loop: PreparedLoop, frames: Sequence[FrameInputs], output: Any) -> Any:  # noqa: ARG002
        """The codes [B, T, C] behind those of the prompt, or an output that has them."""
        sequences = output if isinstance(output, Tensor) else output.sequences
        codes = sequences.view(-1, self.num_codebooks, sequences.shape[1])[:, :, 1:].transpose(1, 2)
        given = loop.model_kwargs.get("audio_input_ids")
        sound = codes if given is None else torch.cat((given, codes), 1)
        if isinstance(output, Tensor):
            return sound
        for name in ("scores", "logits"):
            if output.get(name) is not None:
                shape = (len(codes), self.num_codebooks, -1)
                steps = [step.view(shape) for step in output[name]]
                output[name] = tuple(steps if name == "scores" else [step.flatten(1) for step in steps])
        ids = loop.input_ids
        tokens = _placeholder_tokens(ids, codes, self.network.config)
        return _with_sound(output, torch.cat((ids, tokens), 1), sound)


def _with_sound(output: Any, sequences: Any, sound: Any) -> Any:
    from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import HiggsAudioV2GenerationOutput

    values = {name: output.get(name) for name in ("scores", "logits")}
    return HiggsAudioV2GenerationOutput(sequences=sequences, **values, audio_sequences=sound)


def _placeholder_tokens(ids: Tensor, codes: Tensor, config: Any) -> Tensor:
    """The token of each frame [B, T]: sound, sound whose codebooks end one by one, or the end."""
    is_end = codes == config.audio_stream_eos_id
    ends = is_end.any(-1) | (ids[:, -1:] == config.audio_delay_token_id)
    tokens = torch.where(ends.cummax(1).values, config.audio_delay_token_id, config.audio_token_id)
    if config.eos_token_id is not None:
        tokens = torch.where(is_end.all(-1), config.eos_token_id, tokens)
    return tokens


class _FrameProcessor:
    """transformers' delay pattern, then optionally sampling that avoids repetition, for all rows of a call.

    Repetition-aware sampling (Chen et al. 2024, https://arxiv.org/abs/2406.05370) draws a code, and draws
    again from the model's own distribution if that code is repeated. The result is the distribution of the
    code that remains, so that one draw is enough.
    """

    def __init__(self, delay: Any, config: Any, ids: Tensor, frames: Sequence[FrameInputs]) -> None:
        self._delay, self._config, self._ids = delay, config, ids
        self._sounds = [
            sequence.prompt["audio_input_ids"] for sequence in frames if sequence.prompt is not None
        ]
        self.window = self.max_repeats = 0  # 0: repetition is not avoided
        self.warpers: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count, size = self._config.num_codebooks, scores.shape[-1]
        codes = input_ids.view(-1, count, input_ids.shape[1])[:, :, 1:].transpose(1, 2)  # [B, T, C]
        tokens = torch.cat((self._ids, _placeholder_tokens(self._ids, codes, self._config)), 1)
        delayed: Tensor = self._delay(tokens, scores.view(len(codes), count * size))
        if not self.window:
            return delayed
        for warper in self.warpers:
            delayed = warper(tokens, delayed)
        probs = delayed.softmax(-1)
        repeated = probs * self._is_repeated(codes, size).view_as(probs)
        return (probs - repeated + repeated.sum(-1, keepdim=True) * scores.softmax(-1)).log()

    def _is_repeated(self, codes: Tensor, size: int) -> Tensor:
        """Which codes [B, C, V] are too frequent among the last ones."""
        counts = []
        for sound, new in zip(self._sounds, codes, strict=True):
            recent = torch.cat((sound.to(new.device), new))[-self.window :]  # [W, C]
            found = torch.zeros(new.shape[1], size, device=new.device)
            found.scatter_add_(1, recent.T, torch.ones_like(recent.T, dtype=found.dtype))
            counts.append(found)
        count = torch.stack(counts)
        count[:, :, [self._config.audio_stream_bos_id, self._config.audio_stream_eos_id]] = 0
        return count >= self.max_repeats


class _AllEnded:
    """Ends the rows of a sequence once all of its codebooks are at the end code."""

    def __init__(self, end: int, num_codebooks: int) -> None:
        self._end, self._num_codebooks = end, num_codebooks

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        is_end = (input_ids[:, -1] == self._end).view(-1, self._num_codebooks).all(1)
        return is_end.repeat_interleave(self._num_codebooks)


class _DecoderFamily(CodebookFamily):
    """A decoder of codebooks a step apart, each with a table of embeddings and a head."""

    # Its positions count from the first one that is cached.
    changed_traits: ClassVar[Mapping[str, Any]] = {
        "needs_equal_lengths": True,
        "supports_logits_to_keep": False,
    }

    def __init__(self, model: Any) -> None:
        self.network = model
        self.decoder: Any = getattr(model, "decoder", model)  # with the heads
        config = self.decoder.config
        self.num_codebooks = self.num_rows = config.num_codebooks
        self.has_guidance = self.decoder is not model  # of a text, which the decoder alone does not read
        self._tables = list(self.decoder.model.decoder.embed_tokens)
        self._heads = list(self.decoder.lm_heads)
        self.num_known_codes: int = self._tables[0].num_embeddings

    def embed(self, codes: Tensor) -> Tensor:
        """The sum of the embeddings of a frame's codes [T, C] -> [T, D]."""
        return torch.stack([table(codes[:, index]) for index, table in enumerate(self._tables)]).sum(0)

    @property
    def skipped_modules(self) -> Sequence[Any]:
        """The network, its decoder, and the stack of layers."""
        return [self.network, self.decoder, self.decoder.model, self.decoder.model.decoder]

    def embed_frame(self, codes: Tensor) -> Tensor:
        """The embeddings of one frame of each row [N, 1, C] -> [N, 1, D]."""
        first, *others = codes.unbind(-1)
        embedded: Tensor = self._tables[0](first)
        for table, code in zip(self._tables[1:], others, strict=True):
            embedded = embedded + table(code)
        return embedded

    def position_embedding(self, position: int) -> Tensor | None:
        """The embedding of a position [D]; None: the table is shorter."""
        table = self.decoder.model.decoder.embed_positions.weights
        return table[position] if position < table.shape[0] else None

    def head_logits(self, hidden: Tensor) -> Tensor:
        """The logits of all heads [N, 1, C * V] for hidden states [N, 1, D]."""
        hidden = self.decoder.model.decoder.layer_norm(hidden)
        return torch.cat([head(hidden) for head in self._heads], -1)

    def flat(self, codes: Tensor) -> Tensor:
        """Codes [N, T, C] with a row for each codebook [N * C, T]."""
        return codes.transpose(1, 2).reshape(-1, codes.shape[1])

    def split(self, loop: PreparedLoop) -> tuple[Tensor, list[dict[str, Any]]]:
        """The first codes [B, C, L], and the fields that a sequence of either model has."""
        kwargs = loop.model_kwargs
        for name in ("decoder_attention_mask", "encoder_attention_mask"):
            if kwargs.get(name) is not None and not bool(kwargs[name].all()):
                must = "must be None or all ones for codebooks, whose prompts are not padded"
                raise NotInThisVersion(name, must, kwargs[name], "leave it out")
        codes = self.first_codes(loop)
        pattern = kwargs.get("decoder_delay_pattern_mask", kwargs.get("delay_pattern_mask"))
        forced = pattern.view(len(codes), self.num_codebooks, -1).cpu()
        scale = kwargs.get("guidance_scale")
        pad = loop.generation_config._pad_token_tensor
        shared: dict[str, Any] = {
            "pad_token_id": int(forced[0, 0, 0] if pad is None else pad),
            "guidance_scale": float(scale) if scale is not None and scale > 1 else 1.0,
        }
        return codes, [{"forced": pattern, **shared} for pattern in forced]


class MusicgenFamily(_DecoderFamily):
    """MusicGen: a decoder that attends to an encoded text, or the decoder alone."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._text_mask = CrossAttentionMask()

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The codes as ids with a row for each codebook."""
        name = "decoder_input_ids" if self.network is not self.decoder else "input_ids"
        return {name: self.flat(codes)}

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        codes, past, position, states, mask = inputs
        decoder = self.decoder.model.decoder
        embedded = self.position_embedding(position)
        if embedded is None:  # the module makes a longer table
            embedded = decoder.embed_positions(codes.transpose(1, 2), position)
        hidden = self.embed_frame(codes) + embedded
        made = None
        if states is not None and mask is not None:
            made = self._text_mask.of(decoder.config, hidden, states, mask)
        for layer in decoder.layers:
            # Of the states only their presence counts: the keys and values of the text are cached.
            hidden = layer(
                hidden, None, states, encoder_attention_mask=made, past_key_values=past, use_cache=True
            )
        return self.head_logits(hidden)

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L] and its encoded text."""
        codes, parts = self.split(loop)
        kwargs = loop.model_kwargs
        if kwargs.get("encoder_hidden_states") is not None:
            must = "must be None for the decoder alone"
            do = "use MusicgenForConditionalGeneration"
            raise NotInThisVersion("encoder_hidden_states", must, type(self.network).__name__, do)
        if self.network is self.decoder:
            return codes, [FrameInputs({}, **part) for part in parts]
        texts = zip(parts, self.encoded_texts(loop, len(parts)), strict=True)
        return codes, [
            FrameInputs(text, **part, uncond_inputs=uncond[0] if uncond else None)
            for part, (text, *uncond) in texts
        ]


class MelodyFamily(_DecoderFamily):
    """MusicGen Melody: a decoder that reads an encoded text and melody before the first frame."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.network = self.decoder

    def token_inputs(self, codes: Tensor) -> dict[str, Any]:
        """The codes as ids with a row for each codebook."""
        return {"input_ids": self.flat(codes)}

    def step(self, inputs: StepInputs) -> Tensor:
        """The logits [N, 1, C * V] after one more frame."""
        decoder = self.decoder.model.decoder
        hidden = self.embed_frame(inputs.codes)
        embedded = self.position_embedding(inputs.position)
        if embedded is None:  # the module makes a longer table
            embedded = decoder.embed_positions(hidden, inputs.position)
        hidden = hidden + embedded
        for layer in decoder.layers:
            hidden = layer(hidden, attention_mask=None, past_key_values=inputs.past, use_cache=True)[0]
        return self.head_logits(hidden)

    def frame_inputs(self, loop: PreparedLoop) -> tuple[Tensor, list[FrameInputs]]:
        """The first codes of each sequence [B, C, L] and what it reads before them."""
        codes, parts = self.split(loop)
        states = loop.model_kwargs.get("encoder_hidden_states")
        frames = []
        for row, part in enumerate(parts):
            prefixes = () if states is None else states[row :: len(parts)]
            prefix, uncond = (*prefixes, None, None)[:2]
            uncond_inputs: dict[str, Any] | None = None if uncond is None else {}
            frames.append(
                FrameInputs({}, **part, prefix=prefix, uncond_inputs=uncond_inputs, uncond_prefix=uncond)
            )
        return codes, frames
