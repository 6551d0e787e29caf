"""Hostile grammars: deep, wide, exponential, recursive, huge and catastrophic ones."""

from __future__ import annotations

import json
import random
import resource
import string
import sys
import time
from collections.abc import Iterator
from typing import Any

Bomb = tuple[str, dict[str, Any]]


def _schemas() -> Iterator[Bomb]:
    for depth in (20, 60, 90, 120, 400, 3000):
        nested: Any = {"type": "integer"}
        for _ in range(depth):
            nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
        yield f"{depth} nested objects", {"json_schema": nested}
        nested = {"type": "integer"}
        for _ in range(depth):
            nested = (
                {"anyOf": [nested, {"type": "array", "items": nested}]} if depth <= 20 else {"items": nested}
            )
        yield (
            f"{depth} nested unions",
            {"json_schema": nested if depth > 20 else {"type": "array", "items": nested}},
        )
    for count in (50, 200, 500, 2000, 8000):
        names = [f"key{index}" for index in range(count)]
        wide = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        yield f"{count} optional properties", {"json_schema": wide}
        yield f"{count} required properties", {"json_schema": {**wide, "required": names}}
        yield f"{count} options", {"json_schema": {"anyOf": [{"const": name * 3} for name in names]}}
    for count in (100, 1000, 10_000, 50_000):
        yield f"enum of {count}", {"json_schema": {"enum": [f"v{index * 7919}" for index in range(count)]}}
        yield f"enum of {count} numbers", {"json_schema": {"enum": list(range(count))}}
        yield f"{count} choices", {"choice": [f"choice {index}" for index in range(count)]}
    for bound in (100, 10_000, 1_000_000, 10**9):
        yield f"string of {bound}", {"json_schema": {"type": "string", "maxLength": bound}}
        yield f"string of at least {bound}", {"json_schema": {"type": "string", "minLength": bound}}
        yield (
            f"list of {bound}",
            {"json_schema": {"type": "array", "maxItems": bound, "items": {"type": "null"}}},
        )
        yield f"list of at least {bound}", {"json_schema": {"type": "array", "minItems": bound}}
        yield f"integer to {bound}", {"json_schema": {"type": "integer", "minimum": -bound, "maximum": bound}}
        inner: Any = {"type": "array", "maxItems": bound, "items": {"type": "string", "maxLength": bound}}
        for _ in range(3):
            inner = {"type": "array", "maxItems": bound, "items": inner}
        yield f"lists of lists of {bound}", {"json_schema": inner}


def _references() -> Iterator[Bomb]:
    for target in ("#", "#/$defs/a", "#/$defs/none", "https://example.com/x", "#/a~1b", "file:///etc/passwd"):
        yield (
            f"reference to {target}",
            {"json_schema": {"$ref": target, "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        )
    for count in (10, 30, 100):
        for key in ("anyOf", "allOf", "oneOf"):
            parts = {
                f"n{index}": {key: [{"$ref": f"#/$defs/n{index + 1}"}, {"$ref": f"#/$defs/n{index + 1}"}]}
                for index in range(count)
            }
            parts[f"n{count}"] = {"type": "integer"}
            yield f"{count} doubled {key}", {"json_schema": {"$ref": "#/$defs/n0", "$defs": parts}}
    tree = {"type": "object", "properties": {name: {"$ref": "#"} for name in "abcdefghij"}}
    yield "tree of itself", {"json_schema": tree}
    mutual = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/a"}}}
    yield "mutual recursion", {"json_schema": {"$ref": "#/$defs/a", "$defs": mutual}}


def _patterns() -> Iterator[Bomb]:
    patterns = [
        "(a+)+$",
        "(a|aa)+$",
        "(.*)*x",
        "((a*)*)*",
        "(a|b|ab)*c",
        "(x+x+)+y",
        "a{0,1000000}",
        "(a{1,1000}){1,1000}",
        "(((a{1,100}){1,100}){1,100}){1,100}",
        "(a|b)*a(a|b){20}",
        "(a|b)*a(a|b){60}",
        "[a-z]{5,}(foo|bar)*[0-9]{9}",
        "\\p{L}{0,2000}",
        "(?=a)a",
        "(?<!a)b",
        "(a)\\1",
        "\\b\\w+\\b",
        "a{3,1}",
        "(",
        "[",
        "a**",
        "\\",
        "(?P<n>a)",
        "^(a?){40}a{40}$",
        "(.{0,200}){0,200}",
        "\\w{1,5000}@\\w{1,5000}",
        "(a{2}){2}{2}{2}",
        "[^\\x00-\\x7f]{900}",
        "(\\d+(\\.\\d+)*)*",
        ".*.*.*.*.*.*.*.*=.*",
        "((((((((((a?)?)?)?)?)?)?)?)?)?)?",
        "x" * 9000,
        "x" * 90_000,
        "|".join(f"w{index}" for index in range(2000)),
        "(" * 2000 + "a" + ")" * 2000,
        "a?" * 500 + "a" * 500,
    ]
    for pattern in patterns:
        yield f"regex {pattern[:30]}", {"regex": pattern}
        yield f"pattern {pattern[:30]}", {"json_schema": {"type": "string", "pattern": pattern}}


def _doubling_rules(count: int) -> str:
    rules = [f'r{index} ::= r{index + 1} r{index + 1} | "a"' for index in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "b"'])


def _grammars() -> Iterator[Bomb]:
    texts = [
        "root ::= root",
        'root ::= root "a" | "a"',
        'root ::= "" root',
        "root ::= a\na ::= b\nb ::= a",
        'root ::= x x x x x x x x\nx ::= x x | "a" | ""',
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "root ::= " + " ".join(['"a"?'] * 5000),
        'root ::= "a"{1000000}',
        "root ::= [a-z]{100000}",
        "root ::=",
        "",
        'root ::= "a" (("b" | "c")*)*',
        "root ::= missing",
        'other ::= "a"',
        'root ::= "' + "a" * 90_000 + '"',
        _doubling_rules(60),
        "start: start",
        'start: start "a" | "a"',
        "start: a\na: b\nb: a",
        "start: /(a+)+/",
        'start: "a"~1..1000000',
        "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        'start: (("a"?)*)*',
        "start: missing",
        'start: %json {"a"',
        "start:",
        "%import common.WORD\nstart: WORD",
        'start: "a" | ' * 2000 + '"b"',
    ]
    for text in texts:
        yield f"grammar {text[:30]!r}", {"grammar": text}


def _random(count: int) -> Iterator[Bomb]:
    """Texts of the characters that patterns and grammars are made of, and schemas of random keywords."""
    rng = random.Random(7)
    keys = (
        "type",
        "anyOf",
        "items",
        "properties",
        "$ref",
        "enum",
        "maxLength",
        "pattern",
        "not",
        "required",
        "allOf",
    )
    for index in range(count):
        pattern = "".join(rng.choice("ab.*+?{}()[]|\\^$,0123-") for _ in range(rng.randint(5, 60)))
        text = "".join(rng.choice('ab ::="|()*+?[]{}\n\\' + string.ascii_lowercase) for _ in range(80))
        values: list[Any] = [
            1,
            -1,
            10**30,
            "string",
            "object",
            "#",
            "",
            [],
            {},
            None,
            True,
            [{}],
            {"a": {}},
            ["a", 1],
        ]
        schema = {rng.choice(keys): rng.choice(values) for _ in range(rng.randint(1, 5))}
        yield f"random regex {index}", {"regex": pattern}
        yield f"random grammar {index}", {"grammar": "root ::= " + text}
        yield f"random schema {index}", {"json_schema": schema}


def _tools() -> Iterator[Bomb]:
    for count in (10, 300):
        functions = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(count)]
        yield f"{count} tools", {"tools": functions}
        yield f"{count} required tools", {"tools": functions, "tool_choice": "required"}
    yield "a tool named as a tag", {"tools": [{"function": {"name": '</tool_call>\n"\\'}}]}


# Faults of xgrammar that were given numbers, each with inputs of its kind.
KNOWN_FAULTS: dict[str, list[dict[str, Any]]] = {
    "CVE-2025-57809": [  # recursion without end in a grammar
        {"grammar": "root ::= root"},
        {"grammar": "root ::= a\na ::= b\nb ::= a"},
        {"grammar": 'root ::= "" root'},
        {"json_schema": {"$ref": "#"}},
    ],
    "CVE-2025-58446": [  # large grammars, which its optimizer took very long for
        {"grammar": "root ::= " + " | ".join(f'"word {index}"' for index in range(9000))},
        {"grammar": 'root ::= "' + "a" * 200_000 + '"'},
        {"json_schema": {"enum": [f"value {index}" for index in range(20_000)]}},
    ],
    "CVE-2026-25048": [  # nesting that exhausts the stack
        {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
        {"regex": "(" * 9_000 + "a" + ")" * 9_000},
        {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    ],
}

BOMBS: list[Bomb] = [*_schemas(), *_references(), *_patterns(), *_grammars(), *_tools(), *_random(40)]


def main() -> None:
    """Compile bombs, or as many different schemas, and print what became of each as JSON."""
    from descant.config.generation_config import FIELDS
    from descant.decoding.grammars.compiler import GrammarCompiler
    from descant.errors import ConfigError
    from tests.support.pretrained import tokenizer

    compiler = GrammarCompiler(tokenizer("smollm2"))
    parse = FIELDS["grammar"].parse
    compiler.compile(parse({"regex": "a", "backend": "auto" if sys.argv[1] == "unique" else sys.argv[1]}))
    before, began = _peak_megabytes(), time.process_time()
    if sys.argv[1] == "unique":
        for index in range(int(sys.argv[2])):
            schema = {"type": "object", "properties": {f"name{index}": {"type": "string"}}, "required": []}
            compiler.compile(parse({"json_schema": schema}))
        print(json.dumps({"cached": len(compiler), **_cost(began, before)}))
        return
    faults = [(name, grammar) for name, grammars in KNOWN_FAULTS.items() for grammar in grammars]
    for name, grammar in faults if sys.argv[2] == "known" else BOMBS[:: int(sys.argv[2])]:
        began, before, error = time.process_time(), _peak_megabytes(), ""
        try:
            grammar = compiler.compile(parse({**grammar, "backend": sys.argv[1]}))
            matcher = grammar.new_matcher()
            compiled = time.process_time() - began
            _use(matcher, grammar)
            outcome, error = "compiled", f"compiled in {compiled:.2f} s"
        except ConfigError as refusal:
            outcome, error = "refused", str(refusal)
        print(
            json.dumps({"name": name, "outcome": outcome, "error": error[:200], **_cost(began, before)}),
            flush=True,
        )


def _use(matcher: Any, grammar: Any) -> None:
    """A few steps of a compiled grammar: its masks are made then."""
    import numpy as np

    from descant.decoding.grammars.backend import UnsupportedGrammar

    masks = np.zeros((1, grammar.backend.mask_width), np.uint32)
    for step in range(4):
        try:
            grammar.backend.fill_masks([matcher], masks, [0])
        except UnsupportedGrammar:  # a bound of the library, which fails the row
            return
        permitted = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little"))
        if not len(permitted) or not matcher.accept([int(permitted[(7 * step) % len(permitted)])]):
            return
        matcher.forced_tokens()


def _cost(began: float, before: float) -> dict[str, float]:
    return {"seconds": round(time.process_time() - began, 2), "megabytes": round(_peak_megabytes() - before)}


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
