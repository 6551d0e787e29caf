"""`descant chat`: turns of a conversation, read from a pipe as from a person."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

import descant as package
from descant.cli.chat import command as line_input
from descant.cli.chat import conversation
from descant.cli.chat import conversation as state_files

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


@pytest.mark.parametrize(
    "lines", ["/set num_beams=3\n/set --max-new-tokens = 4", "/set num_beams=3 --max-new-tokens = 4"]
)
def test_set_changes_the_next_answer(descant, loaded, talker, lines):
    result = descant("chat", talker, *OPTIONS, input=f"{lines}\nWho?\n")
    [text] = answers(*loaded(talker), "Who?", num_beams=3, max_new_tokens=4)
    assert (result.exit_code, result.stdout) == (0, output_lines(text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set top_k", "`/set` must be FIELD=VALUE, got 'top_k': for instance /set temperature=0.7"),
        ("/set num_beam=3", "`num_beam` is not a generation parameter, got '3': did you mean `num_beams`?"),
        ("/set num_beams=3 temperature=x", "`temperature` must be"),
        ("/set num_beams=x", "`num_beams` must be an int >= 1, got 'x'"),
        ("/set constraints=5", "`constraints` cannot be set from a command line"),
        ("/set watermarking_config={}", "`watermarking_config` cannot be set from a command line"),
        ("/set output_scores=true", "`output_scores` has no use"),
        ("/set num_return_sequences=2", "`num_return_sequences` must be 1 in a conversation, got 2"),
        ("/set logprobs=2", "`logprobs` has no use in a conversation, got 2"),
        ("/quit", f"`command` must be one of {', '.join(conversation.COMMANDS)}, got '/quit'"),
        ("/undo", "`/undo` needs a turn before it"),
        ("/regenerate", "`/regenerate` needs a reply before it"),
        ("/undo 2", "`/undo` takes no argument, got '2'"),
        ("/save", "`/save` must be /save FILE or /save --overwrite FILE, got ''"),
        ("/save a b", "`/save` must be /save FILE"),
        ("/save 'a", "`/save` must have quotation marks in pairs"),
        ("/load", "`/load` must be /load FILE, got ''"),
        ("/load nowhere.json", "`FILE` must be a file that can be opened (No such file"),
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
    assert conversation.help_text() in result.stderr
    assert "beam search, 2 beams" in result.stderr
    assert "beam search, 3 beams" in result.stderr
    assert "512 new tokens" in result.stderr


def test_a_length_of_the_config_is_kept(descant, talker, tmp_path):
    package.GenerationConfig(max_length=99).save_pretrained(tmp_path)
    result = descant("chat", talker, "--config", tmp_path, input="/config\n")
    assert "99 tokens, prompt included" in result.stderr


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
    monkeypatch.setattr(line_input, "is_interactive", lambda: True)
    monkeypatch.setattr("descant.cli.chat.prompt_session.build_session", lambda _: Typist(typed))
    result = descant("chat", talker, *OPTIONS, "--no-history")
    assert (result.exit_code, len(histories)) == (0, 2)
    assert histories[1].shape[1] > histories[0].shape[1]  # the reply so far is kept


class Typist:
    """In place of a prompt at a terminal."""

    def __init__(self, lines):
        self.lines = iter(lines)

    def prompt(self):
        line = next(self.lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line() if callable(line) else line


@pytest.fixture
def typed(descant, talker, monkeypatch, tmp_path):
    """`typed("Who?", ...)`: a conversation with a user, in a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(line_input, "is_interactive", lambda: True)

    def run(*lines, options=()):
        monkeypatch.setattr("descant.cli.chat.prompt_session.build_session", lambda _: Typist(lines))
        return descant("chat", talker, *OPTIONS, *options)

    return run


def replies(monkeypatch, *texts):
    """Replaces the model: each text is a reply, an error is raised; returns the prompts."""
    prompts, script = [], iter(texts)

    def scripted(model, prompt, tokenizer, config, *, input_ids, **options):
        prompts.append(tokenizer.decode(input_ids[0], skip_special_tokens=True))
        for part in next(script):
            if isinstance(part, BaseException):
                raise part
            yield package.StreamEvent(0, 0, (1,), part)

    monkeypatch.setattr(conversation, "stream", scripted)
    return prompts


# ----------------------------------------------------------------------------- commands
def test_the_documented_line_switches_sampling_on(descant, loaded, talker):
    lines = "/set temperature=0.7\n/config\n/set top_k=5\nWho?\n"
    result = descant("chat", talker, *OPTIONS, "--seed", 1, input=lines)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 1}
    [text] = answers(*loaded(talker), "Who?", **sampled)
    assert (result.exit_code, result.stdout) == (0, output_lines(text))
    assert result.stderr.count("do_sample=true is set too: temperature has no use without it") == 1
    assert "set too: top_k" not in result.stderr


def test_undo_and_system_change_what_the_model_reads(descant, talker, monkeypatch):
    prompts = replies(monkeypatch, ["one"], ["two"], ["three"], ["four"])
    lines = "A?\nB?\n/undo\nC?\n/system Be brief.\n/undo\n/undo\nD?\n/system\n"
    result = descant("chat", talker, input=lines)
    assert result.exit_code == 0
    assert prompts[2] == "user: A?\nassistant: one\nuser: C?\nassistant:"
    assert prompts[3] == "system: Be brief.\nuser: D?\nassistant:"
    assert "removed: B?" in result.stderr
    assert "there is no system prompt now" in result.stderr


def test_regenerate_replies_to_the_same_messages(descant, talker, monkeypatch):
    prompts = replies(monkeypatch, ["one"], ["two"], ["two"], [package.RowError("no token")], ["three"])
    result = descant("chat", talker, input="A?\n/regenerate\n/regenerate\n/regenerate\nB?\n")
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3] == "user: A?\nassistant:"
    assert prompts[4] == "user: A?\nassistant: two\nuser: B?\nassistant:"  # the error changed nothing
    assert result.stdout == "one\ntwo\ntwo\nthree\n"
    assert result.stderr.count("the reply is the same") == 1


# ----------------------------------------------------------------------------- files
def test_a_saved_conversation_goes_on_elsewhere(descant, talker, monkeypatch, tmp_path):
    path = tmp_path / "a talk.json"
    prompts = replies(monkeypatch, ["one ü"], ["two"])
    given = ("--system", "Be brief.", "--num-beams", 2)
    lines = f"A?\n/save '{path}'\n/save '{path}'\n/save --overwrite '{path}'\n"
    result = descant("chat", talker, *OPTIONS, *given, input=lines)
    assert f"2 messages are saved in {path}" in result.stderr
    assert "error: `FILE` must be new" in result.stderr
    assert "give another name, or /save --overwrite FILE" in result.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["settings"] == {"max_new_tokens": 6, "num_beams": 2}
    assert data["messages"] == [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "one ü"}]
    result = descant("chat", talker, input=f"/load '{path}'\n/config\nB?\n")
    assert result.exit_code == 0
    assert "2 messages are loaded" in result.stderr
    assert "beam search, 2 beams" in result.stderr
    assert prompts[1] == "system: Be brief.\nuser: A?\nassistant: one ü\nuser: B?\nassistant:"


def test_a_watermark_key_is_not_saved(descant, talker, tmp_path):
    key, path = tmp_path / "key.json", tmp_path / "talk.json"
    assert descant("watermark", "key", "--scheme", "green", "--out", key).exit_code == 0
    result = descant("chat", talker, "--watermark", key, input=f"/save {path}\n/load {path}\n/config\n")
    assert result.exit_code == 0
    assert str(json.loads(key.read_text())["hashing_key"]) not in path.read_text()
    assert "watermarking_config" in result.stderr.split("messages are loaded")[1]  # the key is still in use


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"version": 2}', '{"version": 1}', '{"version": 1, "messages": [1]}', "[" * 9999,
     '{"version": 1, "messages": [{"role": "user"}]}',
     '{"version": 1, "messages": [{"role": "root", "content": ""}]}',
     '{"version": 1, "messages": [], "system": 5}',
     '{"version": 1, "messages": [], "settings": {"nonsense": 5}}',
     '{"version": 1, "messages": [], "settings": {"watermarking_config": {}}}',
     '{"version": 1, "messages": [], "settings": {"num_beams": 0}}'],
)  # fmt: skip
def test_a_file_that_is_no_conversation_changes_nothing(descant, talker, monkeypatch, tmp_path, content):
    prompts = replies(monkeypatch, ["one"], ["two"])
    (tmp_path / "talk.json").write_text(content)
    result = descant("chat", talker, input=f"A?\n/load {tmp_path / 'talk.json'}\nB?\n")
    assert result.exit_code == 1
    assert "error: `FILE` must be" in result.stderr or "error: `num_beams` must be" in result.stderr
    assert prompts[1] == "user: A?\nassistant: one\nuser: B?\nassistant:"


# ----------------------------------------------------------------------------- with a user
def test_whatever_ends_a_turn_the_conversation_goes_on(typed, monkeypatch):
    failures = ([RuntimeError("out of memory")], [KeyboardInterrupt()], ["so ", "far", KeyboardInterrupt()])
    prompts = replies(monkeypatch, ["one"], *failures, ["two"])
    result = typed("A?", "B?", "C?", "D?", "E?")
    assert (result.exit_code, result.stdout) == (0, "one\nso far\ntwo\n")
    assert "error: RuntimeError: out of memory" in result.stderr
    assert "interrupted before a reply came" in result.stderr
    assert prompts[-1] == ("user: A?\nassistant: one\nuser: D?\nassistant: so far\nuser: E?\nassistant:")


def test_a_pasted_paragraph_is_one_turn(typed, monkeypatch):
    prompts = replies(monkeypatch, ["one"], ["two"])
    typed("First.\n\nSecond.", "/usr/bin is a folder.\nIs it not?")
    assert prompts[0] == "user: First.\n\nSecond.\nassistant:"
    assert "user: /usr/bin is a folder.\nIs it not?\n" in prompts[1]


@pytest.mark.parametrize("end", [SystemExit(143), OSError("terminal")])
def test_a_conversation_that_ends_by_an_error_is_saved(typed, monkeypatch, tmp_path, end):
    replies(monkeypatch, ["one"])
    result = typed("A?", end)
    assert result.exit_code != 0
    [path] = (tmp_path / "state" / "descant").glob("chat-*.json")
    assert f"the conversation is saved: /load {path}" in result.stderr
    assert json.loads(path.read_text())["messages"][1] == {"role": "assistant", "content": "one"}


def test_a_second_signal_does_not_interrupt_the_saving(typed, monkeypatch, tmp_path):
    """A terminal that closes may send more than one."""
    save = state_files.save_transcript

    def hung_up_again(*given):
        os.kill(os.getpid(), signal.SIGHUP)
        save(*given)

    replies(monkeypatch, ["one"])
    monkeypatch.setattr(state_files, "save_transcript", hung_up_again)
    before = signal.getsignal(signal.SIGHUP)
    typed("A?", lambda: os.kill(os.getpid(), signal.SIGHUP))
    [file] = (tmp_path / "state" / "descant").glob("chat-*.json")
    assert json.loads(file.read_text())["messages"][1] == {"role": "assistant", "content": "one"}
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_conversation_that_ends_as_usual_leaves_no_file(typed, monkeypatch, tmp_path):
    replies(monkeypatch, ["one"])
    assert typed("A?", "/exit", options=("--no-history",)).exit_code == 0
    assert not (tmp_path / "state").exists()


def test_the_history_file_is_the_users_alone(typed, monkeypatch, tmp_path):
    path = tmp_path / "state" / "descant" / "chat-history"
    path.parent.mkdir(parents=True)
    path.write_text("")
    path.chmod(0o644)
    assert typed("/exit").exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert state_files.history_file() == path
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_files.state_folder() == tmp_path / ".local" / "state" / "descant"
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file, in which there is no folder
    assert "warning: the history file cannot be written" in typed("/exit").stderr


def test_without_the_prompt_the_error_names_the_extra(descant, talker, monkeypatch):
    monkeypatch.setattr(line_input, "is_interactive", lambda: True)
    monkeypatch.delitem(sys.modules, "descant.cli.chat.prompt_session", raising=False)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    result = descant("chat", talker, "--no-history")
    assert result.exit_code == 1
    assert (
        "error: the prompt of `descant chat` needs the extra `cli`: pip install descant[cli]" in result.stderr
    )


# ----------------------------------------------------------------------------- completion
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/re", ["/regenerate", "/reset"]),
        ("/sa", ["/save "]),
        ("/set temp", ["temperature="]),
        ("/set --max-new", ["max_new_tokens="]),
        ("/set top_k=3 temp", ["temperature="]),
        ("/set temperature=", []),
        ("hello", []),
        ("/system te", []),
        ("hello /re", []),
    ],
)
def test_what_completes_a_line(text, expected):
    assert [new for _, new, _ in conversation.completions(text)] == expected
    assert all(text.endswith(replaced) for replaced, _, _ in conversation.completions(text))


def test_files_are_completed_after_their_commands(tmp_path):
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    from descant.cli.chat.prompt_session import _LineCompleter

    (tmp_path / "talk.json").write_text("")
    found = _LineCompleter().get_completions(Document(f"/load {tmp_path}/ta"), CompleteEvent())
    assert [one.text for one in found] == ["lk.json"]
    found = _LineCompleter().get_completions(Document("/und"), CompleteEvent())
    assert [(one.text, one.start_position) for one in found] == [("/undo", -4)]
