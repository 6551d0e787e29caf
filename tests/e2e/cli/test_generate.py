"""`descant generate` with one prompt: the text is what Python gives, shown as it grows."""

from __future__ import annotations

import json

import pytest

import descant as package
from descant.cli import terminal
from descant.cli.output import StreamPrinter
from descant.models.loading.loading import load
from tests.support.pretrained import folder

PROMPT = "Once upon a time"


def continued(model, tokenizer, prompt, chat=False, **parameters):
    """What is added to the prompt's text, for every returned sequence."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)
    out = package.generate(model, **ids, tokenizer=tokenizer, **parameters)
    before = len(tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True))
    return [tokenizer.decode(line, skip_special_tokens=True)[before:] for line in out]


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ((), {}),
        (("--max-new-tokens", 30), {"max_new_tokens": 30}),
        (("--num-beams", 3, "--max-new-tokens", 8), {"num_beams": 3, "max_new_tokens": 8}),
        (
            ("--do-sample", "--seed", 5, "--temperature", 1.3, "--top-k", "none"),
            {"do_sample": True, "seed": 5, "temperature": 1.3, "top_k": None},
        ),
        (
            ("--repetition-penalty", 1.5, "--suppress-tokens", "278,263", "--max-length", 20),
            {"repetition_penalty": 1.5, "suppress_tokens": [278, 263], "max_length": 20},
        ),
    ],
)
def test_the_text_is_the_calls(descant, loaded, stories, options, parameters):
    result = descant("generate", stories, PROMPT, *options)
    [text] = continued(*loaded(stories), PROMPT, **parameters)
    note = "" if parameters.keys() & {"max_length", "max_new_tokens"} else NOTE
    assert (result.exit_code, result.stdout, result.stderr) == (0, text + "\n", note)


def test_several_sequences_come_one_after_the_other(descant, loaded, stories):
    for how in ({"do_sample": True, "seed": 1}, {"num_beams": 3}):
        options = [f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
                   for name, value in how.items()]  # fmt: skip
        result = descant(
            "generate", stories, PROMPT, "--num-return-sequences", 3, "--max-new-tokens", 9, *options
        )
        texts = continued(*loaded(stories), PROMPT, num_return_sequences=3, max_new_tokens=9, **how)
        assert result.stdout == "\n---\n".join(texts) + "\n"


def test_the_prompt_may_come_from_standard_input(descant, stories):
    by_hand = descant("generate", stories, PROMPT)
    assert descant("generate", stories, "-", input=PROMPT + "\n").stdout == by_hand.stdout
    assert descant("generate", stories, "-", input=PROMPT).stdout == by_hand.stdout
    assert descant("generate", stories, "-", input=PROMPT + "\n\n").stdout != by_hand.stdout


def test_encoder_decoder(descant, tmp_path):
    model, tokenizer = load(str(folder("flan-t5-small-titles")))
    text = "summarize: The committee met on Monday to discuss the new library."
    out = package.generate(model, **tokenizer(text, return_tensors="pt"), num_beams=2, max_new_tokens=8)
    for arguments in ((), ("--output", "-")):
        options = ("--num-beams", 2, "--max-new-tokens", 8, *arguments)
        result = descant("generate", folder("flan-t5-small-titles"), text, *options)
        shown = (
            json.loads(result.stdout)["completions"][0]["text"] if arguments else result.stdout.rstrip("\n")
        )
        assert shown == tokenizer.decode(out[0], skip_special_tokens=True)


def test_a_conversation_goes_through_the_template(descant, loaded, talker):
    plain = "user: Who?\nassistant:"
    [text] = continued(*loaded(talker), plain, chat=True)
    assert descant("generate", talker, "Who?", "--chat").stdout == text + "\n"
    assert descant("generate", talker, "Who?").stdout != text + "\n"


def test_without_a_template_there_is_no_chat(descant, stories):
    for command in ("generate", "chat"):
        result = descant(command, stories, *(["Who?", "--chat"] if command == "generate" else []))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: MODEL must have a chat template in its tokenizer, got ")
        assert "use `descant generate` without --chat" in result.stderr


def test_characters_come_whole_and_at_once(descant, loaded, stories, monkeypatch):
    _, tokenizer = loaded(stories)
    text = "né 日本 🎉🦜 ঢাকা"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)  # some characters are several tokens
    # Each token in turn is made the only choice, by the tokens before it.
    biases = [[ids[: at + 1], 1e4 * (at + 1)] for at in range(len(ids))]
    pieces = []
    write = terminal.write
    monkeypatch.setattr(terminal, "write", lambda piece: (pieces.append(piece), write(piece)))
    result = descant(
        "generate", stories, PROMPT, "--sequence-bias", json.dumps(biases), "--max-new-tokens", len(ids)
    )
    assert result.stdout == " " + text + "\n"
    assert len(pieces) >= len(text) / 2
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_string_is_not_shown(descant, stories):
    whole = descant("generate", stories, PROMPT, "--max-new-tokens", 40).stdout
    assert "named" in whole
    cut = descant("generate", stories, PROMPT, "--max-new-tokens", 40, "--stop-strings", "named").stdout
    assert cut == whole.split("named")[0] + "\n"
    result = descant(
        "generate", stories, PROMPT, "--max-new-tokens", 40, "--stop-strings", "named", "--output", "-"
    )
    [completion] = json.loads(result.stdout)["completions"]
    assert (completion["text"] + "\n", completion["finish_reason"]) == (cut, "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "PROMPT must be given, or --input, got neither: give one of them; - reads standard input"),
        ((PROMPT, "--input", "-"), "PROMPT must be given, or --input, got PROMPT and --input"),
        ((PROMPT, "--logprobs", 2), "--logprobs has no use where only text is shown, got 2: add --output -"),
        ((PROMPT, "--return-dict-in-generate", "--output-scores"), "has no use where text is written"),
        ((PROMPT, "--input=-", "--output=x"), "PROMPT must be given, or --input"),
        (("--input", "nowhere.jsonl"), "--input must be a file that can be opened (No such file"),
        ((PROMPT, "--output", "nowhere/x"), "--output must be a file that can be opened (No such file"),
        ((PROMPT, "--max-length", 2), "--max-length must be > the 5 tokens of the prompt, got 2"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(descant, stories, options, message):
    result = descant("generate", stories, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_row_that_cannot_go_on_exits_1(descant, stories):
    everything = ",".join(map(str, range(32000)))
    result = descant("generate", stories, PROMPT, "--begin-suppress-tokens", everything)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: --begin-suppress-tokens must leave enough to choose from")


def test_a_run_that_fails_exits_1(descant, stories, monkeypatch):
    def failing(*_, **__):
        yield from ()
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr("descant.api.stream.stream", failing)
    result = descant("generate", stories, PROMPT)
    assert (result.exit_code, result.stderr) == (1, "error: RuntimeError: out of memory\n")


def test_a_run_is_recorded(descant, loaded, stories, tmp_path):
    file = tmp_path / "run.jsonl"
    plain = descant("generate", stories, PROMPT, "--max-new-tokens", 6)
    traced = descant("generate", stories, PROMPT, "--max-new-tokens", 6, "--trace", file)
    assert (traced.exit_code, traced.stdout) == (0, plain.stdout)
    trace = package.Trace.load(file)
    [said] = trace.results[0].sequences
    _, tokenizer = loaded(stories)
    assert (
        plain.stdout == tokenizer.decode([*trace.requests[0].prompt, *said.tokens])[4 + len(PROMPT) :] + "\n"
    )
    assert trace.texts.keys() >= {*said.tokens}


def test_what_was_interrupted_is_recorded_as_far_as_it_came(descant, stories, tmp_path, monkeypatch):
    def interrupted(self, event):
        raise KeyboardInterrupt

    file = tmp_path / "run.jsonl"
    monkeypatch.setattr(StreamPrinter, "print_event", interrupted)
    assert descant("generate", stories, PROMPT, "--trace", file).exit_code != 0
    trace = package.Trace.load(file)
    assert len(trace.steps) == 1
    assert trace.results[0].error == "cancelled"


def test_a_record_without_a_run_is_none(descant, stories, tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text("what was there")
    assert descant("generate", stories, PROMPT, "--num-beams", -1, "--trace", file).exit_code != 0
    assert file.read_text() == "what was there"
    for others in (("--output", "-"), ("--input", "-")):
        prompt = () if "--input" in others else (PROMPT,)
        result = descant("generate", stories, *prompt, "--trace", file, *others, input="")
        assert "has no use with --input and --output" in result.stderr
    result = descant("generate", stories, PROMPT, "--trace", tmp_path / "no" / "run.jsonl")
    assert "must be a file that can be opened" in result.stderr


# ----------------------------------------------------------------------------- the default length
NOTE = "stopped at the default of 20 new tokens: set --max-new-tokens\n"


def test_a_text_that_the_default_length_cuts_says_so_once(descant, stories, tmp_path):
    result = descant("generate", stories, PROMPT)
    assert (result.exit_code, result.stderr) == (0, NOTE)
    assert descant("generate", stories, PROMPT, "--num-beams", 2, "--num-return-sequences", 2).stderr == NOTE
    lines = '{"prompt": "Once"}\n' * 3
    result = descant("generate", stories, "--input", "-", "--output", tmp_path / "out.jsonl", input=lines)
    assert (result.exit_code, result.stderr) == (0, NOTE)


def test_a_length_that_somebody_has_set_is_no_default(descant, stories, tmp_path):
    package.GenerationConfig(max_new_tokens=4).save_pretrained(tmp_path)
    for given in (("--max-new-tokens", 4), ("--max-length", 9), ("--config", tmp_path)):
        assert descant("generate", stories, PROMPT, *given).stderr == ""
    line = '{"prompt": "Once", "max_new_tokens": 3}\n'
    assert descant("generate", stories, "--input", "-", "--output", "-", input=line).stderr == ""
