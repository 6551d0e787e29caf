"""The text of `GenerationConfig.explain`, which the engine writes.

The config package cannot import the engine. The package root, which may import both, says where the function
is; it is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from descant.errors import DescantError


class DeferredExplainer:
    """Describes in text what a config runs on a model, with the function that `load` returns."""

    load: Callable[[], Callable[[Any, Any], str]] | None = None

    def __call__(self, config: Any, model: object = None, /) -> str:
        """The text of `GenerationConfig.explain`."""
        if self.load is None:
            raise DescantError("`GenerationConfig.explainer.load` must be set for `explain`: import descant")
        return self.load()(config, model)


EXPLAINER = DeferredExplainer()
