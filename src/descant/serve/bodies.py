"""The bodies of chats, completions, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from descant.config.registry import DRAFTER_FIELDS
from descant.serve.http.errors import ApiError, invalid_value

_MAX_ERRORS: Final = 64  # of a body, that are looked at
StopText = Annotated[str, Field(max_length=1024)]
Label = Annotated[str, Field(max_length=512)]


class Body(BaseModel):
    """A JSON object; null counts as not given."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data


Item = TypeVar("Item")
# One error is enough: a list of very many wrong items would have as many.
Items = Annotated[list[Item], Field(fail_fast=True)]
BodyType = TypeVar("BodyType", bound=Body)


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # with `include_usage`: in every chunk, as load tools ask for
    include_obfuscation: Literal[False] = False  # nothing is padded here

    @property
    def usage_in_chunks(self) -> bool:
        """Whether every chunk has the tokens used so far."""
        return self.include_usage and self.continuous_usage_stats


_GRAMMAR_FIELDS: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# Names of the engine, and the fields that may stand for them.
_FIELD_NAMES: Final = {
    "max_new_tokens": ("max_output_tokens", "max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
    "num_return_sequences": ("n",),
    "stop_strings": ("stop",),
    "eos_token_id": ("ignore_eos",),
    "grammar": ("structured_outputs", *_GRAMMAR_FIELDS, "response_format", "text", "tools"),
    "prompt": ("messages", "input"),
    "prompt_tokens": ("prompt", "messages", "input"),
    "request": ("prompt", "messages", "input"),
    "step_tokens": (
        *(*DRAFTER_FIELDS, "num_assistant_tokens"),
        *("num_beams", "best_of", "n"),
    ),
    "rows": ("num_beams", "best_of", "n"),
}


class StructuredOutputs(Body):
    """The constraint of the text, in the form of vLLM: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def as_grammar(self) -> dict[str, Any]:
        """The same as a value of `grammar`."""
        kinds = {
            "json_schema": {"type": "object"} if self.json_object else self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        given = {kind: value for kind, value in kinds.items() if value is not None}
        if len(given) != 1 or (self.json_object and self.json_ is not None):
            message = (
                "`structured_outputs` must have exactly one of json, regex, choice, grammar, json_object"
            )
            raise invalid_value("structured_outputs", message)
        return given


class GenerationBody(Body):
    """The fields that chat and text completions share; others are generation parameters."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Labels of the client, without an effect here.
    user: str | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Names of vLLM, which its clients and load tools send.
    ignore_eos: bool = False  # an end token does not end the text
    min_tokens: int | None = Field(None, ge=0)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # the last ones to keep; -1: as many as fit
    use_beam_search: bool = False  # with `best_of` or else `n` beams
    best_of: int | None = Field(None, ge=1)
    skip_special_tokens: bool = True
    include_stop_str_in_output: Literal[False] = False
    structured_outputs: StructuredOutputs | None = None  # the newer form of the `guided_` fields
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Descant's own.
    return_token_ids: bool = False  # beside the texts
    trace: bool = False  # record the run
    priority: int | None = None  # lower is sooner, never sooner than 0
    cache_salt: str | None = None  # only requests of the same key with the same salt share cached prefixes
    negative_prompt: str | None = None  # of `guidance_scale`

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "`stream_options` has no use without `stream`", param="stream_options")
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "`truncate_prompt_tokens` must be -1 or >= 1, got 0"
            raise invalid_value("truncate_prompt_tokens", message)
        return self

    @property
    def extra_parameters(self) -> dict[str, Any]:
        """The parameters given beside the declared fields; -1 stands for "off" in vLLM's `top_k`."""
        extra = dict(self.model_extra or {})
        if extra.get("top_k") == -1:
            del extra["top_k"]
        return extra

    def parameters(self) -> dict[str, Any]:
        """The generation parameters of the declared fields, by their names in `GenerationConfig`."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_strings": self.stop if isinstance(self.stop, str) else self.stop or None,
            "seed": None if self.seed == -1 else self.seed,  # -1 stands for "none" in vLLM
            "logit_bias": self.logit_bias or None,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "max_new_tokens": self.max_tokens,
            "num_return_sequences": self.n if self.n > 1 else None,
            "min_new_tokens": self.min_tokens or None,
            "grammar": self._guided_grammar(),
            "num_beams": self._num_beams(),
        }
        if values["num_beams"] == 1 and self.temperature != 0 and "do_sample" not in self.extra_parameters:
            values["do_sample"] = False  # a search with one beam is greedy
        given = {name: value for name, value in values.items() if value is not None}
        return {**given, "eos_token_id": None} if self.ignore_eos else given

    @property
    def field_names(self) -> dict[str, str]:
        """The fields of this body by the names that errors of the engine have for them."""
        given = self.model_fields_set | (self.model_extra or {}).keys()
        names = {"negative_prompt_ids": "negative_prompt"}
        for name, own_names in _FIELD_NAMES.items():
            if name not in given or name == "max_tokens":  # the others come before it
                found = next((own_name for own_name in own_names if own_name in given), None)
                names |= {} if found is None else {name: found}
        if self.use_beam_search and "num_beams" not in given:
            names["num_beams"] = "best_of" if self.best_of is not None else "n"
        return names

    def _num_beams(self) -> int | None:
        """The number of beams by vLLM's fields; None: they name none."""
        if not self.use_beam_search:
            if self.best_of not in (None, self.n):
                message = "`best_of` must equal `n` without `use_beam_search`"
                raise ApiError(400, message, param="best_of", code="unsupported_parameter")
            return None
        beams = self.best_of or self.n
        if beams < self.n:
            raise invalid_value("best_of", f"`best_of` must be >= `n`, got {beams} and {self.n}")
        return beams

    def _guided_grammar(self) -> dict[str, Any] | None:
        """The grammar of `structured_outputs`, or of an older field that says the same."""
        guided = {name.removeprefix("guided_"): getattr(self, name) for name in _GRAMMAR_FIELDS}
        forms = [StructuredOutputs(**{kind: value}) for kind, value in guided.items() if value is not None]
        forms += [] if self.structured_outputs is None else [self.structured_outputs]
        if len(forms) > 1:
            message = "only one of the `guided_` fields and `structured_outputs` may be given"
            raise ApiError(400, message, param="guided_json")
        return forms[0].as_grammar() if forms else None


def parse_body(kind: type[BodyType], data: Any) -> BodyType:
    """A body of that kind, or the error that names the field and what it must be."""
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(data).__name__}", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _field_error(error, data) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _field_error(error: ValidationError, data: Any) -> ApiError:
    """The error of a body at the innermost place: of several types, the one that the value is most like."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_ERRORS]
    paths = [_path_in(data, problem["loc"]) for problem in found]
    deepest = max(paths, key=len)
    same = [problem for problem, path in zip(found, paths, strict=True) if path == deepest]
    kind, path = same[0]["type"], ".".join(deepest) or "body"
    code = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}.get(kind)
    if kind == "extra_forbidden":
        return ApiError(400, f"`{path}` is not supported: leave it out", param=path, code=code)
    text = ", or: ".join(dict.fromkeys(problem["msg"] for problem in same))
    return ApiError(400, f"`{path}`: {text}", param=path, code=code or "invalid_value")


def _path_in(data: Any, loc: Sequence[Any]) -> tuple[str, ...]:
    """The place of an error in a body, without the names of the types that were tried."""
    path = []
    for part in loc:
        if (isinstance(data, Mapping) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]
        elif isinstance(data, Mapping) and part == loc[-1]:  # what is missing
            data = None
        else:
            continue
        path.append(str(part))
    return tuple(path)


_PART_TYPES: Final = ("text", "input_text", "output_text", "refusal")


def _check_part_type(kind: Any) -> Any:
    if kind in _PART_TYPES:
        return kind
    shown = str(kind)[:40]
    must = f"must be one of {', '.join(_PART_TYPES)}: this server takes no images, sounds and files"
    raise PydanticCustomError(
        "part_type", "{must}, got {got}. Leave the part out", {"must": must, "got": shown}
    )


class TextPart(Body):
    """A part of a message; hints of other services, such as `cache_control`, have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        Literal["text", "input_text", "output_text", "refusal"], BeforeValidator(_check_part_type)
    ]
    text: str = ""
    refusal: str = ""


class FunctionCall(Body):
    """The function of a tool call; its arguments are JSON text."""

    name: str
    arguments: str = "{}"


class MessageToolCall(Body):
    """A call that the assistant has made."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its newer name
    # Of answers, which clients send back; they are not shown to the model.
    id: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Its content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal for part in self.content or ())


class FunctionTool(Body):
    """A function that may be called."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The function of a tool choice."""

    name: str


class ToolChoice(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolList(Body):
    """The tools of which some may be called."""

    mode: Literal["auto", "required"]
    tools: Items[ToolChoice]


class AllowedTools(Body):
    """A choice among some of the tools, of which the model sees all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class JsonSchemaFormat(Body):
    """A schema of the answer."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(GenerationBody):
    """A conversation to continue."""

    model_config = ConfigDict(extra="allow")

    messages: Items[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=100)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None  # the old form of tools
    reasoning_effort: str | None = None  # a variable of the chat template
    verbosity: str | None = None  # another
    enable_thinking: bool | None = None  # another
    separate_reasoning: bool = True  # False: the thought is part of the content
    include_reasoning: bool = True  # False: the thought is left out of the answer
    parallel_tool_calls: bool = True
    store: Literal[False] = False
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        names = "reasoning_effort", "verbosity", "enable_thinking"
        own = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in own.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "`top_logprobs` has no use without `logprobs`", param="top_logprobs")
        if self.continue_final_message and "add_generation_prompt" in self.model_fields_set:
            message = "`add_generation_prompt` must not be given with `continue_final_message`"
            raise invalid_value("add_generation_prompt", message)
        return self

    def parameters(self) -> dict[str, Any]:
        """The generation parameters of the declared fields, by their names in `GenerationConfig`."""
        values = super().parameters()
        if self.max_completion_tokens is not None:
            values["max_new_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values


class CompletionBody(GenerationBody):
    """Prompts to continue: texts, or token ids."""

    model_config = ConfigDict(extra="allow")

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(union_mode="left_to_right")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=100)
    suffix: Literal[""] = ""
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def parameters(self) -> dict[str, Any]:
        """The generation parameters of the declared fields, by their names in `GenerationConfig`."""
        values = super().parameters()
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
        if self.echo and self.max_tokens == 0:
            values["max_new_tokens"] = 1  # the least that a request generates; it is not returned
        return values


class TokenizeBody(Body):
    """A text or a conversation, whose tokens are returned."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "either `prompt` or `messages` must be given", param="prompt")
        form, others = ("messages", {"add_special_tokens"})
        if self.prompt is not None:
            form, others = "prompt", {"tools", "add_generation_prompt", "chat_template_kwargs"}
        for name in sorted(others & self.model_fields_set):
            raise ApiError(400, f"`{name}` has no use with `{form}`: leave it out", param=name)
        return self


class DetokenizeBody(Body):
    """Tokens whose text is returned."""

    model: str | None = None
    tokens: Items[int]
