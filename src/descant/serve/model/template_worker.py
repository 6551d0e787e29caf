"""The program that renders chat templates, run by its path in a process with little to lose.

A chat template is a program that comes with a model, from anywhere. Its sandbox keeps it from Python's
insides, and cannot keep it from endless loops and huge texts: one operator on a nested list may take hours,
and no code in the same process can interrupt it. The operating system can. So this process has no environment
variables, opens no files, has a limit of its memory, and is killed when a text takes too much processor time.

It imports nothing of Descant, so that it starts quickly. Messages on its standard streams are JSON after a
length of 8 bytes.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, BinaryIO

# The names under which a message may hold its reasoning; templates read the first or the second.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def read_message(stream: BinaryIO, max_bytes: int) -> bytes | None:
    """The next message; None: there is no other, or it is too long."""
    head = stream.read(8)
    size = int.from_bytes(head, "big")
    if len(head) < 8 or size > max_bytes:
        return None
    body = stream.read(size)
    return body if len(body) == size else None


def write_message(stream: BinaryIO, body: bytes) -> None:
    """Send a message."""
    stream.write(len(body).to_bytes(8, "big") + body)
    stream.flush()


def _restrict(max_bytes: int) -> None:
    """Give up what a template does not need."""
    try:
        import resource
    except ModuleNotFoundError:  # not on this system: the caller's clock is left
        return
    limits = {
        resource.RLIMIT_AS: max_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3,  # the standard streams
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _environment() -> Any:
    """The environment in which transformers renders chat templates: its options, filters and functions."""
    import jinja2
    import jinja2.constants
    import jinja2.debug
    from jinja2 import ext, nodes, sandbox

    class GenerationTag(ext.Extension):
        """`{% generation %}`, which marks what the assistant has written and changes nothing here."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> Any:
            return caller()

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raiser(jinja2),
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _TemplateDict(),
        "namespace": _namespace_type(jinja2),
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raiser(jinja2: ModuleType) -> Any:
    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(message)

    return raise_exception


class _TemplateDict:
    """`dict` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _namespace_type(jinja2: ModuleType) -> Any:
    class TemplateNamespace(jinja2.utils.Namespace):  # type: ignore[name-defined,misc]
        """A namespace without names of Python's insides."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                _check_name(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: Any, value: Any) -> None:
            _check_name(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace must not have the name {name!r}")

    return TemplateNamespace


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under both names that templates read."""
    found = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


# Modules that are imported at their first use must be there before no file can be opened any more.
_WARM_UP = (
    "{{ 'a\\n' | tojson(indent=1) | pprint | urlize | wordwrap }}{{ strftime_now('%c') }}{{ lipsum(1) }}"
    "{{ 'a'.encode() }}{{ ['b', 'a'] | sort | groupby('x') | list | random }}{{ none.x.y }}"
)


def _names_read(environment: Any, template: str) -> frozenset[str]:
    """The variables that a template reads."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


class _Renderer:
    """Renders the texts of messages."""

    def __init__(self, max_chars: int) -> None:
        environment = _environment()
        self._compile = lru_cache(maxsize=4)(environment.from_string)
        self._names = lru_cache(maxsize=4)(partial(_names_read, environment))
        self._max_chars = max_chars
        self.answer(json.dumps({"template": _WARM_UP, "variables": {"messages": []}}).encode())

    def answer(self, body: bytes) -> dict[str, Any]:
        """The text of a message, or what is wrong with it."""
        try:
            request = json.loads(body)
            variables = request["variables"]
            variables["messages"] = [_with_reasoning(message) for message in variables["messages"]]
            template = request["template"]
            unread = [name for name in variables if name not in self._names(template)]
            text = self._compile(template).render(variables)
        except MemoryError:
            return {"error": "it needs too much memory", "is_spent": True}
        except RecursionError:
            return {"error": "it is nested too deeply"}
        except Exception as error:  # a template is a program that may raise anything
            return {"error": _shown(error)}
        if len(text) > self._max_chars:
            return {"error": f"its text must have at most {self._max_chars} characters"}
        return {"text": text, "unread": unread}


def _shown(error: Exception) -> str:
    """The first line of an error; a long one is cut."""
    if isinstance(error, OSError | ImportError):
        return type(error).__name__  # its text has a path of this machine
    try:
        lines = str(error)[:1000].splitlines()
    except Exception:
        lines = []
    return (lines[0] if lines else type(error).__name__)[:200]


def main() -> None:
    """Render until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    begin = read_message(source, 2**20)
    if begin is None:
        return
    options = json.loads(begin)
    sys.path[:] = options["path"]
    renderer = _Renderer(options["max_chars"])
    _restrict(options["max_memory"])
    write_message(target, b"{}")
    while (body := read_message(source, options["max_message"])) is not None:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, options["cpu_seconds"])  # its signal ends the process
        answer = renderer.answer(body)
        encoded = json.dumps(answer).encode()
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(target, encoded)


if __name__ == "__main__":
    main()
