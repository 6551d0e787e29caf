"""`python -m tools.battery NAME`: attack a server of a tiny model."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import replace

from tools.battery.outcome import Outcome

NAMES = {
    "http-fuzz": "random bodies by /openapi.json",
    "byte-fuzz": "broken HTTP, slow bodies, huge headers",
    "template-bombs": "chat templates that try to get out, or never end",
    "cache-isolation": "whether one key's time to first token tells what another has sent",
    "disconnect-storm": "streams that are cut at random moments",
    "poison": "requests that fail in the engine among healthy ones",
    "costly-requests": "requests that cost as much as one may",
    "overload": "ten times as many requests as it can answer",
    "drain": "SIGTERM while requests run",
    "kill": "SIGKILL while requests run, and clients that send them again",
    "soak": "many small requests: whether memory grows",
    "preempt-equality": "a KV pool for about one of many requests",
}


def run_attack(
    name: str, *, is_small: bool, size: int | None = None, seconds: float | None = None
) -> Outcome:
    """Run one attack."""
    module = importlib.import_module(f"tools.battery.{name.replace('-', '_')}")
    chosen = module.SMALL if is_small else module.FULL
    if size is not None:
        chosen = replace(chosen, count=size)
    if seconds is not None:
        chosen = replace(chosen, seconds=seconds)
    outcome: Outcome = module.run(chosen)
    return outcome


def main() -> int:
    """Run the attack of the command line."""
    shown = "\n".join(f"  {name:18}{text}" for name, text in NAMES.items())
    parser = argparse.ArgumentParser(
        "python -m tools.battery", epilog=shown, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    parser.add_argument("--size", type=int, help="its count, in its own unit")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--small", action="store_true", help="the size of CI")
    options = parser.parse_args()
    began = time.monotonic()
    outcome = run_attack(options.name, is_small=options.small, size=options.size, seconds=options.seconds)
    outcome.figures["seconds"] = round(time.monotonic() - began, 1)
    print(outcome.line(options.name), flush=True)
    for failure in outcome.shown_failures():
        print("  " + failure, file=sys.stderr)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
