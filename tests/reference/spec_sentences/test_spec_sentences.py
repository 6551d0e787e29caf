"""Every sentence of the list holds on both sides, or differs for the reason that the list gives."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.reference.spec_sentences import checks, design
from tests.reference.spec_sentences.library import Library
from tests.reference.spec_sentences.sentence import SENTENCES, observe, same
from tests.support import tiny_models
from tests.support.manual_forwards import MORE
from tests.support.tiny_models import ARCHITECTURES

MODELS = ("llama", "gpt2", "mistral", "gpt-neox", "qwen2", "t5", "bart", "gemma2", "mamba", "wide")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of all models."""
    folder = tmp_path_factory.mktemp("sentences")
    with mock.patch.dict(ARCHITECTURES, MORE):
        for name in MODELS:
            tiny_models.build(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def library(root):
    """Descant, with models to which it is attached."""
    import descant

    loaded = {}

    def load(path, options):
        key = path, *sorted(options.items())
        if key not in loaded:
            name = path.rsplit("/", 1)[1]
            with mock.patch.dict(ARCHITECTURES, MORE):
                loaded[key] = tiny_models.load(name, root / name, **options).model
            descant.attach(loaded[key])
        return loaded[key]

    return Library(root, [descant], load)


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.filterwarnings("default")
def test_sentence(name, library, root, reference):
    """The check holds on a side unless the list says why it does not; what both return is the same."""
    sentence = SENTENCES[name]
    theirs = reference.ask("sentence", name=name, root=str(root))
    ours = observe(name, library)
    for side, found, reason in (("Descant", ours, sentence.ours), ("4.52.4", theirs, sentence.theirs)):
        if reason:
            assert not found["holds"], f"{side} does as documented now: take the reason off the list"
        else:
            assert found["holds"], f"on {side}: {found['error']}"
    if ours["holds"] and theirs["holds"]:
        assert same(ours["value"], theirs["value"]), f"{ours['value']} is not {theirs['value']}"


def test_the_list_is_long_enough_and_its_entries_are_whole():
    assert checks.__all__
    assert len(SENTENCES) >= 370
    for sentence in SENTENCES.values():
        assert sentence.line > 0
        assert 10 <= len(sentence.text) <= 160, sentence.name
        assert sentence.text.endswith("."), sentence.name
        for reason in (sentence.ours, sentence.theirs):
            assert not reason or reason.endswith("."), sentence.name


def test_a_check_that_fails_is_seen(library, monkeypatch):
    """The comparison itself: a check that raises does not hold, other values are not the same."""
    assert observe("cfg_maxlen", library)["holds"]
    broken = Library(library.root, [], library._load)
    assert not observe("cfg_maxlen", broken)["holds"]
    assert same([1, 2.0], [1, 2.0])
    assert not same([1, 2.0], [1, 2.1])
    assert not same({"a": 1}, {"b": 1})
    assert not same(True, 1)


def test_the_migration_guide_lists_what_differs():
    page = design.PAGE.read_text(encoding="utf-8")
    assert page == design.render(page), "run python -m tests.reference.spec_sentences.design"
