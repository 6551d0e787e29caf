"""generate() with texts and messages: texts with their tokens come back, and mistakes say what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import descant
from descant.config.generation_config import FIELDS
from descant.config.registry import OTHER_NAMES, suggest_name
from descant.testing import toy

TEXTS = ["Once upon a time", "The dog"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = transformers.AutoTokenizer.from_pretrained("models/stories15m")
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained("models/stories15m", dtype=torch.float32).eval()


def ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer(text)["input_ids"]])


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "seed": 5}, {"logprobs": 2}],
    ids=str,
)
def test_texts_have_the_tokens_of_their_ids(model: Any, tokenizer: Any, fields: dict[str, Any]) -> None:
    out = descant.generate(model, TEXTS, tokenizer=tokenizer, max_new_tokens=8, **fields)
    assert isinstance(out, descant.TextOutput)
    assert all(isinstance(one, descant.Completion) for one in out)
    each = fields.get("num_return_sequences", 1)
    assert [(one.row, one.sequence) for one in out] == [(row, k) for row in (0, 1) for k in range(each)]
    for row, text in enumerate(TEXTS):
        ids = ids_of(tokenizer, text)
        more = {**fields, "return_dict_in_generate": True}
        alone = descant.generate(model, ids, max_new_tokens=8, **more)
        for one, sequence in zip(out[row * each : (row + 1) * each], alone.sequences, strict=True):
            new = sequence[ids.shape[1] :].tolist()[: len(one.token_ids)]
            assert list(one.token_ids) == new
            whole = tokenizer.decode(sequence.tolist(), skip_special_tokens=True)
            assert text + one.text == whole
            assert one.finish_reason == "length"
            assert (one.hypothesis.logprobs is not None) == ("logprobs" in fields)
    assert out.texts == [one.text for one in out]
    assert (out.text, str(out)) == (out.texts[0], "\n".join(out.texts))
    assert repr(out) == f"TextOutput({out.texts!r})"
    assert len(out.output.sequences) == 2 * each


def test_a_text_is_what_the_stream_says(model: Any, tokenizer: Any) -> None:
    call = {"max_new_tokens": 12, "stop_strings": ["there"], "token_healing": True}
    out = descant.generate(model, TEXTS[0], tokenizer=tokenizer, **call)
    streamed = "".join(event.text or "" for event in descant.stream(model, TEXTS[0], tokenizer, **call))
    assert out.text == streamed
    assert out[0].finish_reason == "stop"
    assert str(out[0]) == out.text


def test_messages_pass_the_chat_template(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    expected = descant.generate(model, "user: Hello\nassistant:", tokenizer=tokenizer, max_new_tokens=6)
    for given in (messages, [messages, messages]):
        out = descant.generate(model, given, tokenizer=tokenizer, max_new_tokens=6)
        assert {one.token_ids for one in out} == {expected[0].token_ids}
        events = descant.stream(model, given, tokenizer, max_new_tokens=6)
        assert [event.text for event in events if event.row == 0] != []


def test_a_trace_comes_with_the_texts(model: Any, tokenizer: Any) -> None:
    out = descant.generate(model, TEXTS[0], tokenizer=tokenizer, max_new_tokens=4, trace=True)
    assert out.trace is out.output.trace is not None
    assert "<iframe" in str(out._repr_html_())
    assert descant.generate(model, TEXTS[0], tokenizer=tokenizer, max_new_tokens=2)._repr_html_() is None


def test_an_encoder_reads_the_text() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained("models/flan-t5-small-titles")
    config = transformers.AutoConfig.from_pretrained("models/flan-t5-small-titles")
    config.update({"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_kv": 8, "d_ff": 32})
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    out = descant.generate(model, ["A text.", "Another one"], tokenizer=tokenizer, max_new_tokens=4)
    alone = descant.generate(model, **tokenizer("A text.", return_tensors="pt"), max_new_tokens=4)
    assert list(out[0].token_ids) == alone[0, 1 : 1 + len(out[0].token_ids)].tolist()


def test_a_bar_counts_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    plain = descant.generate(toy(), ids, max_new_tokens=4)
    assert capsys.readouterr().err == ""
    assert torch.equal(descant.generate(toy(), ids, max_new_tokens=4, progress=True), plain)
    shown = capsys.readouterr().err
    assert "generate: 100%" in shown
    assert "2/2" in shown
    with pytest.raises(descant.InputError, match="`progress` must be True or False, got 'yes'"):
        descant.generate(toy(), ids, progress="yes")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m, t: descant.generate("gpt2", "x", tokenizer=t),
            r"`model` must be a model, got 'gpt2': load it",
        ),
        (lambda m, t: descant.generate(None, "x", tokenizer=t), r"`model` must be a model, got None"),
        (lambda m, t: descant.stream("gpt2", "x", t), r"`model` must be a model, got 'gpt2': load it first"),
        (lambda m, t: descant.generate(m, "x"), r"`tokenizer` must be given when `inputs` is text"),
        (
            lambda m, t: descant.generate(m, t("x")),
            r"got 'BatchEncoding': unpack it: generate\(model, \*\*inputs\)",
        ),
        (
            lambda m, t: descant.generate(m, [1, 2]),
            r"`inputs` must hold only texts, .*: pass token ids as a tensor",
        ),
        (lambda m, t: descant.generate(m, ["x", 2], tokenizer=t), r"`inputs` must hold only texts"),
        (lambda m, t: descant.generate(m, [], tokenizer=t), r"`inputs` must be \[batch, length\] of ids"),
        (
            lambda m, t: descant.generate(m, "x", tokenizer=t, attention_mask=torch.ones(1, 1)),
            r"`attention_mask` must not be given with texts as `inputs`",
        ),
        (
            lambda m, t: descant.generate(m, "x", tokenizer=t, max_new_token=3),
            r"did you mean `max_new_tokens`\?",
        ),
        (
            lambda m, t: descant.generate(m, "x", tokenizer=t, max_tokens=3),
            r"the name here is `max_new_tokens`",
        ),
        (lambda m, t: descant.generate(m, "x", tokenizer=t, stop=["."]), r"the name here is `stop_strings`"),
        (lambda m, t: descant.generate(m, "x", tokenizer=t, n=2), r"the name here is `num_return_sequences`"),
        (lambda m, t: descant.generate(m, "x", tokenizer=t, stremer=1), r"did you mean `streamer`\?"),
        (lambda m, t: descant.GenerationConfig(max_tokens=3), r"the name here is `max_new_tokens`"),
    ],
)
def test_mistakes_say_what_to_do(model: Any, tokenizer: Any, make: Any, message: str) -> None:
    with pytest.raises((descant.InputError, descant.ConfigError), match=message):
        make(model, tokenizer)


def test_a_tokenizer_without_a_template_takes_no_messages(model: Any) -> None:
    plain = transformers.AutoTokenizer.from_pretrained("models/stories15m")
    plain.chat_template = None
    with pytest.raises(descant.InputError, match="must have a chat template when prompts are messages"):
        descant.generate(model, [{"role": "user", "content": "Hello"}], tokenizer=plain)


def test_words_of_other_libraries_lead_to_names_here() -> None:
    arguments = {"assistant_model", "negative_prompt_ids"}
    assert {name for name in OTHER_NAMES.values() if name not in FIELDS} == arguments
    assert not OTHER_NAMES.keys() & FIELDS.keys()
    assert suggest_name("max_tokens", FIELDS) == "the name here is `max_new_tokens`"
    assert suggest_name("draft_model", FIELDS) is None
