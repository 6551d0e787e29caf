"""Known wounds of speculation in other decoders, each shown to be none here. One test a wound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import descant
from descant import GenerationConfig, Request, Session
from descant.core.records import ForwardOutput
from descant.decoding.speculative.draft_model import AssistantDrafter
from descant.testing import failing_request, outcomes
from tests.contracts.configs import TEXTS, tokenizer
from tests.contracts.speculation import near
from tests.support.markov_model import Chain
from tests.support.tiny_models import pad
from tests.unit.decoding.speculative.rig import greedy, logits_of, network

VOCAB, END = 97, 2


class Script(Chain):
    """A model that continues with the script of the row's first token, whatever the other tokens."""

    def __init__(self, scripts: dict[int, Sequence[int]]) -> None:
        super().__init__(torch.zeros(1, 1, VOCAB))
        self.scripts = scripts
        self.furthest = 0  # the longest row it was ever shown, tried tokens among it

    def forward(self, rows: Any, proposal: Any, cache: Any) -> ForwardOutput:
        self.fed.append(len(rows))
        lines = torch.full((len(rows), proposal.width + 1, VOCAB), -10.0)
        for row in range(len(rows)):
            script = self.scripts[int(rows.tokens[row, 0])]
            for ahead in range(proposal.width + 1):
                at = int(rows.length[row] - rows.prompt_length[row]) + ahead
                lines[row, ahead, script[at] if at < len(script) else VOCAB - 1] = 10.0
        tried = torch.as_tensor(proposal.draft_counts())
        self.furthest = max(self.furthest, int((rows.length + tried).max()))
        return ForwardOutput(lines)


def config(count: int | None = None, **given: Any) -> GenerationConfig:
    given = {"eos_token_id": END, "pad_token_id": 0, "max_new_tokens": 12, **given}
    if count is not None:
        given |= {"num_assistant_tokens": count, "num_assistant_tokens_schedule": "constant"}
    return GenerationConfig(**given)


def outcomes_of(
    target: Any, helper: Any, texts: Sequence[Sequence[int]], count: int = 8, **given: Any
) -> list[Any]:
    """What became of requests with that draft model."""
    more = {"assistant_model": helper, "tokenizer": given.pop("tokenizer", None)}
    return outcomes(target, [Request(text, config(count, **given), **more) for text in texts])


# ------------------------------------------------------------------------ ends
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_an_end_inside_a_run_is_run_over(count):
    """Drafts after an end token are dropped (transformers#31301, #47912)."""
    scripts = {5: [10, 11, END, 12, 13, 14], 6: [20, 21, 22, 23, 24, END, 25], 7: [END, 30, 31]}
    found = outcomes_of(Script(scripts), Script(scripts), [[5], [6], [7]], count)
    assert [one.tokens for one in found] == [[[10, 11, END]], [[20, 21, 22, 23, 24, END]], [[END]]]
    assert [one.reasons for one in found] == [["eos"]] * 3
    assert [one.streamed_tokens[0] for one in found] == [one.tokens[0] for one in found]


def test_an_end_that_was_looked_up_is_run_over():
    """The prompt holds what comes, its end and what came after that (transformers#31301)."""
    scripts = {5: [10, 11, END, 12, 13]}
    text = [5, 9, 10, 11, END, 12, 13, 14, 9]
    for fields in ({"prompt_lookup_num_tokens": 6}, {"suffix_lookup_num_tokens": 6}):
        asked = config(num_assistant_tokens_schedule="constant", **fields)
        found = outcomes(Script(scripts), [Request(text, asked)])[0]
        assert found.tokens == [[10, 11, END]]
        assert found.hypotheses[0].speculation.saved_forwards >= 2, "what comes before it was guessed"


@pytest.mark.parametrize("count", range(1, 10))
def test_a_length_inside_a_run_is_run_over(count):
    """Never one token too many, and none is even tried beyond what may come (transformers#31301)."""
    script = {5: list(range(10, 40)), 6: list(range(50, 80))}
    for limit in range(1, 10):
        for fields in ({"max_new_tokens": limit}, {"max_new_tokens": None, "max_length": limit + 2}):
            target = Script(script)
            one, two = outcomes_of(target, Script(script), [[5, 7], [6, 7]], count, **fields)
            assert one.tokens == [list(range(10, 10 + limit))]
            assert two.tokens == [list(range(50, 50 + limit))]
            assert one.reasons == two.reasons == ["length"]
            assert target.furthest < limit + 2, "the last token is never fed, tried or not"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_stop_string_across_drafts_is_missed(count):
    """It may begin in one run, or before all, and end in the midst of another."""
    texts = {text: at for at, text in enumerate(TEXTS)}
    spelled = [texts[letter] for letter in "onestopmore!!"]
    scripts = {5: spelled, 6: [texts["x"]] * 13, texts["s"]: [texts["t"], *spelled]}
    found = outcomes_of(
        Script(scripts),
        Script(scripts),
        [[5], [6], [texts["s"]]],
        count,
        stop_strings=["estop", "st"],
        tokenizer=tokenizer(),
    )
    words = ["".join(TEXTS[token] for token in one.tokens[0]) for one in found]
    assert words == ["onest", "x" * 12, "t"]
    assert [one.reasons for one in found] == [["stop"], ["length"], ["stop"]]


# ------------------------------------------------------------------------ rows of a batch
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_row_that_ended_spoils_those_that_draft(count):
    """Rows end at every place of a run while others go on (the request of transformers#32165)."""
    scripts = {row: [*range(30 + row, 30 + row + row), END, 3, 4] for row in range(5, 20)}
    found = outcomes_of(
        Script(scripts), Script(scripts), [[row] for row in scripts], count, max_new_tokens=30
    )
    assert [one.tokens[0] for one in found] == [script[:-2] for script in scripts.values()]


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_drafter_that_always_or_never_agrees(count, agrees):
    """Wrong drafts cost forwards of their own and nothing else: no token is lost or repeated."""
    scripts = {5: list(range(10, 40)), 6: list(range(50, 80))}
    target = Script(scripts)
    helper = Script(scripts if agrees else {5: [3] * 30, 6: [4] * 30})
    found = outcomes_of(target, helper, [[5], [6]], count, max_new_tokens=24)
    assert [one.tokens[0] for one in found] == [script[:24] for script in scripts.values()]
    assert len(target.fed) == (-(-24 // (count + 1)) if agrees else 24)
    report = found[0].hypotheses[0].speculation
    assert (report.acceptance_rate, report.saved_forwards) == (float(agrees), 24 - len(target.fed))


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_a_schedule_that_never_recovers(schedule):
    """After drafts that were all wrong come some that are all right: they are used again."""
    scripts = {5: [10 + at % 40 for at in range(200)]}
    wrong = {5: [3] * 100 + scripts[5][100:]}
    target = Script(scripts)
    asked = GenerationConfig(
        max_new_tokens=200, num_assistant_tokens=5, num_assistant_tokens_schedule=schedule, pad_token_id=0
    )
    found = outcomes(target, [Request([5], asked, assistant_model=Script(wrong))])[0]
    assert found.tokens == [scripts[5]]
    assert found.hypotheses[0].speculation.saved_forwards > 20


# ------------------------------------------------------------------------ what is remembered
@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], list[list[int]]]]:
    """What draft models draft: the rows' texts, and the drafts after each."""
    kept: list[tuple[list[list[int]], list[list[int]]]] = []
    original = AssistantDrafter.draft

    def draft(self: AssistantDrafter, rows: Any, most: Any, aid: Any) -> Any:
        made = original(self, rows, most, aid)
        if made.drafts is not None:
            texts = [rows.tokens[row, : int(rows.length[row])].tolist() for row in range(len(rows))]
            kept.append(
                (texts, [made.drafts[row, : int(made.num_drafts[row])].tolist() for row in range(len(rows))])
            )
        return made

    monkeypatch.setattr(AssistantDrafter, "draft", draft)
    return kept


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "mistral"])
def test_the_draft_models_positions_go_stale(name, drafts):
    """After drafts that were refused it goes on as if it read the whole text anew (transformers#46124)."""
    target, helper = network(name, 1), network(name, 3)
    texts = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17]]
    ends = {"max_new_tokens": 14, "suppress_tokens": list(range(9)), "eos_token_id": None}
    found = outcomes_of(target, helper, texts, 4, **ends, assistant_confidence_threshold=0.0)
    refused = sum(sum(one.hypotheses[0].speculation.drafted) for one in found)
    assert refused > 20
    allowed = torch.arange(VOCAB) >= 9
    for rows, guesses in drafts:
        for text, guess in zip(rows, guesses, strict=True):
            for at in range(len(guess)):
                logits = logits_of(helper, [*text, *guess[:at]])[-1]
                best = logits.masked_fill(~allowed, -torch.inf)
                assert best[guess[at]] >= best.max() - 1e-4, f"{guess[at]} after {[*text, *guess[:at]]}"


@pytest.mark.ci_cases("5-gemma3", "3-mistral", "9-mistral")
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("count", [3, 5, 9])
def test_a_roll_back_past_a_windows_edge(name, count):
    """More drafts than the window of 5 holds, refused at every place (transformers#46629, #48280)."""
    target = network(name, 1)
    texts = [[5, 6, 7, 8, 9, 10, 11, 12], [9], list(range(20, 44))]
    ids, mask = pad(texts, 0, "left")
    given = {"max_new_tokens": 26, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    out = descant.generate(
        target,
        input_ids=ids,
        attention_mask=mask,
        **given,
        output_logits=True,
        assistant_model=near(target, 0.998),
        num_assistant_tokens=count,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    places = {at for one in out.speculation for at, (n, k) in enumerate(zip(*one[:2], strict=True)) if n > k}
    assert len(places) >= min(count, 4), f"guesses were refused at {places} only"
    for row, text in enumerate(texts):
        new = out.sequences[row, ids.shape[1] :].tolist()
        assert new == greedy(target, text, 26)
        whole = logits_of(target, text + new)
        for step in range(26):
            torch.testing.assert_close(
                out.logits[step][row], whole[len(text) - 1 + step], rtol=0, atol=2e-4, msg=f"step {step}"
            )


@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_draft_up_to_the_end_of_a_table_of_positions(count):
    """A learned table has a last position: nothing is tried beyond it, neither here nor there."""
    target, short = network("gpt2", 1), _short_gpt2()
    text = torch.randint(3, VOCAB, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    table = target.config.n_positions
    for limit in (table, table + 1):  # the last token is never fed
        given = {"max_new_tokens": None, "max_length": limit, "eos_token_id": None}
        plain = outcomes(target, [Request(text, config(**given))])[0]
        for helper in (target, network("gpt2", 4), short):
            found = outcomes_of(target, helper, [text, text[:78]], count, **given)
            assert found[0].tokens == plain.tokens
            assert [len(one.tokens[0]) for one in found] == [limit - 80, limit - 78]
            tried = sum(found[0].hypotheses[0].speculation.drafted)
            assert tried > 0 if helper is not short else tried == 0
    # The short one drafts for as long as it can.
    found = outcomes_of(target, short, [text[:5]], count, max_new_tokens=40, eos_token_id=None)
    assert found[0].tokens[0] == greedy(target, text[:5], 40)
    assert 0 < sum(found[0].hypotheses[0].speculation.drafted) <= 20 * count


def _short_gpt2() -> Any:
    """A draft model of few positions."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).eval()


# ------------------------------------------------------------------------ two tokenizers
class Fed:
    """Counts a token among all that a model is fed."""

    def __init__(self, model: Any, token: int) -> None:
        self.count = 0
        self._handle = model.get_input_embeddings().register_forward_pre_hook(
            lambda _, given: self._add(given[0], token)
        )

    def _add(self, ids: torch.Tensor, token: int) -> None:
        self.count += int((ids == token).sum())

    def __enter__(self) -> Fed:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def test_a_first_token_is_added_at_every_encoding(real):
    """Each re-encoding would begin with it, in the midst of a text (transformers#46936)."""
    smol, stories = real("smollm2"), real("stories15m")
    bos = stories.tokenizer.bos_token_id
    texts = ["Once upon a time there was a", "Lily had a red ball and"]
    assert stories.tokens("Lily")[0] == bos, "the tokenizer does add one"
    both = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", "max_new_tokens": 10}

    def run(target: Any, helper: Any) -> list[Any]:
        rows = [target.tokens(text) for text in texts]
        ids, mask = pad(rows, target.pad, "left")
        given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 10}
        plain = descant.generate(target.model, **given)
        guessed = descant.generate(
            target.model,
            **{**given, **both},
            assistant_model=helper.model,
            tokenizer=target.tokenizer,
            assistant_tokenizer=helper.tokenizer,
            return_dict_in_generate=True,
        )
        assert torch.equal(guessed.sequences, plain)
        return list(guessed.speculation)

    with Fed(stories.model, bos) as helper:
        reports = run(smol, stories)
    assert helper.count <= len(texts), "once a row at the most, where it begins"
    assert sum(one.saved_forwards for one in reports) > 0
    with Fed(stories.model, bos) as target:
        reports = run(stories, smol)
    assert target.count == 2 * len(texts), "the prompts' own, with guesses and without"
    assert sum(one.saved_forwards for one in reports) > 0


# ------------------------------------------------------------------------ what goes on afterwards
def test_a_drafter_keeps_rows_that_have_left(monkeypatch):
    """However requests leave, their drafter drops their state (1Cat-vLLM#656)."""
    known: set[int] = set()
    opening, closing = AssistantDrafter.add_requests, AssistantDrafter.remove_requests

    def opened(self: AssistantDrafter, requests: Sequence[int], inputs: Any) -> None:
        known.update(requests)
        opening(self, requests, inputs)

    def closed(self: AssistantDrafter, requests: Sequence[int]) -> None:
        known.difference_update(requests)
        closing(self, requests)

    monkeypatch.setattr(AssistantDrafter, "add_requests", opened)
    monkeypatch.setattr(AssistantDrafter, "remove_requests", closed)
    scripts = {row: list(range(10, 40)) for row in range(5, 9)}
    helper, session = Script(scripts), Session(Script(scripts))
    for turn in range(4):
        asked = [Request([row, 4], config(3), assistant_model=helper) for row in scripts]
        numbers = session.admit(*asked[:3], failing_request(asked[3], turn))
        assert known == set(numbers)
        session.step()
        session.cancel(numbers[1])
        assert numbers[1] not in known
        list(session.drain())
        assert not known
