"""Several models as one: their outputs, their errors, and their cleanup."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import descant
import descant.testing
from descant import ConfigError, ContrastiveDecoding, DExperts, GenerationConfig, InputError, ProxyTuning
from descant.core.records import ForwardOutput, Proposal
from descant.core.rows import Rows
from descant.decoding.guidance import JointModel
from descant.engine.planning.planner import as_model
from descant.kv_cache.row_views import MultiModelCache
from descant.kv_cache.stores.dense import DenseStore
from descant.kv_cache.stores.recurrent_state import RecurrentStateCache
from tests.support.tiny_models import prompts
from tests.unit.decoding.guidance.pairs import EOS, PAD, VOCAB, arch, case, logits_of, made, requests


def test_sessions_of_one_object_do_not_meet():
    """Requests are numbered by session, and encoders keep what they read by number."""
    _, whole, _, _ = case("encoders")
    config = GenerationConfig(max_new_tokens=10)
    first, second = requests("t5", [config], seed=1), requests("t5", [config], seed=2)
    alone = [descant.testing.outcomes(whole, one)[0].tokens for one in (first, second)]
    sessions = [descant.Session(whole), descant.Session(whole)]
    for session, one in zip(sessions, (first, second), strict=True):
        session.admit(*one)
    ended: list[Any] = [None, None]
    while any(len(session) for session in sessions):
        for place, session in enumerate(sessions):
            for event in session.step():
                if isinstance(event, descant.Finished):
                    ended[place] = [event.hypotheses[0].tokens.tolist()]
    assert ended == alone
    assert alone[0] != alone[1]


def test_streaming():
    _, whole, _, _ = case("contrastive")
    ids = torch.tensor(prompts(arch("llama", 0), (6, 6), 24))
    expected = descant.generate(whole, input_ids=ids, max_new_tokens=8)
    rows: list[list[int]] = [[], []]
    for event in descant.stream(whole, ids, max_new_tokens=8):
        rows[event.row] += event.token_ids
    for row, line in zip(rows, expected[:, 6:].tolist(), strict=True):
        assert row == line[: len(row)]
        assert set(line[len(row) :]) <= {PAD}


# ------------------------------------------------------------------------ what is shown
def test_logits_are_the_first_models_and_scores_the_whole():
    _, whole, formula, models = case("contrastive")
    ids = torch.tensor(prompts(arch("llama", 0), (6,), 25))
    found = descant.generate(
        whole, input_ids=ids, max_new_tokens=6, return_dict_in_generate=True, output_logits=True,
        output_scores=True, output_hidden_states=True,
    )  # fmt: skip
    sequence = found.sequences[0].tolist()
    for at, (logits, scores) in enumerate(zip(found.logits, found.scores, strict=True)):
        said = logits_of(models, sequence[: 6 + at], None)
        torch.testing.assert_close(logits[0], said[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(scores[0], formula(*said).float(), atol=1e-3, rtol=1e-4)
    states = models[0](ids, output_hidden_states=True).hidden_states
    for mine, theirs in zip(found.hidden_states[0], states, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_logits_are_those_of_a_network_however_deep():
    models = [made("llama", 0), made("gpt2", 1), made("llama", 3)]
    whole = ProxyTuning(ContrastiveDecoding(*models[:2]), models[2], models[1])
    ids = torch.tensor(prompts(arch("llama", 0), (6,), 25))
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    found = descant.generate(whole, input_ids=ids, **options).logits[0][0]
    torch.testing.assert_close(found, logits_of(models[:1], ids[0].tolist(), None)[0], atol=1e-4, rtol=1e-4)


def test_attentions_of_the_encoder_are_the_first_models():
    expert, amateur = made("t5", 1, attn_implementation="eager"), made("t5", 2)
    ids = torch.tensor(prompts(arch("t5", 0), (6,), 25))
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True}
    found = descant.generate(ContrastiveDecoding(expert, amateur), input_ids=ids, **options)
    for mine, theirs in zip(
        found.encoder_attentions, expert.encoder(ids, output_attentions=True).attentions, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_first_models_config_counts():
    expert, amateur = copy.deepcopy(made("llama", 0)), made("llama", 3)
    expert.generation_config.max_new_tokens = 5
    expert.generation_config.eos_token_id = None
    whole = ContrastiveDecoding(expert, amateur)
    ids = torch.tensor(prompts(arch("llama", 0), (6,), 26))
    assert descant.generate(whole, input_ids=ids).shape[1] == 11
    assert (whole.config, whole.main_input_name, whole.device) == (expert.config, "input_ids", expert.device)
    assert "ContrastiveDecoding" not in GenerationConfig(num_beams=2).explain(whole)
    session = descant.Session(whole)
    session.admit(descant.Request(ids[0], GenerationConfig()))
    assert [
        len(event.hypotheses[0].tokens) for event in session.drain() if isinstance(event, descant.Finished)
    ] == [5]


class Told:
    """How often each model is called."""

    def __init__(self, *models: Any) -> None:
        self.calls = [0] * len(models)
        self._hooks = [
            model.register_forward_pre_hook(lambda *_, place=place: self._count(place))
            for place, model in enumerate(models)
        ]

    def _count(self, place: int) -> None:
        self.calls[place] += 1

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def test_every_model_is_fed_once_a_token():
    base, tuned = made("llama", 0), made("gpt2", 1)
    ids = torch.tensor(prompts(arch("llama", 0), (6, 6), 27))
    with Told(base, tuned) as told:
        descant.generate(
            ProxyTuning(base, tuned, base, 0.5), input_ids=ids, max_new_tokens=5, min_new_tokens=5
        )
    assert told.calls == [5, 5]


def attributes(model: Any) -> list[Any]:
    """The names on every module, and how many hooks each has."""
    return [
        (set(vars(part)), len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()
    ]


def test_models_are_left_as_they_were():
    models = [made("llama", 0), made("gpt2", 1), made("mamba", 4)]
    before = [
        (
            copy.deepcopy(one.state_dict()),
            one.config.to_dict(),
            one.generation_config.to_dict(),
            attributes(one),
        )
        for one in models
    ]
    luck = torch.get_rng_state()
    ids = torch.tensor(prompts(arch("llama", 0), (6, 6), 28))
    whole = ProxyTuning(*models)
    descant.generate(whole, input_ids=ids, max_new_tokens=6, num_beams=3)
    descant.generate(whole, input_ids=ids, max_new_tokens=6, do_sample=True, seed=1)
    with pytest.raises(InputError):
        descant.generate(whole, inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=6)
    for one, (weights, config, own, names) in zip(models, before, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in one.state_dict().items())
        assert (one.config.to_dict(), one.generation_config.to_dict(), attributes(one)) == (
            config,
            own,
            names,
        )
        assert not one.training
        assert all(parameter.grad is None for parameter in one.parameters())
    assert torch.equal(luck, torch.get_rng_state())


# ------------------------------------------------------------------------ refusals
def generated(whole: Any, **options: Any) -> Any:
    ids = torch.tensor(prompts(arch("llama", 0), (6,), 29))
    return descant.generate(whole, **{"input_ids": ids, "max_new_tokens": 4, **options})


def test_another_vocabulary_is_refused(tiny):
    with pytest.raises(
        InputError, match=r"`amateur` must have the vocabulary size of `expert`, 97 tokens, got '101"
    ):
        generated(ContrastiveDecoding(made("llama", 0), tiny("gpt2").model))
    with pytest.raises(InputError, match=r"`untuned` must have the vocabulary size of `base`"):
        generated(ProxyTuning(made("llama", 0), made("llama", 3), tiny("gpt2").model))


def test_encoders_beside_none_are_refused():
    with pytest.raises(InputError, match=r"`amateur` must be a decoder-only model like `expert`"):
        generated(ContrastiveDecoding(made("llama", 0), made("t5", 1)))
    with pytest.raises(InputError, match=r"`amateur` must be an encoder-decoder model like `expert`"):
        generated(ContrastiveDecoding(made("t5", 1), made("llama", 0)))


def test_what_one_model_made_of_a_text_is_refused():
    with pytest.raises(InputError, match=r"inputs_embeds.*several models"):
        generated(
            ContrastiveDecoding(made("llama", 0), made("llama", 3)), inputs_embeds=torch.zeros(1, 6, 32)
        )
    pair = ContrastiveDecoding(made("t5", 1), made("t5", 2))
    with pytest.raises(InputError, match=r"encoder_outputs.*several models"):
        generated(pair, input_ids=None, encoder_outputs=(torch.zeros(1, 6, 32),))
    session = descant.Session(pair)
    given = {"inputs_embeds": torch.zeros(6, 32)}
    with pytest.raises(InputError, match=r"inputs_embeds.*several models"):
        session.admit(descant.Request([EOS], GenerationConfig(max_new_tokens=3), given))
    assert len(session) == 0


def test_the_shortest_table_counts():
    """GPT-2's positions end at 96, a Llama's nowhere."""
    for whole in (
        ContrastiveDecoding(made("llama", 0), made("gpt2", 1)),
        ContrastiveDecoding(made("gpt2", 1), made("llama", 0)),
    ):
        with pytest.raises(ConfigError, match="96 positions"):
            generated(whole, max_new_tokens=92)


def test_only_inputs_that_all_know_are_taken():
    assert "token_type_ids" in as_model(made("gpt2", 1)).traits.input_names
    with pytest.raises(InputError, match="token_type_ids"):
        generated(
            ContrastiveDecoding(made("gpt2", 1), made("llama", 0)),
            token_type_ids=torch.ones(1, 6, dtype=torch.long),
        )


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda a, b: ContrastiveDecoding(a, b, -0.1), "alpha"),
        (lambda a, b: ContrastiveDecoding(a, b, 1.1), "alpha"),
        (lambda a, b: ContrastiveDecoding(a, b, True), "alpha"),
        (lambda a, b: ContrastiveDecoding(a, b, beta=-1), "beta"),
        (lambda a, b: ContrastiveDecoding(a, b, amateur_temperature=0), "amateur_temperature"),
        (lambda a, b: ContrastiveDecoding(a, None), "amateur"),
        (lambda a, b: ProxyTuning(a, b, b, math.nan), "alpha"),
        (lambda a, b: ProxyTuning(a, b, b, "1"), "alpha"),
        (lambda a, b: DExperts(a, None, None), "expert"),
        (lambda a, b: DExperts(a, b, b, math.inf), "alpha"),
        (lambda a, b: DExperts(a, b, b, top_p=0), "top_p"),
    ],
)
def test_wrong_values_are_refused(build, name):
    with pytest.raises(InputError, match=f"`{name}` must") as caught:
        build(made("llama", 0), made("llama", 3))
    assert caught.value.field == name


# ------------------------------------------------------------------------ the port
class ScriptedModel:
    """A model with given outputs that records its inputs."""

    network = None
    rank_group = None

    def __init__(self, logits: Tensor, device: str = "cpu", fails: bool = False) -> None:
        self.logits, self.device, self.fails = logits, torch.device(device), fails
        self.traits = as_model(made("llama", 0)).traits
        self.opened: list[int] = []
        self.fed: list[torch.device] = []

    def add_requests(self, requests: Sequence[int], inputs: Any) -> None:
        if self.fails:
            raise RuntimeError("no room")
        self.opened += requests

    def remove_requests(self, requests: Sequence[int]) -> None:
        self.opened = [one for one in self.opened if one not in requests]

    def forward(self, rows: Rows, proposal: Proposal, cache: Any) -> ForwardOutput:
        self.fed.append(rows.tokens.device)
        if proposal.drafts is not None:
            self.fed.append(proposal.drafts.device)
        return ForwardOutput(self.logits, [{"from": self.logits}])


def joint(*parts: Any) -> JointModel:
    return JointModel(
        ContrastiveDecoding(*parts, alpha=0),
        parts,
        lambda parts: MultiModelCache([DenseStore() for _ in parts]),
    )


def table() -> Rows:
    one = torch.ones(1, dtype=torch.long)
    zero = torch.zeros_like(one)
    return Rows(torch.tensor([[5]]), one, zero, zero, one, zero, zero)


def test_rows_are_brought_to_each_models_device():
    here, there = ScriptedModel(torch.randn(1, 2, VOCAB)), ScriptedModel(torch.randn(1, 2, VOCAB), "meta")
    whole = joint(here, there)
    drafts = torch.tensor([[7]])
    whole.forward(table(), Proposal(None, drafts, torch.tensor([1])), whole.new_cache())
    assert [one.type for one in here.fed] == ["cpu", "cpu"]
    assert [one.type for one in there.fed] == ["meta", "meta"]


def test_the_answer_holds_the_first_models_own():
    first, second = ScriptedModel(torch.randn(1, 1, VOCAB)), ScriptedModel(torch.randn(1, 1, VOCAB))
    whole = joint(first, second)
    answer = whole.forward(table(), Proposal(), whole.new_cache())
    assert answer.base_logits is first.logits
    assert answer.states[0]["from"] is first.logits
    torch.testing.assert_close(answer.logits, first.logits.log_softmax(-1) - second.logits.log_softmax(-1))


def test_an_infinite_contrast_is_still_a_distribution():
    first, second = ScriptedModel(torch.zeros(1, 1, VOCAB)), ScriptedModel(torch.zeros(1, 1, VOCAB))
    second.logits[..., 3] = -math.inf
    whole = joint(first, second)
    answer = whole.forward(table(), Proposal(), whole.new_cache()).logits[0, 0]
    assert answer.softmax(-1)[3] == 1
    assert answer.log_softmax(-1).isfinite().all()


def test_a_request_that_one_model_refuses_is_forgotten_by_all():
    first, second = ScriptedModel(torch.zeros(1)), ScriptedModel(torch.zeros(1), fails=True)
    with pytest.raises(RuntimeError, match="no room"):
        joint(first, second).add_requests([3, 4], {})
    assert first.opened == []


def test_caches_are_of_each_models_own_kind():
    whole = as_model(ContrastiveDecoding(made("llama", 0), made("mamba", 4)))
    made_now = whole.new_cache()
    assert [type(part) for part in made_now.parts] == [DenseStore, RecurrentStateCache]
    assert made_now.max_rewind is None
    assert whole.traits.cache_type == "recurrent"
