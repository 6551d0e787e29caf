"""`descant serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import sys
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from descant.cli import terminal
from descant.cli.command import DecodingCommand, parse_arguments, read_text
from descant.cli.options import option
from descant.config.generation_config import GenerationConfig
from descant.errors import InputError, MissingExtra

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]", "::1")
LOG_FORMATS: Final = ("auto", "json", "text")
GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class ServeCommand(DecodingCommand):
    """Serve a model over HTTP with OpenAI's API; every generation parameter is a field of a request.

    Generation parameters given here are defaults, which requests override. Without API keys it listens on
    this machine only. SIGTERM lets requests finish.
    """

    takes_speech: ClassVar[bool] = True

    host: str = option("Where to listen.", "127.0.0.1", metavar="ADDRESS")
    port: int = option("The port; 0: any that is free.", 8000, min=0, max=65535)
    uds: str | None = option("A Unix socket in place of --host and --port.", metavar="PATH")
    served_model_name: list[str] | None = option(
        "The model's name in requests; further ones are aliases.", metavar="NAME"
    )
    api_keys: str | None = option(
        "API keys and their limits, as TOML; see also DESCANT_API_KEYS.", metavar="FILE"
    )
    allow_anonymous: bool = option("Listen on other addresses without API keys.", False)
    requests_per_minute: int | None = option("Of each key without its own limit.")
    tokens_per_minute: int | None = option("Of each key without its own limit.")
    concurrent_requests: int | None = option("Of each key without its own limit.")
    kv_memory: float | None = option("Memory of the KV pool (half of the free memory).", min=0, metavar="GIB")
    max_running_rows: int = option("Rows of the batch.", 256)
    max_step_tokens: int = option("Tokens of a step, those of prompts included.", 2048)
    chunk_tokens: int = option("Tokens of a prompt that one step reads.", 512)
    max_waiting: int = option("Requests that may wait; others get 429.", 256, min=0)
    prefix_cache: bool = option("Reuse common prefixes.", True)
    engine: str = option(
        'What runs requests: "descant", "vllm", or "auto", vLLM for all that it can.',
        "descant",
        metavar="NAME",
    )
    tensor_parallel_size: int | None = option("GPUs, with vLLM.", min=1)
    max_model_len: int | None = option("Positions, with vLLM.", min=1)
    enforce_eager: bool = option("No CUDA graphs, with vLLM.", False)
    engine_option: list[str] | None = option(
        "An argument of vLLM's EngineArgs; may be repeated.", metavar="NAME=JSON"
    )
    fast: bool = option("Prepack the weights and compile the layers.", False)
    chat_template: str | None = option("A chat template in place of the tokenizer's.", metavar="FILE")
    max_prompt_tokens: int | None = option("Of one prompt.")
    max_output_tokens: int | None = option("Of one sequence.")
    max_request_seconds: float = option("From a request's arrival to its end.", 600.0)
    max_receive_seconds: float = option("From a request's first byte to its last.", 60.0)
    max_body_bytes: int = option("Of a request's body.", 4 * 2**20)
    traces: int = option("Finished traces to hold; 0: requests cannot ask for traces.", 0, min=0)
    page: bool = option("The page at / to try the model on.", True)
    root_path: str = option("Where a proxy publishes it.", "", metavar="PATH")
    cors_origin: list[str] | None = option("A site whose pages may use it.", metavar="ORIGIN")
    allowed_host: list[str] | None = option("A name of the server that requests may use.", metavar="NAME")
    log_prompts: bool = option("Write prompts to the log.", False)
    log_format: str = option(
        '"json", "text", or "auto": text in a terminal, else JSON.', "auto", metavar="NAME"
    )
    otlp_endpoint: str | None = option("A collector of OpenTelemetry: a span of each request.", metavar="URL")
    grace_seconds: float = option("How long requests may take after SIGTERM.", 60.0, min=0)
    ssl_certfile: str | None = option("A certificate for HTTPS.", metavar="FILE")
    ssl_keyfile: str | None = option("Its key.", metavar="FILE")
    ssl_ca_certs: str | None = option("Authorities of clients.", metavar="FILE")

    def run(self) -> int:
        """Load the model and serve it until a signal ends the process."""
        # While the model loads there is nothing to finish.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        server = self._build()
        with contextlib.suppress(KeyboardInterrupt):  # one more signal while it ends
            server.run()
        if not server.started:
            return 1
        # All has ended by now. PyTorch asserts at times, and aborts, when the interpreter clears its tensors.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _build(self) -> Any:
        """The server, with its model loaded."""
        try:
            from descant.serve.application import EngineOptions, load_application
            from descant.serve.http.keys import KeyLimits, KeyRing
            from descant.serve.http.telemetry import AccessLog, check_endpoint
            from descant.serve.server import HttpServer, ListenAddress
            from descant.serve.settings import ServerSettings, model_name
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("descant"):
                raise
            raise MissingExtra("serve", "the server") from error
        if self.log_format not in LOG_FORMATS:
            raise InputError("log_format", f"must be one of {', '.join(LOG_FORMATS)}", self.log_format)
        keys = KeyRing.load(self.api_keys, KeyLimits(**self._own_values(KeyLimits)))
        self._check_host(bool(keys))
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        template = None if self.chat_template is None else read_text("chat_template", self.chat_template)
        kv_bytes = None if self.kv_memory is None else int(self.kv_memory * GIB)
        options = EngineOptions(
            kv_bytes=kv_bytes, engine_options=self._engine_options(), **self._own_values(EngineOptions)
        )
        self.check_parameters()
        self._check_vllm()
        names = self.served_model_name or [model_name(self.model)]
        settings = ServerSettings(
            model_name=names[0],
            aliases=tuple(names[1:]),
            keys=keys,
            generation_config=GenerationConfig.merge(self.parameters, self.file_config()),
            request_extras=self.request_extras(),
            cors_origins=tuple(self.cors_origin or ()),
            allowed_hosts=self._allowed_hosts(bool(keys)),
            **self._own_values(ServerSettings),
        )
        is_text = self.log_format == "text" or (self.log_format == "auto" and sys.stderr.isatty())
        log = AccessLog(is_json=not is_text)
        with terminal.console().status("loading"):
            application = load_application(self.model, settings, options, chat_template=template, log=log)
        address = ListenAddress(**self._own_values(ListenAddress))
        return HttpServer(application, address, log, grace_seconds=self.grace_seconds)

    def _check_vllm(self) -> None:
        """Raise for options that only a session can use."""
        for name in ("recipe", "assistant_model"):
            value = getattr(self, name)
            if value is not None and self.engine == "vllm":
                do = "leave it out, or use --engine auto"
                raise InputError(name, "must not be given with `--engine vllm`", value, do)

    def _engine_options(self) -> dict[str, Any]:
        """The arguments of vLLM's `EngineArgs`: those of `--engine-option` and of the options named alike."""
        options = parse_arguments("engine_option", self.engine_option or ())
        for name in ("tensor_parallel_size", "max_model_len", "enforce_eager"):
            value = getattr(self, name)
            if value is None or value is False:
                continue
            if name in options:
                raise InputError(name, "must be given once", value, "leave it out of --engine-option")
            options[name] = value
        return options

    def _own_values(self, kind: type[Any]) -> dict[str, Any]:
        """The options that have the names of a dataclass's fields."""
        names = {own.name for own in fields(kind)} & {own.name for own in fields(self)}
        return {name: getattr(self, name) for name in names}

    def _check_host(self, has_keys: bool) -> None:
        """Raise where everybody in the network could use the model."""
        if not (has_keys or self.allow_anonymous or self.uds is not None or _is_loopback(self.host)):
            do = "set API keys with --api-keys or DESCANT_API_KEYS, or give --allow-anonymous"
            raise InputError("host", "must be an address of this machine without API keys", self.host, do)

    def _allowed_hosts(self, has_keys: bool) -> tuple[str, ...]:
        """The names that requests may use; without keys, a page of another site must not reach the server."""
        given = tuple(name.lower() for name in self.allowed_host or ())
        if given or has_keys or self.uds is not None or not _is_loopback(self.host):
            return given
        return (*LOOPBACK_NAMES, self.host.lower())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
