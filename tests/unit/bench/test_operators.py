"""`bench.operators`: the time of a trace by groups of operators."""

from __future__ import annotations

import json

import pytest

from bench import operators


def _event(name, start, duration, thread=1, category="cpu_op"):
    return {"name": name, "ts": start, "dur": duration, "tid": thread, "cat": category}


def test_operators_have_their_own_time_and_attention_all_within(tmp_path):
    trace = tmp_path / "trace.json"
    events = [
        _event("aten::linear", 0, 5e6),
        _event("aten::mm", 1e6, 3e6),
        _event("descant::packed_attention", 5e6, 4e6),
        _event("aten::mul", 6e6, 1e6),
        _event("aten::mul", 9e6, 1e6),
        _event("aten::mul", 9e6, 2e6, thread=2),
        _event("aten::mul", 9e6, 2e6, category="python_function"),
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    assert operators.operator_seconds(trace, 5.5)["aten::mm"] == pytest.approx(1.5)  # of 11 s wall time
    seconds = operators.operator_seconds(trace, 11.0)
    assert seconds == pytest.approx(
        {"aten::linear": 2, "aten::mm": 3, "descant::packed_attention": 4, "aten::mul": 3}
    )
    groups = operators.group_seconds(seconds, 14.0)
    assert groups == pytest.approx(
        {
            "norms, activations, positions": 3,
            "attention, cache": 4,
            "matrix products": 5,
            "sampling": 0,
            "the rest": 2,
        }
    )
    lines = operators.table("one", {"fast": groups, "other": groups})
    assert lines[0] == "| one | fast | other |"
    assert lines[-1] == "| all | 14.00 | 14.00 |"
