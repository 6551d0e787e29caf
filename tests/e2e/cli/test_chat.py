"""`descant chat`: turns of a conversation, read from a pipe as from a person."""

from __future__ import annotations

import pytest

import descant as package
from descant.cli.chat import conversation

OPTIONS = ("--max-new-tokens", 6)
HINT = "/help lists commands, /exit leaves\n"


def answers(model, tokenizer, *turns, system=None, **parameters):
    """The replies to these turns, by calls of one prompt each."""
    said = [] if system is None else [f"system: {system}\n"]
    texts = []
    for turn in turns:
        said.append(f"user: {turn}\n")
        ids = tokenizer("".join(said) + "assistant:", return_tensors="pt", add_special_tokens=False)
        out = package.generate(model, **ids, **{"max_new_tokens": 6, **parameters})
        before = len(tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True))
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True)[before:])
        said.append(f"assistant: {texts[-1]}\n")
    return texts


def output_lines(*texts):
    """Texts as standard output has them: each on lines of its own."""
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def test_every_turn_includes_those_before(descant, loaded, talker):
    result = descant("chat", talker, *OPTIONS, input="Who?\n\nAnd the dog?\nSo?\n")
    texts = answers(*loaded(talker), "Who?", "And the dog?", "So?")
    assert (result.exit_code, result.stderr) == (0, HINT)
    assert result.stdout == output_lines(*texts)
    assert texts[1] != answers(*loaded(talker), "And the dog?")[0]


def test_the_system_message_comes_first(descant, loaded, talker):
    result = descant("chat", talker, *OPTIONS, "--system", "Be brief.", input="Who?\n/reset\nWho?\n")
    [text] = answers(*loaded(talker), "Who?", system="Be brief.")
    assert result.stdout == output_lines(text, text)


def test_reset_clears_and_exit_leaves(descant, loaded, talker):
    result = descant("chat", talker, *OPTIONS, input="Who?\n/reset\nWho?\n/exit\nWho?\n")
    [text] = answers(*loaded(talker), "Who?")
    assert (result.exit_code, result.stdout) == (0, output_lines(text, text))


def test_set_changes_the_next_answer(descant, loaded, talker):
    result = descant("chat", talker, *OPTIONS, input="/set num_beams=3\n/set --max-new-tokens = 4\nWho?\n")
    [text] = answers(*loaded(talker), "Who?", num_beams=3, max_new_tokens=4)
    assert (result.exit_code, result.stdout) == (0, output_lines(text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set top_k", "`/set` must be FIELD=VALUE, got 'top_k': for instance /set temperature=0.7"),
        ("/set num_beam=3", "`num_beam` is not a generation parameter, got '3': did you mean `num_beams`?"),
        ("/set num_beams=x", "`num_beams` must be an int >= 1, got 'x'"),
        ("/set top_k=5", "`top_k` has no use while `do_sample` is False"),
        ("/set constraints=5", "`constraints` cannot be set from a command line"),
        ("/set watermarking_config={}", "`watermarking_config` cannot be set from a command line"),
        ("/set output_scores=true", "`output_scores` has no use"),
        ("/set num_return_sequences=2", "`num_return_sequences` must be 1 in a conversation, got 2"),
        ("/set logprobs=2", "`logprobs` has no use in a conversation, got 2"),
        ("/quit", "`command` must be one of /set, /config, /reset, /exit, /help, got '/quit'"),
    ],
)
def test_mistakes_change_nothing(descant, loaded, talker, line, message):
    result = descant("chat", talker, *OPTIONS, input=f"{line}\nWho?\n")
    [text] = answers(*loaded(talker), "Who?")
    assert (result.exit_code, result.stdout) == (1, output_lines(text))
    assert f"error: {message}" in result.stderr


def test_help_and_config(descant, talker):
    result = descant("chat", talker, "--num-beams", 2, input="/help\n/config\n/set num_beams=3\n/config\n")
    assert result.stdout == ""
    assert conversation.HELP in result.stderr
    assert "beam search, 2 beams" in result.stderr
    assert "beam search, 3 beams" in result.stderr
    assert "512 new tokens" in result.stderr


def test_either_length_can_be_set(descant, talker):
    result = descant("chat", talker, input="/set max_length=40\n/config\n/set max_new_tokens=3\n/config\n")
    assert result.exit_code == 0
    assert "40 tokens, prompt included" in result.stderr
    assert " 3 new tokens" in result.stderr


def test_a_length_of_the_config_is_kept(descant, talker, tmp_path):
    package.GenerationConfig(max_length=99).save_pretrained(tmp_path)
    result = descant("chat", talker, "--config", tmp_path, input="/config\n")
    assert "99 tokens, prompt included" in result.stderr


def test_a_failed_turn_is_not_kept(descant, loaded, talker, monkeypatch):
    real, calls = conversation.stream, []

    def failing(*arguments, **options):
        calls.append(options["input_ids"])
        if len(calls) == 1:
            raise package.RowError("no token is left")
        return real(*arguments, **options)

    monkeypatch.setattr(conversation, "stream", failing)
    result = descant("chat", talker, *OPTIONS, input="What?\nWho?\n")
    [text] = answers(*loaded(talker), "Who?")
    assert (result.exit_code, result.stdout) == (1, output_lines(text))
    assert "error: no token is left" in result.stderr


def test_an_interrupt_ends_the_answer_of_a_person_and_the_run_of_a_program(descant, talker, monkeypatch):
    real, histories = conversation.stream, []

    def interrupted(*arguments, **options):
        histories.append(options["input_ids"])
        events = real(*arguments, **options)
        yield next(events)
        if len(histories) == 1:
            events.close()
            raise KeyboardInterrupt
        yield from events

    monkeypatch.setattr(conversation, "stream", interrupted)
    result = descant("chat", talker, *OPTIONS, input="Who?\nSo?\n")
    assert (result.exit_code, len(histories)) == (130, 1)
    assert result.stdout.endswith("\n")
    histories.clear()
    typed = iter(["Who?", "So?"])
    monkeypatch.setattr(conversation, "is_interactive", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(typed, None) or (_ for _ in ()).throw(EOFError))
    result = descant("chat", talker, *OPTIONS)
    assert (result.exit_code, len(histories)) == (0, 2)
