"""The guard of an engine that is used by one caller at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast

from descant.errors import SessionBusy

__all__ = ["single_entry"]

Method = TypeVar("Method", bound=Callable[..., Any])


def single_entry(method: Method) -> Method:
    """The method, which raises `SessionBusy` while this or another guarded method of its object runs.

    An attribute of the object, `_busy_thread`, serves as the lock: no call happens between the test, the
    assignment and `try`, so that neither another thread nor an interrupt can come between them and leave the
    object locked.
    """
    name = getattr(method, "__name__", "call")

    @wraps(method)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if self._busy_thread is not None:
            raise _busy_error(name, self._busy_thread == thread)
        self._busy_thread = thread
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy_thread = None

    return cast(Method, guarded)


def _busy_error(name: str, is_reentrant: bool) -> SessionBusy:
    if is_reentrant:
        must = f"`{name}` must not be called from inside a step, such as by a processor or an observer"
        return SessionBusy(f"{must}: call it between two steps")
    must = f"`{name}` must not be called while another thread is inside the same session"
    return SessionBusy(f"{must}: use one thread, or a lock around every call")
