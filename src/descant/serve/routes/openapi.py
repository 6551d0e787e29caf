"""`/openapi.json`: the API as a schema, for client generators and fuzzers."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

import descant
from descant.config.generation_config import FIELDS
from descant.serve.json_response import JsonResponse
from descant.serve.schema.chat import ChatBody
from descant.serve.schema.completion import CompletionBody, DetokenizeBody, TokenizeBody
from descant.serve.schema.responses import ResponsesBody

__all__ = ["openapi"]

_BODIES: Final[dict[str, type[BaseModel]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_READ_PATHS: Final = ("/v1/models", "/health", "/ready", "/metrics")
_OPEN_PATHS: Final = ("/health", "/ready")
_REFERENCES: Final = "#/components/schemas/{model}"


@cache
def openapi_document() -> dict[str, Any]:
    """The document; it does not depend on the model."""
    schemas: dict[str, Any] = {"Error": _error_schema()}
    paths: dict[str, Any] = {}
    for path, body in _BODIES.items():
        schema = body.model_json_schema(ref_template=_REFERENCES)
        schemas |= schema.pop("$defs", {})
        if schema.pop("additionalProperties", False):
            # Every generation parameter may be given beside the declared fields.
            known = schema["properties"]
            known |= {name: {"description": one.doc} for name, one in FIELDS.items() if name not in known}
            schema["additionalProperties"] = False
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"$ref": _REFERENCES.format(model=body.__name__)}}}
        paths[path] = {
            "post": {"requestBody": {"required": True, "content": content}, "responses": _responses(path)}
        }
    for path in _READ_PATHS:
        paths[path] = {"get": {"responses": _responses(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Descant", "version": descant.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


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


async def openapi(http: HttpRequest) -> JsonResponse:  # noqa: ARG001
    """The document."""
    return JsonResponse(openapi_document())
