"""`python -m tools.fuzz`: random cases, each decoded in several ways that must agree."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from tests.reference.process.client import ReferenceClient
from tools.fuzz.cases import Ask, Case
from tools.fuzz.dimensions import case_of
from tools.fuzz.explained import EXPLAINED
from tools.fuzz.oracles import Difference, judge
from tools.fuzz.reduction import reduce_case

__all__ = ["Tally", "main"]


class Tally:
    """What a run has seen."""

    def __init__(self) -> None:
        self.cases = 0
        self.requests = 0
        self.compared: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.methods: Counter[str] = Counter()
        self.dimensions: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.explained: Counter[str] = Counter()
        self.differences: list[Difference] = []

    def add(self, case: Case, client: ReferenceClient | None = None) -> list[Difference]:
        """Judge a case; the differences that nothing explains."""
        verdict = judge(case, client)
        self.cases += 1
        self.requests += len(case.asks)
        self.compared.update(verdict.compared)
        self.kinds[case.subject_name] += 1
        self.methods.update(ask.method for ask in case.asks)
        self.dimensions.update({name for one in (case, *case.asks) for name in _extras(one)})
        self.refused.update(f"{method}: {error}" for method, error in verdict.refused)
        self.explained.update(one.explained_by for one in verdict.differences if one.explained_by)
        found = [one for one in verdict.differences if one.explained_by is None]
        self.differences += found
        return found

    def document(self) -> dict[str, Any]:
        """It as JSON."""
        counted = ("compared", "kinds", "methods", "dimensions")
        counts = {name: dict(getattr(self, name).most_common()) for name in counted}
        explained = {
            name: {"count": count, "oracle": EXPLAINED[name].oracle, "why": EXPLAINED[name].why}
            for name, count in self.explained.most_common()
        }
        return {
            "cases": self.cases,
            "requests": self.requests,
            **counts,
            "refused": sum(self.refused.values()),
            "explained": explained,
            "differences": [str(one) for one in self.differences],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print each difference; 0 if nothing differs."""
    options = _options(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    seeds = options.only or range(options.seed, options.seed + options.cases)
    client = ReferenceClient() if options.reference else None
    tally, began, last = Tally(), time.process_time(), time.monotonic()
    try:
        for seed in seeds:
            case = case_of(seed)
            if options.verbose:
                _say(described(case))
            for one in tally.add(case, client):
                _say(str(one))
                if options.reduce:
                    _say(described(_reduced(case, one, client)))
            if time.monotonic() - last > 60:
                last = time.monotonic()
                _write(tally, seeds[0], time.process_time() - began, options.out)
                _say(f"... {tally.cases} cases, up to seed {seed}, {len(tally.differences)} differences")
            if options.seconds and time.process_time() - began > options.seconds:
                break
    finally:
        if client is not None:
            client.close()
    _report(tally, seeds[0], time.process_time() - began, options)
    return int(bool(tally.differences))


def _reduced(case: Case, difference: Difference, client: ReferenceClient | None) -> Case:
    """The smallest case with a difference of the same oracle."""

    def differs(smaller: Case) -> bool:
        found = judge(smaller, client if difference.oracle == "4.52.4" else None).differences
        return any(one.oracle == difference.oracle and one.explained_by is None for one in found)

    return reduce_case(case, differs)


def described(case: Case) -> str:
    """A case in words, a line for each request."""
    stores = {"" if ask.store is None else ask.store.name for ask in case.asks}
    lines = [f"case {case.seed}: {case.subject_name} on {stores}, other {case.other.name}, {_extras(case)}"]
    lines += [f"  step {step}: {one.kind} {one.asks}" for step, some in case.actions.items() for one in some]
    lines += [
        f"  {index} {ask.method}: {ask.prompt} {ask.fields} {_extras(ask)}"
        for index, ask in enumerate(case.asks)
    ]
    return "\n".join(lines)


def _extras(one: Case | Ask) -> dict[str, Any]:
    """What a case or a request has besides what each has."""
    given = {each.name: getattr(one, each.name) for each in fields(one) if each.default is not MISSING}
    usual = {each.name: each.default for each in fields(one)}
    return {name: value for name, value in given.items() if value != usual[name] and name != "store"}


def _write(tally: Tally, first: int, seconds: float, path: Path | None) -> None:
    """Write the results so far, if there is a file for them."""
    if path is not None:
        document = {"first seed": first, **tally.document(), "cpu_seconds": round(seconds)}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _report(tally: Tally, first: int, seconds: float, options: argparse.Namespace) -> None:
    """Print the summary, and write the results where they are asked for."""
    _write(tally, first, seconds, options.out)
    _say(
        f"{tally.cases} cases from seed {first}, {tally.requests} requests, {seconds:.0f} CPU s "
        f"({tally.cases / max(seconds, 1e-9):.1f} cases a second)",
        f"compared: {dict(tally.compared)}",
        f"refused: {sum(tally.refused.values())}; explained: {dict(tally.explained)}",
        f"differences: {len(tally.differences)}",
    )
    if options.verbose or options.refused:
        _say(*(f"  {count} {text}" for text, count in tally.refused.most_common(40)))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10000, help="number of cases (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case (default 0)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these cases alone")
    parser.add_argument("--reference", action="store_true", help="compare with transformers 4.52.4, too")
    parser.add_argument("--reduce", action="store_true", help="reduce each case that differs")
    parser.add_argument("--seconds", type=float, help="CPU seconds after which no case begins")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--refused", action="store_true", help="print which requests were refused")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    return parser.parse_args(argv)


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
