"""Writers of every kind of file, killed at random moments: `python writers.py FOLDER KILLS [KIND ...]`.

For each kind a child process writes two versions in turns until it is killed with SIGKILL. Afterwards each
file must be one version or the other, byte for byte, and after one more write nothing else may be in the
folder. The program prints one line of JSON for each kind.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import descant
from descant.cli.show import write_output
from descant.cli.watermark import detectors as detection_output
from descant.config import hub as hub_commit
from descant.config.cache_config import QuantizedCacheConfig
from descant.decoding.watermark.keys import new_settings, write_settings
from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel, save_detector
from descant.models.loading.tiny_llama import toy
from descant.recipes.lock import Lock, Pin
from descant.recipes.scaffold import new_recipe

Writer = Callable[[Path, int], None]  # writes version 0 or 1 below a folder
LONGEST = 0.06  # seconds that a writer lives after its first write
TEXT = "abcdefghij" * 20_000


def trace_file() -> Writer:
    runs = [
        descant.generate(
            toy(), torch.tensor([[5, seed]]), max_new_tokens=120, eos_token_id=None, trace=True
        ).trace
        for seed in (6, 7)
    ]
    return lambda folder, version: runs[version].save(folder / "trace.jsonl")


def config_file() -> Writer:
    configs = [descant.GenerationConfig(suppress_tokens=list(range(low, 20_000))) for low in (1, 2)]
    return lambda folder, version: configs[version].save_pretrained(folder)


def keyed_config_file() -> Writer:
    configs = [
        descant.GenerationConfig(watermarking_config=new_settings("synthid"), max_new_tokens=5)
        for _ in range(2)
    ]
    return lambda folder, version: configs[version].save_pretrained(folder)


def settings_file() -> Writer:
    settings = [new_settings("synthid") for _ in range(2)]
    return lambda folder, version: settings[version].to_json_file(folder / "settings.json")


def cache_config_file() -> Writer:
    configs = [QuantizedCacheConfig(nbits=bits) for bits in (2, 4)]
    return lambda folder, version: configs[version].to_json_file(folder / "cache.json")


def prompt_cache_file() -> Writer:
    caches = [descant.prefill(toy(), torch.arange(3, 60)[None] - low) for low in (0, 1)]
    return lambda folder, version: caches[version].save(folder / "prompt.safetensors")


def trie_file() -> Writer:
    tries = [
        descant.AllowedSequences([[one, two] for one in range(3, 200) for two in range(low, 100)], 2)
        for low in (3, 4)
    ]
    return lambda folder, version: tries[version].save(folder / "trie.safetensors")


def picture_file() -> Writer:
    return lambda folder, version: write_output(f"<svg>{version}{TEXT}", str(folder / "tree.svg"), "svg")


def report_file() -> Writer:
    def write(folder: Path, version: int) -> None:
        detection_output.render_report = lambda *_: f"<html>{version}{TEXT}"
        detection_output.write_page(folder / "report.html", [], None)

    return write


def hub_files() -> Writer:
    def write(folder: Path, version: int) -> None:
        hub_commit.cache_folder = lambda repo: folder
        files = {f"file{version}{number}.json": number for number in range(2_000)}
        hub_commit._cache_commit(hub_commit.HubCommit("owner/name", "a" * 40, files), "main")

    return write


def lock_file() -> Writer:
    def write(folder: Path, version: int) -> None:
        pin = Pin(None, "sha256:" + f"{version}" * 64, trusted="2026-01-01T00:00:00+00:00")
        Lock(folder / "recipes.lock").trust("./mine", pin)

    return write


def detector_folder() -> Writer:
    def make(rate: float) -> BayesianDetectorModel:
        config = BayesianDetectorConfig(30, rate)
        config.set_detector_information("toy", new_settings("synthid"))
        return BayesianDetectorModel(config)

    detectors = [make(rate) for rate in (0.4, 0.5)]
    return lambda folder, version: save_detector(detectors[version], folder)


OVERWRITTEN: Mapping[str, Callable[[], Writer]] = {
    "trace": trace_file,
    "config": config_file,
    "config with a key": keyed_config_file,
    "watermark settings": settings_file,
    "cache config": cache_config_file,
    "prompt cache": prompt_cache_file,
    "trie": trie_file,
    "picture": picture_file,
    "report": report_file,
    "hub listing": hub_files,
    "recipe lock": lock_file,
    "detector": detector_folder,
}
PRIVATE = {"config with a key", "watermark settings", "recipe lock", "detector"}
BESIDE = {"recipes.lock.lock"}  # the lock beside a recipe lock stays, by design


# ------------------------------------------------------------------------ names that are written once
def key_files() -> Callable[[Path, int], None]:
    settings = new_settings("synthid")
    return lambda folder, number: write_settings(folder / f"key{number}.json", settings, "mine")


def recipe_folders() -> Callable[[Path, int], None]:
    return lambda folder, number: void(new_recipe(f"mine{number}", "strategy", folder))


CREATED: Mapping[str, Callable[[], Callable[[Path, int], None]]] = {
    "key file": key_files,
    "recipe": recipe_folders,
}


def void(_: object) -> None:
    """Nothing."""


def content(path: Path) -> bytes:
    """The bytes of a file; of a prompt cache, whose metadata have no order, its digest, once checked."""
    if path.name != "prompt.safetensors":
        return path.read_bytes()
    descant.load_cache(path)
    with safe_open(path, "pt") as opened:
        return str(opened.metadata()["digest"]).encode()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {
        str(path.relative_to(folder)): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in BESIDE
    }


def killed(write: Callable[[], Iterator[None]], draw: random.Random) -> None:
    """Run a writer in a child, from its first write on for a random time, and kill it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            for number, _ in enumerate(write()):
                if not number:
                    os.write(writing, b"!")
        os._exit(1)  # a writer never ends by itself
    os.close(writing)
    try:
        assert os.read(reading, 1), "the writer must not fail"
        time.sleep(draw.uniform(0, LONGEST))
        os.kill(child, signal.SIGKILL)
    finally:
        os.close(reading)
        status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), "the writer must live until it is killed"


def overwrite(kind: str, folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """The result for a kind that overwrites its files."""
    write = OVERWRITTEN[kind]()
    versions = []
    for version in range(2):
        (folder / f"version{version}").mkdir(parents=True)
        write(folder / f"version{version}", version)
        versions.append(contents(folder / f"version{version}"))
    target = folder / "target"
    target.mkdir()
    write(target, 0)

    def forever() -> Iterator[None]:
        for version in itertools.cycle((1, 0)):
            write(target, version)
            yield

    torn = left = 0
    for _ in range(kills):
        killed(forever, draw)
        found = contents(target)
        left += len(found.keys() - versions[0].keys() - versions[1].keys())
        whole = all(
            found.get(name) in (versions[0].get(name), versions[1].get(name))
            for name in versions[0].keys() | versions[1].keys()
        )
        torn += not whole
        for version in (1, 0):  # a lock with the same pins is not written again
            write(target, version)
        assert contents(target) == versions[0], "the next write must remove what is left"
    modes = {
        oct(path.stat().st_mode & 0o777)
        for path in target.rglob("*")
        if path.is_file() and path.name not in BESIDE
    }
    private = modes == {"0o600"} if kind in PRIVATE else True
    return {"kind": kind, "kills": kills, "torn": torn, "left": left, "private": private}


def create(kind: str, folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """The result for a kind whose names must be new: what has a name is whole."""
    write = CREATED[kind]()
    (folder / "whole").mkdir(parents=True)
    write(folder / "whole", 0)
    whole = {one.partition("/")[2]: data for one, data in contents(folder / "whole").items()}
    target = folder / "target"
    target.mkdir()
    numbers = itertools.count()
    torn = left = private = 0
    for _ in range(kills):
        start = 1000 * next(numbers)

        def forever(start: int = start) -> Iterator[None]:
            for number in itertools.count(start):
                write(target, number)
                yield

        killed(forever, draw)
        for entry in target.iterdir():
            if entry.name.startswith("."):
                left += 1
            elif entry.is_dir():
                found = {
                    one: data.replace(entry.name.encode(), b"mine0") for one, data in contents(entry).items()
                }
                torn += found != whole
            else:
                torn += entry.read_bytes() != whole[""]
                private += entry.stat().st_mode & 0o777 != 0o600
        # The killed name can be written now, or it is whole; either way nothing else is left of it.
        for entry in list(target.iterdir()):
            if entry.name.startswith("."):
                write(target, int("".join(filter(str.isdigit, entry.name.split(".")[1]))))
                assert not entry.exists(), "the next write must remove what is left"
    return {"kind": kind, "kills": kills, "torn": torn, "left": left, "private": private == 0}


def main(folder: Path, kills: int, kinds: list[str]) -> None:
    """Kill the writers of some kinds, or of all."""
    torch.set_num_threads(1)
    draw = random.Random()
    for kind in kinds or [*OVERWRITTEN, *CREATED]:
        run = overwrite if kind in OVERWRITTEN else create
        print(json.dumps(run(kind, folder / kind.replace(" ", "-"), kills, draw)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
