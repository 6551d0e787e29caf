"""No code runs without trust, from any source, and nothing is read from standard input.

Every way to load a recipe, without trust, with every bait of `tests.unit.recipes.bait`: the mark that its
code
would leave never appears. What is a trick, or has changed since it was trusted, is refused with trust, too.
"""

from __future__ import annotations

import builtins
import getpass
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.hub import hf_api

import descant
from descant.cli.application import build_app
from descant.config.generation_config import GenerationConfig
from descant.errors import (
    ChangedRecipe,
    DescantError,
    HubError,
    InputError,
    RecipeError,
    UnsupportedModel,
    UntrustedRecipe,
)
from descant.models.loading import loading
from descant.recipes.loading import PACKAGE_PREFIX, inspect_recipe, load_recipe, trust_recipe
from descant.recipes.lock import Lock
from descant.testing import check_recipe
from tests.support.wordpiece import tokenizer
from tests.unit.config.hub.server import Hub
from tests.unit.recipes import bait
from tests.unit.recipes.bait import HARMLESS, Source, Terminal, World

PROMPT = torch.tensor([[5, 6, 7]])
Tiny = Callable[..., Any]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal that must not be read."""
    made = Terminal()
    monkeypatch.setattr(sys, "stdin", made)
    monkeypatch.setattr(sys, "__stdin__", made)
    monkeypatch.setattr(builtins, "input", made.ask)
    monkeypatch.setattr(getpass, "getpass", made.ask)
    yield made
    assert made.readers == []


@pytest.fixture
def world(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Where baits are laid; what they import is forgotten after each test."""
    made = World(tmp_path, hub, monkeypatch)
    # transformers caches the first address.
    monkeypatch.setattr(hf_api(), "endpoint", hub.url)
    before = {name for name in sys.modules if name.startswith(PACKAGE_PREFIX)}
    yield made
    for other in made.others:
        other.close()
    for name in [name for name in sys.modules if name.startswith(PACKAGE_PREFIX) and name not in before]:
        del sys.modules[name]


@pytest.fixture
def model(tiny: Tiny) -> Iterator[Any]:
    """A model whose `generate` a test may replace."""
    found = tiny("llama").model
    yield found
    vars(found).pop("generate", None)


# -- the ways in

Loader = Callable[[Any, Any, Any], object]  # of a model, a reference and the value of trust


def by_recipe(model: Any, ref: Any, trust: Any) -> object:
    return descant.generate(model, PROMPT, recipe=ref, trust_remote_code=trust, max_new_tokens=2)


def by_custom_generate(model: Any, ref: Any, trust: Any) -> object:
    return descant.generate(model, PROMPT, custom_generate=ref, trust_remote_code=trust, max_new_tokens=2)


def by_default(model: Any, ref: Any, trust: Any) -> object:
    """Where False is not given, nothing is."""
    said = {} if trust is None else {"trust_remote_code": trust}
    return descant.generate(model, PROMPT, recipe=ref, max_new_tokens=2, **said)


def by_attached(model: Any, ref: Any, trust: Any) -> object:
    return descant.attach(model).generate(PROMPT, recipe=ref, trust_remote_code=trust, max_new_tokens=2)


def by_attached_custom_generate(model: Any, ref: Any, trust: Any) -> object:
    return descant.attach(model).generate(PROMPT, custom_generate=ref, trust_remote_code=trust)


def by_stream(model: Any, ref: Any, trust: Any) -> object:
    return list(descant.stream(model, PROMPT, recipe=ref, trust_remote_code=trust, max_new_tokens=2))


def by_load_recipe(model: Any, ref: Any, trust: Any) -> object:
    return load_recipe(ref, trust_remote_code=trust)


def by_check_recipe(model: Any, ref: Any, trust: Any) -> object:
    return check_recipe(ref, model, trust_remote_code=trust)


LOADERS: tuple[Loader, ...] = (
    by_recipe, by_custom_generate, by_default, by_attached, by_attached_custom_generate, by_stream,
    by_load_recipe, by_check_recipe,
)  # fmt: skip


@pytest.mark.parametrize("trust", [False, None])
@pytest.mark.parametrize("source", [*bait.PLAIN, *bait.REFUSED])
@pytest.mark.parametrize("loader", LOADERS)
def test_without_trust_nothing_runs(
    loader: Loader, source: Source, trust: bool | None, world: World, model: Any, own_lock: Path
) -> None:
    ref = source(world)
    asked, before = len(world.hub.asked), Lock(own_lock).pins()
    with pytest.raises(UntrustedRecipe, match="needs trust_remote_code=True"):
        loader(model, ref, trust)
    assert not world.canary.exists()
    assert len(world.hub.asked) == asked  # nothing is downloaded, either
    assert Lock(own_lock).pins() == before


@pytest.mark.parametrize("source", bait.REFUSED)
@pytest.mark.parametrize("loader", LOADERS)
def test_with_trust_tricks_and_changes_are_refused(
    loader: Loader, source: Source, world: World, model: Any, own_lock: Path
) -> None:
    ref = source(world)
    before = Lock(own_lock).pins()
    kinds = (RecipeError, HubError) if source in bait.REDIRECTS else (RecipeError,)
    with pytest.raises(kinds) as error:
        loader(model, ref, True)
    if source in bait.CHANGES and source is not bait.swapped_for_a_link:
        assert isinstance(error.value, ChangedRecipe)
    assert "\n" not in str(error.value)
    assert not world.canary.exists()
    assert Lock(own_lock).pins() == before


@pytest.mark.parametrize("source", bait.PLAIN)
def test_the_baits_bite(source: Source, world: World, model: Any) -> None:
    """With trust their code runs: the mark would be seen."""
    assert by_recipe(model, source(world), True) == "caught"
    assert world.canary.exists()


CHANGED = (bait.changed_folder, bait.changed_module, bait.changed_branch, bait.changed_tag)


@pytest.mark.parametrize("source", CHANGED)
def test_a_change_runs_once_it_is_trusted(source: Source, world: World, model: Any) -> None:
    ref = source(world)
    trust_recipe(ref)
    assert not world.canary.exists()  # trusting runs nothing
    by_recipe(model, ref, True)
    assert world.canary.exists()


def test_first_trust_pins_and_the_unchanged_runs_again(world: World, model: Any, own_lock: Path) -> None:
    made = world.folder(generate=HARMLESS)
    assert by_recipe(model, made, True) == "harmless"
    [pin] = Lock(own_lock).pins().values()
    assert by_custom_generate(model, str(made), True) == "harmless"
    assert list(Lock(own_lock).pins().values()) == [pin]
    with pytest.raises(UntrustedRecipe):  # the flag is needed every time
        by_recipe(model, made, False)


def test_a_newer_commit_does_not_run_in_the_pinned_ones_place(world: World, model: Any) -> None:
    repo = world.repo("ann/rec", HARMLESS)
    assert by_recipe(model, "ann/rec", True) == "harmless"
    repo.commit({"generate.py": world.code})
    assert by_recipe(model, "ann/rec", True) == "harmless"
    assert not world.canary.exists()


@pytest.mark.parametrize("trust", [1, "true", "False", 0.0, object()])
@pytest.mark.parametrize("loader", LOADERS)
def test_trust_is_said_with_true_alone(loader: Loader, trust: Any, world: World, model: Any) -> None:
    with pytest.raises(InputError, match="trust_remote_code"):
        loader(model, bait.folder(world), trust)
    assert not world.canary.exists()


@pytest.mark.parametrize("source", [*bait.PLAIN, *bait.REFUSED])
def test_looking_runs_nothing(source: Source, world: World) -> None:
    ref = source(world)
    for one in (inspect_recipe, trust_recipe):
        try:
            one(ref)
        except DescantError:
            assert source in bait.REFUSED
    assert not world.canary.exists()


# -- the command line


def command(*arguments: object) -> int:
    """Run a command line in this process, whose standard input is the terminal that must not be read."""
    with pytest.raises(SystemExit) as end:
        build_app()([str(one) for one in arguments], prog_name="descant")
    return int(end.value.code or 0)


Line = Callable[[str, Any], list[Any]]
LINES: dict[str, Line] = {
    "generate": lambda model, ref: ["generate", model, "Once", "--recipe", ref],
    "generate to a file": lambda model, ref: ["generate", model, "Once", "--recipe", ref, "--output", "-"],
    "chat": lambda model, ref: ["chat", model, "--recipe", ref],
    "check": lambda _, ref: ["recipe", "check", ref],
}
SOURCES = (bait.folder, bait.transformers_layout, bait.hub, bait.linked_file, bait.renamed,
           bait.changed_folder, bait.changed_branch)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("line", LINES)
def test_no_command_runs_it_without_trust(
    line: str, source: Source, world: World, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = source(world)
    assert command(*LINES[line](str(tiny("llama").folder), ref)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "trust" in said or (line == "check" and "must be a folder" in said)
    assert not world.canary.exists()


@pytest.mark.parametrize("source", [bait.linked_file, bait.renamed, bait.changed_folder])
def test_no_command_runs_a_trick_with_trust(source: Source, world: World, tiny: Tiny) -> None:
    line = LINES["generate"](str(tiny("llama").folder), source(world))
    assert command(*line, "--trust-remote-code") != 0
    assert not world.canary.exists()


@pytest.mark.parametrize("source", [*bait.PLAIN, *bait.REFUSED])
def test_commands_that_look_run_nothing(source: Source, world: World) -> None:
    ref = source(world)
    for name in ("show", "trust", "list", "forget"):
        command("recipe", name, *([] if name == "list" else [ref]))
    assert not world.canary.exists()


def test_a_line_of_a_file_brings_no_recipe(
    world: World, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is data says neither which code runs nor that it is trusted."""
    ref, model = str(world.folder()), kit(world, tiny, "kit")
    for name in ("recipe", "custom_generate"):
        lines = world.place / f"{name}.jsonl"
        lines.write_text(json.dumps({"prompt": "Once", name: ref, "trust_remote_code": True}) + "\n")
        command("generate", model, "--input", lines, "--max-new-tokens", 2)
        assert "error" in json.loads(capsys.readouterr().out)
    assert not world.canary.exists()


# -- models, tokenizers and configs


def kit(world: World, tiny: Tiny, name: str, **config: Any) -> Path:
    """A model's folder with its own code in every place where some loader may find it."""
    made = world.place / name
    made.mkdir()
    tiny("llama").model.save_pretrained(made)
    tokenizer().save_pretrained(made)
    mapped = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoModel": "code.Model"}
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**content, "auto_map": mapped, **config}))
    content = json.loads((made / "tokenizer_config.json").read_text())
    mapped = {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}
    (made / "tokenizer_config.json").write_text(json.dumps({**content, "auto_map": mapped}))
    content = {
        "max_new_tokens": 2,
        "custom_generate": str(made),
        "trust_remote_code": True,
        "recipe": str(made),
    }
    (made / "generation_config.json").write_text(json.dumps(content))
    (made / "custom_generate").mkdir()
    for file in ("code.py", "generate.py", "custom_generate/generate.py", "__init__.py", "conftest.py"):
        (made / file).write_text(world.code)
    return made


def local(world: World, made: Path) -> str:
    return str(made)


def linked(world: World, made: Path) -> str:
    (world.place / "link").symlink_to(made)
    return str(world.place / "link")


def on_the_hub(world: World, made: Path) -> str:
    files = {str(one.relative_to(made)): one.read_bytes() for one in made.rglob("*") if one.is_file()}
    # Separate for each test: transformers caches the commit of a name.
    name = f"eve/model-{hashlib.sha256(str(made).encode()).hexdigest()[:12]}"
    world.hub.repo(name, files)
    return name


def redirected(world: World, made: Path) -> str:
    """Its code is in another repository."""
    world.hub.repo("eve/code", {"code.py": world.code})
    for file in ("config.json", "tokenizer_config.json"):
        text = (made / file).read_text()
        (made / file).write_text(text.replace("code.", "eve/code--code."))
    return str(made)


def changed(world: World, made: Path) -> str:
    """It had no code when it was last loaded."""
    text = (made / "config.json").read_text()
    config = {**json.loads(text), "model_type": "llama"}
    del config["auto_map"]
    (made / "config.json").write_text(json.dumps(config))
    loading.load_meta_model(str(made))
    (made / "config.json").write_text(text)
    return str(made)


OPENERS: dict[str, Callable[[str], object]] = {
    "load": loading.load,
    "outline": loading.load_meta_model,
    "tokenizing": loading.load_tokenizer,
    "config": GenerationConfig.from_pretrained,
    "generate command": lambda name: command("generate", name, "Once", "--max-new-tokens", "2"),
    "explain command": lambda name: command("explain", name),
}
PLACES = (local, linked, on_the_hub, redirected, changed)


@pytest.mark.parametrize("kind", ["llama", "strange"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("opener", OPENERS)
def test_a_models_own_code_never_runs(
    opener: str, place: Callable[[World, Path], str], kind: str, world: World, tiny: Tiny
) -> None:
    made = kit(world, tiny, "kit", model_type=kind)
    name = place(world, made)
    if kind == "strange" and opener in ("load", "outline"):
        with pytest.raises(UnsupportedModel):
            OPENERS[opener](name)
    else:
        try:
            OPENERS[opener](name)
        except DescantError:
            assert kind == "strange"
    assert not world.canary.exists()


def test_a_models_config_brings_no_recipe(world: World, tiny: Tiny) -> None:
    """A generation config that names a recipe and says that it is trusted is data all the same."""
    made = kit(world, tiny, "kit", model_type="llama")
    model, _ = loading.load(str(made))
    found = descant.generate(model, PROMPT)
    assert isinstance(found, torch.Tensor)
    assert found.shape == (1, 5)
    config = GenerationConfig.from_pretrained(made)
    assert isinstance(descant.generate(model, PROMPT, config), torch.Tensor)
    assert not world.canary.exists()
