"""`descant generate --input --output`: many prompts, each its own, in order; an error harms no other."""

from __future__ import annotations

import json

import pytest

import descant as package
from descant import GenerationConfig
from descant.config.generation_config import FIELDS
from descant.tokenization.detokenizer import IncrementalDetokenizer

ROWS = [
    {"prompt": "Once upon a time", "id": 17, "tags": ["é", None]},
    {"prompt": "The cat", "max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2},
    {
        "prompt": "One day, a very long prompt was written about a dog",
        "do_sample": True,
        "seed": 4,
        "top_k": 9,
    },
    {"prompt": "Été 日本", "seed": 1, "do_sample": True, "temperature": 1.4, "eos_token_id": None},
    {"messages": [{"role": "user", "content": "Who?"}], "repetition_penalty": 1.7, "suppress_tokens": [13]},
    {"prompt": "Once upon a time", "stop_strings": ["named", "!"], "max_new_tokens": 30},
]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read(text):
    return [json.loads(line) for line in text.splitlines()]


def expected(model, tokenizer, row, **options):
    """The texts and ends of a line, by a call of its own."""
    own = {name: value for name, value in row.items() if name in FIELDS and value is not None}
    text = row.get("prompt") or "user: Who?\nassistant:"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens="prompt" in row)["input_ids"]
    out = package.generate(model, ids, tokenizer=tokenizer, **{**options, **own})
    texts = []
    for line in out:
        stream = IncrementalDetokenizer(
            tokenizer,
            prompt_ids=ids[0].tolist(),
            stop_strings=own.get("stop_strings", ()),
            skip_special_tokens=True,
        )
        texts.append(stream.put(line[ids.shape[1] :].tolist()) + stream.end())
    return texts


@pytest.mark.ci_cases("3")
@pytest.mark.parametrize("width", [1, 3])
def test_round_trip(descant, loaded, talker, tmp_path, width):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(ROWS), encoding="utf-8")
    result = descant("generate", talker, "--input", source, "--output", target, "--batch-size", width,
                     "--max-new-tokens", 8)  # fmt: skip
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    written = target.read_text(encoding="utf-8")
    assert "日本" in written
    found = read(written)
    for row, line in zip(ROWS, found, strict=True):
        assert {name: value for name, value in line.items() if name not in ("completions", "run")} == row
        texts = expected(*loaded(talker), row, max_new_tokens=8)
        assert [one["text"] for one in line["completions"]] == texts
    assert [one["completions"][0]["finish_reason"] for one in found] == ["length"] * 5 + ["stop"]
    assert [one["completions"][0]["tokens"] for one in found[:5]] == [8, 3, 8, 8, 8]
    scores = [one["score"] for one in found[1]["completions"]]
    assert scores == sorted(scores, reverse=True)
    # What comes out may go in again: only the results are replaced.
    again = descant("generate", talker, "--input", target, "--max-new-tokens", 8, "--batch-size", width)
    assert read(again.stdout) == [
        {name: value for name, value in line.items() if name != "run"} for line in found
    ]


def test_pipes(descant, stories):
    text = lines(ROWS[:1]) + "\n  \n" + lines(ROWS[1:2])
    result = descant("generate", stories, "--input", "-", "--output", "-", "--max-new-tokens", 4, input=text)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line["prompt"] for line in read(result.stdout)] == ["Once upon a time", "The cat"]


def test_an_error_is_its_lines_own(descant, stories):
    everything = list(range(32000))
    bad = [
        ("x", "`input` must hold a JSON object in each line (Expecting value"),
        ("[1]", "`input` must hold a JSON object in each line, got '[1]'"),
        ({"id": 4}, '`prompt` must be given, or "messages", in each line, got neither'),
        ({"prompt": "a", "messages": [{}]}, "got both"),
        ({"prompt": 5}, "`prompt` must be text, got 5"),
        ({"prompt": "a", "top_p": 7}, "`top_p` must be a finite number >= 0 and <= 1, got 7"),
        ({"prompt": "a", "top_k": 7}, "`top_k` has no use while `do_sample` is False"),
        (
            {"prompt": "a", "watermarking_config": {"bias": "high"}},
            "`watermarking_config` must have a number between -10000.0 and 10000.0 as `bias`, got 'high'",
        ),
        ({"prompt": "a", "output_scores": True}, "`output_scores` has no use where text is written"),
        ({"prompt": "a", "max_length": 1}, "`max_length` must be > the 2 tokens of the prompt"),
        ({"prompt": "a", "suppress_tokens": [99999]}, "`suppress_tokens` must name tokens below 32000"),
        ({"messages": [{"role": "user", "content": "a"}]}, "`model` must have a chat template"),
        ({"prompt": "a", "begin_suppress_tokens": everything}, "`begin_suppress_tokens` must leave enough"),
    ]
    good = {"prompt": "Once upon a time"}
    text = ""
    for row, _ in bad:
        text += (row if isinstance(row, str) else json.dumps(row)) + "\n" + json.dumps(good) + "\n"
    result = descant(
        "generate", stories, "--input", "-", "--max-new-tokens", 4, "--batch-size", 5, input=text
    )
    told = 'error: 13 of 26 lines failed, each says why in its "error"\n'
    assert (result.exit_code, result.stderr) == (1, told)
    found = read(result.stdout)
    alone = read(descant("generate", stories, good["prompt"], "--output", "-", "--max-new-tokens", 4).stdout)
    assert found[1::2] == alone * len(bad)
    for number, (line, (row, message)) in enumerate(zip(found[::2], bad, strict=True)):
        assert line["error"].startswith(f"line {2 * number + 1}: ")
        assert message in line.pop("error", "no error")
        assert line == (row if isinstance(row, dict) else {})


def test_odd_characters_are_their_lines_own(descant, stories, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    whole = '{"prompt": "a", "note": "é \\ud800"}\n{"prompt": "\\ud83d"}\n'
    source.write_bytes(
        whole.encode() + '{"prompt": "é"}\n'.encode("latin-1") + b'\xef\xbb\xbf{"prompt": "a"}\n'
    )
    result = descant("generate", stories, "--input", source, "--output", target, "--max-new-tokens", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 2 of 4 lines failed")
    first, *bad, last = read(target.read_text(encoding="utf-8"))
    assert (first["note"], len(first["completions"])) == ("é \ud800", 1)
    assert last["completions"] == first["completions"]  # some editors begin a file with a mark
    messages = ["`prompt` must hold whole characters", "codec can't decode byte 0xe9"]
    assert all(message in line["error"] for message, line in zip(messages, bad, strict=True))


def test_a_prompt_is_a_turn_with_chat(descant, talker):
    rows = [{"prompt": "Who?"}, {"messages": [{"role": "user", "content": "Who?"}]}]
    found = read(descant("generate", talker, "--input", "-", "--chat", input=lines(rows)).stdout)
    assert found[0]["completions"] == found[1]["completions"]


def test_logprobs(descant, loaded, stories):
    options = ("--logprobs", 2, "--max-new-tokens", 5, "--suppress-tokens", 29892)
    [line] = read(descant("generate", stories, "Once upon a time", "--output", "-", *options).stdout)
    [completion] = line["completions"]
    tokens = completion["logprobs"]
    model, tokenizer = loaded(stories)
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    out = package.generate(model, ids, max_new_tokens=5, suppress_tokens=[29892])
    logits = model(out).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1).detach()
    assert [one["id"] for one in tokens] == out[0, ids.shape[1] :].tolist()
    assert [one["raw"] for one in tokens] == pytest.approx(
        [float(logits[at, one["id"]]) for at, one in enumerate(tokens)], abs=1e-4
    )
    best = logits.topk(2)
    assert [[top["id"] for top in one["top"]] for one in tokens] == best.indices.tolist()
    ruled_out = [top for one in tokens for top in one["top"] if top["id"] == 29892]
    assert ruled_out
    assert all(top["processed"] is None and top["raw"] < 0 for top in ruled_out)
    assert all(one["token"] == tokenizer.decode([one["id"]]) for one in tokens)


def test_a_bar_is_shown_on_a_terminal_only(descant, stories, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(lines([{"prompt": "a"}] * 3))
    arguments = (
        "generate",
        stories,
        "--input",
        source,
        "--output",
        tmp_path / "out.jsonl",
        "--max-new-tokens",
        1,
    )
    assert descant(*arguments).stderr == ""
    assert "3/3" in descant(*arguments, "--overwrite", env={"FORCE_COLOR": "1"}).stderr


def test_the_input_is_not_overwritten(descant, stories, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(lines([{"prompt": "a"}]))
    result = descant("generate", stories, "--input", source, "--output", source)
    assert result.exit_code == 2
    assert "--output must be another file than --input" in result.stderr
    assert read(source.read_text()) == [{"prompt": "a"}]


def test_a_config_is_below_the_options_and_these_below_the_line(descant, stories, tmp_path):
    GenerationConfig(num_beams=2, max_new_tokens=2).save_pretrained(tmp_path)
    rows = [{"prompt": "a"}, {"prompt": "a", "max_new_tokens": 5}]
    for options, counts in (((), [2, 5]), (("--max-new-tokens", 3), [3, 5])):
        result = descant(
            "generate", stories, "--config", tmp_path, "--input", "-", *options, input=lines(rows)
        )
        found = [line["completions"][0] for line in read(result.stdout)]
        assert [one["tokens"] for one in found] == counts
        assert all("score" in one for one in found)
