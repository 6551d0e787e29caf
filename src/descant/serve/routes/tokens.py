"""`/tokenize`, `/detokenize` and `/v1/models`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

from starlette.requests import Request as HttpRequest

from descant.serve.exchange import read_json
from descant.serve.json_response import JsonResponse
from descant.serve.prompts import PromptRoom
from descant.serve.schema.common import parse_body
from descant.serve.schema.completion import DetokenizeBody, TokenizeBody
from descant.serve.served_model import ServedModel
from descant.serve.settings import check_model_name
from descant.serve.transcriber import Transcriber

_MAX_TOKENS: Final = 64 * 2**10  # of a text whose tokens are returned, or more if the context has more

__all__ = ["detokenize", "list_models", "show_model", "tokenize"]


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
    body = parse_body(TokenizeBody, await read_json(http, model.settings.max_body_bytes))
    if body.model is not None:
        check_model_name(model.settings, body.model)
    ids = await _encode(model, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_positions, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(lambda: [model.token_text(token) for token in ids])
    return JsonResponse(answer)


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
    body = parse_body(DetokenizeBody, await read_json(http, model.settings.max_body_bytes))
    if body.model is not None:
        check_model_name(model.settings, body.model)
    ids = model.prompts.ids(body.tokens) if body.tokens else []
    return JsonResponse({"prompt": await asyncio.to_thread(model.prompts.decode, ids)})
