"""Watermarks: configs, processors, detectors; CompileConfig."""

from __future__ import annotations

import warnings

import torch

from tests.reference.spec_sentences.library import folder, heard, refused, scores
from tests.reference.spec_sentences.sentence import CONFIG, STRATEGIES, UTILITIES, WATERMARKING, page

older, says, field, api = page(STRATEGIES), page(UTILITIES), page(CONFIG), page(WATERMARKING)

KEYS = [654, 400, 836, 123, 340, 443, 597, 160, 57]
NO_CALL = "A config is no function; the page lists every class with the same entry."


def config(lib, **more):
    """A watermark with the documented key."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lib.WatermarkingConfig(**more)


def synthid(lib, **more):
    """A SynthID config with the example's keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lib.SynthIDTextWatermarkingConfig(ngram_len=5, keys=KEYS, **more)


def marked(lib, rows=1, count=12, length=6, **more):
    """Sequences with a watermark."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lib.model().generate(
            lib.ids(rows=rows, length=length),
            watermarking_config=config(lib, **more),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
        )


WM_DEFAULTS = {
    "greenlist_ratio": (2463, 0.25),
    "bias": (2465, 2.0),
    "hashing_key": (2467, 15485863),
    "seeding_scheme": (2469, "lefthash"),
    "context_width": (2474, 1),
}
for _name, (_line, _value) in WM_DEFAULTS.items():

    @says(f"wm_default_{_name}", _line, f"The default of `{_name}` of WatermarkingConfig is {_value!r}.")
    def _(lib, name=_name, value=_value):
        assert getattr(config(lib), name) == value


SYN_DEFAULTS = {
    "context_history_size": (2580, 1024),
    "sampling_table_seed": (2582, 0),
    "sampling_table_size": (2584, 65536),
    "skip_first_ngram_calls": (2586, False),
    "debug_mode": (2588, False),
}
for _name, (_line, _value) in SYN_DEFAULTS.items():

    @says(f"syn_default_{_name}", _line, f"The default of `{_name}` of the SynthID config is {_value!r}.")
    def _(lib, name=_name, value=_value):
        assert getattr(synthid(lib), name) == value


@says("wm_call", 2477, "WatermarkingConfig can be called.", ours=NO_CALL, theirs=NO_CALL)
def _(lib):
    assert callable(config(lib))


@says("compile_call", 2687, "CompileConfig can be called.", ours=NO_CALL, theirs=NO_CALL)
def _(lib):
    assert callable(lib.CompileConfig())


@field("wm_construct", 1476, "A config makes its processor for a vocabulary and a device.")
def _(lib):
    made = config(lib).construct_processor(97, "cpu")
    assert isinstance(made, lib.WatermarkLogitsProcessor)
    return made(lib.ids(), torch.zeros(1, 97))


@field("syn_construct", 1565, "A SynthID config makes its processor.")
def _(lib):
    made = synthid(lib).construct_processor(97, "cpu")
    assert isinstance(made, lib.SynthIDTextWatermarkLogitsProcessor)


@field("wm_to_dict", 1366, "A watermark config is written as a dict and read again.")
def _(lib):
    found = config(lib, bias=1.5).to_dict()
    again = type(config(lib)).from_dict(found)
    assert again.bias == 1.5
    return {name: found[name] for name in WM_DEFAULTS}


@field("wm_json", 1383, "A watermark config is written as JSON, to a file too.")
def _(lib):
    with folder() as path:
        config(lib, bias=1.5).to_json_file(path / "wm.json")
        assert '"bias": 1.5' in (path / "wm.json").read_text()
    assert '"bias": 1.5' in config(lib, bias=1.5).to_json_string()


@field("wm_update", 1392, "`update` of a watermark config sets known values.")
def _(lib):
    made = config(lib)
    made.update(bias=3.0)
    return made.bias


@field(
    "wm_update_unknown",
    1400,
    "`update` of a watermark config ignores unknown names.",
    ours="An unknown name is an error.",
)
def _(lib):
    config(lib).update(other=1)


@field("wm_validate", 1446, "`validate` of a watermark config accepts sound values.")
def _(lib):
    assert config(lib).validate() is None


for _name, _wrong in (
    ("scheme", {"seeding_scheme": "other"}),
    ("ratio", {"greenlist_ratio": 1.5}),
    ("width", {"context_width": 0}),
):

    @field(f"wm_valid_{_name}", 1446, f"A wrong {_name} of a watermark is an error.")
    def _(lib, wrong=_wrong):
        with refused(ValueError):
            marked(lib, count=2, **wrong)


for _scheme in ("lefthash", "selfhash"):

    @says(f"wm_proc_{_scheme}", 1411, f"The {_scheme} processor adds its bias to a part of the vocabulary.")
    def _(lib, scheme=_scheme):
        made = lib.WatermarkLogitsProcessor(
            vocab_size=97,
            device="cpu",
            greenlist_ratio=0.25,
            bias=2.0,
            hashing_key=15485863,
            seeding_scheme=scheme,
            context_width=1,
        )
        return made(lib.ids(), torch.zeros(1, 97))


@says("wm_ratio", 1400, "The green list has the given share of the vocabulary.")
def _(lib):
    made = lib.WatermarkLogitsProcessor(vocab_size=100, device="cpu", greenlist_ratio=0.25, bias=2.0)
    assert int((made(torch.tensor([[5, 6]]), torch.zeros(1, 100)) == 2.0).sum()) == 25


@says("wm_proc_bad", 1409, "Another seeding scheme is an error.")
def _(lib):
    with refused(ValueError):
        lib.WatermarkLogitsProcessor(vocab_size=97, device="cpu", seeding_scheme="other")


@says("wm_proc_ratio", 1400, "A green list ratio outside of (0, 1) is an error.")
def _(lib):
    with refused(ValueError):
        lib.WatermarkLogitsProcessor(vocab_size=97, device="cpu", greenlist_ratio=1.2)


@older("wm_gen", 187, "A watermark config given to generate marks the text.")
def _(lib):
    found = marked(lib, bias=2.5, seeding_scheme="selfhash")
    assert not torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=12, eos_token_id=None))
    return found


@says("wm_example", 1433, "The example: bias 2.5, a context of two tokens, selfhash.")
def _(lib):
    return marked(lib, bias=2.5, context_width=2, seeding_scheme="selfhash")


@older("wm_both", 188, "A watermark config in GenerationConfig gives the same tokens.")
def _(lib):
    with heard():
        inside = lib.GenerationConfig(watermarking_config=config(lib), max_new_tokens=8, eos_token_id=None)
        found = lib.model().generate(lib.ids(), generation_config=inside, eos_token_id=None)
    assert torch.equal(found, marked(lib, count=8))
    return found


@field("wm_dict", 301, "A watermark may be given as a dict.")
def _(lib):
    with heard():
        found = lib.model().generate(
            lib.ids(),
            watermarking_config={"bias": 2.0, "greenlist_ratio": 0.25},
            max_new_tokens=8,
            eos_token_id=None,
        )
    assert torch.equal(found, marked(lib, count=8))
    return found


@older("wm_bias", 180, "Green tokens get the bias added to their logits.")
def _(lib):
    given = scores(1, 97)
    made = lib.WatermarkLogitsProcessor(vocab_size=97, device="cpu", bias=2.5)
    gain = made(lib.ids(), given.clone()) - given
    assert set(gain.round(decimals=3).unique().tolist()) == {0.0, 2.5}


# -------------------------------------------------------------------- detector
def detector(lib, **more):
    """A detector with the settings of `marked`."""
    given = {"bias": 9.0, "seeding_scheme": "selfhash"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lib.WatermarkDetector(
            model_config=lib.model().config, device="cpu", watermarking_config=config(lib, **given), **more
        )


def text(lib, rows=2, **more):
    return marked(lib, rows, 30, bias=9.0, seeding_scheme="selfhash", **more)


@older("detector", 218, "The detector finds marked text and does not find plain text.")
def _(lib):
    plain = lib.model().generate(lib.ids(rows=2), max_new_tokens=30, eos_token_id=None)
    made = detector(lib)
    found = (
        made(text(lib)[:, 6:], return_dict=True).prediction,
        made(plain[:, 6:], return_dict=True).prediction,
    )
    assert found[0].tolist() == [True, True]
    assert found[1].tolist() == [False, False]


@says("detector_plain", 1441, "Without `return_dict` the detector answers an array of bools.")
def _(lib):
    return detector(lib)(text(lib)[:, 6:]).tolist()


@says("detector_threshold", 2487, "The threshold of z is an argument of the call.")
def _(lib):
    return detector(lib)(text(lib)[:, 6:], z_threshold=1000.0).tolist()


@says("detector_args", 2494, "The detector takes `ignore_repeated_ngrams`, `max_cache_size` and a dict.")
def _(lib):
    with heard():
        made = lib.WatermarkDetector(
            model_config=lib.model().config,
            device="cpu",
            ignore_repeated_ngrams=False,
            max_cache_size=64,
            watermarking_config={name: value for name, (_, value) in WM_DEFAULTS.items()}
            | {"bias": 9.0, "seeding_scheme": "selfhash"},
        )
    return made(text(lib)[:, 6:]).tolist()


@api("detector_out", 41, "The record has counts, fraction, z, p, prediction and confidence.")
def _(lib):
    out = detector(lib)(text(lib)[:, 6:], return_dict=True)
    return {
        name: torch.as_tensor(getattr(out, name)).double()
        for name in ("num_tokens_scored", "num_green_tokens", "green_fraction", "z_score")
    }


@api("detector_p", 189, "The p-value is computed from z by an approximation of the normal tail.")
def _(lib):
    out = detector(lib)(text(lib)[:, 6:], return_dict=True)
    z = torch.as_tensor(out.z_score).double()
    want = 1 - 0.5 * (1 + torch.sign(z) * (1 - torch.exp(-2 * z**2 / torch.pi)))
    assert torch.allclose(torch.as_tensor(out.p_value).double(), want, atol=1e-9)


# -------------------------------------------------------------------- SynthID
def synthid_processor(lib):
    with heard():
        return lib.SynthIDTextWatermarkLogitsProcessor(
            ngram_len=3,
            keys=[11, 22, 33],
            sampling_table_size=256,
            sampling_table_seed=0,
            context_history_size=64,
            device="cpu",
        )


@says("synthid", 1041, "The SynthID processor changes scores by its g-values, step after step.")
def _(lib):
    made = synthid_processor(lib)
    ids = lib.ids(length=5, rows=2)
    found = []
    for _ in range(3):
        found.append(made(ids, scores(2, 97)))
        ids = torch.cat((ids, found[-1].argmax(-1, keepdim=True)), 1)
    return found


@says("synthid_g", 1053, "The processor computes g-values, repetition masks and end masks.")
def _(lib):
    made = synthid_processor(lib)
    ids = lib.ids(length=9, rows=2)
    return [
        made.compute_g_values(ids),
        made.compute_context_repetition_mask(ids),
        made.compute_eos_token_mask(ids, 5),
    ]


@says("synthid_mean", 1054, "It estimates the expected mean g-value.")
def _(lib):
    with heard():
        made = lib.SynthIDTextWatermarkLogitsProcessor(
            ngram_len=3,
            keys=[11, 22],
            sampling_table_size=256,
            sampling_table_seed=0,
            context_history_size=64,
            device="cpu",
        )
    return float(made.expected_mean_g_value(vocab_size=97))


@says("synthid_gen", 1093, "A SynthID config marks sampled text.")
def _(lib):
    torch.manual_seed(3)
    with heard():
        return lib.model().generate(
            lib.ids(rows=2),
            watermarking_config=synthid(lib),
            do_sample=True,
            max_new_tokens=10,
            eos_token_id=None,
        )


@says("bayes_config", 2538, "BayesianDetectorConfig has a depth and a base rate of 0.5.")
def _(lib):
    made = lib.BayesianDetectorConfig(watermarking_depth=3)
    return made.watermarking_depth, made.base_rate


@says("bayes_model", 2560, "BayesianDetectorModel is a torch module that answers probabilities.")
def _(lib):
    made = lib.BayesianDetectorModel(lib.BayesianDetectorConfig(watermarking_depth=3))
    assert isinstance(made, torch.nn.Module)
    g_values = torch.randint(0, 2, (2, 7, 3)).float()
    found = made(g_values, torch.ones(2, 7))[0]
    assert bool(((found >= 0) & (found <= 1)).all())
    assert found.shape == (2,)


COMPILE = {
    "fullgraph": (2658, True),
    "dynamic": (2660, None),
    "backend": (2662, "inductor"),
    "mode": (2664, "reduce-overhead"),
    "options": (2666, None),
}
for _name, (_line, _value) in COMPILE.items():

    @says(f"compile_{_name}", _line, f"The default of `{_name}` of CompileConfig is {_value!r}.")
    def _(lib, name=_name, value=_value):
        assert getattr(lib.CompileConfig(), name) == value


@says("compile_gen", 2681, "A compile config is taken with a static cache.")
def _(lib):
    given = lib.CompileConfig(dynamic=True, backend="eager", fullgraph=False, mode=None)
    with heard():
        found = lib.model().generate(
            lib.ids(),
            do_sample=False,
            max_new_tokens=4,
            cache_implementation="static",
            compile_config=given,
            disable_compile=True,
        )
    assert torch.equal(found, lib.model().generate(lib.ids(), max_new_tokens=4))
