"""Stop strings: which tokens complete them."""

from __future__ import annotations

import torch

from tests.reference.spec_sentences.library import refused
from tests.reference.spec_sentences.sentence import CONFIG, UTILITIES, page

says, field = page(UTILITIES), page(CONFIG)

MATCHES = {
    1589: ("st", "op"),
    1590: ("stop",),
    1591: ("st", "opera"),
    1592: ("sto", "pper"),
    1593: ("las", "topper"),
    1594: ("s", "to", "pped"),
}
MISSES = {1599: ("stop", "at"), 1600: ("st", "op", "at"), 1601: ("st", "opera", "tion")}


def row(lib, tokens):
    """The ids of tokens [1, L]."""
    return torch.tensor([[lib.tokenizer.get_vocab()[token] for token in tokens]])


for _line, _tokens in (*MATCHES.items(), *MISSES.items()):

    @says(
        f"stopstr_{'_'.join(_tokens)}",
        _line,
        f"The tokens {' '.join(_tokens)} {'' if _line in MATCHES else 'do not '}end with the string 'stop'.",
    )
    def _(lib, tokens=_tokens, ends=_line in MATCHES):
        found = lib.StopStringCriteria(lib.tokenizer, ["stop"])(row(lib, tokens), None)
        assert found.tolist() == [ends]


OVERLAPS = {
    1620: ("op", 2),
    1621: ("stop", 4),
    1622: ("opera", 2),
    1623: ("pper", 1),
    1624: ("topper", 3),
    1625: ("pped", 1),
}
for _line, (_token, _size) in OVERLAPS.items():

    @says(f"stopstr_overlap_{_token}", _line, f"The token {_token} overlaps the end of 'stop' by {_size}.")
    def _(lib, token=_token, size=_size):
        assert "stop"[-size:] == token[:size]
        head = list("stop"[:-size])
        assert lib.StopStringCriteria(lib.tokenizer, "stop")(row(lib, [*head, token]), None).tolist() == [
            True
        ]
        assert lib.StopStringCriteria(lib.tokenizer, "stop")(
            row(lib, [*head[:-1], "x", token]), None
        ).tolist() == [size == 4]


@says("stopstr_one", 1681, "A string is treated as a list of one.")
def _(lib):
    ids = row(lib, ("st", "op"))
    found = [lib.StopStringCriteria(lib.tokenizer, given)(ids, None) for given in ("stop", ["stop"])]
    assert torch.equal(*found)
    return found[0]


@says("stopstr_rows", 1680, "Any of several strings ends a row, each row for itself.")
def _(lib):
    made = lib.StopStringCriteria(lib.tokenizer, ["stop", "two"])
    ids = torch.cat((row(lib, ("st", "op")), row(lib, ("one", "two")), row(lib, ("op", "st"))))
    return made(ids, None)


@says("stopstr_past", 1606, "A stop string earlier in the row does not end it.")
def _(lib):
    made = lib.StopStringCriteria(lib.tokenizer, ["stop"])
    return made(row(lib, ("stop", "one", "two")), None)


@says("stopstr_gen", 1584, "Generation stops as soon as a token completes a stop string.")
def _(lib):
    plain = lib.model().generate(lib.ids(), max_new_tokens=8, eos_token_id=None)
    text = lib.tokenizer.decode(plain[0, 8:9])
    assert text
    found = lib.model().generate(
        lib.ids(), max_new_tokens=8, eos_token_id=None, stop_strings=[text], tokenizer=lib.tokenizer
    )
    assert found.shape[1] <= 9
    return found


@field("stopstr_gen_str", 152, "`stop_strings` may be one string.")
def _(lib):
    plain = lib.model().generate(lib.ids(), max_new_tokens=8, eos_token_id=None)
    text = lib.tokenizer.decode(plain[0, 7:8])
    return lib.model().generate(
        lib.ids(), max_new_tokens=8, eos_token_id=None, stop_strings=text, tokenizer=lib.tokenizer
    )


@says("stopstr_notok", 1701, "Stop strings need the tokenizer.")
def _(lib):
    with refused(ValueError):
        lib.model().generate(lib.ids(), max_new_tokens=4, stop_strings=["stop"])
