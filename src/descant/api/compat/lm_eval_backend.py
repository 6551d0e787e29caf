"""The backend `descant` of lm-eval: HFLM's model, scored and continued by Descant."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from descant.api.score import ScoringLimits, score
from descant.config.generation_config import FIELDS, GenerationConfig
from descant.engine.protocol import Failed, Finished
from descant.engine.request import Request
from descant.engine.scheduling.config import SchedulerConfig
from descant.engine.session import Session
from descant.errors import InputError

_DEFAULT_ROWS: Final = 64


class DescantLM(HFLM):
    """A model of lm-eval's backend `hf` whose texts Descant scores and generates.

    Its arguments are those of `hf`, every field of `GenerationConfig`, and `generation_config`, a JSON file
    or a folder with one; a name that both have, such as `max_length`, is that of `hf`. The fields take the
    place of those that a task gives. `batch_size` above 1 is the number of rows at the same time, 64 by
    default; no result depends on it.
    """

    def __init__(
        self,
        pretrained: Any,
        batch_size: int | str | None = 1,
        generation_config: str | None = None,
        **kwargs: Any,
    ) -> None:
        own = FIELDS.keys() - inspect.signature(HFLM.__init__).parameters.keys()
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in own}
        config = GenerationConfig()
        if generation_config is not None:
            path = Path(generation_config)
            place = (path,) if path.is_dir() else (path.parent, path.name)
            config = GenerationConfig.from_pretrained(*place)
        config = config.replace(**fields)
        self._fields = {name: getattr(config, name) for name in config.given}
        super().__init__(pretrained, batch_size=1, **kwargs)
        is_given = batch_size not in (None, "auto", 1, "1")
        self.batch_size_per_gpu = int(str(batch_size)) if is_given else _DEFAULT_ROWS

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is the greedy one."""
        if self.backend != "causal":
            found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm=disable_tqdm, override_bs=override_bs
            )
            return found
        # As HFLM: of a text that is too long the first tokens of the context go.
        room = self.max_length + 1
        prompts = [context[max(0, len(context) + len(end) - room) :] for _, context, end in requests]
        ends = [[end] for _, _, end in requests]
        rows = score(self.model, prompts, ends, limits=ScoringLimits(rows=self.batch_size))
        answers = [(one.total, one.is_greedy) for [one] in rows]
        for (pair, _, _), answer in zip(requests, answers, strict=True):
            if pair is not None:  # a window of a document has none
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that continues each context, up to the first of its stop strings."""
        if self.backend != "causal":
            if self._fields:
                must = "must not be given for an encoder-decoder model"
                raise InputError(min(self._fields), must, self._fields)
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return texts
        session = Session(self.model, scheduler=SchedulerConfig(max_running_rows=self.batch_size))
        given = [self._request(*instance.args) for instance in requests]
        numbers = session.admit(*[request for request, _ in given])
        tokens: dict[int, list[int]] = {}
        for event in session.drain():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                tokens[event.request] = event.hypotheses[0].tokens.tolist()
        texts = []
        for number, (_, until), instance in zip(numbers, given, requests, strict=True):
            texts.append(self._text(tokens[number], until))
            self.cache_hook.add_partial("generate_until", instance.args, texts[-1])
        return texts

    def _request(self, context: str, task_fields: dict[str, Any]) -> tuple[Request, list[str]]:
        """The request of a context, and the strings before which its text ends."""
        fields: dict[str, Any] = dict(normalize_gen_kwargs(task_fields, self.max_gen_toks))
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops = [text for text in fields.pop("until") if text]
        fields = {"max_new_tokens": fields.pop("max_gen_toks"), **fields, **self._fields}
        if not fields["do_sample"] or not fields.get("temperature"):
            fields.pop("temperature", None)  # lm-eval writes greedy search as 0
        stops += fields.get("stop_strings") or ()
        fields["stop_strings"] = tuple(stop for stop in stops if stop != eos) or None
        fields["stop_token_ids"] = [self.eot_token_id, *(fields.get("stop_token_ids") or ())]
        room = self.max_length - fields["max_new_tokens"]
        if room < 1:
            must = f"must be less than the model's {self.max_length} positions"
            raise InputError("max_gen_toks", must, fields["max_new_tokens"])
        ids = self.tok_encode(context, left_truncate_len=room)
        request = Request(ids, GenerationConfig(**fields), tokenizer=self.tokenizer)
        return request, handle_stop_sequences(stops, eos=eos)

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """The text of new tokens without thoughts and without what follows a stop string."""
        end: Any = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text: str = self.tok_decode(tokens)
        if isinstance(end, int):
            text = text.lstrip()
        ended: str = postprocess_generated_text(text, until, end if isinstance(end, str) else None)
        return ended
