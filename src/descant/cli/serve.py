"""`descant serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer

from descant.cli import terminal
from descant.cli.command import DecodingCommand, parse_arguments
from descant.config.generation_config import GenerationConfig
from descant.errors import InputError, MissingExtra

__all__ = ["ServeCommand"]

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

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 8000
    uds: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Unix socket in place of --host and --port.")
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The model's name in requests; further ones are aliases."),
    ] = None
    api_keys: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="API keys and their limits, as TOML; see also DESCANT_API_KEYS."),
    ] = None
    allow_anonymous: Annotated[
        bool,
        typer.Option("--allow-anonymous", metavar="", help="Listen on other addresses without API keys."),
    ] = False
    requests_per_minute: Annotated[int | None, typer.Option(help="Of each key without its own limit.")] = None
    tokens_per_minute: Annotated[int | None, typer.Option(help="Of each key without its own limit.")] = None
    concurrent_requests: Annotated[int | None, typer.Option(help="Of each key without its own limit.")] = None
    kv_memory: Annotated[
        float | None,
        typer.Option(min=0, metavar="GIB", help="Memory of the KV pool (half of the free memory)."),
    ] = None
    max_running_rows: Annotated[int, typer.Option(help="Rows of the batch.")] = 256
    max_step_tokens: Annotated[int, typer.Option(help="Tokens of a step, those of prompts included.")] = 2048
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a prompt that one step reads.")] = 512
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; others get 429.")] = 256
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", metavar="", help="Reuse common prefixes.")
    ] = True
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME", help='What runs requests: "descant", "vllm", or "auto", vLLM for all that it can.'
        ),
    ] = "descant"
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="GPUs, with vLLM.")] = None
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Positions, with vLLM.")] = None
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", metavar="", help="No CUDA graphs, with vLLM.")
    ] = False
    engine_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="An argument of vLLM's EngineArgs; may be repeated."),
    ] = None
    fast: Annotated[
        bool, typer.Option("--fast", metavar="", help="Prepack the weights and compile the layers.")
    ] = False
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="A chat template in place of the tokenizer's.")
    ] = None
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Of one prompt.")] = None
    max_output_tokens: Annotated[int | None, typer.Option(help="Of one sequence.")] = None
    max_request_seconds: Annotated[float, typer.Option(help="From a request's arrival to its end.")] = 600.0
    max_receive_seconds: Annotated[float, typer.Option(help="From a request's first byte to its last.")] = (
        60.0
    )
    max_body_bytes: Annotated[int, typer.Option(help="Of a request's body.")] = 4 * 2**20
    traces: Annotated[
        int, typer.Option(min=0, help="Finished traces to hold; 0: requests cannot ask for traces.")
    ] = 0
    page: Annotated[
        bool, typer.Option("--page/--no-page", metavar="", help="The page at / to try the model on.")
    ] = True
    root_path: Annotated[str, typer.Option(metavar="PATH", help="Where a proxy publishes it.")] = ""
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A site whose pages may use it.")
    ] = None
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name of the server that requests may use.")
    ] = None
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", metavar="", help="Write prompts to the log.")
    ] = False
    log_format: Annotated[
        str,
        typer.Option(metavar="NAME", help='"json", "text", or "auto": text in a terminal, else JSON.'),
    ] = "auto"
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="A collector of OpenTelemetry: a span of each request.")
    ] = None
    grace_seconds: Annotated[float, typer.Option(min=0, help="How long requests may take after SIGTERM.")] = (
        60.0
    )
    ssl_certfile: Annotated[str | None, typer.Option(metavar="FILE", help="A certificate for HTTPS.")] = None
    ssl_keyfile: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None
    ssl_ca_certs: Annotated[str | None, typer.Option(metavar="FILE", help="Authorities of clients.")] = None

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
            from descant.serve.access_log import AccessLog
            from descant.serve.api_keys import KeyRing
            from descant.serve.assembly import EngineOptions, load_application
            from descant.serve.http_server import HttpServer, ListenAddress
            from descant.serve.limits import KeyLimits
            from descant.serve.request_spans import check_endpoint
            from descant.serve.settings import ServerSettings
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
        template = _read_template(self.chat_template)
        kv_bytes = None if self.kv_memory is None else int(self.kv_memory * GIB)
        options = EngineOptions(
            kv_bytes=kv_bytes, engine_options=self._engine_options(), **self._own_values(EngineOptions)
        )
        self.check_parameters()
        self._check_vllm()
        names = self.served_model_name or [_name_of(self.model)]
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
        names = {one.name for one in fields(kind)} & {one.name for one in fields(self)}
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


def _name_of(model: str) -> str:
    """The name of a model: on the Hub as it is, of a folder the folder's."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise InputError("chat_template", "must be a text file that can be read", path) from None
