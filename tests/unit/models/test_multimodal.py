"""Images, sounds and marks dealt out to the prompts they belong to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from descant.errors import InputError
from descant.models.forward.inputs import is_per_token, split_by_prompt

IMAGE, VIDEO = 90, 91
MARKS = {"image": IMAGE, "video": VIDEO}


def _ids(*rows: list[int]) -> tuple[Tensor, Tensor]:
    wide = max(map(len, rows))
    ids = torch.tensor([[0] * (wide - len(row)) + row for row in rows])
    here = torch.tensor([[0] * (wide - len(row)) + [1] * len(row) for row in rows]).bool()
    return ids, here


def test_one_prompt_has_everything():
    ids, here = _ids([1, IMAGE, IMAGE, 2])
    pixels = torch.rand(7, 3)
    assert split_by_prompt({"pixel_values": pixels, "odd": "x"}, ids, here, MARKS, 1) == [
        {"pixel_values": pixels, "odd": "x"}
    ]


def test_an_image_for_each_prompt():
    ids, here = _ids([IMAGE, IMAGE, 2], [1, 2, IMAGE, IMAGE, 3])
    pixels = torch.arange(2.0)[:, None]
    lines = split_by_prompt({"pixel_values": pixels}, ids, here, MARKS, 2)
    assert [line["pixel_values"].tolist() for line in lines] == [[[0.0]], [[1.0]]]


def test_marks_lose_the_padding():
    ids, here = _ids([5], [5, 6, 7])
    kinds = torch.tensor([[8, 8, 1], [2, 3, 4]])
    lines = split_by_prompt({"token_type_ids": kinds}, ids, here, MARKS, 2)
    assert [line["token_type_ids"].tolist() for line in lines] == [[1], [2, 3, 4]]


def test_marks_must_fit_the_tokens():
    ids, here = _ids([5], [5, 6, 7])
    with pytest.raises(InputError, match=r"`token_type_ids` must have an entry for each token \[2, 3\]"):
        split_by_prompt({"token_type_ids": torch.zeros(2, 4)}, ids, here, MARKS, 2)


def test_two_images_in_one_prompt_and_none_in_another():
    ids, here = _ids([IMAGE, 1, IMAGE, 2], [3, 4])
    lines = split_by_prompt({"pixel_values": torch.arange(2.0)[:, None]}, ids, here, MARKS, 2)
    assert lines[0]["pixel_values"].flatten().tolist() == [0.0, 1.0]
    assert "pixel_values" not in lines[1]


def test_adjacent_images_are_separated_by_their_token_count():
    ids, here = _ids([IMAGE] * 4, [1, IMAGE, IMAGE])
    lines = split_by_prompt({"pixel_values": torch.arange(3.0)[:, None]}, ids, here, MARKS, 2)
    assert [line["pixel_values"].flatten().tolist() for line in lines] == [[0.0, 1.0], [2.0]]


def test_patches_follow_their_grid():
    # Four patches make a place: 2 x 2 and 2 x 4 patches are one place and two.
    ids, here = _ids([1, IMAGE, 2], [IMAGE, IMAGE])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4]])
    given = {"pixel_values": torch.arange(12.0)[:, None], "image_grid_thw": grid}
    lines = split_by_prompt(given, ids, here, MARKS, 2)
    assert [line["pixel_values"].flatten().tolist() for line in lines] == [
        list(range(4)),
        list(map(float, range(4, 12))),
    ]
    assert [line["image_grid_thw"].tolist() for line in lines] == [[[1, 2, 2]], [[1, 2, 4]]]


def test_videos_and_images_are_counted_apart():
    ids, here = _ids([VIDEO, 1], [IMAGE, 2], [VIDEO, IMAGE])
    given = {
        "pixel_values": torch.arange(2.0)[:, None],
        "pixel_values_videos": torch.arange(5.0, 7.0)[:, None],
    }
    lines = split_by_prompt(given, ids, here, MARKS, 3)
    found = [{name: value.item() for name, value in line.items()} for line in lines]
    assert found == [
        {"pixel_values_videos": 5.0},
        {"pixel_values": 0.0},
        {"pixel_values": 1.0, "pixel_values_videos": 6.0},
    ]


def test_media_without_places_go_one_to_a_prompt():
    lines = split_by_prompt({"input_features": torch.arange(2.0)[:, None]}, None, None, {}, 2)
    assert [line["input_features"].item() for line in lines] == [0.0, 1.0]
    with pytest.raises(InputError, match=r"`input_features` must have an entry for each of 3 prompts"):
        split_by_prompt({"input_features": torch.zeros(2, 1)}, None, None, {}, 3)


def test_what_does_not_come_out_even_is_refused():
    ids, here = _ids([IMAGE] * 3, [IMAGE] * 2, [1])
    with pytest.raises(InputError, match="pass this prompt by itself"):
        split_by_prompt({"pixel_values": torch.zeros(4, 1)}, ids, here, MARKS, 3)


def test_pointers_count_from_the_prompts_own_features():
    ids, here = _ids([IMAGE, 1], [IMAGE, IMAGE])
    pixels = torch.zeros(3, 4, 5)  # four features each
    pointers = torch.tensor([[0, 3], [4, -1], [8, 11]])
    lines = split_by_prompt({"pixel_values": pixels, "image_token_pooling": pointers}, ids, here, MARKS, 2)
    assert [line["image_token_pooling"].tolist() for line in lines] == [[[0, 3]], [[0, -1], [4, 7]]]


def test_a_sound_loses_the_silence_that_fills_it_up():
    sounds, mask = torch.arange(8.0).view(2, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    lines = split_by_prompt({"input_values": sounds, "padding_mask": mask}, None, None, {}, 2)
    assert [line["input_values"].tolist() for line in lines] == [[[0, 1, 2, 3]], [[4, 5]]]
    assert [line["padding_mask"].shape[1] for line in lines] == [4, 2]


def test_marks_by_name():
    assert is_per_token("mm_token_type_ids", 1)
    assert is_per_token("image_attention_mask", 2)
    assert not is_per_token("image_attention_mask", 4)
    assert not is_per_token("pixel_values", 4)
