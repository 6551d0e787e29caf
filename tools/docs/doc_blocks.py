"""Run the code blocks of the README and the docs in order, and compare their output with the pages.

    python tools/docs/doc_blocks.py run [FILE ...]              run the python blocks (default: of all files)
    python tools/docs/doc_blocks.py one FILE LANGUAGE NUMBER    print one block, counted from 1

All python blocks of one file share one namespace. They run at the root of the checkout, where they may read
(`models/smollm2`) but not write. A `text` block directly after a python block is the expected output of that
block. No marker skips a block.

A python block below the comment `<!-- on transformers 4.52.4 -->` runs on that version, in the venv that
tools/reference_env.py builds. All such blocks of a file share one namespace.

A file whose first line is `<!-- in a folder of its own -->` writes files. It runs in an empty folder that
contains `models`, and its bash blocks run too. The tests provide the folder and a local Hub.

A file whose first line is `<!-- with vLLM -->` runs in the environment of tools/vllm_env.py, by tests/vllm.

A file whose first line is `<!-- with the tools of others -->` runs in the environment of
tools/clients_env.py, by tests/e2e/integrations.

A file whose first line is `<!-- programs of examples/ -->` shows whole programs. tests/e2e/examples runs each
in its own process, and compares code and output with the page.
"""

import argparse
import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the working directory may be any

from tools.docs.transformers4 import Transformers4  # noqa: E402

LANGUAGES = frozenset({"python", "text", "bash", "toml", "json", "yaml"})
ISOLATED = "<!-- in a folder of its own -->"
PROGRAMS = "<!-- programs of examples/ -->"
WITH_VLLM = "<!-- with vLLM -->"
WITH_CLIENTS = "<!-- with the tools of others -->"
BEFORE = "<!-- on transformers 4.52.4 -->"
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)$")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class BlockError(Exception):
    """A block that is malformed, fails, prints something else, or writes into the checkout."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a Markdown file."""

    path: Path
    line: int  # of the opening fence, from 1
    end: int  # of the closing fence
    language: str
    text: str
    before: bool = False  # runs on the old transformers

    @property
    def where(self) -> str:
        """`file:line`, relative to the checkout if inside it."""
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}"


def sources() -> list[Path]:
    """Every Markdown file whose blocks must run, in a fixed order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(path: Path) -> list[Block]:
    """All fenced blocks of a file; an unclosed fence or an unknown language is an error."""
    blocks: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent, ticks = len(opening["indent"]), opening["ticks"]
        start = at
        at += 1
        while at < len(lines) and lines[at].strip() != ticks:
            at += 1
        if at == len(lines):
            raise BlockError(f"{path}:{start + 1}: this fence is never closed")
        language = opening["info"].strip()
        if language not in LANGUAGES:
            raise BlockError(
                f"{path}:{start + 1}: a block's language must be one of {', '.join(sorted(LANGUAGES))}, "
                f"got {language!r}"
            )
        body = "".join(line[indent:].rstrip() + "\n" for line in lines[start + 1 : at])
        above = next((line.strip() for line in reversed(lines[:start]) if line.strip()), "")
        blocks.append(Block(path, start + 1, at + 1, language, body, above == BEFORE))
        at += 1
    return blocks


def is_isolated(path: Path) -> bool:
    """Whether a file runs in its own folder, with its bash blocks."""
    return path.read_text(encoding="utf-8").startswith(ISOLATED)


def needs_vllm(path: Path) -> bool:
    """Whether a file runs in the environment with vLLM."""
    return path.read_text(encoding="utf-8").startswith(WITH_VLLM)


def needs_clients(path: Path) -> bool:
    """Whether a file runs in the environment with the tools of others."""
    return path.read_text(encoding="utf-8").startswith(WITH_CLIENTS)


def is_programs(path: Path) -> bool:
    """Whether a file shows the programs of examples/, which run separately."""
    return path.read_text(encoding="utf-8").startswith(PROGRAMS)


def paired(path: Path, languages: tuple[str, ...] = ("python",)) -> list[tuple[Block, Block | None]]:
    """Each block that runs, with the `text` block of its expected output if one follows directly."""
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks = read(path)
    pairs: list[tuple[Block, Block | None]] = []
    for at, block in enumerate(blocks):
        if block.language not in languages:
            continue
        after = blocks[at + 1] if at + 1 < len(blocks) else None
        adjacent = (
            after is not None
            and after.language == "text"
            and not any(line.strip() for line in lines[block.end : after.line - 1])
        )
        pairs.append((block, after if adjacent else None))
    return pairs


def needs_transformers4(path: Path) -> bool:
    """Whether a file has code that runs on transformers 4.52.4."""
    return any(block.before for block in read(path))


def run(path: Path, folder: Path | None = None, programs: Path | None = None) -> int:
    """Run a file's blocks in one namespace, at the checkout's root or in `folder`; the number of blocks.

    Bash blocks find their commands in the folder `programs`, else beside this Python.
    """
    if is_isolated(path) and folder is None:
        raise BlockError(f"{path}: this file needs its own folder: run pytest tests/e2e/docs/test_blocks.py")
    if is_programs(path):
        raise BlockError(f"{path}: these programs run separately: run pytest tests/e2e/examples")
    name = "blocks_" + re.sub(r"\W", "_", str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))
    module = types.ModuleType(name)
    pairs = paired(path, ("python", "bash") if folder is not None else ("python",))
    before = Path.cwd()
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    os.chdir(folder or ROOT)
    try:
        with contextlib.closing(Transformers4()) as transformers4, GUARD.armed():
            for block, expected in pairs:
                execute(block, expected, Scope(module.__dict__, transformers4, programs))
    finally:
        os.chdir(before)
        del sys.modules[name]
    return len(pairs)


@dataclass(frozen=True)
class Scope:
    """The state that the blocks of one file share."""

    namespace: dict[str, object]
    transformers4: Transformers4
    programs: Path | None = None  # first entry of PATH in bash blocks


def execute(block: Block, expected: Block | None, scope: Scope) -> None:
    """Run one block; its traceback shows the lines of the Markdown file."""
    # Leading empty lines give every statement its line number in the file.
    source = "\n" * block.line + block.text
    filename = f"{block.path}#{block.line}"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            if block.language == "bash":
                shell(block.text, scope.programs)
            elif block.before:
                print(scope.transformers4.run(source, filename), end="")
            else:
                exec(compile(source, filename, "exec"), scope.namespace)  # noqa: S102
    except Exception as error:
        raise BlockError(f"{block.where}: {type(error).__name__}: {error}") from error
    if expected is not None and tidy(printed.getvalue()) != tidy(expected.text):
        raise BlockError(
            f"{expected.where}: the block above printed something else\n"
            f"expected:\n{tidy(expected.text)}\nprinted:\n{tidy(printed.getvalue())}"
        )


def shell(text: str, programs: Path | None = None) -> None:
    """Run lines of bash with this Python's programs, and print their output."""
    folders = [*([str(programs)] if programs else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    path = os.pathsep.join(folders)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={**os.environ, "PATH": path, "COLUMNS": "110", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, end="")
    if done.returncode:
        raise OSError(f"exit code {done.returncode}: {done.stdout[-2000:]}")


def tidy(text: str) -> str:
    """The text without trailing blanks."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


class Guard:
    """An audit hook that refuses to create, change or remove files in the checkout while armed."""

    def __init__(self, root: Path):
        self.root = root
        self.active = False
        self.installed = False

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Refuse writes inside the context; a hook cannot be removed, so it stays installed and inactive."""
        if not self.installed:
            sys.addaudithook(self)
            self.installed = True
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """Called by the interpreter for every audited event."""
        if not self.active:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING:
                self.refuse(path)
        elif event == "os.truncate":
            self.refuse(arguments[0])
        elif event in {"os.mkdir", "os.remove", "os.rmdir"}:
            self.refuse(arguments[0], arguments[-1])
        elif event in {"os.rename", "os.link", "os.symlink"}:
            self.refuse(arguments[1], arguments[-1])

    def refuse(self, path: object, folder: object = -1) -> None:
        """Raise if the path lies in the checkout; only Python's own byte code may be written there.

        `folder` is the descriptor of the folder that a relative path starts from; -1: the working directory.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a file descriptor: checked when it was opened
        start = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else ""
        where = Path(os.path.abspath(os.path.join(start, os.fsdecode(path))))
        if where.is_relative_to(self.root) and "__pycache__" not in where.parts:
            raise PermissionError(f"an example must not write into the checkout, got {where}; use tempfile")


GUARD = Guard(ROOT)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run every python block")
    runner.add_argument("files", nargs="*", type=Path)
    one = commands.add_parser("one", help="print one block of a file")
    one.add_argument("file", type=Path)
    one.add_argument("language", choices=sorted(LANGUAGES))
    one.add_argument("number", type=int)
    arguments = parser.parse_args()
    if arguments.command == "one":
        found = [block for block in read(arguments.file.resolve()) if block.language == arguments.language]
        print(found[arguments.number - 1].text, end="")
        return 0
    failed = 0
    for path in [file.resolve() for file in arguments.files] or sources():
        try:
            print(f"{path}: {run(path)} blocks")
        except BlockError as error:
            failed = 1
            print(f"{path}: FAILED\n{error}", file=sys.stderr)
            if error.__cause__ is not None:
                sys.excepthook(type(error.__cause__), error.__cause__, error.__cause__.__traceback__)
    return failed


if __name__ == "__main__":
    sys.exit(main())
