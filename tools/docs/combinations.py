"""Write docs/guide/combinations.md, the planner's verdict on every pair of methods, or check the page.

python tools/docs/combinations.py             write
python tools/docs/combinations.py --check     fail if the page differs from the planner
"""

import argparse
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import descant
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits
from descant.engine.planning.drafter_factory import DraftInputs, drafter_spec
from descant.engine.planning.planner import make_plan
from descant.errors import DescantError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "combinations.md"

DECODER: Final = ModelTraits(
    is_encoder_decoder=False,
    supports_position_ids=True,
    supports_logits_to_keep=True,
    supports_inputs_embeds=True,
    vocab_size=100,
    num_layers=4,
    attn_implementation="sdpa",
    sliding_windows={},
    max_positions=None,
    context_length=None,
)
ENCODER_DECODER: Final = replace(DECODER, is_encoder_decoder=True)
# The traits of a joint model of `descant.decoding.guidance`.
JOINT_DECODER: Final = replace(DECODER, supports_inputs_embeds=False, has_lm_head=False)
JOINT_ENCODER_DECODER: Final = replace(ENCODER_DECODER, supports_inputs_embeds=False, has_lm_head=False)

BEAMS: Final = {"num_beams": 4}


@dataclass(frozen=True)
class Method:
    """A decoding method and the fields that select it."""

    name: str
    page: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_strategy: bool = False  # selects tokens, rather than changing the scores
    joint_model: bool = False  # runs several models as one

    @property
    def link(self) -> str:
        """Its name, as a link to its page if it has one."""
        return f"[{self.name}]({self.page})" if self.page else self.name


METHODS: Final = (
    Method("greedy search", is_strategy=True),
    Method("sampling", "shape.md#samplers", {"do_sample": True, "temperature": 0.8}, True),
    Method("beam search", "scores.md#the-score-of-a-sequence", {**BEAMS, "length_penalty": 0.8}, True),
    Method("beam sampling", None, {**BEAMS, "do_sample": True}, True),
    Method(
        "diverse beams", "diverse-beams.md", {**BEAMS, "num_beam_groups": 2, "diversity_penalty": 1.0}, True
    ),
    Method("constrained beams", "constrained-beams.md", {**BEAMS, "force_words_ids": [[33, 34]]}, True),
    Method("contrastive search", "contrastive.md", {"penalty_alpha": 0.6, "top_k": 4}, True),
    Method("DoLa", "dola.md", {"dola_layers": "high"}),
    Method("guidance", "guidance.md", {"guidance_scale": 1.5}),
    Method("logit arithmetic", "model-arithmetic.md", {}, joint_model=True),
    Method(
        "allowed sequences",
        "constrained-beams.md#one-of-a-list",
        {"prefix_allowed_tokens_fn": descant.AllowedSequences([[33, 34], [35]], 2)},
    ),
    Method("grammar", "structured-output.md", {"grammar": {"regex": "[!-~]+"}}),
    Method("token healing", "healing-and-bans.md#token-healing", {"token_healing": True}),
    Method("banned phrases", "healing-and-bans.md#banned-phrases", {"banned_phrases": ["no"]}),
    Method("prompt lookup", "speculation.md#prompt-lookup", {"prompt_lookup_num_tokens": 3}),
    Method("suffix lookup", "speculation.md#suffix-lookup", {"suffix_lookup_num_tokens": 3}),
    Method("early exit", "speculation.md#early-exit", {"assistant_early_exit": 1}),
)

HEAD = """\
<!-- Written by tools/docs/combinations.py from the planner's verdicts: edit there. -->

# Combinations

Which methods combine in one request. A number means that the pair is refused: `generate` raises the reason
below the table as an error before it runs the model. *Yes* means that both methods have their documented
effect. The tables come from the planner's verdict on every pair, and a test keeps them current.

Methods of *different* requests always combine: a batch or a [session](sessions.md) may mix all of them, each
prompt with its own config. Only the model, and so logit arithmetic, is the same for all. All methods support
[processors](shape.md), [stops](stop-and-stream.md), streams, [log-probabilities](scores.md) and batches of
ragged prompts. A [draft model](speculation.md#a-draft-model) is an argument, not a config field; it combines
with the same methods as prompt lookup.
"""


def verdict(first: Method, second: Method, encoder: bool) -> str | None:
    """Why two methods do not combine on a kind of model; None if they do."""
    joint = first.joint_model or second.joint_model
    if encoder:
        traits = JOINT_ENCODER_DECODER if joint else ENCODER_DECODER
    else:
        traits = JOINT_DECODER if joint else DECODER
    try:
        config = GenerationConfig.merge({**first.fields, **second.fields, "eos_token_id": 2})
        make_plan(
            config, traits, drafter_spec(config, SimpleNamespace(traits=traits, network=None), DraftInputs())
        )
    except DescantError as error:
        return str(error).split(", got ")[0]
    return None


def table(title: str, encoder: bool) -> str:
    """The table of all pairs on a kind of model, with the reasons below it."""
    reasons: dict[str, int] = {}

    def cell(first: Method, second: Method) -> str:
        if not second.fields and first is not second and first.is_strategy and second.is_strategy:
            return "–"  # greedy search is the absence of another strategy
        reason = verdict(first, second, encoder)
        if reason is None:
            return "yes"
        return f"({reasons.setdefault(reason, len(reasons) + 1)})"

    used = [one for one in METHODS if verdict(one, one, encoder) is None]
    lines = []
    for at, row in enumerate(used):
        cells = [row.link, *(cell(row, column) for column in used[: at + 1])]
        lines.append(f"| {' | '.join(cells)}{' |' * (len(used) - at)}")
    head = "| | " + " | ".join(one.name for one in used) + " |"
    parts = [f"\n## {title}\n\n{head}\n{'|---' * (len(used) + 1)}|\n", *(f"{line}\n" for line in lines)]
    if reasons:
        parts += ["\n", *(f"{number}. {reason}\n" for reason, number in reasons.items())]
    refused = {one.link: verdict(one, one, encoder) for one in METHODS if one not in used}
    if refused:
        parts.append("\nNot available for these models:\n\n")
        parts += [f"- {name}: {reason}\n" for name, reason in refused.items()]
    return "".join(parts)


def render() -> str:
    """The current page."""
    return HEAD + table("Decoder-only models", False) + table("Encoder-decoder models", True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    new = render()
    if not parser.parse_args().check:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    difference = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "the page", "the planner", lineterm=""
    )
    print("\n".join(difference), end="")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
