"""An estimate is what the cache then takes; a run that cannot fit is refused before it begins."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import descant
from descant.api.call import merge_configs
from descant.engine import memory_check
from descant.engine.planning.cache_factory import CACHES
from descant.engine.request import MERGED
from descant.models import kv_shape
from descant.models.kv_shape import kv_shape_of

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}

MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, **HEADS, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=512),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **HEADS, sliding_window=48),
    "gemma": lambda: transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3}, **HEADS, head_dim=16, sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen": lambda: transformers.Qwen3Config(**SMALL, **HEADS, head_dim=16),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=512,
    ),
    "mla": lambda: transformers.DeepseekV3Config(
        **SMALL, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, first_k_dense_replace=2,
    ),
}  # fmt: skip

SETTINGS = {
    "snapkv": {"budget": 40},
    "h2o": {"budget": 40, "recent": 10},
    "sink": {"window_length": 40, "num_sink_tokens": 2},
    "quantized": {"nbits": 4, "q_group_size": 8, "residual_length": 16},
}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama")


def measured(model: Any, prompt: int, batch: int, **fields: Any) -> int:
    """What the cache of a session takes in its last step."""
    config = merge_configs(model, None, {**fields, "eos_token_id": None})[0]
    session = descant.Session(model)
    ids = torch.randint(3, 90, (batch, prompt), generator=torch.Generator().manual_seed(1))
    session.admit(*(descant.Request(line.tolist(), config, _call=MERGED) for line in ids))
    last = 0
    while len(session):
        last = session.report().cache_bytes or last
        session.step()
    return last


def fields_of(kind: str, **more: Any) -> dict[str, Any]:
    given = {"cache_implementation": kind, "max_new_tokens": 34, **more}
    return {**given, "cache_config": SETTINGS[kind]} if kind in SETTINGS else given


@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_what_the_cache_takes(name: str) -> None:
    model = make_model(name)
    estimate = descant.estimate(model, prompt_length=70, batch=2, max_new_tokens=34)
    assert estimate.cache_name == "dynamic"
    assert measured(model, 70, 2, max_new_tokens=34) == pytest.approx(estimate.bytes, rel=0.05)
    assert {"dynamic", "paged", "static", "quantized"} <= estimate.total_bytes.keys()


@pytest.mark.parametrize("kind", sorted(CACHES.keys() - {"mamba", "sliding_window"}))
@pytest.mark.parametrize("many", [{}, {"do_sample": True, "num_return_sequences": 3}])
def test_every_kind_is_estimated_as_it_is(kind: str, many: dict[str, Any], llama: Any) -> None:
    if kind == "quantized":
        pytest.importorskip("optimum.quanto")
    fields = fields_of(kind, **many)
    estimate = descant.estimate(llama, prompt_length=70, batch=2, **fields)
    assert estimate.cache_name == kind
    assert measured(llama, 70, 2, **fields) == pytest.approx(estimate.bytes, rel=0.05)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
@pytest.mark.parametrize("kind", ["sliding_window", "hybrid"])
def test_windows_are_counted(name: str, kind: str) -> None:
    model = make_model(name)
    estimate = descant.estimate(model, prompt_length=300, **fields_of(kind))
    assert measured(model, 300, 1, **fields_of(kind)) == pytest.approx(estimate.bytes, rel=0.05)
    assert estimate.total_bytes[kind] < estimate.total_bytes["dynamic"]


def test_beams_share_a_prompt_only_where_they_do(llama: Any) -> None:
    beams = {"prompt_length": 256, "max_new_tokens": 32, "num_beams": 4}
    assert descant.estimate(llama, **beams).cache_name == "dynamic"  # little is shared
    assert descant.estimate(llama, **beams, batch=64).cache_name == "paged"
    estimate = descant.estimate(llama, **beams, cache_implementation="paged")
    assert (estimate.cache_name, estimate.rows, estimate.positions) == ("paged", 4, 256 + 31)
    # How much beams share after the prompt is not known before; the bound assumes nothing.
    real = measured(llama, 256, 1, max_new_tokens=32, num_beams=4, cache_implementation="paged")
    assert 0.5 * estimate.bytes <= real <= estimate.bytes
    assert estimate.total_bytes["dynamic"] > 2 * estimate.total_bytes["paged"]
    assert measured(
        llama, 256, 1, max_new_tokens=32, num_beams=4, cache_implementation="dynamic"
    ) == pytest.approx(estimate.total_bytes["dynamic"], rel=0.05)


def test_candidates_of_contrastive_search_are_rows(llama: Any) -> None:
    fields = {"penalty_alpha": 0.5, "top_k": 4, "max_new_tokens": 20, "cache_implementation": "dynamic"}
    estimate = descant.estimate(llama, prompt_length=70, **fields)
    assert estimate.rows == 4
    assert measured(llama, 70, 1, **fields) == pytest.approx(estimate.bytes, rel=0.05)


def test_four_bits_are_counted_with_their_scales(llama: Any) -> None:
    whole = {"residual_length": 0, "q_group_size": 8, "compute_dtype": "float16"}
    estimate = descant.estimate(
        llama, prompt_length=400, max_new_tokens=1, cache_implementation="quantized", cache_config=whole
    )
    # 8 numbers: 4 bytes of codes, a scale and an offset of 2 bytes; two layers, two heads, keys and values.
    assert estimate.bytes == 400 * 2 * 2 * 2 * (4 + 2 + 2)


def test_an_encoder_is_read_once_a_prompt() -> None:
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    few, many = (
        descant.estimate(model, prompt_length=50, batch=3, max_new_tokens=8, num_beams=beams)
        for beams in (1, 4)
    )
    cross = 3 * 50 * 2 * 2 * 2 * 8 * 4  # prompts, positions, layers, keys and values, heads, numbers, bytes
    assert few.bytes - cross == pytest.approx((many.bytes - cross) / 4)
    assert kv_shape_of(model).cross_bytes == cross // 150


def test_a_state_of_a_models_own_is_weighed() -> None:
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2)
    )
    estimate = descant.estimate(model, prompt_length=1000, batch=2, max_new_tokens=20)
    assert estimate.cache_name == "mamba"
    # Two layers of 32 channels: a window of 4 for the convolution and a state of 16, for each of two rows.
    assert estimate.bytes == 2 * 2 * 32 * (4 + 16) * 4
    assert set(estimate.total_bytes) == {"mamba", "hybrid", "dynamic"}


def test_an_unknown_size_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)
    )
    monkeypatch.setattr(kv_shape, "_feed_row", _fails)
    estimate = descant.estimate(model, prompt_length=10)
    assert estimate.bytes is None
    assert "unknown" in str(estimate)


def _fails(*_: Any) -> Any:
    raise ValueError("more than tokens")


def test_it_can_be_read(llama: Any) -> None:
    estimate = descant.estimate(llama, prompt_length=100, max_new_tokens=29)
    assert estimate.bytes_per_token["static"] == estimate.total_bytes["static"] / 128
    lines = str(estimate).splitlines()
    assert lines[0] == "1 row of 128 positions"
    assert [line.split()[0] for line in lines[2:]] == list(estimate.total_bytes)
    assert [line.split()[0] for line in lines if " * " in line] == ["dynamic"]


@pytest.mark.parametrize("wrong", [{"prompt_length": 0}, {"prompt_length": 5, "batch": 1.5}])
def test_sizes_are_checked(wrong: dict[str, Any], llama: Any) -> None:
    with pytest.raises(descant.InputError, match="must be an integer >= 1"):
        descant.estimate(llama, **wrong)


def test_a_model_that_is_trained_draws_nothing() -> None:
    model = make_model("gpt2").train()  # its dropout would move the generator
    before = torch.get_rng_state()
    kv_shape_of(model)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training


# ------------------------------------------------------------------------ no room
@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with 64 KiB left, and a record of every check."""
    monkeypatch.setattr(memory_check, "_MIN_CHECKED_BYTES", 0)
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 64 * 1024)


@pytest.mark.usefixtures("tight")
def test_what_cannot_fit_is_refused_before_anything_is_allocated(llama: Any) -> None:
    ids = torch.randint(3, 90, (4, 100))
    with pytest.raises(descant.NotEnoughMemory) as caught:
        descant.generate(llama, ids, max_new_tokens=40)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert isinstance(error, descant.DescantError)
    assert error.free == 64 * 1024
    assert error.needed == descant.estimate(llama, prompt_length=100, batch=4, max_new_tokens=40).bytes
    assert str(error).startswith("the dynamic cache of 4 rows of up to 139 positions needs ")
    assert "cpu has 64.0 KiB left" in str(error)
    for name in error.fitting:
        assert (
            descant.estimate(
                llama, prompt_length=100, batch=4, max_new_tokens=40, cache_implementation=name
            ).peak_bytes[name]
            <= 64 * 1024
        )


@pytest.mark.usefixtures("tight")
def test_what_is_proposed_runs(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 128 * 1024)
    ids = torch.randint(3, 90, (1, 100))
    fields = {"max_new_tokens": 20, "num_beams": 6}
    with pytest.raises(descant.NotEnoughMemory, match='cache_implementation="paged"') as caught:
        descant.generate(llama, ids, **fields, cache_implementation="dynamic")
    assert caught.value.fitting[0] == "paged"
    assert descant.generate(llama, ids, **fields, cache_implementation="paged").shape == (1, 120)


@pytest.mark.usefixtures("tight")
def test_rows_that_run_count_with_what_they_will_write(llama: Any) -> None:
    session = descant.Session(llama)
    config = descant.GenerationConfig(max_new_tokens=140, eos_token_id=None)
    session.admit(descant.Request(list(range(3, 33)), config))
    session.step()
    more = descant.Request(list(range(3, 33)), config)
    with pytest.raises(descant.NotEnoughMemory):
        session.admit(more)
    assert len(session) == 1
    for _ in session.drain():
        pass
    assert session.admit(more)


@pytest.mark.usefixtures("tight")
def test_a_refused_request_does_not_choose_the_cache(llama: Any) -> None:
    session = descant.Session(llama)
    prompt = list(range(3, 93)) * 3
    with pytest.raises(descant.NotEnoughMemory):
        session.admit(descant.Request(prompt, descant.GenerationConfig(max_new_tokens=20)))
    config = descant.GenerationConfig(max_new_tokens=5, cache_implementation="paged")
    assert session.admit(descant.Request(prompt[:20], config))


def test_a_small_run_is_not_looked_at(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 0)
    ids = torch.randint(3, 90, (1, 10))
    assert descant.generate(llama, ids, max_new_tokens=2).shape == (1, 12)


def test_the_look_costs_microseconds(llama: Any) -> None:
    session = descant.Session(llama)
    config = merge_configs(llama, None, {"max_new_tokens": 20})[0]
    known = session._admission.make_plan(descant.Request([5], config, _call=MERGED), session.model.traits)
    asked = [(known, 10, 30, 0)]
    best = float("inf")
    for _ in range(200):
        begin = time.perf_counter()
        memory_check.check_kv_fits(session.model, session._tables.default.cache, None, asked, None)
        best = min(best, time.perf_counter() - begin)
    assert best < 100e-6


def test_what_the_machine_and_its_groups_leave_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:    800 kB\n")
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    inner = tmp_path / "groups" / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr(memory_check, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_check, "_CGROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(memory_check, "_CGROUP_ROOT", tmp_path / "groups")
    cpu = torch.device("cpu")
    assert memory_check.free_bytes(cpu) == 800 * 1024
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("1000\n")
    assert memory_check.free_bytes(cpu) == 800 * 1024
    (inner.parent / "memory.max").write_text("500000\n")
    (inner.parent / "memory.current").write_text("300000\n")
    (inner.parent / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert memory_check.free_bytes(cpu) == 250000
    (tmp_path / "cgroup").write_text("4:memory:/c\n")
    old = tmp_path / "groups" / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("400000\n")
    (old / "memory.usage_in_bytes").write_text("390000\n")
    assert memory_check.free_bytes(cpu) == 10000
    (tmp_path / "meminfo").unlink()
    assert memory_check.free_bytes(cpu) is None
    assert memory_check.free_bytes(torch.device("meta")) is None


# ------------------------------------------------------------------------ caches of fixed size
@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
@pytest.mark.parametrize(
    "sizes", [{"max_cache_len": 2**30}, {"max_cache_len": 2**31 - 1, "batch_size": 2**20}]
)
def test_a_size_that_cannot_be_allocated_is_refused(kind: str, sizes: dict[str, int], llama: Any) -> None:
    given = {"cache_implementation": kind, "cache_config": sizes}
    with pytest.raises(
        descant.NotEnoughMemory, match=f"rows of {sizes['max_cache_len']} positions"
    ) as caught:
        descant.generate(llama, torch.tensor([[5, 6, 7]]), max_new_tokens=3, **given)
    rows = sizes.get("batch_size", 1)
    assert caught.value.needed == rows * sizes["max_cache_len"] * kv_shape_of(llama).bytes_per_token
    assert "max_cache_len" in str(caught.value)


def test_an_allocation_that_fails_is_not_enough_memory(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: None)  # nobody knows
    given = {
        "cache_implementation": "static",
        "cache_config": {"max_cache_len": 2**31 - 1, "batch_size": 2**24},
    }
    with pytest.raises(descant.NotEnoughMemory, match=r"needs blocks of .* cannot allocate"):
        descant.generate(llama, torch.tensor([[5, 6, 7]]), max_new_tokens=3, **given)


def test_blocks_that_exist_are_not_counted_again(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "_MIN_CHECKED_BYTES", 0)
    size = 2 * 64 * kv_shape_of(llama).bytes_per_token
    free = [size]
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: free[0])
    sizes = {"max_cache_len": 64, "batch_size": 2}
    config = descant.GenerationConfig(max_new_tokens=4, cache_implementation="static", cache_config=sizes)
    session = descant.Session(llama)
    session.admit(descant.Request([5, 6, 7], config))
    session.step()
    free[0] = 0
    assert session.admit(descant.Request([5, 6], config))
