"""Grammars on the command line: options, fields of JSON lines, and tools in a conversation."""

from __future__ import annotations

import json

import pytest

import descant as package
from descant.api.chat_prompt import ChatPrompt, tool_prompt
from descant.cli.chat import conversation

PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = 'root ::= "the " ("cat" | "dog") "!"\n'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


@pytest.fixture
def schema_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    return path


@pytest.fixture
def tools_file(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS), encoding="utf-8")
    return path


def called(model, tokenizer, grammar, **parameters):
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = package.generate(model, **ids, tokenizer=tokenizer, grammar=grammar, **parameters)
    before = len(tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True))
    return tokenizer.decode(out[0], skip_special_tokens=True)[before:]


def test_a_schema_from_a_file(descant, loaded, stories, schema_file):
    result = descant("generate", stories, PROMPT, "--json-schema", schema_file, "--max-new-tokens", 40)
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert data["name"] in ("Tom", "Lily")
    assert 3 <= data["age"] <= 9
    text = called(*loaded(stories), {"json_schema": SCHEMA}, max_new_tokens=40)
    assert result.stdout == text + "\n"


def test_a_grammar_from_a_file(descant, stories, tmp_path):
    file = tmp_path / "grammar.ebnf"
    file.write_text(EBNF, encoding="utf-8")
    result = descant("generate", stories, PROMPT, "--grammar-file", file, "--max-new-tokens", 20)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout in ("the cat!\n", "the dog!\n")


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--regex", "[ab]{3}c"), {f"{a}{b}{c}c" for a in "ab" for b in "ab" for c in "ab"}),
        (("--choice", "red, blue", "--choice", r"C:\new"), {"red, blue", r"C:\new"}),
        (("--grammar", '{"choice": ["yes", "no"]}'), {"yes", "no"}),
    ],
)
def test_a_grammar_on_the_command_line(descant, stories, options, texts):
    result = descant("generate", stories, PROMPT, *options, "--max-new-tokens", 20)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.removesuffix("\n") in texts


def test_beams_under_a_grammar_come_one_after_the_other(descant, stories):
    result = descant(
        "generate", stories, PROMPT, "--choice", "red", "--choice", "blue", "--num-beams", 2,
        "--num-return-sequences", 2, "--max-new-tokens", 8,
    )  # fmt: skip
    assert sorted(result.stdout.split()) == ["---", "blue", "red"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--regex", "a", "--choice", "b"),
            "--grammar must be given once, got '--regex and --choice': give one of them",
        ),
        (
            ("--regex", "a", "--grammar", '{"regex": "b"}'),
            "--grammar must be given once, got '--regex and --grammar'",
        ),
        (
            ("--json-schema", "nowhere.json"),
            "--json-schema must be a file that can be opened (No such file or directory), got 'nowhere.json'",
        ),
        (("--json-schema", "{tmp}/text"), "--json-schema must be a file of JSON (Expecting value"),
        (("--json-schema", "{tmp}/list.json"), "`json_schema` is a schema, its text, or a type"),
        (("--grammar-file", "{tmp}/binary"), "--grammar-file must be a file of UTF-8 text"),
        (("--regex", "("), "--grammar must be"),
        (("--regex", ""), "`regex` is a text"),
    ],
)
def test_mistakes_are_usage_errors(descant, stories, tmp_path, options, message):
    (tmp_path / "text").write_text("no JSON", encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    result = descant("generate", stories, PROMPT, *(part.replace("{tmp}", str(tmp_path)) for part in options))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_each_json_line_may_have_its_own_grammar(descant, loaded, stories, tmp_path):
    rows = [
        {"prompt": PROMPT, "grammar": {"choice": ["red", "blue"]}},
        {"prompt": PROMPT},
        {"prompt": PROMPT, "grammar": {"json_schema": {"not": {}}}},
        {"prompt": PROMPT, "grammar": {"regexp": "a"}},
        {"prompt": PROMPT, "grammar": {"json_schema": SCHEMA}, "do_sample": True, "seed": 3},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ("generate", stories, "--input", source, "--output", target, "--regex", "x{2}",
               "--max-new-tokens", 40)  # fmt: skip
    assert descant(*command).exit_code == 1
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line.get("grammar") for line in found] == [row.get("grammar") for row in rows]
    assert found[0]["completions"][0]["text"] in ("red", "blue")
    assert found[1]["completions"][0]["text"] == "xx"
    assert found[2]["error"].startswith("line 3: `grammar` must be a grammar that")
    assert "`not`" in found[2]["error"]
    assert found[3]["error"].startswith("line 4: `grammar` must be a dict with exactly one of json_schema,")
    text = called(*loaded(stories), {"json_schema": SCHEMA}, max_new_tokens=40, do_sample=True, seed=3)
    assert found[4]["completions"][0]["text"] == text
    # The rows are this command's; with another expression they are another run's.
    assert "5 lines are there already" in descant(*command).stderr
    other = descant(*(part if part != "x{2}" else "x{3}" for part in command))
    assert other.exit_code == 2
    assert "a row of another run" in other.stderr


def test_the_order_of_properties_makes_another_run(descant, stories, tmp_path):
    source, target, schema = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "schema.json"))
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    command = ("generate", stories, "--input", source, "--output", target, "--max-new-tokens", 30,
               "--json-schema", schema)  # fmt: skip
    rows = [{"prompt": PROMPT}, {"prompt": PROMPT, "grammar": {"json_schema": SCHEMA}}]

    def write(schema_data, line_schema):
        schema.write_text(json.dumps(schema_data), encoding="utf-8")
        rows[1]["grammar"] = {"json_schema": line_schema}
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    write(SCHEMA, SCHEMA)
    assert descant(*command).exit_code == 0
    for schemas in ((turned, SCHEMA), (SCHEMA, turned)):
        write(*schemas)
        result = descant(*command)
        assert result.exit_code == 2
        assert "a row of another run" in result.stderr
    write(SCHEMA, SCHEMA)
    assert "2 lines are there already" in descant(*command).stderr


# ------------------------------------------------------------------------ tools
def call_text(name, city):
    call = json.dumps({"name": name, "arguments": {"city": city}})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_the_results_of_calls_are_turns(descant, talker, tools_file, monkeypatch):
    texts = iter([call_text("weather", "Rome") + call_text("time", "Oslo"), "Warm.", "So."])
    prompts, grammars = [], []

    def scripted(model, prompt, tokenizer, config, *, input_ids, grammar, **options):
        prompts.append(tokenizer.decode(input_ids[0], skip_special_tokens=True))
        grammars.append(grammar)
        yield package.StreamEvent(0, 0, (1,), next(texts), finish_reason="eos")

    monkeypatch.setattr(conversation, "stream", scripted)
    result = descant("chat", talker, "--tools", tools_file, input="Well?\nsunny\n\nnoon\nThanks.\n")
    assert result.exit_code == 0
    assert [grammar["tools"] for grammar in grammars] == [TOOLS] * 3
    asked = [line for line in result.stderr.splitlines() if "result" in line]
    assert asked[0] == 'weather({"city": "Rome"}): the next line is its result'
    assert asked[-1] == 'time({"city": "Oslo"}): the next line is its result'
    first, second, third = prompts
    assert "<tools>" in first
    assert first.endswith("user: Well?\nassistant:")
    assert second.startswith(first)
    assert second.endswith("</tool_call>\ntool: sunny\ntool: noon\nassistant:")
    assert third.endswith("assistant: Warm.\nuser: Thanks.\nassistant:")


def test_a_failed_reply_asks_for_the_results_again(descant, talker, tools_file, monkeypatch):
    call = call_text("time", "Oslo")
    texts, prompts = iter([call, None, "Noon.", call, "Hello."]), []

    def scripted(model, prompt, tokenizer, config, *, input_ids, **options):
        prompts.append(tokenizer.decode(input_ids[0], skip_special_tokens=True))
        text = next(texts)
        if text is None:
            raise package.RowError("no token is left")
        yield package.StreamEvent(0, 0, (1,), text, finish_reason="eos")

    monkeypatch.setattr(conversation, "stream", scripted)
    result = descant("chat", talker, "--tools", tools_file, input="When?\none\ntwo\nAnd?\n/reset\nHi\n")
    assert "error: no token is left" in result.stderr
    assert prompts[2].endswith("tool: two\nassistant:")
    assert "one" not in prompts[2].split("When?")[1]
    assert prompts[4].endswith("user: Hi\nassistant:")  # no result: /reset drops the call
    assert "tool:" not in prompts[4]


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "time"}), ("time", {"time"})])
def test_a_required_call_is_the_answer_to_a_user_and_not_to_a_result(
    descant, talker, tools_file, choice, names
):
    options = ("--tools", tools_file, "--tool-choice", choice, "--max-new-tokens", 50)
    result = descant("chat", talker, *options, input="Well?\n")
    assert result.exit_code == 0
    text, [call] = package.parse_tool_calls(result.stdout)
    assert text == ""
    assert call.name in names
    assert call.arguments["city"] in ("Rome", "Oslo")
    both = descant("chat", talker, *options, input="Well?\nsunny\n")
    assert both.stdout.startswith(result.stdout)
    assert both.stdout.removeprefix(result.stdout).strip()
    assert package.parse_tool_calls(both.stdout)[1] == [call]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("[]", (), "`tools` are a list of functions with different names"),
        ("5", (), "--grammar must be"),
        ("[{}]", (), "`tools` are functions, each with a name"),
        ("[", (), "--tools must be a file of JSON"),
        (json.dumps(TOOLS), ("--tool-choice", "clock"), "or names one of weather, time"),
        (json.dumps(TOOLS), ("--regex", "a"), "--grammar must be given once, got '--regex and --tools'"),
    ],
)
def test_tools_that_are_refused(descant, talker, tmp_path, content, options, message):
    file = tmp_path / "tools.json"
    file.write_text(content, encoding="utf-8")
    result = descant("chat", talker, "--tools", file, *options, input="Well?\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_tool_choice_needs_tools(descant, talker):
    result = descant("chat", talker, "--tool-choice", "required", input="Well?\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: --tool-choice has no use without --tools, got 'required': add --tools" in result.stderr


def test_a_template_with_tools_shows_them_itself(loaded, talker):
    _, tokenizer = loaded(talker)
    prompt = ChatPrompt(tokenizer, "Be brief.", TOOLS)
    assert not prompt.template_has_tools
    assert prompt.system_text == "Be brief.\n\n" + tool_prompt(TOOLS)
    own = tokenizer.chat_template
    tokenizer.chat_template = "{{ tools | length if tools else 'none' }}" + own
    try:
        prompt = ChatPrompt(tokenizer, "Be brief.", TOOLS)
        assert prompt.template_has_tools
        text = tokenizer.decode(prompt.encode([{"role": "user", "content": "Hi"}])["input_ids"][0])
        assert "2system: Be brief.\nuser: Hi\nassistant:" in text
        assert "<tools>" not in text
    finally:
        tokenizer.chat_template = own
