"""The runs of all prompts of a request as one stream of updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from descant.serve.exchange import Exchange
from descant.serve.generation import ChoiceUpdate, PromptRun, TraceUpdate

__all__ = ["GroupUpdate", "RunGroup"]


class GroupUpdate(NamedTuple):
    """An update of one prompt."""

    prompt: int
    update: ChoiceUpdate | TraceUpdate


class RunGroup:
    """The runs of one HTTP request; what they use is counted in its exchange."""

    def __init__(self, exchange: Exchange, runs: Sequence[PromptRun]) -> None:
        self.exchange, self.runs = exchange, list(runs)

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens used so far, and once it is known how many of them were cached."""
        prompt = sum(run.num_prompt_tokens for run in self.runs)
        new = sum(run.num_new_tokens for run in self.runs)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        cached = [run.num_cached_tokens for run in self.runs if run.num_cached_tokens is not None]
        if len(cached) < len(self.runs):
            return usage
        return {**usage, "prompt_tokens_details": {"cached_tokens": sum(cached)}}

    async def updates(self) -> AsyncIterator[GroupUpdate]:
        """The updates of all prompts; leaving early cancels all."""
        try:
            source = self._single() if len(self.runs) == 1 else self._merged()
            async with aclosing(source) as updates:  # type: ignore[type-var]
                async for one in updates:
                    if isinstance(one.update, ChoiceUpdate):
                        if self.exchange.first_output_at is None:
                            self.exchange.first_output_at = time.monotonic()
                        if one.update.finish_reason is not None:
                            self.exchange.finish_reasons.append(one.update.finish_reason)
                    yield one
        finally:
            self.exchange.num_new_tokens = sum(run.num_new_tokens for run in self.runs)

    async def _single(self) -> AsyncIterator[GroupUpdate]:
        async with aclosing(self.runs[0].updates()) as updates:  # type: ignore[type-var]
            async for update in updates:
                yield GroupUpdate(0, update)

    async def _merged(self) -> AsyncIterator[GroupUpdate]:
        """The updates of several prompts as they come; the first error ends all."""
        queue: asyncio.Queue[GroupUpdate | None] = asyncio.Queue()

        async def forward(index: int, run: PromptRun) -> None:
            try:
                async with aclosing(run.updates()) as updates:  # type: ignore[type-var]
                    async for update in updates:
                        queue.put_nowait(GroupUpdate(index, update))
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.ensure_future(forward(index, run)) for index, run in enumerate(self.runs)]
        try:
            ended = 0
            while ended < len(tasks):
                one = await queue.get()
                if one is not None:
                    yield one
                    continue
                ended += 1
                for task in tasks:
                    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                        raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
