"""vLLM's engine with the plug-in, and what it can apply of a model's own config."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from descant.config.generation_config import FIELDS, GenerationConfig
from descant.config.registry import suggest_name
from descant.engine.vllm.field_support import FIELD_SUPPORT
from descant.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def start_llm(model: str, options: dict[str, Any]) -> LLMEngine:
    """vLLM's engine, with the plug-in."""
    try:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise MissingExtra("vllm", "descant.VLLM") from error
    from descant.engine.vllm.logits_processor import DescantLogitsProcessor
    from descant.engine.vllm.plugin import register

    # With the policy, the priority of a request counts.
    options = {"scheduling_policy": "priority", "disable_log_stats": True, **options}
    own = f"{DescantLogitsProcessor.__module__}:{DescantLogitsProcessor.__name__}"
    given = options.pop("logits_processors", None) or ()
    processors = [processor for processor in given if processor not in (own, DescantLogitsProcessor)]
    if not _is_installed():
        processors.append(DescantLogitsProcessor)
        register()
    known = EngineArgs.__dataclass_fields__.keys()
    for name in options.keys() - known:
        do = suggest_name(name, known) or "leave it out"
        raise InputError(name, "must be an argument of vLLM's EngineArgs", options[name], do)
    try:
        arguments = EngineArgs(model=model, logits_processors=processors, **options)
        config = arguments.create_engine_config()
    except (TypeError, ValueError) as error:  # a ValueError, too, is what pydantic raises
        given = {name: value for name, value in options.items() if value is not None}
        raise InputError("engine_options", f"must be ones that vLLM takes ({error})", given) from error
    if config.parallel_config.world_size == 1:
        # In this process, so that errors of the plug-in are those of their requests.
        config.parallel_config.distributed_executor_backend = "uni"
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def read_model_config(model_config: Any) -> tuple[GenerationConfig, dict[str, Any]]:
    """The fields of a model's own config that vLLM can apply, and those that it cannot."""
    config = GenerationConfig.from_transformers(model_config.try_get_generation_config() or {})
    given = {name: getattr(config, name) for name in config.given}
    unused = {
        name: value
        for name, value in given.items()
        if FIELD_SUPPORT[name].by == "refused" and value != FIELDS[name].default
    }
    config = GenerationConfig(**{name: value for name, value in given.items() if name not in unused})
    if config.eos_token_id is None:
        config = config.replace(eos_token_id=getattr(model_config.hf_text_config, "eos_token_id", None))
    return config, unused


def _is_installed() -> bool:
    """Whether vLLM finds the plug-in by its entry point."""
    return any(point.name == "descant" for point in entry_points(group="vllm.logits_processors"))
