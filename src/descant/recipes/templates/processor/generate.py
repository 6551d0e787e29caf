"""A temperature that decreases with the length of the text."""

from torch import Tensor

from descant.parts import Context, LogitsProcessor, check_number


class CoolDown(LogitsProcessor):
    """Divides scores by a temperature going from `first` to `last` in `span` tokens.

    A processor is pure: it treats each line separately, keeps no state in `self`, and
    returns a new tensor.
    """

    def __init__(self, *, first: float = 1.5, last: float = 0.7, span: int = 20):
        self.first = check_number("first", first, 0.01, 100)
        self.last = check_number("last", last, 0.01, 100)
        self.span = check_number("span", span, 1, integer=True)

    def process(self, context: Context, scores: Tensor) -> Tensor:
        """Return new scores [N, V]; `context` describes each line."""
        progress = (context.generated / self.span).clamp(max=1.0)  # [N, 1]
        return scores / (self.first + (self.last - self.first) * progress)


processor = CoolDown
