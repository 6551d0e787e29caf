"""The format of a trace: what is written is read again, and what is not a trace is a TraceError, always."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descant import Trace, TraceError
from descant.trace.records import (
    CandidateRecord,
    ChoiceRecord,
    ProcessorRecord,
    RequestRecord,
    ResultRecord,
    ReturnedSequence,
    RowRecord,
    RunRecord,
    StepRecord,
    TokenShift,
    TokenTexts,
    TraceHeader,
    TruncationRecord,
    read_records,
    to_json_line,
)

COUNT = st.integers(0, 2**40)
NUMBER = st.floats(-1e6, 1e6).map(lambda one: round(one, 4) + 0.0)
LOG = st.one_of(st.just(float("-inf")), NUMBER)
WORD = st.text(max_size=12)
BYTES = st.binary(max_size=6).map(lambda one: one.decode("utf-8", "surrogateescape"))


def several(one, most=3):
    return st.lists(one, max_size=most).map(tuple)


def maybe(one):
    return st.one_of(st.none(), one)


STAGE = st.builds(
    ProcessorRecord, WORD, COUNT, COUNT, NUMBER, several(st.builds(TokenShift, COUNT, LOG, LOG))
)
LOOK = st.builds(
    ChoiceRecord, NUMBER, NUMBER, several(st.builds(CandidateRecord, COUNT, LOG, LOG)), several(STAGE)
)
RUN = st.builds(
    RunRecord, several(COUNT), several(COUNT), COUNT, COUNT, maybe(NUMBER), maybe(COUNT), maybe(WORD)
)
ROW = st.builds(RowRecord, COUNT, COUNT, COUNT, several(LOOK), several(COUNT), several(RUN))
SAID = st.builds(ReturnedSequence, several(COUNT), WORD, COUNT, maybe(NUMBER), maybe(several(COUNT)))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORD,
    lambda one: st.lists(one, max_size=2) | st.dictionaries(WORD, one, max_size=2),
    max_leaves=4,
)
HEADER = st.builds(TraceHeader, WORD, WORD, COUNT, COUNT, COUNT)
OTHER = st.one_of(
    st.builds(
        RequestRecord, COUNT, COUNT, several(COUNT), WORD, st.dictionaries(WORD, PLAIN, max_size=3),
        several(WORD), COUNT, COUNT, COUNT, maybe(WORD), maybe(COUNT),
    ),
    st.builds(TokenTexts, st.dictionaries(COUNT, BYTES, max_size=3), several(COUNT)),
    st.builds(StepRecord, COUNT, NUMBER, several(ROW), maybe(COUNT)),
    st.builds(ResultRecord, COUNT, several(SAID), maybe(WORD)),
    st.builds(TruncationRecord, COUNT, WORD),
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(HEADER, st.lists(OTHER, max_size=4))
def test_what_is_written_is_read_again(header, others):
    records = [header, *others]
    lines = [to_json_line(one) for one in records]
    assert all(line.isascii() and "\n" not in line for line in lines)
    assert list(read_records(lines)) == records


def test_bytes_come_back_whole():
    broken = b"\xf0\x9f a \xff".decode("utf-8", "surrogateescape")
    [_, texts] = read_records(
        [to_json_line(TraceHeader("1", "M", 9, 1, 5000)), to_json_line(TokenTexts({7: broken, 8: "é\u202e"}))]
    )
    assert texts.texts[7].encode("utf-8", "surrogateescape") == b"\xf0\x9f a \xff"
    assert texts.texts[8] == "é\u202e"


def test_default_values_are_not_written():
    plain = StepRecord(
        3,
        0.25,
        (
            RowRecord(
                0,
                4,
                looks=(ChoiceRecord(1.0, 1.0, (CandidateRecord(5, -0.5, -0.5),)),),
                runs=(RunRecord((5,), (6,)),),
            ),
        ),
    )
    assert json.loads(to_json_line(plain)) == {
        "kind": "step",
        "step": 3,
        "seconds": 0.25,
        "rows": [
            {
                "request": 0,
                "at": 4,
                "looks": [{"entropy": 1.0, "left": 1.0, "top": [[5, -0.5]]}],
                "runs": [{"tokens": [5], "nodes": [6]}],
            }
        ],
    }


# ------------------------------------------------------------------------ what is none
HEAD = to_json_line(TraceHeader("1", "M", 9, 1, 5000))
CHOICE = ChoiceRecord(
    0.5,
    0.25,
    (CandidateRecord(3, -1.0, -0.5),),
    (ProcessorRecord("Top", 3, 2, 0.5, (TokenShift(3, -1.0, -0.5),)),),
)
SOUND = [
    HEAD,
    to_json_line(RequestRecord(0, 0, (1, 2), "greedy search", {"top_k": 3, "x": [1.5]}, ("Top",))),
    to_json_line(TokenTexts({1: "a", 2: "b"}, (2,))),
    to_json_line(
        StepRecord(0, 0.5, (RowRecord(0, 0, 0, (CHOICE,), (3,), (RunRecord((3,), (1,), score=-1.5),)),), 17)
    ),
    to_json_line(TruncationRecord(1, "steps")),
    to_json_line(ResultRecord(0, (ReturnedSequence((3,), "eos", 1, -0.5, (0,)),))),
]
INSERTED = ("0", "-", "9" * 30, "null", "[", "}", '"', ",", "1e5", "\\u0000", "\x00", "\n", "{}")


def _whole(text: str) -> None:
    """Read a trace and ask it for everything that is not a picture."""
    trace = Trace(read_records(text.splitlines()))
    _ = trace.header, trace.requests, trace.results, trace.truncations, trace.texts, trace.special_tokens
    for node in trace.tree.nodes.values():
        _ = trace.tree.path_to(node.number), node.state
    for moment in trace.replay():
        assert moment.step in trace.steps


def test_a_sound_one_is_read():
    _whole("\n".join(SOUND))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "empty file"),
        (SOUND[1:], "must begin with its header"),
        ([HEAD, HEAD], "must begin with its header and have one"),
        ([HEAD.replace('"version":1', '"version":2')], "line 1 must be a record, got version 2"),
        ([HEAD.replace("descant-trace", "other")], "'other' for the format"),
        ([HEAD, "{}"], "line 2 must be a record, got 'None' for a kind"),
        ([HEAD, "[]"], "for an object"),
        ([HEAD, "nonsense"], "line 2 must be a record"),
        ([HEAD, '{"kind":"cut","step":1}'], "TruncationRecord without 'what'"),
        ([HEAD, '{"kind":"cut","step":1,"what":"x","why":2}'], "unknown field 'why'"),
        ([HEAD, '{"kind":"cut","step":-1,"what":"x"}'], "-1 for a count"),
        ([HEAD, '{"kind":"step","step":1,"seconds":NaN}'], "the number NaN"),
        ([HEAD, '{"kind":"step","step":1,"seconds":1e999}'], "the number 1e999"),
        ([HEAD, "[" * 100_000], "line 2 must be a record"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(lines, says):
    with pytest.raises(TraceError, match=says):
        Trace(read_records(lines))


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_done_to_a_trace_it_is_a_trace_or_a_trace_error(chance):
    text = "\n".join(SOUND)
    for _ in range(chance.randint(1, 4)):
        text = _hurt(chance, text)
    with contextlib.suppress(TraceError):
        _whole(text)


def _hurt(chance: random.Random, text: str) -> str:
    at = chance.randrange(len(text) + 1)
    end = min(len(text), at + chance.randint(0, 12))
    match chance.randrange(5):
        case 0:
            return text[:at] + text[end:]
        case 1:
            return text[:at] + chance.choice(INSERTED) + text[at:]
        case 2:
            lines = text.splitlines()
            chance.shuffle(lines)
            return "\n".join(lines)
        case 3:
            lines = text.splitlines() or [""]
            return "\n".join([*lines, chance.choice(lines)])
        case _:
            other = [str(chance.randint(0, 9)) if chance.random() < 0.1 else one for one in text]
            return "".join(new if one.isdigit() else one for one, new in zip(text, other, strict=True))


def test_files_are_read_within_bounds(tmp_path, monkeypatch):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(SOUND) + "\n")
    assert len(Trace.load(file).records) == len(SOUND)
    file.write_bytes(HEAD.encode() + "\né\n".encode())
    with pytest.raises(TraceError, match="ASCII"):
        Trace.load(file)
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TraceError, match="must be a file that can be read"):
            Trace.load(missing)
    monkeypatch.setattr("descant.trace.trace_data.MAX_TRACE_BYTES", 100)
    with pytest.raises(TraceError, match="at most 100 bytes"):
        Trace.load(file)
