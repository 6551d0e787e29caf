"""The endpoints beside generation: models, tokens, traces, the page, probes and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import descant
from descant.config.generation_config import FIELDS
from descant.serve.bodies import Body, DetokenizeBody, TokenizeBody, parse_body
from descant.serve.http.errors import ApiError, JsonResponse
from descant.serve.http.request import RequestState, read_json
from descant.serve.http.telemetry import ServerMetrics
from descant.serve.model.prompts import PromptRoom
from descant.serve.model.served_model import ServedModel
from descant.serve.routes.transcriptions import Transcriber
from descant.serve.settings import check_model_name
from descant.trace.records import to_json_line

TokenBody = TypeVar("TokenBody", TokenizeBody, DetokenizeBody)
_MAX_TOKENS: Final = 64 * 2**10  # of a text whose tokens are returned, or more if the context has more


def _model_json(model: ServedModel | Transcriber, name: str) -> dict[str, Any]:
    context = model.max_positions if isinstance(model, ServedModel) else None
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "descant",
        "root": model.settings.model_name,
        "max_model_len": context,
    }


async def list_models(http: HttpRequest) -> JsonResponse:
    """The names of the model."""
    model: ServedModel | Transcriber = http.app.state.model
    data = [_model_json(model, name) for name in model.settings.model_names]
    return JsonResponse({"object": "list", "data": data})


async def show_model(http: HttpRequest) -> JsonResponse:
    """One name of the model."""
    model: ServedModel | Transcriber = http.app.state.model
    name = http.path_params["name"]
    check_model_name(model.settings, name)
    return JsonResponse(_model_json(model, name))


async def tokenize(http: HttpRequest) -> JsonResponse:
    """The tokens of a text or a conversation."""
    model: ServedModel = http.app.state.model
    body = await _read_body(http, TokenizeBody)
    ids = await _encode(model, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_positions, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(lambda: [model.token_text(token) for token in ids])
    return JsonResponse(answer)


async def _read_body(http: HttpRequest, kind: type[TokenBody]) -> TokenBody:
    """The body of a request about tokens, which may name the model."""
    settings = http.app.state.model.settings
    body = parse_body(kind, await read_json(http, settings.max_body_bytes))
    if body.model is not None:
        check_model_name(settings, body.model)
    return body


async def _encode(model: ServedModel, body: TokenizeBody) -> list[int]:
    room = PromptRoom(max(_MAX_TOKENS, model.max_positions or 0))
    if body.prompt is not None:
        special = body.add_special_tokens
        return await model.in_encoder_thread(
            partial(model.prompts.text, body.prompt, room, add_special_tokens=special)
        )
    return await model.encode_chat(
        room,
        body.messages or (),
        body.tools or (),
        variables=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )


async def detokenize(http: HttpRequest) -> JsonResponse:
    """The text of tokens."""
    model: ServedModel = http.app.state.model
    body = await _read_body(http, DetokenizeBody)
    ids = model.prompts.ids(body.tokens) if body.tokens else []
    return JsonResponse({"prompt": await asyncio.to_thread(model.prompts.decode, ids)})


async def health(http: HttpRequest) -> JsonResponse:
    """Whether the process should live: its engine runs."""
    model: ServedModel | Transcriber = http.app.state.model
    is_healthy = model.is_healthy
    return JsonResponse({"status": "ok" if is_healthy else "failed"}, 200 if is_healthy else 503)


async def ready(http: HttpRequest) -> JsonResponse:
    """Whether requests should be sent here: it is healthy and not shutting down."""
    model: ServedModel | Transcriber = http.app.state.model
    is_ready = model.is_healthy and not http.app.state.is_draining
    return JsonResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def metrics(http: HttpRequest) -> Response:
    """Counters, gauges and histograms for Prometheus."""
    source: ServerMetrics = http.app.state.metrics
    return Response(await asyncio.to_thread(source.render), media_type=source.content_type)


async def show_trace(http: HttpRequest) -> Response:
    """A finished trace: as a page, or with `.jsonl` as its records."""
    model: ServedModel = http.app.state.model
    key = RequestState.of(http.scope).key
    assert key is not None
    name: str = http.path_params["name"]
    trace_id, _, kind = name.partition(".")
    if kind not in ("", "jsonl"):
        raise ApiError(404, "there is no such trace", code="trace_not_found")
    trace = model.traces.get(key, trace_id)
    if kind == "jsonl":
        lines = "".join(f"{to_json_line(record)}\n" for record in trace.records)
        return Response(lines, media_type="application/jsonl")
    page = await asyncio.to_thread(trace.html)
    return HTMLResponse(page)


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
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.is_file() and file.name.rpartition(".")[2] in _TYPES
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


_OPEN_PATHS: Final = ("/health", "/ready")
_REFERENCES: Final = "#/components/schemas/{model}"


class ApiRoute(Route):
    """A route with the body that it takes; GET where it takes none."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        body: type[BaseModel] | None = None,
        *,
        include_in_schema: bool = True,
    ) -> None:
        methods = ["GET" if body is None else "POST"]
        super().__init__(path, endpoint, methods=methods, include_in_schema=include_in_schema)
        self.body = body


def openapi_document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The document of the routes of a server."""
    schemas: dict[str, Any] = {"Error": _error_schema()}
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {"responses": _responses(route.path)}
        if route.body is not None:
            schemas |= _body_schemas(route.body)
            media = "application/json" if issubclass(route.body, Body) else "multipart/form-data"
            content = {media: {"schema": {"$ref": _REFERENCES.format(model=route.body.__name__)}}}
            operation = {"requestBody": {"required": True, "content": content}, **operation}
        if route.include_in_schema:
            paths[route.path] = {"get" if route.body is None else "post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Descant", "version": descant.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def _body_schemas(body: type[BaseModel]) -> dict[str, Any]:
    """The schemas of a body and of its parts, by their names."""
    schema = body.model_json_schema(ref_template=_REFERENCES)
    parts: dict[str, Any] = schema.pop("$defs", {})
    if schema.pop("additionalProperties", False):
        # Every generation parameter may be given beside the declared fields.
        known = schema["properties"]
        known |= {name: {"description": field.doc} for name, field in FIELDS.items() if name not in known}
        schema["additionalProperties"] = False
    return {**parts, body.__name__: schema}


def _responses(path: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFERENCES.format(model="Error")}}}
    codes = {"200": {"description": "The answer."}}
    if path in _OPEN_PATHS:
        return {**codes, "503": {"description": "It is not."}}
    names = {"400": "Refused.", "401": "No key.", "404": "No such model.", "408": "It took too long."}
    names |= {"413": "Too large.", "415": "Not JSON.", "429": "Try again later.", "503": "Shutting down."}
    return {**codes, **{code: {"description": text, "content": error} for code, text in names.items()}}


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


async def openapi(http: HttpRequest) -> JsonResponse:
    """The schema of the API, for client generators and fuzzers."""
    return JsonResponse(openapi_document(http.app.routes))
