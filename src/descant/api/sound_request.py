"""Requests of a Session for models that predict sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from descant.api.call import CallOptions
from descant.api.codebook_call import PreparedFrames, own_arguments, prepare_frames
from descant.config.generation_config import FIELDS
from descant.core.records import Hypothesis
from descant.engine.request import Request
from descant.errors import InputError
from descant.models.codebooks.config_checks import check_codebook_config
from descant.models.codebooks.families import codebook_family_of
from descant.models.codebooks.frames import CODEBOOK_INPUT, Codebook, CodebookFamily, PreparedLoop
from descant.models.own_loop import LoopInputs, run_with_loop

__all__ = ["SoundRequest", "sound_request"]


class _Prepared(BaseException):
    """Leaves a model's own generate() where its loop would begin."""

    def __init__(self, frames: PreparedFrames) -> None:
        super().__init__()
        self.frames = frames


@dataclass(frozen=True, eq=False)
class SoundRequest:
    """One sequence of frames as requests of a Session, one for each codebook that is a row.

    They are admitted together: `numbers = session.admit(*one.requests)`. `result` takes the first hypothesis
    of each, in this order, and returns what the model's own generate() returns for the prompt.
    """

    requests: tuple[Request, ...]
    model: Any
    family: CodebookFamily
    prepared: PreparedFrames
    arguments: Mapping[str, Any]

    def result(self, hypotheses: Sequence[Hypothesis]) -> Any:
        """The output of the model's own generate() for the codes of these hypotheses."""
        if len(hypotheses) != len(self.requests):
            must = f"must be one for each of the {len(self.requests)} requests"
            raise InputError("hypotheses", must, f"{len(hypotheses)} of them")
        new = [one.tokens for one in hypotheses]
        tokens = torch.nn.utils.rnn.pad_sequence(
            new, batch_first=True, padding_value=self.prepared.frames[0].pad_token_id
        )
        codes = self.prepared.codes[0]
        ids = torch.cat((codes, tokens.to(codes.device)), 1)

        def loop(model: Any, inputs: LoopInputs) -> Any:
            return self.family.loop_result(PreparedLoop(model, inputs), self.prepared.frames, ids)

        return run_with_loop(self.model, loop, self.arguments)


def sound_request(model: Any, generation_config: Any = None, **inputs: Any) -> SoundRequest:
    """The requests of one prompt for a Session of a model with several codebooks.

    `inputs` are those of generate() for a batch of one, and may hold fields of the config.
    """
    family = codebook_family_of(model)
    if family is None:
        must = "must predict several codebooks in a step, such as MusicGen"
        raise InputError("model", must, type(model).__name__, "use Request")
    fields = {name: value for name, value in inputs.items() if name in FIELDS}
    options = CallOptions.from_call(model, generation_config, {**fields, "return_dict_in_generate": False})
    for config in options.configs:
        check_codebook_config(config, family)
    arguments = own_arguments(model, generation_config, inputs) | {"return_dict_in_generate": False}

    def loop(model: Any, inputs: LoopInputs) -> Any:
        raise _Prepared(prepare_frames(family, PreparedLoop(model, inputs), options.configs))

    try:
        run_with_loop(model, loop, arguments)
    except _Prepared as done:
        prepared = done.frames
    if len(prepared.frames) != 1:
        must = "must hold one prompt"
        raise InputError("inputs", must, f"{len(prepared.frames)} prompts", "make a request for each")
    requests = tuple(
        Request(
            prepared.codes[0, row],
            prepared.configs[row],
            {CODEBOOK_INPUT: Codebook(prepared.frames[0], row)},
            prepared.changes.processors,
            prepared.changes.criteria,
            prompt_index=row,
            batch_row=row,
            batch_size=family.num_rows,
            config_merged=True,
        )
        for row in range(family.num_rows)
    )
    return SoundRequest(requests, model, family, prepared, arguments)
