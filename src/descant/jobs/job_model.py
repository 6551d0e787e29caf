"""The model of a job: its engine, its tokenizer, and the digest of all that decides the results."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, Self

import torch

from descant.api.run_digest import run_settings
from descant.config.generation_config import GenerationConfig
from descant.engine.memory_check import free_bytes
from descant.engine.planning.planner import as_model
from descant.engine.scheduling.sizing import sized_scheduler
from descant.engine.serving.async_engine import AsyncEngine
from descant.engine.serving.fallback_engine import FallbackEngine
from descant.engine.session import Session
from descant.engine.vllm.vllm_engine import VLLM
from descant.jobs.description import JobDescription
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.loading.loading import load, load_meta_model, load_tokenizer
from descant.models.loading.weight_files import WeightFiles

__all__ = ["JobModel"]


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
        needed = 2 * sum(one.numel() * one.element_size() for one in self.model.parameters()) + 2**30
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
            vocabulary=hashlib.blake2b(vocabulary, digest_size=16).hexdigest(),
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
