"""The exception tree, and that every error can be read, shown and sent between processes."""

import pickle

import pytest
import torch

from descant.errors import (
    ChangedRecipe,
    ConfigError,
    DescantError,
    EngineFull,
    HubError,
    InputError,
    MissingExtra,
    MissingRequirements,
    NotEnoughMemory,
    NotInThisVersion,
    RecipeError,
    RowError,
    SessionBusy,
    UnsupportedModel,
    UntrustedRecipe,
    format_value,
)


def test_the_exception_tree():
    for kind, builtin in (
        (ConfigError, ValueError), (NotInThisVersion, ConfigError), (InputError, ValueError),
        (UnsupportedModel, ValueError), (RowError, ValueError), (MissingExtra, ImportError),
        (NotEnoughMemory, MemoryError), (RecipeError, ValueError), (UntrustedRecipe, RecipeError),
        (ChangedRecipe, UntrustedRecipe), (MissingRequirements, RecipeError), (HubError, OSError),
        (SessionBusy, RuntimeError), (EngineFull, RuntimeError),
    ):  # fmt: skip
        assert issubclass(kind, DescantError)
        assert issubclass(kind, builtin)
    assert (
        str(MissingExtra("serve", "The server"))
        == "The server needs the extra `serve`: pip install descant[serve]"
    )


@pytest.mark.parametrize(
    "error",
    [ConfigError("a", "must be b", 1, "do c"), InputError(("a", "b"), "must", None), RowError("failed", 3),
     MissingExtra("x", "y"), NotEnoughMemory("no room", 8, 4, ("paged",)), UnsupportedModel("no"),
     NotInThisVersion("a", "is not", object), RecipeError("a/b", "no"), UntrustedRecipe("a/b", "no"),
     ChangedRecipe("a/b", "no"), MissingRequirements("a/b", ["foo (installed: None)"]),
     HubError("a/b", "no"), SessionBusy("no"), EngineFull(3, 3)],
)  # fmt: skip
def test_errors_survive_a_pickle(error):
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin)) == (type(error), str(error))
    for name in ("field", "request", "extra", "needed", "free", "fitting", "recipe", "missing", "repo",
                 "waiting", "limit"):  # fmt: skip
        assert getattr(twin, name, None) == getattr(error, name, None)


def test_shown_is_short_and_never_fails():
    class Nasty:
        def __repr__(self):
            raise RuntimeError

    assert format_value(Nasty()) == "<Nasty>"
    assert format_value(torch.zeros(2, 3)) == "Tensor [2, 3] torch.float32"
    assert format_value("a\nb" * 1000).endswith("...")
    assert len(format_value("x" * 1000)) == 80
    assert format_value(torch.tensor(3)) == "tensor(3)"


def test_the_name_of_a_recipe_stays_in_one_line():
    error = RecipeError("a\n\x1b[31mb" + "x" * 500, "no")
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 200
    listed = "Missing requirements for a/b:\nfoo (installed: None)\nbar==1 (installed: 2)"
    assert str(MissingRequirements("a/b", ["foo (installed: None)", "bar==1 (installed: 2)"])) == listed
