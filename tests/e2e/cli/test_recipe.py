"""`descant recipe`, and `--recipe` in `generate` and `chat`: what is shown, what is trusted, what runs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

import descant as package
from descant import testing
from descant.cli import recipe as commands
from descant.recipes.loading import inspect_recipe
from descant.recipes.lock import Lock
from descant.recipes.recipe_files import RECIPE_KINDS
from tests.support.pretrained import ROOT

PROMPT = "Once upon a time"
SHORT = ("--max-new-tokens", 8)
LENGTH = {"max_new_tokens": 8}
# Repeats one token, given by its argument.
FUNCTION = """\
import torch


def generate(model, input_ids, *, word: int = 100, times: int = 3):
    if times < 1:
        raise RuntimeError("no time for that")
    return torch.cat((input_ids, torch.full((len(input_ids), times), word)), 1)
"""
SHUT = """\
from descant.parts import LogitsProcessor


class Shut(LogitsProcessor):
    def __init__(self, *, token: int = 260):
        self.token = token

    def process(self, context, scores):
        scores = scores.clone()
        scores[:, self.token] = float("-inf")
        return scores


processor = Shut
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of the test's own to work in; its processes find Descant."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    return tmp_path


@pytest.fixture
def canary(here):
    """A file that is there once a recipe of `bird` has run."""
    return here / "canary"


def bird(canary, folder="bird", code=FUNCTION, **files):
    """A recipe that leaves a trace if any of it runs: its code, a module beside it, or its tests."""
    trace = f"open({str(canary)!r}, 'a').close()\n"
    made = {"generate.py": trace + code, "other.py": trace, "tests/test_it.py": trace, "conftest.py": trace}
    made |= {"README.md": "# Bird\n\nIt sings.\n", **files}
    for name, text in made.items():
        (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(text, encoding="utf-8")
    return made


def untouched(result, message=None, code=2):
    """A refusal in one line, and nothing on standard output."""
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert message is None or message in result.stderr


def entry(text, name):
    """The lines of an overview under a name."""
    lines, found = text.splitlines(), []
    at = next(at for at, line in enumerate(lines) if line.startswith(f"{name} "))
    while not found or (at < len(lines) and lines[at][:1] == " "):
        found.append(lines[at][14:])
        at += 1
    return found


# ------------------------------------------------------------------------ new and check
# Two processes that load everything and run the laws: CI checks one kind like this, and the others' laws and
# tests in tests/unit/recipes/test_scaffold.py.
@pytest.mark.usefixtures("extent")
@pytest.mark.parametrize(
    "kind",
    [kind if kind == "strategy" else pytest.param(kind, marks=pytest.mark.slow) for kind in RECIPE_KINDS],
)
def test_a_new_folder_passes_its_check_as_written(descant, here, own_lock, capfd, kind):
    result = descant("recipe", "new", "mine", "--kind", kind)
    files = {"mine/generate.py", "mine/README.md", "mine/tests/test_recipe.py"}
    assert (result.exit_code, set(result.stdout.splitlines())) == (0, files)
    before = sys.path[:], set(sys.modules)
    result = descant("recipe", "check", "mine", "--trust-remote-code")
    said = capfd.readouterr()
    assert (result.exit_code, result.stdout) == (0, f"the contracts of its kind, {kind}, are fulfilled\n")
    assert "2 passed" in said.out
    assert {str(one.relative_to(here)) for one in here.rglob("*") if one.is_file()} == files
    assert not own_lock.exists()
    assert sys.path == before[0]
    assert not {name for name in set(sys.modules) - before[1] if "mine" in name or name == "generate"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a/b",), "NAME must be letters, digits, and single - . _ between them"),
        (("..",), "NAME must be"),
        (("a\x1b[31mb",), "NAME must be"),
        (("there",), "NAME must not exist yet, got 'there'"),
        (("mine", "--kind", "beam"), "--kind must be one of generate, strategy, drafter, processor, wrapper"),
        ((), "Missing argument 'NAME'"),
    ],
)
def test_new_refuses(descant, here, words, message):
    (here / "there").mkdir()
    result = descant("recipe", "new", *words)
    untouched(result, message)
    assert "\x1b" not in result.stderr
    assert [one.name for one in here.rglob("*")] == ["there"]


@pytest.mark.parametrize("words", [(), ("--recipe-argument", "word=1"), ("--debug",)])
def test_check_runs_nothing_untrusted(descant, canary, own_lock, capfd, words):
    bird(canary)
    result = descant("recipe", "check", "bird", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "recipe `bird`: is third-party code and needs --trust-remote-code" in result.stderr
    assert not canary.exists()
    assert not own_lock.exists()
    assert capfd.readouterr().out == ""


def test_check_finds_a_broken_law(descant, capfd):
    descant("recipe", "new", "mine", "--kind", "processor")
    code = Path("mine/generate.py").read_text()
    assert "return scores / (" in code
    # The first one decides for all.
    broken = code.replace("# [N, 1]", "[:1]").replace("return scores / (", "return scores - scores[:1] / (")
    Path("mine/generate.py").write_text(broken)
    result = descant("recipe", "check", "mine", "--trust-remote-code")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: mine violates a contract of its kind, processor: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert "passed" not in capfd.readouterr().out  # its own tests have not run


@pytest.fixture
def shut(here, monkeypatch):
    """The folder of a recipe with a test of its own, and the result of its contracts, which takes a while."""
    asked = []
    monkeypatch.setattr(testing, "check_recipe", lambda one: asked.append((one.kind, dict(one.arguments))))
    (here / "shut" / "tests").mkdir(parents=True)
    (here / "shut" / "generate.py").write_text(SHUT)
    (here / "shut" / "tests" / "test_it.py").write_text("def test_it():\n    assert True\n")
    return asked


def test_check_finds_a_failing_test(descant, shut, capfd):
    Path("shut/tests/test_more.py").write_text("def test_that_fails():\n    assert 1 == 2\n")
    result = descant("recipe", "check", "shut", "--trust-remote-code")
    assert (result.exit_code, result.stdout) == (1, "the contracts of its kind, processor, are fulfilled\n")
    assert "its own tests fail: pytest " in result.stderr
    assert "1 failed, 1 passed" in capfd.readouterr().out
    assert shut == [("processor", {})]


def test_check_goes_without_tests(descant, shut):
    for empty in ("shut/tests/test_it.py", "shut/tests"):
        Path(empty).unlink() if Path(empty).is_file() else Path(empty).rmdir()
        result = descant("recipe", "check", "shut", "--trust-remote-code")
        assert result.exit_code == 0
        assert "it has no tests of its own" in result.stderr


def test_check_takes_arguments(descant, shut):
    words = ("recipe", "check", "./shut", "--trust-remote-code", "--recipe-argument")
    assert descant(*words, "token=3").exit_code == 0
    assert shut == [("processor", {"token": 3})]
    untouched(descant(*words, "tokn=3"), "takes no argument `tokn`: its own are token")


def test_check_needs_pytest_for_tests(descant, shut, monkeypatch):
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None)
    result = descant("recipe", "check", "shut", "--trust-remote-code")
    assert result.exit_code == 1
    told = "running a recipe's own tests needs the extra `testing`: pip install descant[testing]"
    assert told in result.stderr


def test_tests_read_nothing_and_see_no_stray_modules(descant, shut, canary, capfd, monkeypatch):
    """They get no standard input, and a file in the current folder stands for no module."""
    Path("pytest.py").write_text(f"open({str(canary)!r}, 'a').close()\n")
    run, given = commands.subprocess.run, []
    monkeypatch.setattr(
        commands.subprocess, "run", lambda *a, **k: (given.append(k["stdin"]), run(*a, **k))[1]
    )
    result = descant("recipe", "check", "shut", "--trust-remote-code", input="something\n")
    assert (result.exit_code, given) == (0, [commands.subprocess.DEVNULL])
    assert "1 passed" in capfd.readouterr().out
    assert not canary.exists()


def test_check_reports_a_difference_from_the_trusted_version(descant, shut, own_lock):
    assert descant("recipe", "trust", "shut").exit_code == 0
    before = own_lock.read_bytes()
    quiet = descant("recipe", "check", "shut", "--trust-remote-code")
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    with open("shut/generate.py", "a") as file:
        file.write("# a change\n")
    told = descant("recipe", "check", "shut", "--trust-remote-code")
    assert told.exit_code == 0
    assert "warning: shut has changed since it was trusted; checking it anyway" in told.stderr
    assert own_lock.read_bytes() == before


def test_check_needs_its_requirements(descant, shut):
    Path("shut/requirements.txt").write_text("nowhere-to-be-found\n")
    result = descant("recipe", "check", "shut", "--trust-remote-code")
    untouched(result, "Missing requirements for shut: nowhere-to-be-found (installed: None)")
    assert shut == []


# ------------------------------------------------------------------------ show
def test_show_imports_nothing(descant, canary, own_lock):
    files = bird(canary, **{"requirements.txt": "packaging>=1\nnowhere-to-be-found>=2\n"})
    result = descant("recipe", "show", "bird", "--code")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not canary.exists()
    assert not own_lock.exists()
    text = result.stdout
    assert entry(text, "recipe") == ["bird"]
    assert entry(text, "from") == [f"the folder {os.path.realpath('bird')}"]
    assert entry(text, "kind") == ["generate"]
    assert entry(text, "state")[0].startswith("never trusted: it runs only with trust_remote_code=True")
    assert entry(text, "hash") == [inspect_recipe("./bird").contents.digest]
    [met, missing] = entry(text, "requirements")
    assert met.startswith("packaging>=1 (installed: 2")
    assert missing == "nowhere-to-be-found>=2 (installed: None, which does not do)"
    sizes = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in entry(text, "files")}
    assert sizes == {name: len(data) for name, data in files.items()}
    run = {line.split()[1] for line in entry(text, "files") if line.endswith("  (code that would run)")}
    assert run == {"generate.py", "other.py", "conftest.py"}
    assert "\nREADME.md\n  | # Bird\n  | \n  | It sings.\n" in text
    assert "\ngenerate.py\n  | open(" in text


def test_show_lists_changes(descant, canary):
    bird(canary, **{"gone.txt": "x"})
    descant("recipe", "trust", "bird")
    pin = inspect_recipe("./bird").pin
    assert entry(descant("recipe", "show", "bird").stdout, "state") == [
        f"trusted on {pin.trusted}, and pinned: it runs with trust_remote_code=True"
    ]
    Path("bird/gone.txt").unlink()
    Path("bird/new.txt").write_text("")
    Path("bird/generate.py").write_text("def generate(model): ...\n")
    assert entry(descant("recipe", "show", "bird").stdout, "state") == [
        f"CHANGED since it was trusted on {pin.trusted}: it is refused",
        "`descant recipe trust bird` would trust it as it is here",
        "generate.py has changed",
        "new.txt is new",
        "gone.txt is gone",
    ]
    assert not canary.exists()


def test_show_finds_installed_ones(descant, monkeypatch):
    for name in [one for one in sys.modules if one.startswith("descant.recipes.cookbook")]:
        monkeypatch.delitem(sys.modules, name)
    result = descant("recipe", "show", "bayes-risk")
    assert entry(result.stdout, "from") == [
        f"descant {package.__version__}, which is installed: descant.recipes.cookbook.bayes_risk"
    ]
    assert entry(result.stdout, "state")[0].startswith("installed, and runs without further trust")
    assert "descant.recipes.cookbook.bayes_risk" not in sys.modules


def test_show_reads_the_hub(descant, hub, canary):
    repo = hub.repo("ann/bird", bird(canary))
    first = repo.head
    result = descant("recipe", "show", "ann/bird")
    assert entry(result.stdout, "from") == [f"the Hub, ann/bird at commit {first}"]
    assert entry(result.stdout, "state")[0].startswith("never trusted")
    assert descant("recipe", "trust", "ann/bird").exit_code == 0
    second = repo.commit({"other.py": "more = 1\n"})
    # The trusted version would run until the current one is inspected.
    result = descant("recipe", "show", "ann/bird")
    assert entry(result.stdout, "from") == [f"the Hub, ann/bird at commit {first}"]
    assert entry(result.stdout, "state")[0].startswith("trusted on ")
    result = descant("recipe", "show", "ann/bird", "--latest")
    assert entry(result.stdout, "from") == [f"the Hub, ann/bird at commit {second}"]
    state = entry(result.stdout, "state")
    assert state[0].startswith("CHANGED since it was trusted on ")
    assert state[2:] == [f"commit {first[:12]} was trusted", "other.py has changed"]
    assert not canary.exists()


ODD = "a\x1b[2J\x9b31m\r\b\x07\x00\u202e\u2066\u200b\ufeff\u2028\x7fz"
SPELT = r"a\x1b[2J\x9b31m\r\x08\x07\x00\u202e\u2066\u200b\ufeff\u2028\x7fz"


def test_show_escapes_control_sequences(descant, canary, monkeypatch):
    """Also where it could only be there by a gap in the checks before."""
    bird(canary)
    real = inspect_recipe("./bird")

    def looked(given, latest):
        contents = real.contents
        files = MappingProxyType({ODD: b"", **contents.files, "generate.py": ODD.encode()})
        changed = replace(contents, files=files)
        vars(changed).update(readme=f"one{ODD}\ntwo\nstate         trusted", digest=contents.digest)
        vars(changed).update(
            requirements=[], modules={"generate": b"", ODD: b""}, defined_kinds=lambda: ("generate",)
        )
        pin = replace(real.current_pin, files={ODD: real.current_pin.digest}, digest="sha256:" + "0" * 64)
        return replace(real, reference=replace(real.reference, name=ODD), contents=changed, pin=pin)

    monkeypatch.setattr(commands, "inspect_recipe", looked)
    result = descant("recipe", "show", "bird", "--code")
    assert result.exit_code == 0
    text = result.stdout
    assert all(one.isprintable() or one == "\n" for one in text)
    assert entry(text, "recipe") == [SPELT]
    assert f"        0  {SPELT}" in entry(text, "files")
    assert f"  | one{SPELT}\n  | two\n  | state         trusted\n" in text  # behind a bar, and so not ours
    assert f"generate.py\n  | {SPELT}\n" in text
    assert entry(text, "state")[0].startswith("CHANGED")


# ------------------------------------------------------------------------ trust, list, forget
def test_trust_pins_and_forget_unpins(descant, canary, own_lock):
    bird(canary)
    digest = inspect_recipe("./bird").contents.digest
    key = f"folder:{os.path.realpath('bird')}"
    result = descant("recipe", "trust", "bird")
    assert (result.exit_code, result.stdout) == (0, f"trusted bird, 5 files, {digest}\n")
    assert Lock().pin(key).digest == digest
    assert f"{key}  trusted 20" in descant("recipe", "list").stdout
    Path("bird/other.py").write_text("more = 1\n")
    result = descant("recipe", "trust", "bird")
    assert result.stdout.endswith("\n  other.py has changed\n")
    assert Lock().pin(key).digest == inspect_recipe("./bird").contents.digest != digest
    result = descant("recipe", "forget", "bird")
    assert (result.exit_code, result.stdout) == (0, f"forgot {key}\n")
    assert Lock().pins() == {}
    untouched(descant("recipe", "forget", "bird"), "REF must be a recipe that has been trusted, got 'bird'")
    untouched(descant("recipe", "forget", "bayes-risk"), "REF must be a recipe that has been trusted")
    assert not canary.exists()


def test_forget_takes_what_list_shows_and_folders_that_are_gone(descant, canary):
    bird(canary)
    key = f"folder:{os.path.realpath('bird')}"
    for name in (key, "./bird"):
        Path("nest").rename("bird") if Path("nest").exists() else None
        descant("recipe", "trust", "./bird")
        Path("bird").rename("nest")
        assert descant("recipe", "forget", name).stdout == f"forgot {key}\n"


def test_list_shows_what_is_installed_and_trusted(descant, hub, canary):
    repo = hub.repo("ann/bird", bird(canary))
    assert [line.split()[:2] for line in descant("recipe", "list").stdout.splitlines()] == [
        [name, "installed"] for name in ("bayes-risk", "keep-thinking", "roll-back")
    ]
    descant("recipe", "trust", "ann/bird")
    *_, last = descant("recipe", "list").stdout.splitlines()
    assert " ".join(last.split()).startswith("hub:ann/bird trusted 20")
    assert f"commit {repo.head[:12]}, sha256:" in last


# ------------------------------------------------------------------------ push
def test_push_and_use(descant, hub, stories):
    hub.user("ann", "hf_x")
    hub.login("hf_x")
    Path("mine").mkdir()
    Path("mine/generate.py").write_text(FUNCTION)
    result = descant("recipe", "push", "mine", "ann/mine", "--message", "first")
    assert (result.exit_code, result.stderr) == (0, "")
    repo = hub.repos["ann/mine"]
    assert result.stdout == f"ann/mine@{repo.head}\n"
    assert repo.commits[repo.head].message == "first"
    assert not repo.private
    assert repo.files["generate.py"] == FUNCTION.encode()
    result = descant("generate", stories, PROMPT, "--recipe", "ann/mine", "--trust-remote-code", *SHORT)
    assert result.exit_code == 0
    Path("mine/generate.py").rename("mine/more.py")
    Path("mine/generate.py").write_text(FUNCTION)
    descant("recipe", "push", "mine", "ann/mine")
    Path("mine/more.py").unlink()
    untouched(descant("recipe", "push", "mine", "ann/mine"), "--prune")
    assert "more.py" in repo.files
    assert descant("recipe", "push", "mine", "ann/mine", "--prune").exit_code == 0
    assert "more.py" not in repo.files
    assert descant("recipe", "push", "mine", "ann/own", "--private").exit_code == 0
    assert hub.repos["ann/own"].private


def test_a_hub_that_fails_exits_1(descant, hub, canary):
    hub.repo("ann/bird", bird(canary))
    hub.fail("GET ", "500")
    result = descant("recipe", "show", "ann/bird")
    untouched(result, "`ann/bird` on the Hub", code=1)
    untouched(descant("recipe", "push", "bird", "ann/bird"), code=1)  # not logged in


# ------------------------------------------------------------------------ generate and chat
def text_of(loaded, stories, **asked):
    """What a call of generate() adds to the prompt."""
    model, tokenizer = loaded(stories)
    given = tokenizer(PROMPT, return_tensors="pt")
    out = package.generate(model, **given, **{**LENGTH, **asked})
    return [tokenizer.decode(line, skip_special_tokens=True).removeprefix(PROMPT) for line in out]


@pytest.mark.parametrize("kind", ["generate", "strategy", "drafter"])
def test_generate_runs_each_kind(descant, loaded, stories, kind):
    descant("recipe", "new", "mine", "--kind", kind)
    options = {
        "generate": {"tries": 3},
        "strategy": {"budget": 0.0},
        "drafter": {"ahead": 2},
    }[kind]
    asked = {"do_sample": True, "seed": 3} if kind == "strategy" else {}
    [text] = text_of(loaded, stories, recipe="./mine", trust_remote_code=True, **options, **asked)
    words = [word for name, value in options.items() for word in ("--recipe-argument", f"{name}={value}")]
    words += ["--do-sample", "--seed", 3] if asked else []
    words += ["--recipe", "./mine", "--trust-remote-code", *SHORT]
    result = descant("generate", stories, PROMPT, *words)
    assert (result.exit_code, result.stdout, result.stderr) == (0, text + "\n", "")
    if kind != "drafter":
        assert [text] != text_of(loaded, stories, **asked)
    lines = descant("generate", stories, PROMPT, *words, "--output", "-")
    [completion] = json.loads(lines.stdout)["completions"]
    assert completion["text"] == text
    assert completion["tokens"] == 8
    assert completion["finish_reason"] == (None if kind == "generate" else "length")


def test_lines_of_json_share_a_recipe(descant, loaded, stories):
    Path("mine").mkdir()
    Path("mine/generate.py").write_text(SHUT)
    rows = [{"prompt": PROMPT}, {"prompt": PROMPT, "max_new_tokens": 3}, {"prompt": PROMPT, "top_k": -1}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [plain] = text_of(loaded, stories)
    _, tokenizer = loaded(stories)
    token = tokenizer(PROMPT + plain)["input_ids"][len(tokenizer(PROMPT)["input_ids"])]
    options = ("--recipe", "./mine", "--trust-remote-code", "--recipe-argument", f"token={token}")
    result = descant("generate", stories, "--input", "in.jsonl", *options, *SHORT)
    whole, part, wrong = [json.loads(line) for line in result.stdout.splitlines()]
    [text] = text_of(loaded, stories, recipe="./mine", trust_remote_code=True, token=token)
    assert text != plain
    assert whole["completions"][0]["text"] == text
    assert (part["completions"][0]["tokens"], part["completions"][0]["finish_reason"]) == (3, "length")
    assert "`top_k` must" in wrong["error"]
    assert result.exit_code == 1


@pytest.mark.parametrize("name", ["recipe", "custom_generate", "trust_remote_code"])
def test_a_line_chooses_no_recipe(descant, stories, canary, name):
    bird(canary)
    Path("in.jsonl").write_text(json.dumps({"prompt": PROMPT, name: "./bird"}) + "\n")
    result = descant("generate", stories, "--input", "in.jsonl", *SHORT)
    told = f"line 1: `{name}` applies to all lines and must not be set in one, got './bird': give --recipe"
    assert json.loads(result.stdout)["error"] == told
    assert result.exit_code == 1
    assert not canary.exists()


def test_a_function_takes_lines_one_by_one(descant, loaded, stories):
    Path("mine").mkdir()
    code = FUNCTION.replace("*, word", "generation_config=None, *, word").replace(
        "times < 1", "generation_config.max_new_tokens < 5"
    )
    Path("mine/generate.py").write_text(code)
    rows = [{"prompt": PROMPT, "id": 7}, {"prompt": PROMPT, "max_new_tokens": 2}, {"prompt": "The cat"}, {}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--recipe", "mine", "--trust-remote-code", "--recipe-argument", "times=2", *SHORT)
    result = descant("generate", stories, "--input", "in.jsonl", *options)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    _, tokenizer = loaded(stories)
    for row, at in (({"prompt": PROMPT, "id": 7}, 0), ({"prompt": "The cat"}, 2)):
        ids = [*tokenizer(row["prompt"])["input_ids"], 100, 100]
        text = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(row["prompt"])
        assert found[at] == {**row, "completions": [{"text": text, "tokens": 2, "finish_reason": None}]}
    assert found[1]["error"] == "line 2: RuntimeError: no time for that"
    assert "`prompt` must be given" in found[3]["error"]
    assert result.exit_code == 1


def test_a_function_may_pad_its_prompt_or_leave_it_out(descant, loaded, stories):
    _, tokenizer = loaded(stories)
    Path("mine").mkdir()
    said = []
    for change in (
        "input_ids",
        f"torch.full((1, 3), {tokenizer.pad_token_id}), input_ids",
        f"torch.full((1, 0), {tokenizer.pad_token_id}), input_ids",
    ):
        Path("mine/generate.py").write_text(FUNCTION.replace("cat((input_ids", f"cat(({change}"))
        descant("recipe", "trust", "mine")
        options = ("--recipe", "mine", "--trust-remote-code", "--recipe-argument", "word=400")
        said.append(descant("generate", stories, PROMPT, *options).stdout)
    assert said[0] == said[1] == said[2] != ""
    Path("mine/generate.py").write_text(
        FUNCTION.replace("cat((input_ids, ", "cat((").replace("), 1)", ",), 1)")
    )
    descant("recipe", "trust", "mine")
    alone = descant("generate", stories, PROMPT, "--recipe", "mine", "--trust-remote-code").stdout
    assert alone == tokenizer.decode([100] * 3) + "\n"


@pytest.mark.parametrize("answer", ["'text'", "None", "input_ids.float()", "input_ids[0]", "[[1, 2]]"])
def test_a_function_returns_ids(descant, stories, answer):
    Path("mine").mkdir()
    Path("mine/generate.py").write_text(f"def generate(model, input_ids, **others):\n    return {answer}\n")
    result = descant("generate", stories, PROMPT, "--recipe", "mine", "--trust-remote-code")
    untouched(result, "recipe `mine`: must return token ids [N, L], or a record with `sequences`, got ")


@pytest.mark.parametrize("kind", ["strategy", "generate"])
def test_chat_answers_with_a_recipe(descant, talker, kind):
    descant("recipe", "new", "mine", "--kind", kind)
    options = ["--recipe", "./mine", "--trust-remote-code", *SHORT]
    options += ["--do-sample", "--seed", 3] if kind == "strategy" else []
    first = descant("generate", talker, "Who?", "--chat", *options).stdout
    result = descant("chat", talker, *options, input="Who?\n/reset\nWho?\nAnd?\n")
    assert result.exit_code == 0
    assert result.stdout.startswith(first + first)
    assert len(result.stdout) > 2 * len(first)
    assert first != descant("generate", talker, "Who?", "--chat", *SHORT).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trust-remote-code",), "--trust-remote-code has no use without --recipe, got True: add --recipe"),
        (("--recipe-argument", "a=1"), "--recipe-argument has no use without --recipe, got ['a=1']"),
        (
            ("--recipe", "bird", "--recipe-argument", "word"),
            "--recipe-argument must be NAME=JSON, got 'word'",
        ),
        (("--recipe", "bird", "--recipe-argument", "=1"), "--recipe-argument must be NAME=JSON"),
        (("--recipe", "bird", "--recipe-argument", "a b=1"), "--recipe-argument must be NAME=JSON"),
        (
            ("--recipe", "bird", "--recipe-argument", "word=text"),
            "--recipe-argument must have JSON after its =, got 'word=text': write text in quotation marks:",
        ),
        (
            ("--recipe", "bird", "--recipe-argument", "word=1", "--recipe-argument", "word=2"),
            "--recipe-argument must give each argument once, got 'word=2'",
        ),
        (("--recipe", "nowhere-at-all"), "recipe `nowhere-at-all`: is neither installed"),
        (("--recipe", "./nowhere", "--trust-remote-code"), "recipe `./nowhere`"),
        (("--recipe", "bayes-risk", "--recipe-argument", "sample=4"), "takes no argument `sample`"),
        (("--recipe", ""), "is neither a path nor a name"),
    ],
)
def test_mistakes_are_one_line(descant, stories, talker, canary, words, message):
    bird(canary)
    untouched(descant("generate", stories, PROMPT, *words), message)
    untouched(descant("chat", talker, *words, input="Who?\n"), message)
    assert not canary.exists()
