"""`/v1/completions`."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from descant.engine.protocol import TokenLogprobs
from descant.serve.bodies import CompletionBody, GenerationBody, ResponseFormat, parse_body
from descant.serve.http.errors import invalid_value
from descant.serve.model.served_model import BodyParameters, ServedModel
from descant.serve.routes.chat import finite_logprob, format_grammar
from descant.serve.routes.generation import ChoiceUpdate, GenerationCall, PromptRun, sequence_logprobs


@dataclass
class CompletionLogprobs:
    """The `logprobs` of a text completion, whose offsets count from the beginning of its text."""

    model: ServedModel
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    # A character may have several tokens; it counts with the last of them.
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore")
    )

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token; the first of a prompt has no log-probability."""
        text = self.model.token_text(token)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        if token not in self.model.token_bytes.special_ids:  # which the text leaves out
            self.offset += len(self.characters.decode(self.model.token_data(token)))
        if logprobs is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite_logprob(logprobs.raw))
        # Tokens with the same text: the first is the more probable.
        top: dict[str, float] = {}
        for other, raw, _ in logprobs.top:
            top.setdefault(self.model.token_text(other), finite_logprob(raw))
        top.setdefault(text, finite_logprob(logprobs.raw))
        self.top_logprobs.append(top)

    def take(self) -> dict[str, Any]:
        """The entries so far as JSON values; further ones begin anew behind them."""
        data = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return data


@dataclass
class _Completion:
    """One text as it grows."""

    run: PromptRun
    logprobs: CompletionLogprobs | None
    text: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # of its log-probabilities, piece by piece
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    held: list[ChoiceUpdate] = field(default_factory=list)  # that wait for the prompt's log-probabilities


class CompletionCall(GenerationCall):
    """The prompts of one request on their way through the engine."""

    body: CompletionBody
    body_type: ClassVar[type[GenerationBody]] = CompletionBody
    is_chat = False
    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    async def encode(self) -> list[PromptRun]:
        """The runs of the prompts."""
        body, most = self.body, self.model.settings.max_prompts
        if len(body.prompts) > most or not body.prompts:
            raise invalid_value("prompt", f"`prompt` must hold 1 to {most} prompts, got {len(body.prompts)}")
        if body.trace and len(body.prompts) > 1:
            raise invalid_value("trace", "`trace` must have one prompt")
        form = None if body.response_format is None else parse_body(ResponseFormat, body.response_format)
        parameters = self.read_parameters(format_grammar(form))
        if self.model.settings.log_prompts:
            self.state.prompt = body.prompts
        # In a thread: so many prompts may be long, each with texts to encode and parameters to merge.
        return await self.model.in_encoder_thread(partial(self._encode_all, parameters))

    def _encode_all(self, parameters: BodyParameters) -> list[PromptRun]:
        model, body, encoder = self.model, self.body, self.model.prompts
        room = parameters.prompt_room(body.truncate_prompt_tokens)
        prompts = [
            encoder.text(prompt, room, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else encoder.ids(prompt, room)
            for prompt in body.prompts
        ]
        negative = model.encode_negative(body, room.limit)
        return self.make_runs(parameters, prompts, negative, body.logprobs if body.echo else None)

    def new_choice(self, run: PromptRun) -> _Completion:
        """A text before its first token."""
        return _Completion(run, None if self.body.logprobs is None else CompletionLogprobs(self.model))

    def piece(self, choice: _Completion, update: ChoiceUpdate) -> dict[str, Any]:
        """The next piece of a text; the prompt comes first where it is echoed."""
        if self.body.echo and choice.logprobs is not None:
            # The prompt's log-probabilities are first and known last.
            choice.held.append(update)
            if update.finish_reason is None:
                return {}
            update = _joined(choice.held)
        if self._is_scoring:
            update = update._replace(text="", tokens=(), logprobs=())
        text = update.text
        if self.body.echo and not choice.text:
            text = self._echo(choice) + text
        piece: dict[str, Any] = {}
        if choice.logprobs is not None:
            for token, entry in zip(update.tokens, update.logprobs, strict=True):
                choice.logprobs.add(token, entry)
            piece["logprobs"] = choice.logprobs.take()
            choice.entries.append(piece["logprobs"])
        if self.body.return_token_ids:
            choice.token_ids += update.tokens
            piece["token_ids"] = list(update.tokens)
        if text or update.finish_reason is not None:
            choice.text.append(text)
            piece["text"] = text
        if update.finish_reason is not None:
            choice.finish_reason = piece["finish_reason"] = update.finish_reason
        return piece

    def _echo(self, choice: _Completion) -> str:
        """The text of the prompt; its tokens are added to the log-probabilities."""
        ids = list(choice.run.request.prompt)
        if choice.logprobs is not None:
            for token, entry in zip(ids, (None, *sequence_logprobs(choice.run.prompt_logprobs)), strict=True):
                choice.logprobs.add(int(token), entry)
        return self.model.prompts.decode(ids, skip_special_tokens=True)

    @property
    def _is_scoring(self) -> bool:
        """Whether only the prompt is wanted, so that the one token that is generated is dropped."""
        return self.body.echo and self.body.max_tokens == 0

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens used so far."""
        usage = super().usage
        return (
            {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            if self._is_scoring
            else usage
        )

    def choice_json(self, index: int, choice: _Completion) -> dict[str, Any]:
        """A whole text."""
        answer = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": None if choice.logprobs is None else _join_entries(choice.entries),
            "finish_reason": choice.finish_reason,
        }
        if self.body.return_token_ids:
            answer |= {"token_ids": choice.token_ids, "prompt_token_ids": list(choice.run.request.prompt)}
        return answer

    def chunk_json(self, index: int, piece: dict[str, Any]) -> dict[str, Any]:
        """A piece of a text."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None, **piece}


def _joined(updates: list[ChoiceUpdate]) -> ChoiceUpdate:
    """Several updates of one sequence as one."""
    return updates[-1]._replace(
        text="".join(update.text for update in updates),
        tokens=tuple(token for update in updates for token in update.tokens),
        logprobs=tuple(entry for update in updates for entry in update.logprobs),
    )


def _join_entries(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry for piece in pieces for entry in piece[name]] for name in names}
