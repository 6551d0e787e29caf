"""Chat templates that try to leave their sandbox, and templates that never end."""

from __future__ import annotations

import random

# ruff: noqa: E501

__all__ = ["BOMBS", "COMPILE_BOMBS", "INJECTIONS", "random_template"]

# Each must fail, or give a text without anything of Python's insides.
INJECTIONS = (
    "{{ ''.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ ''['__class__'] }}",
    "{{ messages.__class__ }}", "{{ messages.__init__.__globals__ }}", "{{ [].__class__.__base__ }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}", "{{ {}.__class__.fromkeys }}",
    "{{ self.__init__.__globals__ }}", "{{ self._TemplateReference__context }}", "{{ self.__dict__ }}",
    "{{ namespace.__init__.__globals__ }}", "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ joiner.__init__.__globals__ }}", "{{ lipsum.__globals__ }}", "{{ lipsum.__globals__['os'].popen('id') }}",
    "{{ range.__class__ }}", "{{ dict.__class__.__mro__ }}", "{{ dict.fromkeys.__func__.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__globals__['sys'] }}", "{{ strftime_now.__code__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}", "{{ '{0.__globals__}'.format(raise_exception) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}", "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{{ ''|attr('__class__') }}", "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}", "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}", "{{ ['']|groupby('__class__') }}", "{{ ['']|sum(attribute='__class__') }}",
    "{{ messages|selectattr('__class__')|list }}", "{% for x in [1] recursive %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% include 'SECRET' %}", "{% import 'SECRET' as x %}{{ x }}", "{% extends 'SECRET' %}",
    "{{ messages.append(1) }}{{ messages.clear() }}", "{{ messages[0].update({'a': 1}) }}",
    "{{ config }}{{ request.environ }}{{ environ }}{{ os.environ }}", "{{ __import__('os').environ }}{{ open('SECRET').read() }}",
    "{{ (1).__class__.__bases__ }}", "{{ (messages|tojson).__class__ }}", "{{ undefined_name.__class__ }}",
    "{{ context.parent }}{{ environment.globals }}", "{{ (x for x in messages) }}",
)  # fmt: skip

# `n` is the number of messages, 1: so nothing is known before the template runs.
_DOUBLED = "{% set ns = namespace(x=[n]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
_TEXT = "{% set ns = namespace(x='x' * n) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
_LOOPS = "{% for a in range(99999 * n) %}{% for b in range(99999) %}"
BOMBS = (
    _LOOPS + "{% endfor %}{% endfor %}", _LOOPS + "{{ a }}{% endfor %}{% endfor %}",
    "{% for a in range(99999 * n) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for a in range(99999 * n) %}{{ range(99999)|list|sort|length }}{% endfor %}",
    "{{ 'x' * (10 ** 10 * n) }}", "{{ [0] * (10 ** 9 * n) }}", "{{ ('x' * (10 ** 8 * n))|length ~ ('y' * (10 ** 9 * n)) }}",
    "{{ (10 * n) ** (10 ** 9) }}", "{{ 7 ** (7 * n) ** 7 ** 7 }}", "{{ ((9 * n) ** 99999) ** 999 % 7 }}",
    "{{ ((9 * n) ** 9999999)|string }}", "{{ '%1000000000d' % n }}", "{{ ('%' ~ (10 ** 9 * n) ~ 'd') % 1 }}",
    "{{ '%0999999999.999999999f'|format(n) }}", "{{ '{:>1000000000}'.format(n) }}", "{{ '{:1000000000d}'.format(n) }}",
    "{{ 'x'.ljust(10 ** 10 * n) }}", "{{ 'x'.center(10 ** 10 * n) }}", "{{ 'x'|center(10 ** 10 * n) }}", "{{ 'x'.zfill(10 ** 10 * n) }}",
    "{{ ('\t' * 10000 * n).expandtabs(10 ** 6) }}", "{{ ('a' * 100000 * n).replace('a', 'b' * 100000) }}",
    "{{ ('b' * 100000).join(('a' * 100000 * n)|list) }}", "{{ ('a' * 50000 * n)|replace('', 'c' * 50000) }}",
    "{{ 'x'|indent(10 ** 10 * n, true) }}", "{{ ('x\n' * 100000 * n)|indent(100000) }}", "{{ messages|tojson(indent=10 ** 10 * n) }}",
    "{{ [[n]]|tojson(indent='x' * 10 ** 9) }}", _DOUBLED + "{{ ns.x }}", _DOUBLED + "{{ ns.x|tojson }}", _DOUBLED + "{{ ns.x|string|length }}",
    "{% set ns = namespace(x=[n], y=[n]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    "{% endfor %}{{ ns.x == ns.y }}",
    _TEXT + "{{ ns.x }}", _TEXT.replace("ns.x ~ ns.x", "ns.x + ns.x") + "{{ ns.x|length }}",
    "{% set ns = namespace(x=[n]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(n) }}",
    "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60 * n) }}",
    "{% set x = [[n]] %}{% for a in x recursive %}{{ loop([x[0]]) }}{% endfor %}",
    "{{ lipsum(n=10 ** 8 * n) }}", "{{ range(99999 * n)|batch(1)|map('join')|map('list')|map('sort')|list * 10000 }}",
    "{{ range(99999 * n)|map('string')|join('x' * 99999) }}", "{{ range(99999 * n)|slice(99999)|list * 1000 }}", "{{ ('a ' * 10 ** 6 * n)|wordwrap(1)|urlize|title|wordcount }}",
    "{{ ('http://a.b ' * 10 ** 6 * n)|urlize }}", "{{ ('<' * 10 ** 6 * n)|striptags }}", "{{ ('(' * 10 ** 6 * n)|urlize }}",
    "{{ 'x'.encode().hex() * (10 ** 10 * n) }}", "{{ n.to_bytes(10 ** 10, 'big') }}", "{{ (n).from_bytes(('\xff' * 10 ** 6).encode()) ** 999 }}",
    "{% for i in range(99999 * n) %}{% set x = 'a' * 10 ** 8 %}{% endfor %}",
)  # fmt: skip

# These do their harm before the template runs, when its constants are folded or its text is read.
COMPILE_BOMBS = (
    "{{ 'x' * 10 ** 10 }}", "{{ 10 ** 9 ** 9 }}", "{{ 9 ** (9 ** 9) }}", "{{ [1] * 10 ** 9 }}", "{{ '%1000000000d' % 1 }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 90000 + " }}", "{{ " + "-" * 50000 + "1 }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ 1" + "|upper" * 20000 + " }}", "{{ " + "x." * 20000 + "x }}",
    "{{ " + "1+" * 30000 + "1 }}", "{{ " + "'a'~" * 30000 + "1 }}", "{% for a in b %}" * 1000 + "{% endfor %}" * 1000,
    "{#" * 100000, "{{ '" + "\\x41" * 300000 + "' }}", "{% raw %}" * 50000,
)  # fmt: skip

_ATOMS = (
    "messages",
    "n",
    "'x'",
    "range(9)",
    "[1, 2]",
    "{'a': 1}",
    "none",
    "loop",
    "ns",
    "1.5",
    "'é'",
    "10 ** 6",
    "dict",
    "cycler",
)
_FILTERS = ("list", "tojson", "length", "join('x')", "sort", "upper", "string", "batch(2)", "unique", "sum", "map('string')", "center(99999)",
            "pprint", "e", "random", "trim", "first", "items", "dictsort", "format(1)", "wordwrap(3)", "attr('__class__')")  # fmt: skip
_OPERATORS = ("+", "*", "~", "**", "%", "==", "in", "and", "//", "<")


def random_template(rng: random.Random, depth: int = 0) -> str:
    """A template of random parts, most of which make no sense."""
    kind = rng.randrange(6 if depth < 4 else 2)
    if kind == 0:
        return rng.choice(("a", "\n", "{{", "%}", "{# x #}", "{%- -%}"))
    if kind == 1:
        return "{{ " + _expression(rng) + " }}"
    inner = "".join(random_template(rng, depth + 1) for _ in range(rng.randint(1, 3)))
    if kind == 2:
        return "{% for loop_item in " + _expression(rng) + " recursive %}" + inner + "{% endfor %}"
    if kind == 3:
        return "{% if " + _expression(rng) + " %}" + inner + "{% else %}" + inner + "{% endif %}"
    if kind == 4:
        return "{% set ns = " + _expression(rng) + " %}" + inner
    return "{% macro f(x) %}" + inner + "{% endmacro %}{{ f(" + _expression(rng) + ") }}"


def _expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(5 if depth < 3 else 1)
    if kind < 2:
        return rng.choice(_ATOMS)
    if kind == 2:
        return f"({_expression(rng, depth + 1)})|{rng.choice(_FILTERS)}"
    if kind == 3:
        return f"({_expression(rng, depth + 1)} {rng.choice(_OPERATORS)} {_expression(rng, depth + 1)})"
    return f"{rng.choice(_ATOMS)}[{_expression(rng, depth + 1)}]"
