"""Calls of huggingface_hub with a deadline and errors of one line."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from descant.errors import HubError, printable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = [
    "LOGIN_HINT",
    "ONLINE_HINT",
    "AuthToken",
    "call_hub",
    "disable_progress_bars",
    "hub_api",
    "is_offline",
]

AuthToken = str | bool | None
Answer = TypeVar("Answer")

ONLINE_HINT: Final = "run it once without HF_HUB_OFFLINE"
LOGIN_HINT: Final = "pass token=..., set HF_TOKEN, or run `hf auth login`"
_CACHE_HINT: Final = "try again, or use what is cached with HF_HUB_OFFLINE=1"


def hub_api() -> HfApi:
    """A client with the current endpoint."""
    from huggingface_hub import HfApi

    return HfApi(library_name="descant")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def call_hub(repo: str, call: Callable[[], Answer]) -> Answer:
    """The result of a call of huggingface_hub; any exception or timeout is a HubError.

    huggingface_hub has no deadline, and its retries can take minutes. The call runs in a thread that is
    stopped at the timeout, so that a call that failed here has no later effect.
    """
    timeout = _call_timeout()
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # all of it becomes the caller's HubError
            answers.put((None, error))

    thread = threading.Thread(target=run, name="descant-hub", daemon=True)
    thread.start()
    try:
        answer, error = answers.get(timeout=timeout)
    except BaseException as late:  # timeout, or an interrupt of the waiting thread
        _cancel_thread(thread)
        if not isinstance(late, queue.Empty):
            raise
        do = "try again, or give it longer with HF_HUB_DOWNLOAD_TIMEOUT"
        raise HubError(repo, f"no answer after {timeout:g} s: {do}") from None
    if isinstance(error, HubError):
        raise error
    if error is not None:
        raise HubError(repo, _describe_error(error)) from error
    return answer  # type: ignore[no-any-return]


class _ThreadCancelled(SystemExit):
    """Ends an abandoned thread; threads do not report a SystemExit."""


def _cancel_thread(thread: threading.Thread) -> None:
    """Raise in a thread as soon as it runs Python code again."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_ThreadCancelled)
        )


def _call_timeout() -> float:
    """The timeout of one call in seconds: three times that of one packet."""
    from huggingface_hub import constants

    return 3.0 * max(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _describe_error(error: BaseException) -> str:
    """The failure in one line, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _describe_error(error.__cause__)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"the client is offline; {ONLINE_HINT}"
    for error_type, reason in (
        (errors.GatedRepoError, f"it is gated: ask for access on its page, and {LOGIN_HINT}"),
        (
            errors.RepositoryNotFoundError,
            f"no such repository, or it is private: check the name, or {LOGIN_HINT}",
        ),
        (errors.RevisionNotFoundError, "no such revision: look at its branches, tags and commits"),
        (errors.EntryNotFoundError, "no such file at this commit"),
    ):
        if isinstance(error, error_type):
            return reason
    message = printable(str(getattr(error, "server_message", None) or error).strip().split("\n")[0])
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the token may not do this (status {status}): {LOGIN_HINT}"
    if status is not None:
        return f"the Hub answered with status {status} ({message}): try again later"
    class_names = {base.__name__ for base in type(error).__mro__}  # independent of the HTTP library
    if any("Timeout" in name for name in class_names):
        return f"the Hub did not answer in time: {_CACHE_HINT}"
    if "TransportError" in class_names or isinstance(error, ConnectionError):
        return f"the Hub cannot be reached ({message}): {_CACHE_HINT}"
    return f"{type(error).__name__}: {message}"


def disable_progress_bars() -> contextlib.AbstractContextManager[object]:
    """Disable progress bars, unless HF_HUB_DISABLE_PROGRESS_BARS is set."""
    from huggingface_hub import constants, utils

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        return contextlib.nullcontext()
    return utils.disable_progress_bars()  # type: ignore[attr-defined]
