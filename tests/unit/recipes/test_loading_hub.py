"""Recipes on the Hub: pinned by commit and content, run as pinned, also offline."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from descant.errors import ChangedRecipe, HubError
from descant.recipes.loading import PACKAGE_PREFIX, inspect_recipe, load_recipe, trust_recipe
from descant.recipes.lock import Lock
from tests.unit.config.hub.server import Hub

GENERATE = "def generate(model, left_padding=None, **kwargs):\n    return 'ran'\n"


def ours() -> set[str]:
    return {name for name in sys.modules if name.startswith(PACKAGE_PREFIX)}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Every test imports its modules again."""
    yield
    for name in ours():
        del sys.modules[name]


def test_a_hub_recipe_is_pinned_by_commit_and_content(hub: Hub, own_lock: Path) -> None:
    repo = hub.repo("ann/rec", {"generate.py": GENERATE, "README.md": "hello"})
    recipe = load_recipe("ann/rec", trust_remote_code=True)
    assert (recipe.name, recipe.source, recipe.revision) == ("ann/rec", "hub", repo.head)
    assert recipe.make(None) == "ran"
    pins = Lock(own_lock).pins()
    assert list(pins) == ["hub:ann/rec"]
    assert recipe.contents is not None
    assert (pins["hub:ann/rec"].revision, pins["hub:ann/rec"].digest) == (repo.head, recipe.contents.digest)
    assert set(pins["hub:ann/rec"].files) == {"generate.py", "README.md"}


def test_without_a_revision_the_pinned_commit_runs_until_trusted_again(hub: Hub) -> None:
    repo = hub.repo("ann/rec", {"generate.py": GENERATE})
    first = load_recipe("ann/rec", trust_remote_code=True)
    old = repo.head
    new = repo.commit({"generate.py": GENERATE.replace("ran", "newer"), "more.py": ""})
    asked = len(hub.asked)
    again = load_recipe("ann/rec", trust_remote_code=True)
    assert again.make is first.make
    assert again.revision == old
    assert len(hub.asked) == asked  # all of it is cached
    hub.offline()
    assert load_recipe("ann/rec", trust_remote_code=True).revision == old
    hub.offline(False)
    assert inspect_recipe("ann/rec").revision == old
    assert inspect_recipe("ann/rec").trust_state == "trusted"
    latest = inspect_recipe("ann/rec", latest=True)
    assert (latest.revision, latest.trust_state) == (new, "changed")
    assert trust_recipe("ann/rec").revision == new
    assert load_recipe("ann/rec", trust_remote_code=True).make(None) == "newer"


def test_the_pinned_commit_is_downloaded_again_where_the_cache_is_gone(hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo("ann/rec", {"generate.py": GENERATE})
    load_recipe("ann/rec", trust_remote_code=True)
    old = repo.head
    repo.commit({"generate.py": GENERATE.replace("ran", "newer")})
    shutil.rmtree(hub.cache)
    assert load_recipe("ann/rec", trust_remote_code=True).revision == old
    shutil.rmtree(hub.cache)
    hub.offline()
    with pytest.raises(HubError):
        load_recipe("ann/rec", trust_remote_code=True)


@pytest.mark.parametrize("name", ["main", "v1"])
def test_a_branch_or_tag_that_has_moved_is_changed(hub: Hub, name: str) -> None:
    repo = hub.repo("ann/rec", {"generate.py": GENERATE})
    repo.tag("v1")
    assert load_recipe(f"ann/rec@{name}", trust_remote_code=True).revision == repo.head
    old, new = repo.head, repo.commit({"generate.py": GENERATE.replace("ran", "newer")})
    repo.tag("v1")
    with pytest.raises(ChangedRecipe, match=f"commit {old[:12]} is now {new[:12]}, generate.py has changed"):
        load_recipe(f"ann/rec@{name}", trust_remote_code=True)
    assert inspect_recipe(f"ann/rec@{name}").trust_state == "changed"
    assert trust_recipe(f"ann/rec@{name}").revision == new
    assert load_recipe(f"ann/rec@{name}", trust_remote_code=True).make(None) == "newer"


def test_a_moved_branch_is_changed_even_where_its_recipe_is_the_same(hub: Hub) -> None:
    repo = hub.repo("ann/rec", {"generate.py": GENERATE})
    load_recipe("ann/rec@main", trust_remote_code=True)
    repo.commit({".gitattributes": "x"})
    with pytest.raises(ChangedRecipe, match="is now"):
        load_recipe("ann/rec@main", trust_remote_code=True)


def test_a_full_commit_stays_what_it_is(hub: Hub) -> None:
    repo = hub.repo("ann/rec", {"generate.py": GENERATE})
    old = repo.head
    repo.commit({"generate.py": GENERATE.replace("ran", "newer")})
    assert load_recipe(f"ann/rec@{old}", trust_remote_code=True).make(None) == "ran"
    hub.offline()
    assert load_recipe(f"ann/rec@{old}", trust_remote_code=True).revision == old


def test_a_model_beside_the_recipe_is_not_downloaded(hub: Hub) -> None:
    """The documented layout: a model's repository with `custom_generate/`."""
    big = b"\0" * (3 << 20)
    config = json.dumps({"auto_map": {"AutoModel": "eve/other--modeling.Model"}})
    hub.repo(
        "ann/model",
        {
            "custom_generate/generate.py": "from .more import x\ndef generate(model): return x",
            "custom_generate/more.py": "x = 'ran'",
            "custom_generate/requirements.txt": "torch",
            "model.safetensors": big,
            "tokenizer.json": big,
            "config.json": config,
            "modeling.py": "raise SystemExit",
            "generation_config.json": json.dumps({"max_new_tokens": 3}),
            "README.md": "hello",
        },
    )
    recipe = load_recipe("ann/model", trust_remote_code=True)
    assert recipe.make(None) == "ran"
    assert recipe.config().max_new_tokens == 3
    asked = " ".join(hub.since())
    assert "custom_generate/more.py" in asked
    for name in ("safetensors", "tokenizer.json", "/config.json", "modeling.py"):
        assert name not in asked
