"""The reference's side of the pipe; runs in the venv that holds transformers 4.52.4.

A request is `{"op": name, ...}`, an answer `{"ok": result}` or `{"error": {"type", "message", "traceback"}}`.
To teach it something new, write a function and put `@operation` over it: its name is the op, its keyword
arguments are the request's other fields.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import json
import os
import re
import resource
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
import transformers

from tests.reference.parity.own import allowed_by_any, verdict
from tests.reference.process import detectors, margins, stepping, wire
from tests.reference.spec_sentences.library import Library
from tests.reference.spec_sentences.sentence import observe
from tests.unit.decoding.constraints import script
from tests.unit.decoding.processors.prefixes import allowed_after

# transformers imports hqq where it finds it, and with it torch's compiler, which switches this off for all.
torch.distributions.Distribution.set_default_validate_args(True)

MODEL_BYTES = 700 << 20  # loaded models are dropped, the least recently used first, to stay below this

_operations: dict[str, Callable[..., Any]] = {}


def operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let requests name this function."""
    _operations[function.__name__] = function
    return function


class Models:
    """Loaded models by folder and load options, the least recently used dropped first."""

    def __init__(self) -> None:
        self.loaded: collections.OrderedDict[tuple[str, str], Any] = collections.OrderedDict()

    def get(self, folder: str, options: Mapping[str, Any]) -> Any:
        """The model in `folder`, in evaluation mode and in fp32 unless the options name a dtype."""
        key = folder, json.dumps(options, sort_keys=True)
        if key not in self.loaded:
            needed = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
            while self.loaded and sum(map(_bytes, self.loaded.values())) + needed > MODEL_BYTES:
                self.loaded.popitem(last=False)
            self.loaded[key] = _load(folder, options)
        self.loaded.move_to_end(key)
        return self.loaded[key]


def _bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _load(folder: str, options: Mapping[str, Any]) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    return auto.from_pretrained(folder, **{"torch_dtype": torch.float32, **options}).eval()


_models = Models()


def _peak() -> int:
    """The most memory that this process has held, in KiB."""
    # rusage charges a new process with what its parent held.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@operation
def ping() -> dict[str, Any]:
    """Versions, threads and the most memory held so far, in MB."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peak_mb": _peak() // 1024,
    }


@operation
@torch.no_grad()
def generate(
    *,
    model: str,
    inputs: dict[str, Any],
    arguments: dict[str, Any],
    want: Sequence[str],
    seed: int | None = None,
    load: Mapping[str, Any] | None = None,
    objects: Mapping[str, Sequence[Sequence[Any]]] | None = None,
) -> dict[str, Any]:
    """`model.generate(**inputs, **arguments)`; returns the fields of its output named in `want`.

    `objects` are arguments that are lists of objects: `{"logits_processor": [(class, arguments), ...]}`.

    Besides the output's own fields, `want` may name `transition_scores` (the model's own
    `compute_transition_scores`), `log_transition_scores` (the same, normalised), `logprobs` (what the latter
    should be: its fp32 sums along a strided axis lose up to 3e-4 over 32,000 tokens), `choices` (the two
    best scores of each step, [R, T, 2]), `running` (the sums with which beams enter each step, [T, B, K]),
    `margin` (how narrowly the removed methods chose: see `tests/reference/process/margins.py`) and `fed`
    (tokens put through each forward).
    """
    if arguments.get("cache_implementation") == "quantized":
        _spare_compiler()
    net = _models.get(model, load or {})
    asked = {k: True for k in ("scores", "logits", "hidden_states", "attentions") if _asks(want, k)}
    asked |= {"scores": True} if _DERIVED & set(want) else {}
    seen = Seen()
    hook = net.register_forward_pre_hook(
        lambda *call: seen.fed.append(_tokens_in(*call[1:])), with_kwargs=True
    )
    choose = net._get_running_beams_for_next_iteration
    net._get_running_beams_for_next_iteration = lambda **given: seen.kept(choose(**given))
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with margins.watched() as seen.watch:
            out = net.generate(
                **inputs,
                **detectors.marking(arguments),
                **{name: [_made(*one) for one in some] for name, some in (objects or {}).items()},
                return_dict_in_generate=True,
                **{f"output_{k}": v for k, v in asked.items()},
            )
    finally:
        hook.remove()
        del net._get_running_beams_for_next_iteration
    return {field: _field(net, out, field, seen) for field in want}


def _spare_compiler() -> None:
    """Let optimum-quanto read what it packed without an extension that it would first compile in C++."""
    from optimum.quanto.library.extensions import cpp

    cpp.ext._lib = types.SimpleNamespace(unpack=_unpacked)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(parts).to(torch.uint8)


@dataclasses.dataclass
class Seen:
    """What was seen of a call while it ran."""

    fed: list[int] = dataclasses.field(default_factory=list)
    running: list[torch.Tensor] = dataclasses.field(default_factory=list)
    watch: margins.Watch = dataclasses.field(default_factory=margins.Watch)

    def kept(self, chosen: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Note the sums of the beams that go on."""
        self.running.append(chosen[1])
        return chosen


def _made(name: str, arguments: Mapping[str, Any]) -> Any:
    """An object of the class `name` of transformers or of its processors or criteria."""
    places = (transformers, transformers.generation.logits_process, transformers.generation.stopping_criteria)
    return next(getattr(place, name) for place in places if hasattr(place, name))(**arguments)


_DERIVED = {"transition_scores", "log_transition_scores", "logprobs", "choices"}


def _asks(want: Sequence[str], kind: str) -> bool:
    return any(field == kind or field.endswith(f"_{kind}") for field in want if "transition" not in field)


def _tokens_in(given: Sequence[Any], arguments: Mapping[str, Any]) -> int:
    if given:
        return int(given[0].numel())
    for name in ("decoder_input_ids", "input_ids"):
        if arguments.get(name) is not None:
            return int(arguments[name].numel())
    embeds = arguments["inputs_embeds"]
    return int(embeds.shape[0] * embeds.shape[1])


def _field(net: Any, out: Any, field: str, seen: Seen) -> Any:
    if field == "fed":
        return seen.fed
    if field == "margin":
        return min(seen.watch.margins, default=float("inf"))
    if field == "running" and seen.watch.sums:
        return torch.stack([seen.watch.first(), *seen.watch.running[:-1]])
    if field == "running":
        first = torch.full_like(seen.running[0], -1e9)
        first[:, 0] = 0
        return torch.stack([first, *seen.running[:-1]])
    if field == "choices":
        return torch.stack([step.topk(2, dim=-1).values for step in out.scores], dim=1)
    if field == "logprobs":
        new = out.sequences[:, -len(out.scores) :]
        steps = [
            scores.double().log_softmax(-1).gather(1, new[:, t, None]) for t, scores in enumerate(out.scores)
        ]
        return torch.cat(steps, dim=1).float()
    if field.endswith("transition_scores"):
        return net.compute_transition_scores(
            out.sequences,
            out.scores,
            out.get("beam_indices"),
            normalize_logits=field.startswith("log_"),
        )
    return out.get(field)


@operation
@torch.no_grad()
def forward(
    *,
    model: str,
    inputs: dict[str, Any],
    want: Sequence[str] = ("logits",),
    load: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One plain forward of the model; returns the fields of its output named in `want`."""
    out = _models.get(model, load or {})(**inputs, return_dict=True)
    return {field: out.get(field) for field in want}


@operation
@torch.no_grad()
def steps(
    *,
    model: str,
    cache: tuple[str, dict[str, Any]],
    feeds: Sequence[dict[str, Any]],
    past: str = "past_key_values",
    load: Mapping[str, Any] | None = None,
) -> list[torch.Tensor]:
    """The logits of manual forwards over one cache, `(class, arguments)`; see `reference/stepping.py`."""
    if cache[0] == "QuantoQuantizedCache":
        _spare_compiler()
    net = _models.get(model, load or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SinkCache calls itself deprecated
        return stepping.logits(net, stepping.made(*cache, net), feeds, past)


@operation
@torch.no_grad()
def custom(*, path: str, model: str, config: dict[str, Any], arguments: dict[str, Any]) -> torch.Tensor:
    """What the function `generate` of a file returns.

    Called as `custom_generate` calls it: that itself fails for a local folder in 4.52.4, which copies the
    file to a folder that is not there.
    """
    function = runpy.run_path(path)["generate"]
    settings = transformers.GenerationConfig(**config)
    said: torch.Tensor = function(_models.get(model, {}), generation_config=settings, **arguments)
    return said


@operation
@torch.no_grad()
def transition_scores(*, model: str, arguments: dict[str, Any]) -> torch.Tensor:
    """`compute_transition_scores` on given sequences and scores."""
    scores: torch.Tensor = _models.get(model, {}).compute_transition_scores(**arguments)
    return scores


@operation
@torch.no_grad()
def call(
    *,
    name: str,
    arguments: dict[str, Any],
    calls: Sequence[dict[str, Any]],
    seed: int | None = None,
) -> list[Any]:
    """Build the class `name` of transformers (a processor, a criterion, ...) and call the object in turn."""
    thing = _made(name, arguments)
    if seed is not None:
        torch.manual_seed(seed)
    return [thing(**keywords) for keywords in calls]


@operation
def streamer(
    *, tokenizer: str, arguments: Mapping[str, Any], runs: Sequence[Sequence[Sequence[int]]]
) -> list[list[tuple[str, bool]]]:
    """What a TextStreamer with the tokenizer of a folder hands to `on_finalized_text`, for each run.

    A run is the prompt's ids [L] and then the ids of each step; each is followed by `end`.
    """
    loaded = _tokenizer(tokenizer)
    return [_streamed(transformers.TextStreamer(loaded, **arguments), run) for run in runs]


@functools.cache
def _tokenizer(folder: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def _streamed(thing: Any, run: Sequence[Sequence[int]]) -> list[tuple[str, bool]]:
    texts: list[tuple[str, bool]] = []
    thing.on_finalized_text = lambda text, stream_end=False: texts.append((text, stream_end))
    thing.put(torch.tensor([run[0]]))
    for ids in run[1:]:
        thing.put(torch.tensor(ids))
    thing.end()
    return texts


@operation
@torch.no_grad()
def process(
    *, name: str, cases: Sequence[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """One processor and one call for each case, `(arguments, input_ids, scores)`.

    Arguments that the pipe cannot carry are sent as what they are made from: a config as its fields,
    a prefix function as its salt, the members of a list as `(class, arguments)`.
    """
    return [_processor(name, arguments)(ids, scores) for arguments, ids, scores in cases]


def _processor(name: str, arguments: Mapping[str, Any]) -> Any:
    made = dict(arguments)
    if "generate_config" in made:
        made["generate_config"] = transformers.GenerationConfig(**made["generate_config"])
    if "prefix_allowed_tokens_fn" in made:
        made["prefix_allowed_tokens_fn"] = allowed_after(*made["prefix_allowed_tokens_fn"])
    if name == "LogitsProcessorList":
        return transformers.LogitsProcessorList(_made(*one) for one in made["members"])
    return _made(name, made)


@operation
def generate_own(
    *,
    arguments: dict[str, Any],
    tokenizer: str | None = None,
    prefix: Sequence[Any] | None = None,
    verdicts: Sequence[Sequence[Any]] = (),
    **fields: Any,
) -> dict[str, Any]:
    """`generate` with what a user brings along: the tokenizer of a folder, a prefix function, criteria.

    The functions are sent as what they are made from: see `tests/reference/parity/own.py`.
    """
    given = dict(arguments)
    if tokenizer is not None:
        given["tokenizer"] = _tokenizer(tokenizer)
    if prefix is not None:
        given["prefix_allowed_tokens_fn"] = allowed_by_any(*prefix)
    if verdicts:
        given["stopping_criteria"] = [verdict(*one) for one in verdicts]
    return dict(generate(arguments=given, **fields))


@operation
@torch.no_grad()
def criteria(*, cases: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Verdicts of many criteria: each of a class `name` and `arguments`, called on `calls` (input ids).

    A `tokenizer` is named by its folder.
    """
    tokenizers: dict[str, Any] = {}
    verdicts = []
    for case in cases:
        arguments = dict(case["arguments"])
        folder = case.get("tokenizer")
        if folder is not None:
            if folder not in tokenizers:
                tokenizers[folder] = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            arguments["tokenizer"] = tokenizers[folder]
        criterion = _made(case["name"], arguments)
        verdicts.append([criterion(ids, None) for ids in case["calls"]])
    return verdicts


@operation
def constraints(*, cases: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Scripts of calls on constraints: see `tests/unit/decoding/constraints/script.py`."""
    return [script.run(transformers, **case) for case in cases]


@operation
@torch.no_grad()
def scorer(
    *,
    name: str,
    arguments: Mapping[str, Any],
    constraints: Sequence[Sequence[Any]],
    calls: Sequence[Mapping[str, Any]],
    last: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A beam scorer of the class `name`: `process` for each call, then `finalize` unless `last` is None.

    Its constraints are sent as `(class, arguments)`. Each step tells also which requests are done after it.
    """
    given = {"constraints": [_made(*one) for one in constraints]} if constraints else {}
    thing = _made(name, {**arguments, **given, "device": torch.device("cpu")})
    steps = [{**thing.process(**one), "done": thing._done.clone()} for one in calls]
    return {"steps": steps, "end": None if last is None else dict(thing.finalize(**last))}


@operation
def sentence(*, name: str, root: str) -> dict[str, Any]:
    """Whether a documented sentence holds here: see `tests/reference/spec_sentences`."""
    from tests.reference.spec_sentences import checks

    assert checks.__all__
    generation = transformers.generation
    places = [
        transformers, transformers.cache_utils, generation.logits_process, generation.stopping_criteria,
        generation.utils, generation.watermarking, generation.beam_constraints, generation.beam_search,
        generation.configuration_utils, generation.streamers,
    ]  # fmt: skip
    if name.startswith("quanto"):
        _spare_compiler()
    return observe(name, Library(Path(root), places, _models.get))


for one in detectors.OPERATIONS:
    operation(one)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one request; whatever it raises becomes the answer."""
    fields = dict(request)
    try:
        return {"ok": _operations[fields.pop("op")](**fields)}
    except Exception as error:
        return {
            "error": {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
        }


def main() -> None:
    """Serve requests until the pipe closes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # what the imports made stays to the end: no collection need traverse it
    # Whatever a library prints must not reach the pipe.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = wire.receive(sys.stdin.buffer)
        except wire.Closed:
            return
        wire.send(pipe, answer(request))


if __name__ == "__main__":
    main()
