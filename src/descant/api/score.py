"""score(), score_documents() and label_probabilities(): log-likelihoods of given texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.api.inputs import encode_texts
from descant.config.generation_config import GenerationConfig
from descant.core.records import Hypothesis
from descant.engine.protocol import Failed, Finished
from descant.engine.request import Request
from descant.engine.scoring import ScoringSession
from descant.errors import InputError, UnsupportedModel
from descant.kv_cache.prefix_cache import PrefixCache
from descant.models.wrapping.wrapped_model import unwrap_model

Ids: TypeAlias = Tensor | Sequence[int]

_PLAIN: Final = GenerationConfig()


@dataclass(frozen=True)
class TextScore:
    """The log-probabilities of the tokens of a text after what comes before it, natural logarithms."""

    tokens: Tensor  # [T] (host)
    logprobs: Tensor  # [T] (host)
    is_greedy: bool  # whether greedy search would write it

    @property
    def total(self) -> float:
        """The log-likelihood: the sum over the tokens."""
        return float(self.logprobs.double().sum())

    @property
    def mean(self) -> float:
        """The log-likelihood of a token on average."""
        return self.total / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean, negated."""
        return float(torch.tensor(-self.mean, dtype=torch.float64).exp())


@dataclass(frozen=True, kw_only=True)
class ScoringLimits:
    """How much is read at the same time; it changes no score."""

    rows: int = 64  # continuations; a prompt with more is read again for the others
    tokens: int = 16384  # in the cache, over all rows; a longer prompt is read alone

    def __post_init__(self) -> None:
        for name in ("rows", "tokens"):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(name, "must be an integer >= 1", value)


class _Group(NamedTuple):
    """A prompt that is read once, with its distinct continuations."""

    prompt: tuple[int, ...]
    continuations: list[tuple[int, ...]]

    @property
    def num_tokens(self) -> int:
        """The positions of its rows at the most, as if none were shared."""
        return len(self.prompt) * len(self.continuations) + sum(map(len, self.continuations))


def score(  # noqa: PLR0913 - one argument for each part that can be chosen
    model: Any,
    prompts: Sequence[Any],
    continuations: Sequence[Sequence[str | Ids]],
    *,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    adapter_name: str | None = None,
    limits: ScoringLimits | None = None,
    prefix_cache: PrefixCache | None = None,
) -> list[list[TextScore]]:
    """The log-likelihood of each continuation of each prompt: `score(model, ["2 + 2 ="], [[" 4", " 5"]])`.

    A prompt is a text, messages, or token ids; `continuations[i]` are texts or token ids that may follow
    `prompts[i]`. Texts need the `tokenizer`. A text is cut into tokens together with its prompt; spaces at
    the end of a prompt count as the start of its continuations. A prompt is read once for all its
    continuations, also where it is given several times. Without a `generation_config` the scores are the
    model's own; with one its processors and guidance apply, and the model's own config is not read. A
    `prefix_cache` keeps what several prompts begin with.
    """
    if len(prompts) != len(continuations):
        must = f"must hold the continuations of {len(prompts)} prompts"
        raise InputError("continuations", must, len(continuations))
    model = unwrap_model(model)
    config = _PLAIN if generation_config is None else generation_config
    session = {} if prefix_cache is None else {"prefix_cache": prefix_cache}
    scorer = _Scorer(model, config, adapter_name, limits or ScoringLimits(), session)
    pairs = [
        _encode_pairs(prompt, texts, tokenizer) for prompt, texts in zip(prompts, continuations, strict=True)
    ]
    scores = scorer.score([(tuple(prompt), tuple(each)) for prompt, given in pairs for each in given])
    found = iter(scores)
    return [[next(found) for _ in given] for _, given in pairs]


def score_documents(
    model: Any,
    documents: Sequence[str | Ids],
    *,
    tokenizer: Any = None,
    window: int | None = None,
    stride: int | None = None,
    prefix_token: int | None = None,
    **options: Any,
) -> list[TextScore]:
    """The log-likelihood of each document, token by token: `score_documents(model, texts, tokenizer=...)`.

    A document is a text or token ids. It is read after `prefix_token`, which is not scored: by default the
    tokenizer's first of its bos and eos tokens, and for ids their own first token. A forward reads at most
    `window` tokens, by default as many as the model was trained for. A longer document is scored in steps of
    `stride` tokens, by default `window`; a smaller stride gives each token more context and takes more time.
    `options` are those of `score`.
    """
    model = unwrap_model(model)
    texts = [_encode_document(document, tokenizer, prefix_token) for document in documents]
    if window is None:
        window = _context_length(model) or max(map(len, texts), default=1)
    stride = window if stride is None else stride
    sizes: tuple[tuple[str, Any, int | None], ...] = (("window", window, None), ("stride", stride, window))
    for name, value, most in sizes:
        if not isinstance(value, int) or value < 1 or (most is not None and value > most):
            raise InputError(name, f"must be an integer from 1 to {most or 'the length of a text'}", value)
    parts = [list(_windows(len(text), window, stride)) for text in texts]
    pieces = [
        (text[begin:start], text[start:end])
        for text, own in zip(texts, parts, strict=True)
        for begin, start, end in own
    ]
    scored = iter(score(model, [one for one, _ in pieces], [[one] for _, one in pieces], **options))
    return [_joined([next(scored)[0] for _ in own]) for own in parts]


def label_probabilities(
    model: Any,
    prompts: Sequence[Any],
    labels: Sequence[str | Ids | Sequence[str]],
    *,
    calibration_prompts: Sequence[Any] = (),
    **options: Any,
) -> Tensor:
    """The probability of each label after each prompt, given that it is one of them [N, L].

    A label is a text, token ids, or a list of spellings, whose probabilities are added. With
    `calibration_prompts`, prompts without content such as "N/A", the probabilities are divided by those of
    the labels there, so that a label that is always likely has no advantage (Zhao et al. 2021). `options` are
    those of `score`.
    """
    if not labels:
        raise InputError("labels", "must hold at least one label", labels)
    spellings = [_spellings(label) for label in labels]
    flat: list[Any] = [text for texts in spellings for text in texts]
    given = [*prompts, *calibration_prompts]
    scored = score(model, given, [flat] * len(given), **options)
    totals = torch.tensor([[one.total for one in row] for row in scored], dtype=torch.float64)
    totals = totals.view(len(given), len(flat))
    by_label = [part.logsumexp(1) for part in totals.split([len(texts) for texts in spellings], 1)]
    logprobs = torch.stack(by_label, 1).log_softmax(1)  # [N, L]
    own, others = logprobs[: len(prompts)], logprobs[len(prompts) :]
    if len(others):
        own = (own - others.exp().mean(0).log()).log_softmax(1)
    return own.exp().float()


@dataclass
class _Scorer:
    """Scores continuations in one session."""

    model: Any
    config: GenerationConfig
    adapter_name: str | None
    limits: ScoringLimits
    session_arguments: Mapping[str, Any]
    _results: dict[tuple[tuple[int, ...], tuple[int, ...]], TextScore] = field(default_factory=dict)

    def score(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[TextScore]:
        """The scores of pairs of a prompt and a continuation."""
        session = ScoringSession(self.model, **self.session_arguments)
        self._check(session, pairs)
        groups = dict(enumerate(self._groups(pairs)))
        waiting, running = deque(groups), dict[int, _Group]()
        try:
            with torch.no_grad():
                while waiting or running:
                    while waiting and self._has_room(running, groups[waiting[0]]):
                        number = waiting.popleft()
                        self._admit(session, number, groups[number])
                        running[number] = groups[number]
                    for event in session.session.step():
                        if isinstance(event, Failed):
                            raise event.error
                        if isinstance(event, Finished):
                            self._keep(running.pop(event.request), event.hypotheses)
        except BaseException:
            for number in running:  # a prefix cache outlives the session
                session.cancel(number)
            raise
        return [self._results[pair] for pair in pairs]

    def _groups(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[_Group]:
        by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for prompt, continuation in pairs:
            by_prompt.setdefault(prompt, {})[continuation] = None
        for prompt, distinct in by_prompt.items():
            # Of similar lengths in one group: rows of a step score as many tokens as the longest.
            ordered = sorted(distinct, key=len)
            for start in range(0, len(ordered), self.limits.rows):
                yield _Group(prompt, ordered[start : start + self.limits.rows])

    def _has_room(self, running: Mapping[int, _Group], group: _Group) -> bool:
        rows = sum(len(one.continuations) for one in running.values()) + len(group.continuations)
        tokens = sum(one.num_tokens for one in running.values()) + group.num_tokens
        return not running or (rows <= self.limits.rows and tokens <= self.limits.tokens)

    def _admit(self, session: ScoringSession, number: int, group: _Group) -> None:
        request = Request(group.prompt, self.config, adapter_name=self.adapter_name)
        session.admit(number, request, [torch.tensor(one) for one in group.continuations])

    def _keep(self, group: _Group, hypotheses: Sequence[Hypothesis]) -> None:
        for continuation, hypothesis in zip(group.continuations, hypotheses, strict=True):
            tokens, logprobs = hypothesis.tokens, hypothesis.logprobs
            assert logprobs is not None
            is_greedy = torch.equal(tokens, logprobs.top[:, 0])
            self._results[group.prompt, continuation] = TextScore(tokens, logprobs.processed, is_greedy)

    def _check(
        self, session: ScoringSession, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        traits = session.session.traits
        if traits.is_encoder_decoder:
            raise UnsupportedModel(f"`score` needs a decoder-only model, got {type(self.model).__name__}")
        if self.config.token_healing:
            raise InputError("generation_config", "must have no `token_healing` in `score`", self.config)
        sizes = {"prompts": traits.num_prompt_ids, "continuations": traits.vocab_size}
        for pair in pairs:
            for (name, size), ids in zip(sizes.items(), pair, strict=True):
                if not ids:
                    raise InputError(name, "must have at least one token each", ids)
                if min(ids) < 0 or max(ids) >= size:
                    raise InputError(name, f"must hold ids from 0 to {size - 1}", ids)
            length = sum(map(len, pair)) - 1  # the last token is never fed
            if traits.max_positions is not None and length > traits.max_positions:
                must = f"must leave room: the model has {traits.max_positions} positions"
                raise InputError("prompts", must, f"{length} tokens with a continuation", "shorten them")


# ------------------------------------------------------------------------ texts
def _encode_pairs(
    prompt: Any, continuations: Sequence[str | Ids], tokenizer: Any
) -> tuple[list[int], list[list[int]]]:
    """The ids of a prompt, and of its continuations after it."""
    if isinstance(continuations, str | Tensor) or not len(continuations):
        raise InputError("continuations", "must be a list for each prompt, with one or more", continuations)
    if not _is_text(prompt):
        ids = _as_ids("prompts", prompt)
        return ids, [_encode_alone(one, tokenizer) for one in continuations]
    if not isinstance(prompt, str):  # messages
        ids = _encode_prompt(prompt, tokenizer)
        return ids, [_encode_alone(one, tokenizer) for one in continuations]
    text = prompt.rstrip() or prompt
    ids = _encode_prompt(text, tokenizer)
    encoded = []
    for one in continuations:
        if not isinstance(one, str):
            if text != prompt:
                must = "must be texts after a prompt that ends with a space"
                raise InputError("continuations", must, one, "remove the space")
            encoded.append(_as_ids("continuations", one))
            continue
        whole = _encode_prompt(f"{prompt}{one}", tokenizer)
        if whole[: len(ids)] != ids:
            must = f"must begin with a new token after the prompt {text[-20:]!r}"
            raise InputError("continuations", must, one, "begin it with a space, or pass token ids")
        encoded.append(whole[len(ids) :])
    return ids, encoded


def _is_text(prompt: Any) -> bool:
    """Whether a prompt is a text or messages."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return isinstance(prompt, str) or (is_list and isinstance(prompt[0], Mapping))


def _encode_prompt(prompt: Any, tokenizer: Any) -> list[int]:
    encoded = encode_texts("prompts", [prompt], tokenizer)["input_ids"][0]
    return [int(token) for token in encoded.tolist()]


def _encode_alone(text: str | Ids, tokenizer: Any) -> list[int]:
    """The ids of a text without special tokens."""
    if not isinstance(text, str):
        return _as_ids("continuations", text)
    if tokenizer is None:
        raise InputError(
            "tokenizer", "must be given when a text is scored", None, "pass the model's tokenizer"
        )
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _as_ids(name: str, given: Any) -> list[int]:
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(name, "must hold texts or sequences of token ids", given) from None
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype is torch.bool:
        if not ids.numel() and ids.ndim == 1:
            return []
        raise InputError(name, "must hold texts or sequences of token ids", given)
    return [int(token) for token in ids.tolist()]


def _encode_document(document: str | Ids, tokenizer: Any, prefix_token: int | None) -> list[int]:
    """The ids of a document after its prefix token."""
    ids = _encode_alone(document, tokenizer)
    if prefix_token is None and isinstance(document, str):
        candidates = tokenizer.bos_token_id, tokenizer.eos_token_id
        prefix_token = next((token for token in candidates if token is not None), None)
        if prefix_token is None:
            must = "must be given: the tokenizer has no bos and no eos token"
            raise InputError("prefix_token", must, None)
    ids = ids if prefix_token is None else [prefix_token, *ids]
    if len(ids) < 2:
        raise InputError("documents", "must have at least one token to score", document)
    return ids


def _windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The forwards of a text: the first token that is read, the first that is scored, and the end."""
    for start in range(1, length, stride):
        end = min(start + stride, length)
        yield max(0, end - 1 - window), start, end


def _context_length(model: Any) -> int | None:
    traits = ScoringSession(model).session.traits
    sizes = [size for size in (traits.max_positions, traits.context_length) if size is not None]
    return min(sizes) if sizes else None


def _joined(parts: Sequence[TextScore]) -> TextScore:
    """The parts of a document as one."""
    tokens, logprobs = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "logprobs"))
    return TextScore(tokens, logprobs, all(part.is_greedy for part in parts))


def _spellings(label: Any) -> list[Any]:
    """A label as a list of texts or ids."""
    is_list = isinstance(label, list | tuple) and len(label) > 0
    return list(label) if is_list and all(isinstance(one, str) for one in label) else [label]
