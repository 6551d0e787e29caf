"""huggingface_hub, asked so that it answers within seconds or fails in one line."""

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
    """A client that knows the endpoint as it is set now."""
    from huggingface_hub import HfApi

    return HfApi(library_name="descant")


def is_offline() -> bool:
    """Whether the user has told the client to stay offline."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def call_hub(repo: str, call: Callable[[], Answer]) -> Answer:
    """What a call of huggingface_hub answers; anything that it raises, and its silence, is a HubError.

    Its retries and a server that trickles can take minutes, and it knows no deadline: it runs in a thread
    that is stopped when the time is over, so that what has failed here does not happen later after all.
    """
    patience = _call_timeout()
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # all of it becomes the caller's HubError
            answers.put((None, error))

    thread = threading.Thread(target=run, name="descant-hub", daemon=True)
    thread.start()
    try:
        answer, error = answers.get(timeout=patience)
    except BaseException as late:  # the time is over, or whoever waits is interrupted
        _cancel_thread(thread)
        if not isinstance(late, queue.Empty):
            raise
        do = "try again, or give it longer with HF_HUB_DOWNLOAD_TIMEOUT"
        raise HubError(repo, f"no answer after {patience:g} s: {do}") from None
    if isinstance(error, HubError):
        raise error
    if error is not None:
        raise HubError(repo, _describe_error(error)) from error
    return answer  # type: ignore[no-any-return]


class _ThreadCancelled(SystemExit):
    """What ends a thread nobody waits for; of this kind, no thread reports it."""


def _cancel_thread(thread: threading.Thread) -> None:
    """Have a thread raise as soon as it runs Python again: after its sleep, or the packet it waits for."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_ThreadCancelled)
        )


def _call_timeout() -> float:
    """Seconds for one question in all: three times what the client waits for one packet."""
    from huggingface_hub import constants

    return 3.0 * max(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _describe_error(error: BaseException) -> str:
    """What went wrong, in one line, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _describe_error(error.__cause__)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"the client is offline; {ONLINE_HINT}"
    for kind, reason in (
        (errors.GatedRepoError, f"it is gated: ask for access on its page, and {LOGIN_HINT}"),
        (
            errors.RepositoryNotFoundError,
            f"no such repository, or it is private: check the name, or {LOGIN_HINT}",
        ),
        (errors.RevisionNotFoundError, "no such revision: look at its branches, tags and commits"),
        (errors.EntryNotFoundError, "no such file at this commit"),
    ):
        if isinstance(error, kind):
            return reason
    said = printable(str(getattr(error, "server_message", None) or error).strip().split("\n")[0])
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the token may not do this (status {status}): {LOGIN_HINT}"
    if status is not None:
        return f"the Hub answered with status {status} ({said}): try again later"
    kinds = {kind.__name__ for kind in type(error).__mro__}  # of whichever library speaks HTTP for it
    if any("Timeout" in name for name in kinds):
        return f"the Hub did not answer in time: {_CACHE_HINT}"
    if "TransportError" in kinds or isinstance(error, ConnectionError):
        return f"the Hub cannot be reached ({said}): {_CACHE_HINT}"
    return f"{type(error).__name__}: {said}"


def disable_progress_bars() -> contextlib.AbstractContextManager[object]:
    """No progress bars, unless HF_HUB_DISABLE_PROGRESS_BARS has decided already."""
    from huggingface_hub import constants, utils

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        return contextlib.nullcontext()
    return utils.disable_progress_bars()  # type: ignore[attr-defined]
