"""Random legal configs: the fields of a method, of processors, of lengths and of stops."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from descant import AllowedSequences, DisjunctiveConstraint, PhrasalConstraint
from tools.fuzz.subjects import Subject

__all__ = [
    "METHODS",
    "NEIGHBOURS",
    "Fields",
    "Methods",
    "length_fields",
    "method_names",
    "processor_fields",
    "stop_fields",
]

Fields = dict[str, Any]
Maker = Callable[[random.Random, Subject], Fields]
Methods = Mapping[str, tuple[int, Maker]]  # by name: how often, and the fields


def _some(rng: random.Random, subject: Subject, count: int) -> list[int]:
    """That many tokens without a special meaning, each once."""
    return rng.sample(subject.tokens, count)


# ------------------------------------------------------------------------ methods
def _sampled(rng: random.Random, subject: Subject) -> Fields:
    fields: Fields = {"do_sample": True, "seed": rng.randrange(2**31)}
    for maker in rng.sample(_SAMPLERS, rng.choice((0, 1, 1, 2, 3))):
        fields |= maker(rng, subject)
    return fields


def _fanned(rng: random.Random, subject: Subject) -> Fields:
    return {**_sampled(rng, subject), "num_return_sequences": rng.choice((1, 1, 2, 3))}


def _beams(rng: random.Random, _: Subject) -> Fields:
    beams = rng.choice((2, 2, 3, 4, 5))
    fields: Fields = {"num_beams": beams, "num_return_sequences": rng.randint(1, beams)}
    if rng.random() < 0.5:
        fields["early_stopping"] = rng.choice((True, "never"))
    if rng.random() < 0.6:
        fields["length_penalty"] = rng.choice((-1.0, 0.0, 0.5, 2.0))
    return fields


def _groups(rng: random.Random, subject: Subject) -> Fields:
    beams, groups = rng.choice(((4, 2), (4, 4), (6, 2), (6, 3)))
    return {
        **_beams(rng, subject),
        "num_beams": beams,
        "num_beam_groups": groups,
        "diversity_penalty": rng.choice((0.3, 1.0, 5.0)),
        "num_return_sequences": rng.randint(1, beams),
    }


def _constrained(rng: random.Random, subject: Subject) -> Fields:
    one, two, three, four = _some(rng, subject, 4)
    kinds: tuple[Fields, ...] = (
        {"force_words_ids": [[one]]},
        {"force_words_ids": [[one, two], [three]]},
        {"force_words_ids": [[[one, two], [three]], [four]]},
        {"constraints": [PhrasalConstraint([one, two])]},
        {"constraints": [DisjunctiveConstraint([[one], [two, three]]), PhrasalConstraint([four])]},
    )
    fields = dict(rng.choice(kinds))
    if rng.random() < 0.25:
        fields["ordered_constraints"] = True
    if rng.random() < 0.25:
        fields["constraint_gap"] = rng.randint(1, 2)
    return {**(_groups if rng.random() < 0.25 else _beams)(rng, subject), **fields}


def _contrastive(rng: random.Random, subject: Subject) -> Fields:
    fields: Fields = {"penalty_alpha": rng.choice((0.2, 0.5, 0.6, 0.9)), "top_k": rng.randint(2, 5)}
    if rng.random() < 0.3 and subject.cache_type != "recurrent":
        fields["low_memory"] = True
    return fields


def _dola(rng: random.Random, _: Subject) -> Fields:
    return {"dola_layers": rng.choice(("low", "high", [0], [1], [0, 1]))}


def _guided(rng: random.Random, _: Subject) -> Fields:
    return {"guidance_scale": rng.choice((-1.0, 0.0, 0.5, 1.5, 3.0))}


def _schedule(rng: random.Random) -> Fields:
    names = ("constant", "heuristic", "heuristic_transient", "adaptive")
    return {"num_assistant_tokens_schedule": rng.choice(names)}


def _lookup(rng: random.Random, _: Subject) -> Fields:
    fields = {"prompt_lookup_num_tokens": rng.randint(1, 6), **_schedule(rng)}
    return {**fields, "max_matching_ngram_size": rng.randint(1, 3)} if rng.random() < 0.6 else fields


def _suffix(rng: random.Random, _: Subject) -> Fields:
    fields: Fields = {"suffix_lookup_num_tokens": rng.randint(1, 6), **_schedule(rng)}
    return {**fields, "suffix_lookup_shared": True} if rng.random() < 0.3 else fields


def _drafted(rng: random.Random, _: Subject) -> Fields:
    threshold = rng.choice((0.0, 0.1, 0.4))
    return {
        "num_assistant_tokens": rng.randint(1, 6),
        "assistant_confidence_threshold": threshold,
        **_schedule(rng),
    }


def _exited(rng: random.Random, subject: Subject) -> Fields:
    return {"assistant_early_exit": 1, **_drafted(rng, subject)}


def _banned(rng: random.Random, _: Subject) -> Fields:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return {"banned_phrases": ["".join(rng.choices(letters, k=rng.randint(1, 2))) for _ in range(12)]}


def _grammar(rng: random.Random, _: Subject) -> Fields:
    grammars: Sequence[Fields] = (
        {"regex": "[d-m]{2,6}"},
        {"regex": "(ab|ef|xy)+z"},
        {"choice": ["defab", "deab", "zz"]},
        {"regex": "n[0-9]*k{3}", "drafts": False},
    )
    return {"grammar": rng.choice(grammars)}


def _healed(*_: Any) -> Fields:
    return {"token_healing": True}


def _joined(*makers: Maker) -> Maker:
    """The fields of several methods in one."""
    return lambda rng, subject: {k: v for make in makers for k, v in make(rng, subject).items()}


def _plain(*_: Any) -> Fields:
    return {}


_HOT: Maker = lambda rng, _: {"do_sample": True, "seed": rng.randrange(2**31), "temperature": 5.0}  # noqa: E731

METHODS: Methods = {
    "greedy": (5, _plain),
    "sampling": (5, _fanned),
    "beams": (6, _beams),
    "beam sampling": (2, _joined(_sampled, _beams)),
    "diverse beams": (3, _groups),
    "constrained beams": (3, _constrained),
    "contrastive": (3, _contrastive),
    "dola": (2, _dola),
    "dola sampling": (1, _joined(_HOT, _dola)),
    "dola beams": (1, _joined(_beams, _dola)),
    "dola contrastive": (1, _joined(_contrastive, _dola)),
    "guidance": (2, _guided),
    "guidance sampling": (1, _joined(_fanned, _guided)),
    "guidance beams": (1, _joined(_beams, _guided)),
    "guidance contrastive": (1, _joined(_contrastive, _guided)),
    "prompt lookup": (2, _lookup),
    "prompt lookup sampling": (1, _joined(_fanned, _lookup)),
    "prompt lookup guidance": (1, _joined(_guided, _lookup)),
    "suffix lookup": (2, _suffix),
    "suffix lookup sampling": (1, _joined(_fanned, _suffix)),
    "suffix lookup dola": (1, _joined(_dola, _suffix)),
    "draft model": (2, _drafted),
    "draft model sampling": (2, _joined(_fanned, _drafted)),
    "early exit": (2, _exited),
    "early exit sampling": (1, _joined(_fanned, _exited)),
    "banned phrases": (1, _banned),
    "banned phrases sampling": (1, _joined(_HOT, _banned)),
    "banned phrases guidance": (1, _joined(_guided, _banned)),
    "token healing": (1, _healed),
    "token healing beams": (1, _joined(_beams, _healed)),
}
# What may be in the way of others, and of which others may be in the way.
NEIGHBOURS: Methods = {
    "grammar": (2, _grammar),
    "grammar sampling": (1, _joined(_fanned, _grammar)),
    "grammar beams": (1, _joined(_beams, _grammar)),
    "grammar prompt lookup": (1, _joined(_lookup, _grammar)),
    "grammar dola": (2, _joined(_dola, _grammar)),
    "grammar dola beams": (1, _joined(_beams, _dola, _grammar)),
    "grammar guidance": (2, _joined(_guided, _grammar)),
    "dola": (1, _dola),
    "guidance": (2, _guided),
    "guidance sampling": (1, _joined(_fanned, _guided)),
}
_DRAFTS = ("prompt lookup", "suffix lookup", "draft model", "early exit")


def method_names(subject: Subject, rewinds: bool, methods: Methods = METHODS) -> dict[str, int]:
    """Methods that a model has, each with its weight; `rewinds`: the cache can be cut to any length."""
    missing: tuple[str, ...] = () if rewinds else ("banned phrases",)
    if subject.cache_type == "recurrent":
        missing += (*_DRAFTS, "banned phrases")
    if subject.cache_type == "none":
        missing += ("early exit",)
    if subject.encodes:
        missing += ("dola", "guidance", "early exit", "token healing")
    return {
        name: weight for name, (weight, _) in methods.items() if not any(word in name for word in missing)
    }


# ------------------------------------------------------------------------ samplers
_SAMPLERS: Sequence[Maker] = (
    lambda rng, _: {"temperature": rng.choice((0.4, 0.8, 1.5, 3.0))},
    lambda rng, _: {"top_k": rng.choice((0, 2, 5, 20))},
    lambda rng, _: {"top_p": rng.choice((0.3, 0.7, 0.95))},
    lambda rng, _: {"min_p": rng.choice((0.01, 0.1, 0.4))},
    lambda rng, _: {"top_h": rng.choice((0.2, 0.6))},
    lambda rng, _: {"top_n_sigma": rng.choice((0.5, 1.5))},
    lambda *_: {"p_less": True},
    lambda rng, _: {"typical_p": rng.choice((0.2, 0.9))},
    lambda rng, _: {"epsilon_cutoff": rng.choice((1e-3, 0.05))},
    lambda rng, _: {"eta_cutoff": rng.choice((1e-3, 0.05))},
    lambda rng, _: {"xtc_probability": rng.choice((0.5, 1.0)), "xtc_threshold": 0.05},
    lambda rng, _: {"dynamic_temperature_range": 0.5, "dynamic_temperature_exponent": rng.choice((0.5, 2))},
    lambda rng, _: {"mirostat_tau": rng.choice((1.0, 3.0))},
    lambda rng, _: {"adaptive_p_target": rng.choice((0.2, 0.6)), "adaptive_p_decay": 0.5},
)


# ------------------------------------------------------------------------ processors
class Allowed:
    """A prefix function: about two thirds of the vocabulary, by the row's length and last token."""

    def __init__(self, salt: int, vocab: int) -> None:
        self.salt, self.vocab = salt, vocab

    def __call__(self, _: int, ids: Any) -> list[int]:
        """The allowed tokens after a row."""
        last = int(ids[-1]) if len(ids) else 0
        return [token for token in range(self.vocab) if (token * 7 + last * 3 + self.salt + len(ids)) % 3]

    def __repr__(self) -> str:
        return f"Allowed({self.salt}, {self.vocab})"


def _dry(rng: random.Random, subject: Subject) -> Fields:
    fields: Fields = {"dry_multiplier": rng.choice((0.8, 5.0)), "dry_allowed_length": rng.randint(1, 2)}
    if rng.random() < 0.4:
        fields["dry_range"] = rng.randint(2, 9)
    return {**fields, "dry_sequence_breakers": _some(rng, subject, 3)} if rng.random() < 0.4 else fields


def _ngram(rng: random.Random, _: Subject) -> Fields:
    fields: Fields = {"no_repeat_ngram_size": rng.randint(1, 3)}
    return {**fields, "no_repeat_ngram_window": rng.randint(2, 8)} if rng.random() < 0.3 else fields


def _thinking(rng: random.Random, subject: Subject) -> Fields:
    end, start = _some(rng, subject, rng.randint(1, 2)), _some(rng, subject, 1)
    fields: Fields = {"thinking_budget": rng.randint(0, 4), "thinking_end": end}
    return {**fields, "thinking_start": start} if rng.random() < 0.4 and start[0] not in end else fields


def _listed(rng: random.Random, subject: Subject) -> Fields:
    tokens = _some(rng, subject, 6)
    texts = [[rng.choice(tokens) for _ in range(rng.randint(1, 7))] for _ in range(20)]
    return {"prefix_allowed_tokens_fn": AllowedSequences(texts, subject.eos)}


def _watermark(rng: random.Random, _: Subject) -> Fields:
    # Few keys: the table that each needs takes long to make.
    fields: Fields = {"hashing_key": rng.choice((77, 2**37 + 9)), "bias": rng.choice((2.0, 5.0))}
    if rng.random() < 0.5:
        fields |= {"seeding_scheme": "selfhash", "context_width": rng.randint(1, 3)}
    return {"watermarking_config": fields}


def _sequence_bias(rng: random.Random, subject: Subject) -> Fields:
    one, two, three = _some(rng, subject, 3)
    return {"sequence_bias": {(one,): rng.uniform(-5, 5), (two, three): rng.uniform(-5, 8)}}


_PROCESSORS: Sequence[Maker] = (
    lambda rng, _: {"repetition_penalty": rng.choice((0.6, 1.2, 1.8, 3.0))},
    lambda rng, _: {"presence_penalty": rng.choice((-1.0, 0.7, 2.0))},
    lambda rng, _: {"frequency_penalty": rng.choice((-1.0, 0.7, 2.0))},
    _dry,
    _ngram,
    lambda rng, subject: {"logit_bias": {t: rng.uniform(-4, 4) for t in _some(rng, subject, 3)}},
    lambda rng, subject: {"bad_words_ids": [[t] for t in _some(rng, subject, 4)] + [_some(rng, subject, 2)]},
    _sequence_bias,
    lambda rng, _: {"exponential_decay_length_penalty": (rng.randint(0, 4), rng.choice((0.8, 1.2, 2.0)))},
    lambda rng, subject: {"suppress_tokens": _some(rng, subject, rng.choice((1, 5, 20)))},
    lambda rng, subject: {"begin_suppress_tokens": [subject.eos, *_some(rng, subject, 3)]},
    lambda *_: {"renormalize_logits": True},
    lambda *_: {"remove_invalid_values": True},
    lambda _, subject: {"forced_eos_token_id": subject.eos},
    lambda rng, subject: {"forced_bos_token_id": _some(rng, subject, 1)[0]},
    lambda rng, _: {"encoder_repetition_penalty": rng.choice((0.7, 1.5))},
    lambda rng, _: {"encoder_no_repeat_ngram_size": rng.randint(2, 3)},
    _thinking,
    lambda rng, subject: {"prefix_allowed_tokens_fn": Allowed(rng.randrange(3), subject.vocab)},
    _listed,
    _watermark,
)


def processor_fields(rng: random.Random, subject: Subject, method: str, fields: Fields) -> Fields:
    """Fields of up to three processors that go with a method."""
    chosen: Fields = {}
    for maker in rng.sample(_PROCESSORS, rng.choice((0, 0, 1, 1, 2, 3))):
        chosen |= maker(rng, subject)
    if "token healing" in method:
        chosen.pop("prefix_allowed_tokens_fn", None)
    if chosen and rng.random() < 0.1:
        names = [name for name in (*chosen, *fields) if name in _ORDERED]
        rng.shuffle(names)
        chosen |= {"processor_order": names} if len(names) > 1 else {}
    return chosen


_ORDERED = frozenset(
    {
        "logit_bias", "sequence_bias", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "dry_multiplier", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "temperature", "top_k",
        "top_p", "min_p", "typical_p", "renormalize_logits", "begin_suppress_tokens", "forced_eos_token_id",
    }
)  # fmt: skip


# ------------------------------------------------------------------------ lengths and stops
def length_fields(rng: random.Random, length: int) -> Fields:
    """How long the result of a prompt of that many decoder tokens may and must be."""
    most = rng.choice((1, 2, 3, 4, 5, 6, 7, 9))
    by_total = rng.random() < 0.2
    fields: Fields = {"max_length": length + most} if by_total else {"max_new_tokens": most}
    if rng.random() < 0.25:
        least = rng.randint(1, most)
        fields |= {"min_length": length + least} if rng.random() < 0.4 else {"min_new_tokens": least}
    return fields


def stop_fields(rng: random.Random, subject: Subject) -> Fields:
    """End tokens, stop strings and the like."""
    fields: Fields = {"eos_token_id": subject.eos, "pad_token_id": subject.pad}
    chance = rng.random()
    if chance < 0.15:
        fields["eos_token_id"] = [subject.eos, *_some(rng, subject, 2)]
    elif chance < 0.25:
        fields["stop_token_ids"] = _some(rng, subject, 3)
    elif chance < 0.4:
        letters = "abcdefghijklmnopqrst"
        texts = ["".join(rng.choices(letters, k=rng.choice((1, 1, 2, 3)))) for _ in range(rng.randint(1, 4))]
        fields["stop_strings"] = texts if rng.random() < 0.8 else texts[0]
    elif chance < 0.44:
        fields["stop_regex"] = rng.choice(("[aeiou]{2}", "a|q", "(?s).{5}", "[A-Z!-/]"))
    return fields
