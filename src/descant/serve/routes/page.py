"""The page at `/`, on which a model can be tried."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from descant.serve.api_errors import ApiError
from descant.serve.served_model import ServedModel

__all__ = ["show_page", "show_page_asset"]

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Whatever a model writes, the browser runs and fetches nothing but the files of the page.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {"cache-control": "no-cache", "content-security-policy": _POLICY}


async def show_page(http: HttpRequest) -> Response:
    """The page itself."""
    model = _model_with_page(http)
    text = _assets()["index.html"].decode()
    # An attribute, because the policy allows no script inside of the page.
    has_traces = "true" if model.settings.traces else "false"
    return _respond("html", text.replace("{{has-traces}}", has_traces).encode())


async def show_page_asset(http: HttpRequest) -> Response:
    """A script or a style of the page."""
    _model_with_page(http)
    name: str = http.path_params["name"]
    content = _assets().get(name)
    if content is None or name == "index.html":
        raise _no_such_path()
    return _respond(name.rpartition(".")[2], content)


@cache
def _assets() -> dict[str, bytes]:
    """The files of the page by name."""
    folder = files("descant.serve").joinpath("page")
    return {
        one.name: one.read_bytes()
        for one in folder.iterdir()
        if one.is_file() and one.name.rpartition(".")[2] in _TYPES
    }


def _model_with_page(http: HttpRequest) -> ServedModel:
    model: ServedModel = http.app.state.model
    if not model.settings.page:
        raise _no_such_path()
    return model


def _no_such_path() -> ApiError:
    return ApiError(404, "there is no such path", code="not_found")


def _respond(kind: str, content: bytes) -> Response:
    return Response(content, headers={**_HEADERS, "content-type": _TYPES[kind]})
