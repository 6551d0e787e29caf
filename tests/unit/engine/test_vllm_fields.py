"""The table of fields on vLLM: complete, true to the refusals of the sampler, and shown in the guide."""

from __future__ import annotations

import pytest

from descant import ConfigError, GenerationConfig
from descant.config.generation_config import FIELDS
from descant.engine.vllm.field_support import FIELD_SUPPORT, check_fields
from tests.support.sampling_configs import FIELD_VALUES
from tools.docs import vllm_fields


def test_every_field_has_an_entry():
    assert FIELD_SUPPORT.keys() == FIELDS.keys()


def test_the_random_configs_use_what_the_table_calls_supported():
    applied = {name for name, one in FIELD_SUPPORT.items() if one.by in ("vllm", "plug-in")}
    # Set by every random config, or by other tests: ends and counts, texts, the order of processors.
    others = {
        *("max_new_tokens", "max_length", "eos_token_id", "num_return_sequences", "do_sample", "seed"),
        *(
            "thinking_message",
            "thinking_start",
            "thinking_end",
            "grammar",
            "processor_order",
            "pad_token_id",
            "bos_token_id",
        ),
    }
    assert applied - others == FIELD_VALUES.keys()


@pytest.mark.parametrize("name", [name for name, one in FIELD_SUPPORT.items() if one.by == "refused"])
def test_refused_fields_raise_by_name(name):
    values = {"prefix_allowed_tokens_fn": max, "constraints": [object()]}
    config = GenerationConfig()
    object.__setattr__(config, "_values", {name: values.get(name, "another")})
    with pytest.raises(ConfigError, match=f"`{name}`"):
        check_fields(config, ("vllm", "plug-in", "engine"))


def test_a_default_is_no_refusal():
    check_fields(GenerationConfig(num_beams=1, use_cache=True), ("vllm", "plug-in"))
    with pytest.raises(ConfigError, match=r"`stop_regex` must be None in vLLM's own requests"):
        check_fields(GenerationConfig(stop_regex="a"), ("vllm", "plug-in"))


def test_the_guide_shows_the_table():
    text = vllm_fields.PAGE.read_text("utf-8")
    assert vllm_fields.page(text) == text, "run `python tools/docs/vllm_fields.py`"
