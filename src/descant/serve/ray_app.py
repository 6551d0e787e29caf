"""The server as an application of Ray Serve: replicas, autoscaling and restarts are Ray's."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from descant.errors import InputError
from descant.serve.application import EngineOptions, ServerApplication, load_application
from descant.serve.http.keys import KeyRing
from descant.serve.settings import ServerSettings, model_name


class RayArguments(BaseModel):
    """The arguments of `serve run descant.serve.ray_app:build_app NAME=VALUE ...`."""

    model_config = ConfigDict(extra="forbid")

    model: str  # a folder that every node has, or a name on the Hub
    dtype: str | None = None
    device: str | None = None
    served_model_name: str | None = None
    api_keys: str | None = None  # a file that every node has; the replicas read DESCANT_API_KEYS as well
    allow_anonymous: bool = False
    server: dict[str, Any] = Field(default_factory=dict)  # further fields of ServerSettings
    engine: dict[str, Any] = Field(default_factory=dict)  # fields of EngineOptions
    kv_memory: float | None = Field(None, gt=0)  # GiB of each replica's KV pool
    num_replicas: int = Field(1, ge=1)  # with `max_replicas`: at least
    max_replicas: int | None = Field(None, ge=1)  # None: no autoscaling
    target_ongoing_requests: float = Field(16, gt=0)  # of a replica, which autoscaling aims at
    max_ongoing_requests: int = Field(512, ge=1)  # of a replica; others wait in Ray's proxy
    num_cpus: float = Field(1, ge=0)  # of a replica; the proxy needs some of a node's as well
    num_gpus: float = Field(0, ge=0)
    grace_seconds: float = Field(60, gt=0)  # how long requests may take when a replica is stopped


class ServerReplica:
    """One process with the model; Ray replaces it when its engine has failed."""

    app: Any  # the ASGI application, which Ray sets

    def check_health(self) -> None:
        """Raise if the process should be replaced."""
        application: ServerApplication = self.app.application
        if not application.model.is_healthy:
            raise RuntimeError("the engine has failed")


class NamedReplica:
    """The application, with the header `x-served-by` in each response: which process gave it."""

    def __init__(self, application: ServerApplication, name: str) -> None:
        self.application = application
        self._app: ASGIApp = application
        self._header = (b"x-served-by", name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a connection event."""

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, send_with_name)


def build_app(options: RayArguments) -> Any:
    """The application for `serve run` and `serve.run`; the model is loaded in the replicas."""

    def build_replica() -> NamedReplica:
        replica = serve.get_replica_context().replica_id.unique_id
        return NamedReplica(_load_application(options), f"{replica}.{os.getpid()}")

    scale: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.max_replicas is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": options.num_replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_ongoing_requests,
            }
        }
    deployment = serve.deployment(
        name="descant",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.grace_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        **scale,
    )
    return deployment(serve.ingress(build_replica)(ServerReplica)).bind()


def _load_application(options: RayArguments) -> ServerApplication:
    """The application with its model, in the replica's own process."""
    keys = KeyRing.load(options.api_keys)
    if not keys and not options.allow_anonymous:
        do = "set API keys with `api_keys` or DESCANT_API_KEYS, or give `allow_anonymous=true`"
        raise InputError("allow_anonymous", "must be true without API keys", False, do)
    name = options.served_model_name or model_name(options.model)
    settings = ServerSettings(model_name=name, keys=keys, **options.server)
    kv_bytes = None if options.kv_memory is None else int(options.kv_memory * 2**30)
    engine = EngineOptions(kv_bytes=kv_bytes, dtype=options.dtype, device=options.device, **options.engine)
    return load_application(options.model, settings, engine)
