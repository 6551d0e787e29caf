"""Links that open a notebook of examples/notebooks in Colab and on Kaggle.

As a mkdocs hook it replaces the comments `<!-- notebook: NAME -->`. The address of the repository is
`repo_url` of mkdocs.yml, so that no page repeats it.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
MARK = re.compile(r"<!-- notebook: (\w+) -->")


def links(name: str, repository: str) -> str:
    """The links to one notebook, as Markdown."""
    if not (FOLDER / f"{name}.ipynb").exists():
        raise FileNotFoundError(f"there is no notebook `{name}` in {FOLDER}")
    file = f"blob/main/examples/notebooks/{name}.ipynb"
    source = f"{repository.rstrip('/')}/{file}"
    colab = source.replace("https://github.com/", "https://colab.research.google.com/github/")
    kaggle = f"https://kaggle.com/kernels/welcome?src={quote(source, safe='')}"
    return f"[Colab]({colab}), [Kaggle]({kaggle}), [file]({source})"


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return MARK.sub(lambda mark: links(mark[1], config.repo_url), markdown)
