"""The model of a job: its engine, its tokenizer, the digest of what decides its results, and its requests."""

from __future__ import annotations

import hashlib
import json
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from descant.api.chat_prompt import encode_prompt, require_chat_template, user_messages
from descant.api.inputs import prepare_prompts
from descant.api.json_lines import parse_text
from descant.api.run_digest import run_settings
from descant.config.generation_config import GenerationConfig
from descant.core.interfaces import ModelTraits
from descant.engine.memory_check import free_bytes
from descant.engine.planning.planner import as_model
from descant.engine.request import MERGED, Request
from descant.engine.scheduling.sizing import sized_scheduler
from descant.engine.serving.async_engine import AsyncEngine
from descant.engine.serving.fallback_engine import FallbackEngine
from descant.engine.session import Session
from descant.engine.vllm.vllm_engine import VLLM
from descant.errors import InputError
from descant.jobs.description import (
    CONFIG_COLUMN,
    PROMPT_COLUMNS,
    JobDescription,
    check_generation_fields,
)
from descant.jobs.source import SourceRow
from descant.jobs.source_files import content_digest
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.loading.loading import load, load_meta_model, load_tokenizer
from descant.models.loading.weight_files import WeightFiles


@dataclass(frozen=True)
class JobModel:
    """A loaded model with its tokenizer; on vLLM alone, a model without weights."""

    job: JobDescription
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, job: JobDescription) -> Self:
        """The model that a job names."""
        if job.engine == "vllm":
            return cls(job, load_meta_model(job.model), load_tokenizer(job.model)[0])
        return cls(job, *load(job.model, job.dtype, job.device))

    @property
    def device(self) -> torch.device:
        """The device of the prompts."""
        return torch.device("cpu") if self.job.engine == "vllm" else as_model(self.model).device

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own config."""
        return GenerationConfig.from_transformers(self.model.generation_config)

    def start_engine(self, workers: int = 1) -> tuple[AsyncEngine, GenerationConfig]:
        """An engine and the model's config that it applies, on a machine that runs this many workers."""
        job = self.job
        if job.engine == "vllm":
            vllm = VLLM(job.model, **{"dtype": job.dtype, **job.engine_options})
            return AsyncEngine(vllm), vllm.generation_config
        free = free_bytes(self.device)
        share = None if free is None or workers == 1 else free // (2 * workers)
        scheduler, budget = sized_scheduler(self.model, kv_bytes=share)
        if job.engine == "descant":
            prefixes = PrefixCache(max_bytes=budget or 2**30)
            return AsyncEngine(self.model, scheduler=scheduler, prefix_cache=prefixes), self.generation_config
        fast = VLLM(job.model, **{"dtype": job.dtype, **job.engine_options})
        engine = FallbackEngine(fast, Session(self.model, scheduler=scheduler))
        return AsyncEngine(engine), self.generation_config

    def fitting_workers(self) -> int:
        """The number of workers that the cores and the free memory of this machine can run."""
        cores = max(1, (os.cpu_count() or 1) // (self.job.cpus_per_worker or 1))
        if self.device.type != "cpu":
            return max(1, torch.accelerator.device_count())
        free = free_bytes(self.device)
        # A worker needs the weights, about as much for keys and values, and what Python and torch take.
        needed = 2 * sum(weight.numel() * weight.element_size() for weight in self.model.parameters()) + 2**30
        return cores if free is None else max(1, min(cores, int(free // needed)))

    def digest(self) -> str:
        """The digest of everything that decides the results, without what only changes the speed."""
        job = self.job
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()
        is_loaded = job.engine != "vllm"
        settings = run_settings(
            self.model,
            self.tokenizer,
            fingerprint=None if is_loaded else WeightFiles.locate(job.model).digest(),
            vocabulary=content_digest(vocabulary).hex(),
            dtype=str(self.model.dtype) if is_loaded else job.dtype,
            device=self.device.type,
            engine=json.dumps([job.engine, dict(job.engine_options)], sort_keys=True, default=repr),
            config=job.generation_config,
            prompt=json.dumps([job.template, job.chat]),
            columns=json.dumps([job.override_columns, job.id_column, job.keep_columns]),
            seed=job.seed,
            select=None if job.select is None else job.select.digest_parts(),
        )
        return hashlib.blake2b(settings, digest_size=16, person=b"descant job").hexdigest()


_SEED_BYTES: Final = 7  # a seed is a positive number of 63 bits


def row_seed(seed: int, row_id: int | str) -> int:
    """The seed of a row, by the job's seed and the row's id alone."""
    # JSON tells the id 1 from the id "1".
    digest = hashlib.blake2b(
        json.dumps([seed, row_id]).encode(), digest_size=_SEED_BYTES, person=b"descant row"
    )
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True)
class RowRequests:
    """Makes the requests of a job's rows."""

    job: JobDescription
    tokenizer: Any
    model_config: GenerationConfig
    traits: ModelTraits
    device: torch.device

    def build(self, row: SourceRow) -> Request:
        """The request of a row; raises DescantError for a row that cannot run."""
        if row.error is not None:
            raise row.error
        assert row.id is not None  # else it has an error
        values = self._values(row)
        if values.get("seed") is None:
            values["seed"] = row_seed(self.job.seed, row.id)
        if self.job.select is not None and self.job.select.needs_logprobs:
            values["logprobs"] = 0  # of the tokens themselves, without alternatives
        config = GenerationConfig.merge(values, self.job.generation_config, self.model_config)
        check_generation_fields({"max_time": config.max_time})  # which may be the model's own
        if self.job.select is not None:
            self.job.select.check_samples(config.num_return_sequences)
        inputs = self._encode(row)
        self._check_length(inputs["input_ids"].shape[1], config)
        prompts = prepare_prompts(inputs, config, self.traits, self.device)
        return Request(prompts.prompt(0), config, prompts.inputs[0], tokenizer=self.tokenizer, _call=MERGED)

    def _values(self, row: SourceRow) -> dict[str, Any]:
        """The generation parameters that a row sets."""
        values: dict[str, Any] = {}
        whole = _value(row, CONFIG_COLUMN)
        if whole is not None:
            if not isinstance(whole, Mapping):
                raise InputError(CONFIG_COLUMN, "must be an object of generation parameters", whole)
            values.update(whole)
        for name in self.job.override_columns:
            value = _value(row, name)
            if value is not None:
                values[name] = value
        if values.get("compile_config") is not None:
            must = "applies to all rows and must not be set in one"
            raise InputError("compile_config", must, values["compile_config"], "set it in the job")
        check_generation_fields(values)
        return values

    def _encode(self, row: SourceRow) -> dict[str, Any]:
        """The model inputs [1, L] of a row's prompt."""
        if self.job.template is not None:
            return self._encode_text(_fill(self.job.template, row))
        given = [name for name in PROMPT_COLUMNS if row.data.get(name) not in (None, "")]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InputError("prompt", f"must be in one of the columns {', '.join(PROMPT_COLUMNS)}", found)
        [name] = given
        if name == "prompt":
            if not isinstance(row.data[name], str):
                raise InputError(name, "must be text", row.data[name])
            return self._encode_text(row.data[name])
        value = _value(row, name)
        if name == "messages":
            require_chat_template(self.tokenizer, self.job.model)
            if not isinstance(value, list) or not value:
                raise InputError(name, "must be a non-empty list of messages", value)
            return encode_prompt(self.tokenizer, value)
        size = len(self.tokenizer)
        if not isinstance(value, list) or not value or not all(_is_token(token, size) for token in value):
            raise InputError(name, f"must be a non-empty list of token ids from 0 to {size - 1}", value)
        input_ids = torch.tensor([value])
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    def _encode_text(self, text: str) -> dict[str, Any]:
        if self.job.chat:
            require_chat_template(self.tokenizer, self.job.model)
            return encode_prompt(self.tokenizer, user_messages(text))
        return encode_prompt(self.tokenizer, text)

    def _check_length(self, length: int, config: GenerationConfig) -> None:
        """Raise InputError for a prompt that leaves no room for its new tokens."""
        sizes = [size for size in (self.traits.max_positions, self.traits.context_length) if size is not None]
        # An encoder's prompt is in a table of its own, which the engine checks.
        if not sizes or self.traits.is_encoder_decoder:
            return
        needed = length + (config.max_new_tokens or 1)
        if needed > min(sizes):
            must = f"must fit with its new tokens into the {min(sizes)} positions of the model"
            raise InputError("prompt", must, f"{length} tokens and {needed - length} new ones")


def _value(row: SourceRow, name: str) -> Any:
    """The value of a column; None: the row has none."""
    value = row.data.get(name)
    if not row.is_text or value is None:
        return value
    return None if value == "" else parse_text(value)


def _fill(template: str, row: SourceRow) -> str:
    """A template with the values of a row."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append(literal)
        if name is None:
            continue
        value = row.data.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InputError(name, "must hold a text or a number for the template", value)
        parts.append(str(value))
    return "".join(parts)


def _is_token(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size
