"""The settings of a server, apart from its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from descant.config.generation_config import GenerationConfig
from descant.errors import ConfigError
from descant.serve.http.errors import ApiError
from descant.serve.http.keys import KeyRing


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names, keys and limits of a server."""

    model_name: str
    aliases: tuple[str, ...] = ()  # further names of the model
    keys: KeyRing = field(default_factory=KeyRing)
    generation_config: GenerationConfig | None = None  # overrides the model's, and requests override it
    request_extras: dict[str, Any] = field(default_factory=dict)  # of every request: a draft model, a recipe
    root_path: str = ""  # the path at which a proxy publishes the server
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # of the Host header; empty: any
    max_body_bytes: int = 4 * 2**20
    max_context: int | None = None  # tokens of a prompt and its output; None: the model's own limit
    max_prompt_tokens: int | None = None  # None: the model's positions
    max_output_tokens: int | None = None  # of one sequence; None: the model's positions
    max_audio_bytes: int = 64 * 2**20  # of a recording
    max_prompts: int = 256  # of one request for completions
    max_sequences: int = 128  # of one prompt: `n`
    max_beams: int = 64
    max_connections: int = 2048  # HTTP requests at once; others get 429
    max_receive_seconds: float = 60.0  # from the first byte of a request to its last
    max_request_seconds: float | None = 600.0
    log_prompts: bool = False
    otlp_endpoint: str | None = None  # a collector of OpenTelemetry that gets a span of each request
    traces: int = 0  # the number of finished traces to hold; 0: traces are off
    max_trace_bytes: int = 4_000_000
    page: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_sequences", "max_beams", "max_trace_bytes"):
            _check_count(name, getattr(self, name))
        for name in ("max_context", "max_prompt_tokens", "max_output_tokens"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if not self.max_receive_seconds > 0:
            raise ConfigError("max_receive_seconds", "must be > 0", self.max_receive_seconds)
        if self.max_request_seconds is not None and not self.max_request_seconds > 0:
            raise ConfigError("max_request_seconds", "must be > 0", self.max_request_seconds)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError("root_path", "must begin with / and not end with it", self.root_path)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that a request may use for the model."""
        return (self.model_name, *self.aliases)


def model_name(source: str) -> str:
    """The name that requests use for a model: on the Hub its own, of a folder the folder's."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def check_model_name(settings: ServerSettings, name: str) -> None:
    """Raise for the name of another model."""
    if name not in settings.model_names:
        shown = name if len(name) <= 80 else name[:77] + "..."
        message = f"the model `{shown}` does not exist: this server has `{settings.model_name}`"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(name, "must be an integer >= 1", value)
