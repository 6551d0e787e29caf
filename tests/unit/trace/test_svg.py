"""Pictures as SVG: well-formed, by themselves, with the trace's own numbers, and text only as text."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import descant
from descant.tokenization.display import escape_invisible, join_pieces
from descant.trace.records import RequestRecord, ResultRecord, ReturnedSequence
from descant.trace.trace import Trace
from descant.trace.trace_data import PICTURES, token_pieces
from tests.e2e.browser import hostile, sample_pages
from tests.unit.trace import fakes

ONE = ("tree", "text", "processors", "speculation")
TAGS = {"svg", "title", "desc", "style", "g", "rect", "text", "tspan", "line", "path"}
METHODS = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 1, "temperature": 1.5, "top_k": 20, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "several": {"do_sample": True, "seed": 1, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "long beams": {"num_beams": 4, "max_new_tokens": 30, "min_new_tokens": 30},
    "groups": {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0, "num_return_sequences": 3},
    "constrained": {"num_beams": 4, "force_words_ids": [[7, 8]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "speculation": {"prompt_lookup_num_tokens": 3},
}
PROMPT = torch.tensor([[5, 9, 11, 4, 5, 9, 11]])


def parsed(said: str) -> ElementTree.Element:
    """The picture, which must need nothing else and do nothing."""
    root = ElementTree.fromstring(said)
    for one in root.iter():
        assert one.tag.removeprefix("{http://www.w3.org/2000/svg}") in TAGS
        assert not any(name.startswith("on") or "href" in name or name == "style" for name in one.attrib)
    [style] = [one for one in root.iter() if one.tag.endswith("}style")]
    assert "url(" not in style.text
    assert "@import" not in style.text
    assert "prefers-color-scheme:dark" in style.text
    assert root[0].tag.endswith("}title")
    assert root[1].tag.endswith("}desc")
    return root


def marked(root: ElementTree.Element, name: str) -> dict[int, ElementTree.Element]:
    return {int(one.attrib[name]): one for one in root.iter() if name in one.attrib}


def boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of every node's box."""
    found = []
    for one in marked(root, "data-node").values():
        rect = next(part for part in one if part.tag.endswith("}rect"))
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    return found


@pytest.fixture(scope="module")
def traces(tiny) -> dict[str, Trace]:
    """A run of every method by a tiny model."""
    made = {}
    for name, fields in METHODS.items():
        fields = {"max_new_tokens": 9, **fields}
        made[name] = descant.generate(tiny("llama").model, PROMPT, trace=True, **fields).trace
    return made


@pytest.mark.parametrize("name", METHODS)
def test_every_picture_of_every_method(traces, name):
    trace = traces[name]
    for picture in ONE:
        parsed(trace.svg(picture))
        parsed(trace.svg(picture, step=trace.steps[len(trace.steps) // 2].step))
    parsed(trace.svg("beside", beside=traces["greedy"]))


@pytest.mark.parametrize("name", METHODS)
def test_the_tree_has_the_nodes_and_scores_of_the_trace(traces, name):
    trace = traces[name]
    found = marked(parsed(trace.svg("tree")), "data-node")
    if name != "long beams":
        assert found.keys() == trace.tree.nodes.keys()
    assert found.keys() <= trace.tree.nodes.keys()
    assert trace.results[0].sequences[0].leaf in found
    for number, group in found.items():
        node = trace.tree.node(number)
        if node.token is None:
            continue
        assert int(group.attrib["data-token"]) == node.token
        assert group.attrib["data-state"] == node.state
        for key, value in (("data-score", node.score), ("data-processed", node.processed)):
            assert (float(group.attrib[key]) if key in group.attrib else None) == value


def test_the_text_has_every_token_of_the_sequence(traces):
    trace = traces["several"]
    for sequence, said in enumerate(trace.results[0].sequences):
        root = parsed(trace.svg("text", sequence=sequence))
        found = marked(root, "data-node")
        path = trace.tree.path_to(said.leaf)
        assert list(found) == [node.number for node in path]
        for node in path:
            assert float(found[node.number].attrib["data-raw"]) == node.raw
            assert float(found[node.number].attrib["data-processed"]) == node.processed


def test_bars_are_what_the_processors_did(traces):
    trace = traces["sampling"]
    root = parsed(trace.svg("processors", step=3))
    node = next(one for one in trace.tree.path_to(trace.results[0].sequences[0].leaf) if one.step == 3)
    bars = [one for one in root.iter() if "data-before" in one.attrib]
    expected = [one for stage in node.choice.stages for one in stage.moved]
    got = [tuple(float(one.attrib[f"data-{key}"]) for key in ("token", "before", "after")) for one in bars]
    assert got[: len(expected)] == [tuple(map(float, one)) for one in expected]
    said = " ".join(root.itertext())
    assert all(stage.name in said for stage in node.choice.stages)


def test_accepted_and_rejected_drafts():
    trace = fakes.guesses(seed=4)
    root = parsed(trace.svg("speculation"))
    rows = [row for step in trace.steps for row in step.rows]
    flags = [one.attrib["data-accepted"] for one in root.iter() if "data-accepted" in one.attrib]
    assert flags.count("1") == sum(len(row.runs[0].tokens) - 1 for row in rows)
    assert flags.count("0") == sum(len(row.drafts) >= len(row.runs[0].tokens) for row in rows) > 0
    for place, one in marked(root, "data-position").items():
        assert int(one.attrib["data-tried"]) == sum(len(row.drafts) >= place for row in rows)
        assert int(one.attrib["data-stood"]) == sum(len(row.runs[0].tokens) > place for row in rows)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(4, 1), (6, 3), (3, 1)]), st.integers(2, 20))
def test_no_two_boxes_overlap_and_all_are_on_the_paper(seed, shape, steps):
    trace = fakes.beams(shape[0], steps, seed, groups=shape[1], returned=2)
    root = parsed(trace.svg("tree"))
    found = boxes(root)
    for one, other in combinations(found, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(x >= 0 and y >= 0 and right <= width and low <= height for x, y, right, low in found)


def test_a_deep_tree_is_truncated_with_a_note():
    trace = fakes.beams(16, 120, seed=3)
    said = trace.svg("tree")
    drawn = marked(parsed(said), "data-node")
    assert len(drawn) < 60
    assert "not drawn" in said
    assert trace.results[0].sequences[0].leaf in drawn
    window = marked(parsed(trace.svg("tree", step=60)), "data-node")
    assert {trace.tree.node(one).step for one in window if trace.tree.node(one).step > 54} == set(
        range(55, 61)
    )


def all_hostile(text: str) -> list[Trace]:
    """Traces with a text everywhere that a trace has one."""
    words = [*(text,) * (len(fakes.WORDS) - 1), text]
    found = []
    for trace in (fakes.beams(words=words, steps=3), fakes.guesses(3, words=words)):
        records = []
        for one in trace.records:
            if isinstance(one, RequestRecord):
                one = dataclasses.replace(
                    one, method=text, config={text: text}, drafter=text, stages=(text,), demands=2
                )
            elif isinstance(one, ResultRecord):
                said = [ReturnedSequence(said.tokens, text, said.leaf, said.score) for said in one.sequences]
                one = ResultRecord(one.request, tuple(said))
            records.append(one)
        found.append(Trace(records))
    return found


@pytest.mark.parametrize("family", hostile.FAMILIES)
def test_hostile_texts_stay_texts(family):
    texts = hostile.of(family)
    trace = sample_pages.of_texts(texts)
    for picture in PICTURES:
        beside = {"beside": trace} if picture == "beside" else {}
        letters = "".join(parsed(trace.svg(picture, **beside)).itertext())
        for letter in set(letters):
            assert letter in "\n\u200d\ufe0f" or letter.isprintable(), hex(ord(letter))
        if picture == "text":
            assert [text for text in texts if join_pieces(escape_invisible(text))[:8] not in letters] == []


def test_what_was_not_kept_is_not_invented():
    """A trace without summaries has no shades and no bars, and a note."""
    trace = fakes.guesses(4)
    cut = []
    for one in trace.records:
        if hasattr(one, "rows"):
            one = dataclasses.replace(one, rows=tuple(dataclasses.replace(row, looks=()) for row in one.rows))
        cut.append(one)
    bare = Trace(cut)
    root = parsed(bare.svg("text"))
    assert not any("data-raw" in one.attrib for one in root.iter())
    assert "perplexity" not in bare.svg("text")
    assert "not kept" in bare.svg("processors")
    parsed(bare.svg("tree"))


def test_a_run_that_has_not_ended():
    trace = fakes.beams(4, 6)
    going = Trace(trace.records[:-3])  # without the last two steps and the result
    for picture in ONE:
        parsed(going.svg(picture))
    assert "still in the running" in going.svg("tree")


def test_shades_are_by_the_probability_of_the_model():
    trace = fakes.guesses(30, seed=7)
    root = parsed(trace.svg("text"))
    for number, group in marked(root, "data-node").items():
        chance = math.exp(trace.tree.node(number).raw)
        expected = next(at for at, least in enumerate((0.9, 0.5, 0.2, 0.05, 0.0)) if chance >= least)
        shades = re.findall(r"shade(\d)", " ".join(one.attrib.get("class", "") for one in group.iter()))
        assert [int(one) for one in shades[:1]] == ([expected] if expected else [])
        assert join_pieces(token_pieces(trace, trace.tree.node(number).token)) in "".join(group.itertext())
