"""Every method and field of the form is one of the server's, and refusals are shown where they belong."""

from __future__ import annotations

import json

import pytest

from tests.e2e.serve_page.conftest import OpenPage

# What each method sends beside its defaults of the page.
SENT = {
    "greedy": {"do_sample": False},
    "sampling": {
        "do_sample": True, "temperature": 0.5, "top_p": 0.95, "top_k": 50, "min_p": 0.1, "seed": 7,
        "n": 2,
    },
    "beams": {"do_sample": False, "num_beams": 4, "n": 2, "length_penalty": 1.5},
    "diverse": {"do_sample": False, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1, "n": 3},
    "contrastive": {"do_sample": False, "penalty_alpha": 0.6, "top_k": 4},
    "dola": {"do_sample": False, "dola_layers": [0], "repetition_penalty": 1.2},
}  # fmt: skip
SECTIONS = {
    "guidance": (
        {"guidance_scale": "1.5", "negative_prompt": "bad"},
        {"guidance_scale": 1.5, "negative_prompt": "bad"},
    ),
    "lookup": ({"prompt_lookup_num_tokens": "3"}, {"prompt_lookup_num_tokens": 3}),
    "stop": ({"stop": "one\ntwo"}, {"stop": ["one", "two"]}),
    "others": ({"others": '{"no_repeat_ngram_size": 2}'}, {"no_repeat_ngram_size": 2}),
}  # fmt: skip
GRAMMARS = {
    "json_schema": ('{"type": "boolean"}', {"true", "false"}),
    "regex": ("a{3}b", {"aaab"}),
    "choice": ("yes\nno", {"yes", "no"}),
}

# A method, its fields, the control that shows the refusal, and what it says.
REFUSALS = (
    ("beams", {"num_beams": "0"}, "#beams-num_beams", "`num_beams` must be an int >= 1, got 0"),
    ("beams", {"num_beams": "2", "n": "3"}, "#beams-n", "`n` must be <= `num_beams`"),
    ("sampling", {"temperature": "warm"}, "#sampling-temperature", "valid number"),
    ("greedy", {"others": '{"top_q": 1}'}, "#field-others", "`top_q` is not a parameter"),
    ("greedy", {"others": '{"top_q": '}, "#field-others", "must be JSON"),
    ("greedy", {"others": "[1]"}, "#field-others", "must be a JSON object"),
    ("greedy", {"grammar_kind": "regex", "grammar": "("}, "#field-grammar", "`grammar` must be a grammar"),
    ("greedy", {"max_tokens": "99999"}, "#field-max_tokens", "context"),
)


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_the_server_takes_each_method(open_page: OpenPage, mode: str) -> None:
    page = open_page()
    page.set_mode(mode)
    page.fill("max_tokens", 3)
    for method, sent in SENT.items():
        fields = {name: json.dumps(value) for name, value in sent.items() if name != "do_sample"}
        page.choose(method, fields)
        entry = page.ask("Once")
        assert entry.locator(".notice:visible").count() == 0, entry.text_content()
        body = page.bodies[-1]
        fixed = {"model", "messages", "prompt", "stream", "stream_options", "logprobs", "top_logprobs"}
        fixed |= {"separate_reasoning"}  # the page shows a thought as part of the answer
        assert {name: body[name] for name in body.keys() - fixed} == {**sent, "max_tokens": 3}
        assert entry.locator(".answer").count() == sent.get("n", 1)
    page.check()


def test_the_server_takes_what_is_beside_the_method(open_page: OpenPage) -> None:
    page = open_page()
    page.set_mode("completion")
    page.choose("greedy", {"max_tokens": 3})
    for given, sent in SECTIONS.values():
        for name, value in given.items():
            page.fill(name, value)
        entry = page.ask("Once upon a time, once upon")
        assert entry.locator(".notice:visible").count() == 0, entry.text_content()
        assert {name: page.bodies[-1].get(name) for name in sent} == sent
        for name in given:
            page.fill(name, "")
    page.fill("max_tokens", 12)
    for kind, (grammar, allowed) in GRAMMARS.items():
        page.set_grammar(kind, grammar)
        page.ask("Say")
        assert page.answer() in allowed
    page.check()


def test_the_chosen_one_of_several_answers_goes_on(open_page: OpenPage) -> None:
    page = open_page()
    page.choose("beams", {"num_beams": 3, "n": 3, "max_tokens": 4})
    page.ask("Once")
    texts = [page.answer(index) for index in range(3)]
    assert len(set(texts)) == 3
    page.page.locator(".answer input[type=radio]").nth(2).check()
    page.ask("More")
    assert page.bodies[-1]["messages"][1] == {"role": "assistant", "content": texts[2]}
    page.check()


def test_refusals_are_shown_at_their_fields(open_page: OpenPage) -> None:
    page = open_page(width=800)  # the settings are folded at this width, and opened by the error
    for number, (method, fields, at, says) in enumerate(REFUSALS):
        if not page.page.locator("#settings").is_visible():
            page.page.locator("#fold").click()
        page.page.locator("#reset").click()
        page.choose(method, fields)
        page.send(f"Once {number}")
        control, error = page.page.locator(at), page.page.locator(f"{at}-error")
        page.until(f"document.querySelector('{at}').ariaInvalid === 'true'")
        assert error.is_visible()
        assert says in (error.text_content() or "")
        assert control.get_attribute("aria-describedby") == error.get_attribute("id")
        page.wait_for_end()
        assert page.page.locator("#input").input_value() == f"Once {number}"
        assert page.page.locator(".entry").count() <= 1
        control.select_text()
        page.page.keyboard.type("1")
        assert not error.is_visible()
    page.check()


def test_settings_are_kept_and_prompts_are_not(open_page: OpenPage) -> None:
    page = open_page()
    page.set_mode("completion")
    page.choose("beams", {"num_beams": 7, "max_tokens": 2, "negative_prompt": "secret one"})
    page.page.locator("label:has(#shading)").click()
    page.ask("secret two")
    page.set_mode("chat")
    page.fill("system", "secret three")
    page.set_mode("completion")
    stored = page.page.evaluate("JSON.stringify({...localStorage}) + JSON.stringify({...sessionStorage})")
    assert "secret" not in stored
    page.page.reload()
    page.until("document.getElementById('model').textContent !== ''")
    assert page.page.locator("#beams-num_beams").input_value() == "7"
    assert page.page.locator("#beams-num_beams").is_visible()
    assert not page.page.locator("#shading").is_checked()
    assert page.page.locator(".segments input:checked").get_attribute("value") == "completion"
    page.page.locator("#reset").click()
    assert page.page.locator("#sampling-temperature").is_visible()
    assert page.page.evaluate("document.cookie") == ""
    page.check()
