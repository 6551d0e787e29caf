"""Tiny random models with image, audio or speech inputs or outputs, and their prompts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .small_media import SPECIAL, VOCABULARY, Ids, overrides, shrink
from .subject import Entry, Subject

__all__ = ["subject"]

Inputs = dict[str, Tensor]
LENGTHS = ((3, 4), (2, 9), (7, 0))  # text before and after the picture; the last prompt has text only
# Query and key weights.
QUERY_KEY = re.compile(r"(^|[._])(q|k|query|key|q_proj|k_proj|qkv|c_attn|query_key_value)\.weight")
PER_TOKEN = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
    "image_embeds_position_mask",
    "image_attention_mask",
    "cross_attention_mask",
    "bbox",
)


def noise(*shape: int, seed: int) -> Tensor:
    """Standard normal values that depend only on the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_ids(count: int, seed: int) -> list[int]:
    """Ordinary token ids: no special tokens, no placeholders."""
    return torch.randint(30, SPECIAL - 2, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def build(entry: Entry) -> Any:
    """The architecture at a small size, with weights under which every input matters."""
    kind = getattr(transformers, entry.name)
    fields = shrink(kind.config_class().to_dict(), Ids())
    overrides(fields, entry)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields)).eval().float()
    randomize_weights(model)
    for part in model.modules():  # some generate() methods call that of an inner model
        settings = getattr(part, "generation_config", None)
        if settings is not None:
            settings.eos_token_id = settings.forced_eos_token_id = None
            settings.pad_token_id = padding(model)
    return model


def padding(model: Any) -> int:
    """The padding id; some models use it to find where a row begins."""
    text = model.config.get_text_config(decoder=True)
    return int(first(model.config, "pad_token_id", default=first(text, "pad_token_id", default=0)))


def randomize_weights(model: nn.Module) -> None:
    """Draw weights that keep activations stable and attention selective; shift norms."""
    generator = torch.Generator().manual_seed(1)
    tables = {id(part.weight): 1.0 for part in model.modules() if isinstance(part, nn.Embedding)}
    for part in model.modules():  # the embedding scale is on the model or on its table
        scale = first(part, "scalar_embed_scale", "embed_scale")
        for table in (part, *part.children()) if scale is not None else ():
            if isinstance(table, nn.Embedding) and (table is part or table.num_embeddings >= VOCABULARY):
                tables[id(table.weight)] = 1 / float(scale)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise_values = torch.randn(weight.shape, generator=generator)
            if id(weight) in tables:
                weight.copy_(noise_values * tables[id(weight)])
            elif weight.dim() > 1:
                inputs = weight.shape[-1] if weight.dim() == 3 else weight[0].numel()
                weight.copy_(noise_values * (2.0 if QUERY_KEY.search(name) else 1.2) / max(1, inputs) ** 0.5)
            else:
                weight.add_(0.2 * noise_values)
        for name, buffer in model.named_buffers():
            if name.endswith(("codebook.embed_sum", "codebook.embed")):  # equal in an untrained codec
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


def parameters(function: Callable[..., Any]) -> set[str]:
    """The parameter names of a function."""
    return set(inspect.signature(function).parameters)


def side(config: Any, *names: str) -> Any:
    """The sub-configuration of the vision or audio tower under the first of these names."""
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), config)


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that has a value."""
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def square(model: Any, index: int) -> Inputs:
    """An image of the tower's own size."""
    vision = side(model.config, "vision_config", "encoder")
    size = first(vision, "image_size", default=16)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": noise(1, 3, height, width, seed=100 + index)}


def patches(model: Any, index: int) -> Inputs:
    """An image as flat patches and their grid, in the format of Qwen2-VL's processor."""
    vision = side(model.config, "vision_config")
    merge = first(vision, "spatial_merge_size", "merge_size", default=2)
    height, width = 2 * merge, (2 + index % 2) * merge
    channels = first(vision, "in_channels", "in_chans", "num_channels", default=3)
    volume = (
        channels * first(vision, "temporal_patch_size", "patch_temporal", default=1) * vision.patch_size**2
    )
    return {
        "pixel_values": noise(height * width, volume, seed=100 + index),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def channel_patches(model: Any, index: int) -> Inputs:
    """Patches that keep their channels, rows and columns, and their grid."""
    media = patches(model, index)
    size = model.config.vision_config.patch_size
    return media | {"pixel_values": media["pixel_values"].view(-1, 3, size, size)}


def patches_with_merge_size(model: Any, index: int) -> Inputs:
    """Flat patches, their grid, and the side of the square of patches per token."""
    return patches(model, index) | {"image_merge_sizes": torch.tensor([2])}


def patches_with_2d_grid(model: Any, index: int) -> Inputs:
    """Flat patches and their grid without a time axis."""
    media = patches(model, index)
    return {"pixel_values": media["pixel_values"], "image_grid_hw": media["image_grid_thw"][:, 1:]}


def patch_strip(model: Any, index: int) -> Inputs:
    """Patches side by side in one strip, with the grid they come from (MiniCPM-V)."""
    size = model.config.vision_config.patch_size
    height, width = 4, 4 + 4 * (index % 2)
    return {
        "pixel_values": noise(1, 3, size, size * height * width, seed=100 + index),
        "target_sizes": torch.tensor([[height, width]], dtype=torch.int32),
    }


def patches_with_positions(model: Any, index: int) -> Inputs:
    """Flat patches with their positions (Gemma 4)."""
    height, width = 4, 4
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    volume = 3 * model.config.vision_config.patch_size**2
    return {
        "pixel_values": noise(1, height * width, volume, seed=100 + index),
        "image_position_ids": places[None],
    }


def padded_patches(model: Any, index: int) -> Inputs:
    """Flat patches padded to a common number, with their mask and shape (SigLIP 2)."""
    height, width, limit = 4, 2 + 2 * (index % 2), 16
    volume = 3 * model.config.vision_config.patch_size**2
    return {
        "pixel_values": nn.functional.pad(
            noise(1, height * width, volume, seed=100 + index), (0, 0, 0, limit - height * width)
        ),
        "pixel_attention_mask": (torch.arange(limit) < height * width).long()[None],
        "spatial_shapes": torch.tensor([[height, width]]),
    }


def patches_only(model: Any, index: int) -> Inputs:
    """Flat patches only (Fuyu)."""
    return {"pixel_values": noise(4 + 2 * index, 3 * model.config.patch_size**2, seed=100 + index)}


def video_patches(model: Any, index: int) -> Inputs:
    """Patches in time, height, width and channel (Inkling)."""
    vision = model.config.vision_config
    size = vision.patch_size
    return {"pixel_values": noise(4 + 2 * index, vision.temporal_patch_size, size, size, 3, seed=100 + index)}


def merged_patches(model: Any, index: int) -> Inputs:
    """Squares of patches, one for each token, and their grid (Inkling 2)."""
    vision = model.config.vision_config
    size, height, width = vision.patch_size * vision.spatial_merge_size, 2, 2 + index % 2
    return {
        "pixel_values": noise(height * width, size, size, 3, seed=100 + index),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def two_resolutions(model: Any, index: int) -> Inputs:
    """An image at two resolutions (DeepSeek-VL)."""
    size = model.config.high_res_vision_config.image_size
    return square(model, index) | {"high_res_pixel_values": noise(1, 3, size, size, seed=200 + index)}


def pooled_crops(model: Any, index: int) -> Inputs:
    """An overview and a crop, flat patches in both, with the patches each token pools (Molmo 2)."""
    vision = model.config.vision_config
    corner = torch.tensor([0, 1, 4, 5])
    windows = torch.stack([corner + shift + 16 * crop for crop in range(2) for shift in (0, 2, 8, 10)])
    return {
        "pixel_values": noise(2, 16, 3 * vision.patch_size**2, seed=100 + index),
        "image_token_pooling": windows,
        "image_grids": torch.tensor([[2, 2, 2, 2]]),
        "image_num_crops": torch.tensor([2]),
    }


def masked_image(model: Any, index: int) -> Inputs:
    """An image with the mask of its real pixels, as a list of one image."""
    size = model.config.vision_config.image_size
    return {
        "pixel_values": noise(1, 1, 3, size, size, seed=100 + index),
        "pixel_attention_mask": torch.ones(1, 1, size, size, dtype=torch.long),
    }


def image_with_size(model: Any, index: int) -> Inputs:
    """An image with its height and width."""
    media = square(model, index)
    return media | {"image_sizes": torch.tensor([media["pixel_values"].shape[-2:]])}


def tiles(model: Any, index: int) -> Inputs:
    """An overview and two tiles of an image, and its original size."""
    size = model.config.vision_config.image_size
    return {
        "pixel_values": noise(1, 3, 3, size, size, seed=100 + index),
        "image_sizes": torch.tensor([[size, 2 * size]]),
    }


def image_format(model: Any) -> Callable[[Any, int], Inputs]:
    """The image format for the signature of the forward."""
    accepted = parameters(model.forward)
    if "image_grid_thw" in accepted:
        return patches
    if "pixel_attention_mask" in accepted:
        return masked_image
    return square


def num_features(model: Any, media: Inputs) -> int:
    """The number of placeholders of an image or a sound, equal to its number of features."""
    names = ("get_image_features", "get_audio_features", "get_video_features")
    owners = (model, getattr(model, "model", model))
    read = next(getattr(owner, name) for name in names for owner in owners if hasattr(owner, name))
    if not any("pixel" in name for name in media) and hasattr(model, "get_audio_features"):
        read = model.get_audio_features
    accepted = parameters(read)
    with torch.no_grad():
        try:
            found = read(**{name: value for name, value in media.items() if name in accepted})
        except TypeError:  # a signature with only **kwargs
            found = read(**media)
    if not isinstance(found, (Tensor, list, tuple)):
        layers = getattr(found, "deepstack_features", None)
        if found.pooler_output is not None:
            found = found.pooler_output
        else:
            found = layers[0][1] if layers else found.last_hidden_state
    if isinstance(found, (list, tuple)):
        return sum(each.shape[:-1].numel() for each in found)
    return int(found.shape[:-1].numel())


def placeholder(config: Any) -> int:
    """The placeholder id of one feature of an image or a sound."""
    mark = first(config, *PLACEHOLDERS, default=first(side(config, "vision_config"), *PLACEHOLDERS))
    if mark is None:
        raise LookupError(f"`{type(config).__name__}` names no token for a picture or a sound")
    return int(mark)


def prompt(model: Any, ids: list[int], media: Inputs) -> Inputs:
    """One row in the format of a processor."""
    row: Inputs = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
    }
    accepted = parameters(model.forward) | parameters(model.prepare_inputs_for_generation)
    kind = model.config.model_type
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in accepted:
            marks = [placeholder(model.config)]
            if name.startswith("moe") or kind == "molmo2":  # the tokens around the image count as image
                marks += [model.config.image_start_token_id, model.config.image_end_token_id]
            row[name] = torch.isin(row["input_ids"], torch.tensor(marks)).long()
    if kind == "paligemma":  # here the type separates the prompt from the answer
        row["token_type_ids"].zero_()
    return row | media


def collate(
    model: Any, rows: list[Inputs], concatenate: Mapping[str, Callable[[list[Tensor]], Tensor]] | None = None
) -> Inputs:
    """Rows as one batch: text padded at the left (an encoder's at the right), other inputs concatenated."""
    batch: Inputs = {}
    left = not model.config.is_encoder_decoder
    widest = max(row["input_ids"].shape[1] if "input_ids" in row else 0 for row in rows)
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        if concatenate and name in concatenate:
            batch[name] = concatenate[name](values)
            continue
        if widest and name in PER_TOKEN and (values[0].dim() < 4 or name == "cross_attention_mask"):
            trailing = [0, 0] * (values[0].dim() - 2)
            fill = padding(model) if name == "input_ids" else 0
            missing = [widest - value.shape[1] for value in values]
            values = [
                nn.functional.pad(value, (*trailing, count, 0) if left else (*trailing, 0, count), value=fill)
                for value, count in zip(values, missing, strict=True)
            ]
        batch[name] = torch.cat([pad_to_largest(value, values) for value in values])
    return batch


def pad_to_largest(value: Tensor, others: list[Tensor]) -> Tensor:
    """The tensor zero-padded at the end of every dimension but the first, to the largest of the others."""
    ends: list[int] = []
    for dimension in range(value.dim() - 1, 0, -1):
        ends += [0, max(other.shape[dimension] for other in others) - value.shape[dimension]]
    return nn.functional.pad(value, ends)


def media_prompts(entry: Entry, model: Any) -> Subject:
    """Text with one image or sound, with two if the model accepts two, and with none."""
    picture = PICTURES.get(entry.model_type) or image_format(model)
    concatenate = CONCATENATE.get(entry.model_type)
    rows = []
    for index, (before, after) in enumerate(LENGTHS):
        if index == 2 and entry.model_type in NEED_PICTURE:
            after = 2
        media_items = [picture(model, index)] if after else []
        if index == 1 and entry.model_type not in ONE_PICTURE | MIXED:
            media_items.append(picture(model, 3))
        ids = random_ids(before, index)
        for count, media in enumerate(media_items):
            ids += place(entry, model, media) + random_ids(1, 30 + count)
        media = collate(model, media_items, concatenate) if media_items else {}
        if len(media_items) == 2 and picture is masked_image:  # images of a row share dimension 1
            media = {name: torch.cat([each[name] for each in media_items], dim=1) for name in media}
        rows.append(prompt(model, ids + random_ids(after, index + 10), media))
    batch_rows = rows
    if picture is masked_image:  # and in a batch a row without an image has an empty one
        empty = {name: torch.zeros_like(value) for name, value in masked_image(model, 0).items()}
        batch_rows = [empty | row for row in rows]
    return Subject(entry, model, rows, collate(model, batch_rows, concatenate))


def place(entry: Entry, model: Any, media: Inputs) -> list[int]:
    """The placeholder ids of one image or sound, between its start and end tokens if it has them."""
    config = model.config
    count = (
        NUM_PLACEHOLDERS[entry.model_type]
        if entry.model_type in NUM_PLACEHOLDERS
        else num_features(model, media)
    )
    opening, closing = first(config, *OPENINGS), first(config, *CLOSINGS)
    middle = [placeholder(config)] * count
    return middle if opening is None or closing is None else [opening, *middle, closing]


def text_prompts(entry: Entry, model: Any) -> Subject:
    """Text only."""
    rows = []
    for index, length in enumerate((6, 11, 8)):
        ids = torch.tensor([random_ids(length, index)])
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return Subject(entry, model, rows, collate(model, rows))


def diffusion_prompts(entry: Entry, model: Any) -> Subject:
    """Text only, for a model that generates blocks by diffusion, in few steps."""
    model.generation_config.max_denoising_steps = 4
    return text_prompts(entry, model)


def speech_output_prompts(entry: Entry, model: Any) -> Subject:
    """Text for a model with audio output."""
    set_decoder_start(model)
    subject = text_prompts(entry, model)
    return AUDIO_OUTPUT[entry.model_type](subject) if entry.model_type in AUDIO_OUTPUT else subject


def set_codebook_start(subject: Subject) -> Subject:
    """Start a codebook decoder at its padding token (MusicGen)."""
    decoder = subject.model.config.decoder
    for part in (subject.model, subject.model.decoder):
        part.generation_config.decoder_start_token_id = part.generation_config.pad_token_id = (
            decoder.pad_token_id
        )
        part.generation_config.bos_token_id = decoder.pad_token_id
    return subject


def add_delay_pattern(subject: Subject) -> Subject:
    """Add the delayed starts of the channels to the decoder inputs (Dia)."""
    config = subject.model.config
    late = torch.tensor(config.delay_pattern)
    steps = torch.arange(int(late.max()) + 1)[:, None]
    start = torch.where(steps <= late, config.decoder_config.bos_token_id, config.decoder_config.pad_token_id)
    everything = [*subject.prompts, subject.batch] if subject.batch else subject.prompts
    for row in everything:
        count = row["input_ids"].shape[0]
        row["decoder_input_ids"] = start[None].expand(count, -1, -1).clone()
        row["decoder_attention_mask"] = torch.ones(count, len(steps), dtype=torch.long)
    settings = subject.model.generation_config
    settings.pad_token_id = config.decoder_config.pad_token_id
    settings.bos_token_id = settings.decoder_start_token_id = config.decoder_config.bos_token_id
    settings.eos_token_id = config.decoder_config.eos_token_id
    subject.options = {"output_logits": False}
    subject.note = (
        "eos_token_id stays: the delay of the channels is worked out from it; logits not compared, since "
        "transformers writes into those that it returns"
    )
    return subject


def end_with_audio_start(subject: Subject) -> Subject:
    """End every prompt with the token that starts audio (Higgs Audio)."""
    mark = subject.model.config.audio_bos_token_id
    for row in [*subject.prompts, subject.batch or {}]:
        if row:
            row["input_ids"][:, -1] = mark
    return subject


def set_frames(subject: Subject) -> Subject:
    """End speech after few frames, by its logits in some rows (Pocket TTS).

    Each latent is fed again, so that the rounding of a batch grows by frame, in transformers too.
    """
    subject = end_with_audio_start(subject)
    subject.options = {
        "max_new_tokens": 5,
        "eos_threshold": 1.5,
        "min_frames_before_eos": 0,
        "frames_after_eos": 1,
    }
    return subject


def set_languages(subject: Subject) -> Subject:
    """Set a language for text, units and vocoder (SeamlessM4T)."""
    settings = subject.model.generation_config
    for name in ("text_decoder_lang_to_code_id", "t2u_lang_code_to_id", "vocoder_lang_code_to_id"):
        setattr(settings, name, {"eng": 1 if name.startswith("vocoder") else 20})
    if subject.entry.model_type == "seamless_m4t_v2":
        settings.eos_token_id = subject.model.config.eos_token_id
        subject.note = "eos_token_id stays: the step from text to units asks for it"
    settings.id_to_text = {str(n): chr(97 + n % 26) for n in range(VOCABULARY)}
    settings.char_to_id = {chr(97 + n): 5 + n for n in range(26)}
    subject.model.t2u_model.generation_config.max_new_tokens = 20
    subject.options = {
        "tgt_lang": "eng",
        "return_intermediate_token_ids": True,  # else it returns audio only
        "return_dict_in_generate": False,  # it sets this itself
        "output_logits": False,
    }
    return subject


def set_bark_stages(subject: Subject) -> Subject:
    """Set the three stages, and pad text to the width of the first (Bark)."""
    settings = subject.model.generation_config
    settings.semantic_config = {
        "eos_token_id": 40,
        "semantic_vocab_size": 40,
        "text_encoding_offset": 50,
        "text_pad_token": 240,
        "semantic_infer_token": 241,
        "max_input_semantic_length": 12,
    }
    settings.coarse_acoustics_config = {
        "coarse_semantic_pad_token": 80,
        "coarse_infer_token": 81,
        "max_coarse_input_length": 12,
        "max_coarse_history": 20,
        "sliding_window_len": 12,
    }
    settings.fine_acoustics_config = {"max_fine_history_length": 8, "max_fine_input_length": 16}
    settings.codebook_size = 16
    for row in [*subject.prompts, subject.batch or {}]:
        for name, value in row.items():
            row[name] = nn.functional.pad(value, (0, 12 - value.shape[1]))
    settings.semantic_config["pad_token_id"] = settings.semantic_config["eos_token_id"]
    subject.options = {"semantic_max_new_tokens": 10, "max_new_tokens": None}
    subject.batch = None  # every row of a batch is as long as the longest
    subject.note = (
        "three stages; semantic_max_new_tokens, not max_new_tokens, which the second stage sets itself"
    )
    return subject


def thinker_prompts(entry: Entry, model: Any) -> Subject:
    """The text part of a model with speech output."""
    options: dict[str, Any] = {"thinker_max_new_tokens": 10}
    if hasattr(model, "speaker_map"):
        model.speaker_map.setdefault("Chelsie", {})
    if entry.model_type == "qwen3_omni_moe":
        options["thinker_eos_token_id"] = None
    else:
        options["generation_mode"] = "text"
    inner = media_prompts(Entry(entry.task, f"{entry.model_type}_thinker", entry.name), model.thinker)
    return Subject(entry, model, inner.prompts, inner.batch, options, "text only, without its voice")


def realtime_prompts(entry: Entry, model: Any) -> Subject:
    """Text aligned with audio, eight frames per token (Voxtral Realtime)."""
    rows = []
    for index, length in enumerate((6, 9, 7)):
        ids = torch.tensor([random_ids(length, index)])
        sound = noise(1, model.config.audio_config.num_mel_bins, 8 * (length + 24), seed=100 + index)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": sound})
    return Subject(entry, model, rows, None)


def audio_frame_prompts(entry: Entry, model: Any) -> Subject:
    """Audio samples, one token per frame (Kyutai); padding would change them."""
    # Random weights give latents of 10^4. Beside these the codes, of size 1, are equally far away but for
    # rounding, and which is nearest depends on the size of a batch.
    with torch.no_grad():
        model.codec_model.encoder.downsample.conv.weight.mul_(1e-4)
    rows = []
    for index in range(3):
        count = 14 * model.config.codec_config.frame_size
        rows.append(
            {
                "input_values": noise(1, 1, count, seed=100 + index),
                "padding_mask": torch.ones(1, 1, count, dtype=torch.long),
            }
        )
    return Subject(entry, model, rows, collate(model, rows))


def caption_prompts(entry: Entry, model: Any) -> Subject:
    """An image and the beginning of its caption; the image is a separate input."""
    picture = PICTURES.get(entry.model_type) or image_format(model)
    set_decoder_start(model)
    rows = []
    for index, length in enumerate((4, 7, 2)):
        ids = torch.tensor(
            [[first(model.config.get_text_config(), "bos_token_id", default=1), *random_ids(length, index)]]
        )
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | picture(model, index)
        if "bbox" in parameters(model.forward):
            row["bbox"] = torch.rand(1, length + 1, 4, generator=torch.Generator().manual_seed(index))
        if "image_attention_mask" in parameters(model.forward):
            row["image_attention_mask"] = torch.ones(1, length + 1, 1, dtype=torch.long)
        if "cross_attention_mask" in parameters(model.forward):
            ids[0, 1] = placeholder(model.config)
            row["cross_attention_mask"] = (
                torch.ones(1, length + 1, 1, 4, dtype=torch.long) * row["aspect_ratio_mask"]
            )
            row["cross_attention_mask"][:, 0] = 0
        rows.append(row)
    return Subject(entry, model, rows, collate(model, rows))


def kosmos_prompts(entry: Entry, model: Any) -> Subject:
    """Text after an image whose positions are given by a mask (Kosmos)."""
    rows = []
    count = model.config.latent_query_num
    for index, (_, after) in enumerate(LENGTHS):
        ids = torch.tensor([[0, *random_ids(count + 2, index), *random_ids(after + 3, index + 10)]])
        places = torch.zeros_like(ids)
        places[0, 2 : 2 + count] = 1
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_embeds_position_mask": places}
        if entry.model_type == "kosmos-2":
            media = square(model, index)
        else:
            media = flat(model, index)
            del media["attention_mask"]
            media |= {"height": torch.tensor([3]), "width": torch.tensor([2 + index])}
            places[0, 1] = places[0, 2 + count] = -1
        rows.append(row | media)
    return Subject(entry, model, rows, collate(model, rows))


def image_encoder_prompts(entry: Entry, model: Any) -> Subject:
    """An image for the encoder, the start token for the decoder."""
    picture = PICTURES.get(entry.model_type) or image_format(model)
    set_decoder_start(model)
    rows = [picture(model, index) for index in range(3)]
    return Subject(entry, model, rows, collate(model, rows))


def audio_encoder_prompts(entry: Entry, model: Any) -> Subject:
    """Audio of three lengths for the encoder, the start token for the decoder."""
    set_decoder_start(model)
    rows = [SOUNDS[entry.model_type](model, index) for index in range(3)]
    return Subject(entry, model, rows, collate(model, rows))


def pop2piano_prompts(entry: Entry, model: Any) -> Subject:
    """Audio with a style token (Pop2Piano)."""
    model.generation_config.composer_to_feature_token = {f"composer{n + 1}": n + 100 for n in range(21)}
    return audio_encoder_prompts(entry, model)


def set_decoder_start(model: Any) -> None:
    """Set the decoder start token if the config has none."""
    if model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 3


def spectrogram(model: Any, frames: int, seed: int, bins: int = 8) -> Inputs:
    """Log-mel frames, time first, with the mask of the feature extractor."""
    config = side(model.config, "encoder_config", "audio_config")
    bins = first(
        config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", default=bins
    )
    return {
        "input_features": noise(1, frames, bins, seed=seed),
        "attention_mask": torch.ones(1, frames, dtype=torch.long),
    }


def wave(samples: int, seed: int) -> Inputs:
    """Audio samples with the mask of the feature extractor."""
    return {
        "input_values": noise(1, samples, seed=seed),
        "attention_mask": torch.ones(1, samples, dtype=torch.long),
    }


def window(model: Any, index: int) -> Inputs:
    """Log-mel frames of a fixed window, bins first (Whisper)."""
    config = side(model.config, "audio_config")
    return {
        "input_features": noise(1, config.num_mel_bins, 2 * config.max_source_positions, seed=100 + index)
    }


def flat(model: Any, index: int) -> Inputs:
    """Flat patches with their positions, padded to a common number (Pix2Struct)."""
    vision = model.config.vision_config
    volume = vision.patch_embed_hidden_size  # the width of the flat patch, by another name
    height, width, limit = 3, 2 + index, 12
    places = torch.cartesian_prod(torch.arange(1.0, height + 1), torch.arange(1.0, width + 1))
    pixels = noise(height * width, volume, seed=100 + index)
    row = nn.functional.pad(torch.cat([places, pixels], dim=1), (0, 0, 0, limit - height * width))
    return {
        "flattened_patches": row[None],
        "attention_mask": (torch.arange(limit) < height * width).float()[None],
    }


def image_with_question(model: Any, index: int) -> Inputs:
    """An image and the question for the Q-Former (InstructBLIP)."""
    ids = torch.tensor([random_ids(3 + 2 * index, 20 + index)])
    return square(model, index) | {"qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}


def video_with_question(model: Any, index: int) -> Inputs:
    """Four frames and the question for the Q-Former."""
    return image_with_question(model, index) | {"pixel_values": noise(1, 4, 3, 16, 16, seed=100 + index)}


def single_image(model: Any, index: int) -> Inputs:
    """A list of one image (IDEFICS)."""
    return {"pixel_values": square(model, index)["pixel_values"][None]}


def image_with_aspect_ratio(_model: Any, index: int) -> Inputs:
    """An image as two of four tiles, with its aspect ratio (Llama 3.2 Vision)."""
    tiles_used = torch.arange(4) < 2
    return {
        "pixel_values": noise(1, 1, 4, 3, 16, 16, seed=100 + index) * tiles_used[:, None, None, None],
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": tiles_used.long()[None, None],
    }


def crops(_model: Any, index: int) -> Inputs:
    """An overview and one crop with the mask of their patches (Phi-4 multimodal)."""
    return {
        "image_pixel_values": noise(1, 2, 3, 16, 16, seed=100 + index),
        "image_sizes": torch.tensor([[16, 16]]),
        "image_attention_mask": torch.ones(1, 2, 4, 4, dtype=torch.long),
    }


def protein(_model: Any, index: int) -> Inputs:
    """A chain of amino acids (Evolla)."""
    ids = torch.tensor([random_ids(6 + 3 * index, 30 + index)])
    return {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}


def frames(count: int, bins: int, seed: int) -> Inputs:
    """Log-mel frames, time first, as input of a model with audio placeholders in its text."""
    return {
        "input_features": noise(1, count, bins, seed=seed),
        "input_features_mask": torch.ones(1, count, dtype=torch.long),
    }


def bins_first(media: Inputs) -> Inputs:
    """Log-mel frames with bins first."""
    return media | {"input_features": media["input_features"].transpose(1, 2).contiguous()}


def padded_frames(model: Any, index: int) -> Inputs:
    """Log-mel frames padded to a multiple of a hundred (Qwen3-ASR)."""
    media = bins_first(frames(100, model.config.audio_config.num_mel_bins, 100 + index))
    return media | {"input_features_mask": (torch.arange(100) < 60 + 20 * index).long()[None]}


def frames_with_mask(model: Any, index: int) -> Inputs:
    """Log-mel frames with a mask of the projected features (Granite Speech)."""
    media = frames(30, model.config.encoder_config.input_dim, 100 + index)
    return media | {"input_features_mask": torch.ones(1, 6, dtype=torch.bool)}


def window_with_sample_mask(model: Any, index: int) -> Inputs:
    """A Whisper window, its mask, and the mask of its samples (MOSS)."""
    media = window(model, index)
    count = media["input_features"].shape[-1]
    return media | {
        "input_features_mask": torch.ones(1, count, dtype=torch.long),
        "padding_mask": torch.ones(1, count * 160, dtype=torch.long),
    }


def window_with_mask(model: Any, index: int) -> Inputs:
    """A Whisper window and its mask (Audio Flamingo)."""
    media = window(model, index)
    return media | {"input_features_mask": torch.ones(1, media["input_features"].shape[-1], dtype=torch.long)}


def window_with_feature_mask(model: Any, index: int) -> Inputs:
    """A Whisper window and its mask (Qwen2-Audio)."""
    media = window(model, index)
    return media | {
        "feature_attention_mask": torch.ones(1, media["input_features"].shape[-1], dtype=torch.long)
    }


def samples_with_mask(_model: Any, index: int) -> Inputs:
    """Samples and their mask (VibeVoice)."""
    count = 16 * (4 + 2 * index)
    return {
        "input_values": noise(1, 1, count, seed=100 + index),
        "padding_mask": torch.ones(1, count, dtype=torch.bool),
    }


def offset_windows(values: list[Tensor]) -> Tensor:
    """Patch index windows of several images, each offset by the patches before it."""
    return torch.cat([value + 32 * index for index, value in enumerate(values)])


PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "image_patch_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
OPENINGS = (
    "vision_start_token_id",
    "image_start_token_id",
    "image_start_id",
    "boi_token_index",
    "boi_token_id",
    "audio_bos_token_id",
)
CLOSINGS = (
    "vision_end_token_id",
    "image_end_token_id",
    "image_end_id",
    "eoi_token_index",
    "eoi_token_id",
    "audio_eos_token_id",
)
NEED_PICTURE = frozenset({"blip-2", "instructblip", "instructblipvideo"})  # generate() requires pixel_values
ONE_PICTURE = frozenset(  # one image or sound per row, by design
    [
        "blip-2",
        "instructblip",
        "instructblipvideo",
        "florence2",
        "molmo2",
        "phi4_multimodal",
        "audioflamingo3",
        "musicflamingo",
        "fun_asr_nano",
        "glmasr",
        "granite_speech",
        "granite_speech_plus",
        "moss_transcribe_diarize",
        "nemo_speechlm",
        "qwen3_asr",
        "vibevoice_asr",
    ]
)
# transformers assigns images or sounds to the wrong beams when a row has two: the score of a row is not its
# score alone.
MIXED = frozenset(
    {
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm5_next",
        "glm_ocr",
        "granite4_vision",
        "qwen2_audio",
        "voxtral",
    }
)
NO_BATCH = {  # rows whose output in transformers changes in a batch
    "musicgen_melody": "no batch: padding moves the text before the melody",
    "voxtral_realtime": "no batch: sound and text of one length only",
}
# Number of placeholders, for models that do not expose it.
NUM_PLACEHOLDERS = {"qwen2_audio": 8, "musicflamingo": 8, "instructblipvideo": 16, "phi4_multimodal": 13}
ROW = {"pixel_values": lambda values: torch.cat(values, dim=-1)}
CONCATENATE: dict[str, Mapping[str, Callable[[list[Tensor]], Tensor]]] = {
    "minicpm_ocr": ROW,
    "minicpmv4_6": ROW,
    "minicpmv4_7": ROW,
    "molmo2": {"image_token_pooling": offset_windows},
}
PICTURES: dict[str, Callable[[Any, int], Inputs]] = {
    "llava_next": tiles,
    "llava_onevision": tiles,
    "llava_next_video": tiles,
    "granite4_vision": tiles,
    "mistral3": image_with_size,
    "mistral_large4": image_with_size,
    "lighton_ocr": image_with_size,
    "pix2struct": flat,
    "kimi_k25": channel_patches,
    "paddleocr_vl": channel_patches,
    "video_llama_3": patches_with_merge_size,
    "nemotron_h_omni": patches_with_2d_grid,
    "minicpm_ocr": patch_strip,
    "minicpmv4_6": patch_strip,
    "minicpmv4_7": patch_strip,
    "gemma4": patches_with_positions,
    "gemma4_unified": patches_with_positions,
    "lfm2_vl": padded_patches,
    "fuyu": patches_only,
    "inkling_mm_model": video_patches,
    "inkling2": merged_patches,
    "deepseek_vl_hybrid": two_resolutions,
    "molmo2": pooled_crops,
    "emu3": image_with_size,
    "instructblip": image_with_question,
    "instructblipvideo": video_with_question,
    "idefics": single_image,
    "mllama": image_with_aspect_ratio,
    "evolla": protein,
    "fun_asr_nano": lambda model, index: frames(6, 7 * model.config.audio_config.num_mel_bins, 100 + index),
    "granite_speech": frames_with_mask,
    "granite_speech_plus": frames_with_mask,
    "qwen3_asr": padded_frames,
    "glmasr": lambda _, index: bins_first(frames(48, 8, 100 + index)),
    "voxtral": window,
    "moss_transcribe_diarize": window_with_sample_mask,
    "audioflamingo3": window_with_mask,
    "musicflamingo": window_with_mask,
    "qwen2_audio": window_with_feature_mask,
    "phi4_multimodal": crops,
    "nemo_speechlm": lambda _, index: frames(24 + 16 * index, 8, 100 + index),
    "vibevoice_asr": samples_with_mask,
}
# Equal lengths where padding would change the audio, and so the output of a batch.
SOUNDS: dict[str, Callable[[Any, int], Inputs]] = {
    "whisper": window,
    "speech_to_text": lambda model, index: spectrogram(model, 31, index),
    "canary": lambda model, index: spectrogram(model, (40, 57, 72)[index], index),
    "cohere_asr": lambda model, index: spectrogram(model, (40, 57, 72)[index], index),
    "seamless_m4t": lambda model, index: spectrogram(model, (12, 15, 20)[index], index),
    "seamless_m4t_v2": lambda model, index: spectrogram(model, (12, 15, 20)[index], index),
    "pop2piano": lambda model, index: spectrogram(model, (7, 9, 12)[index], index, bins=32),
    "moonshine": lambda _, index: wave(3000, index),
    "moonshine_streaming": lambda _, index: wave(3200, index),
    "speech-encoder-decoder": lambda _, index: wave((200, 260, 320)[index], index),
    "speecht5": lambda _, index: wave(260, index),
}
NO_BEAMS = "transformers has greedy search and sampling only"
NOTES: dict[str, str] = {
    **dict.fromkeys(
        (
            "CsmForConditionalGeneration",
            "DiaForConditionalGeneration",
            "HiggsAudioV2ForConditionalGeneration",
            "MusicgenForConditionalGeneration",
            "MusicgenMelodyForConditionalGeneration",
        ),
        f"{NO_BEAMS}; several codebooks a step",
    ),
    **dict.fromkeys(
        ("GradiumPhononTTSForConditionalGeneration", "PocketTTSForConditionalGeneration"),
        f"{NO_BEAMS}; gives continuous latents, which are compared in place of tokens",
    ),
    **dict.fromkeys(
        ("FuyuForCausalLM", "Llama4ForConditionalGeneration"),
        "transformers' beam search fails once there is a picture",
    ),
    "DiffusionGemmaForBlockDiffusion": "block diffusion, not autoregressive",
}
AUDIO_OUTPUT: dict[str, Callable[[Subject], Subject]] = {
    "musicgen": set_codebook_start,
    "musicgen_melody": set_codebook_start,
    "dia": add_delay_pattern,
    "higgs_audio_v2": end_with_audio_start,
    "pocket_tts": set_frames,
    "gradium_phonon_tts": set_frames,
    "bark": set_bark_stages,
    "seamless_m4t": set_languages,
    "seamless_m4t_v2": set_languages,
}
PROMPT_BUILDERS: dict[str, Callable[[Entry, Any], Subject]] = {
    "Mistral4ForCausalLM": text_prompts,
    "DiffusionGemmaForBlockDiffusion": diffusion_prompts,
    "Pop2PianoForConditionalGeneration": pop2piano_prompts,
    "VoxtralRealtimeForConditionalGeneration": realtime_prompts,
    "KyutaiSpeechToTextForConditionalGeneration": audio_frame_prompts,
    **dict.fromkeys(
        ("Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"), thinker_prompts
    ),
    **dict.fromkeys(
        (
            "BarkModel",
            "CsmForConditionalGeneration",
            "DiaForConditionalGeneration",
            "GradiumPhononTTSForConditionalGeneration",
            "HiggsAudioV2ForConditionalGeneration",
            "MusicgenForConditionalGeneration",
            "MusicgenMelodyForConditionalGeneration",
            "PocketTTSForConditionalGeneration",
            "SeamlessM4TForTextToSpeech",
            "SeamlessM4Tv2ForTextToSpeech",
            "VibeVoiceForConditionalGeneration",
        ),
        speech_output_prompts,
    ),
    **dict.fromkeys(("Kosmos2ForConditionalGeneration", "Kosmos2_5ForConditionalGeneration"), kosmos_prompts),
    **dict.fromkeys(
        (
            "BlipForConditionalGeneration",
            "GitForCausalLM",
            "IdeficsForVisionText2Text",
            "MllamaForConditionalGeneration",
            "UdopForConditionalGeneration",
            "EvollaForProteinText2Text",
        ),
        caption_prompts,
    ),
    **dict.fromkeys(
        (
            "VisionEncoderDecoderModel",
            "Pix2StructForConditionalGeneration",
            "PPFormulaNetForConditionalGeneration",
        ),
        image_encoder_prompts,
    ),
    **dict.fromkeys(
        (
            "WhisperForConditionalGeneration",
            "Speech2TextForConditionalGeneration",
            "CanaryForConditionalGeneration",
            "CohereAsrForConditionalGeneration",
            "SeamlessM4TForSpeechToText",
            "SeamlessM4Tv2ForSpeechToText",
            "MoonshineForConditionalGeneration",
            "MoonshineStreamingForConditionalGeneration",
            "SpeechEncoderDecoderModel",
            "SpeechT5ForSpeechToText",
        ),
        audio_encoder_prompts,
    ),
}


def subject(entry: Entry) -> Subject:
    """A small model of that class with three prompts of different length."""
    if not getattr(transformers, entry.name).can_generate():
        raise TypeError(f"`{entry.name}` has no generate()")
    subject = PROMPT_BUILDERS.get(entry.name, media_prompts)(entry, build(entry))
    if entry.model_type in NO_BATCH:
        subject.batch = None
    mixed = "one picture or sound a row: transformers' beams mix up two" if entry.model_type in MIXED else ""
    notes = (subject.note, NOTES.get(entry.name), mixed, NO_BATCH.get(entry.model_type))
    subject.note = "; ".join(filter(None, notes))
    return subject
