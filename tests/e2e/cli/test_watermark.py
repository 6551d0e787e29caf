"""`descant watermark`: the answer is the Detector's, from texts, lines and pipes; no key is ever shown."""

from __future__ import annotations

import json
import stat
import warnings

import pytest
import torch

import descant as package
from descant.config.watermarking_config import as_watermarking_config
from descant.decoding.watermark.detection import Detector
from descant.decoding.watermark.keys import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    fingerprint,
    read_settings,
)
from descant.decoding.watermark.report import VERDICT_TEXTS, explain_verdict
from descant.decoding.watermark.synthid import get_tournament, repetition_mask
from descant.models.bayesian_detector import BayesianDetectorConfig, BayesianDetectorModel, save_detector
from descant.models.loading.loading import load, load_tokenizer

PROMPT = "Once upon a time"
SECRET = 8123456789012
KEYS = {
    "green": {"hashing_key": SECRET + 1, "bias": 4.0},
    "synthid": {"ngram_len": 5, "keys": [SECRET + 77 * at for at in range(30)]},
    "gumbel": {"key": SECRET, "nonces": 2},
}
SAMPLED = {"do_sample": True, "seed": 3, "max_new_tokens": 120}
PLAIN = (
    "A harbour pilot keeps a list of the stones below the water, and every winter he has to draw it again. "
    "Nobody else reads it. When the ferries come in at night he stands in the bow with a lamp and counts, "
    "and what he says is written down by a boy who would rather be asleep."
)


@pytest.fixture(autouse=True)
def _no_key_lies_about(monkeypatch):
    for name in (KEY_VARIABLE, KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def key(tmp_path):
    """`key("green")`: a file with that key, named as its scheme."""

    def written(*names):
        path = tmp_path / f"{'-'.join(names)}.json"
        path.write_text(json.dumps([{"name": name, **KEYS[name]} for name in names]), encoding="utf-8")
        return path

    return written


@pytest.fixture(scope="module")
def marked(stories):
    """New tokens with each mark, and their text."""
    model, tokenizer = load(stories)
    found = {}
    for name, settings in KEYS.items():
        given = tokenizer(PROMPT, return_tensors="pt")
        out = package.generate(model, **given, **SAMPLED, watermarking_config=settings)
        ids = out[0, given["input_ids"].shape[1] :].tolist()
        found[name] = (ids, tokenizer.decode(out[0], skip_special_tokens=True)[len(PROMPT) :])
    return found


@pytest.fixture
def detector(stories):
    """The library's Detector with these keys."""
    tokenizer, vocabulary = load_tokenizer(stories)
    return lambda *names, **more: Detector(
        {name: as_watermarking_config(KEYS[name]) for name in names}, vocabulary, tokenizer, **more
    )


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(text):
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------------------- detect
@pytest.mark.parametrize("name", KEYS)
def test_a_marked_text_is_found(descant, stories, tmp_path, key, marked, detector, name):
    file = tmp_path / "text.txt"
    file.write_text(marked[name][1] + "\n", encoding="utf-8")
    expected = detector(name).text(marked[name][1])
    assert expected.verdict == "marked"
    asked = ("watermark", "detect", file, "--model", stories, "--key", key(name))
    result = descant(*asked, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert read(result.stdout) == [{"file": str(file), **expected.to_dict()}]
    shown = descant(*asked)
    assert (shown.exit_code, shown.stderr) == (0, "")
    words = " ".join(shown.stdout.split())
    for told in (f"text {file}", "verdict marked", f"key {name}", f"{expected.scored} of {expected.tokens}"):
        assert told in words
    assert explain_verdict(expected) in words
    assert not any(str(SECRET)[:9] in text for text in (result.stdout, shown.stdout))


@pytest.mark.parametrize("name", KEYS)
def test_another_key_finds_nothing(descant, stories, tmp_path, key, marked, name):
    file = tmp_path / "text.txt"
    file.write_text(marked[name][1], encoding="utf-8")
    others = [key(other) for other in KEYS if other != name]
    result = descant(
        "watermark", "detect", file, "--json", "--tokenizer", stories, "--key", others[0], "--key", others[1]
    )
    [found] = read(result.stdout)
    assert found["verdict"] != "marked"
    assert found["tests"] >= 2
    both = descant("watermark", "detect", file, "--json", "--model", stories, "--key", key(*KEYS))
    assert read(both.stdout)[0]["key"] == name


def test_standard_input_with_a_key_of_the_environment(descant, stories, key, marked, detector):
    text = marked["green"][1]
    asked = ("watermark", "detect", "--model", stories, "--json")
    [found] = read(descant(*asked, input=text + "\n", env={KEY_FILE_VARIABLE: str(key("green"))}).stdout)
    assert found == {"file": "-", **detector("green").text(text).to_dict()}
    told = json.dumps({"name": "green", **KEYS["green"]})
    for more in (("-",), ("-", "--key", "env")):
        assert read(descant(*asked, *more, input=text, env={KEY_VARIABLE: told}).stdout) == [found]


def test_lines_have_texts_ids_prompts_and_completions(descant, stories, tmp_path, key, marked, detector):
    ids, text = marked["green"]
    tokenizer, _ = load_tokenizer(stories)
    before = tokenizer(PROMPT)["input_ids"]
    rows = [
        {"text": text, "id": "a"},
        {"text": text, "prompt": PROMPT},
        {"ids": ids, "id": 7},
        {"ids": ids, "prompt": before},
        {"ids": before + ids, "prompt": len(before)},
        {"prompt": PROMPT, "completions": [{"text": text, "tokens": 120}, {"text": PLAIN}]},
        {"text": PLAIN},
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n" + lines(rows), encoding="utf-8")
    asked = detector("green")
    expected = [
        ({"line": 2, "id": "a"}, asked.text(text)),
        ({"line": 3}, asked.text(text, prompt=PROMPT)),
        ({"line": 4, "id": 7}, asked.ids(ids)),
        ({"line": 5}, asked.ids(before + ids, prompt=len(before))),
        ({"line": 6}, asked.ids(before + ids, prompt=len(before))),
        ({"line": 7, "completion": 1}, asked.text(text, prompt=PROMPT)),
        ({"line": 7, "completion": 2}, asked.text(PLAIN, prompt=PROMPT)),
        ({"line": 8}, asked.text(PLAIN)),
    ]
    options = ("--model", stories, "--key", key("green"))
    result = descant("watermark", "detect", file, *options, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert read(result.stdout) == [
        {"file": str(file), **where, **found.to_dict()} for where, found in expected
    ]
    assert [one["verdict"] == "marked" for one in read(result.stdout)] == [True] * 6 + [False] * 2
    piped = descant("watermark", "detect", "-", *options, "--json", "--jsonl", input=lines(rows[:1]))
    assert read(piped.stdout) == [{"file": "-", "line": 1, "id": "a", **expected[0][1].to_dict()}]
    table = descant("watermark", "detect", file, *options).stdout
    assert table.splitlines()[0].split() == [
        "text", "verdict", "scheme", "key", "scored", "score", "95", "%", "interval", "z", "p",
    ]  # fmt: skip
    assert [line.split()[0] for line in table.splitlines()[1:9]] == [
        f"{file}:{one.get('line')}" + (f":{one['completion']}" if "completion" in one else "")
        for one, _ in expected
    ]
    words = " ".join(table.split())
    verdicts = {found.verdict for _, found in expected}
    assert all(
        (f"{verdict}: {told}" in words) == (verdict in verdicts) for verdict, told in VERDICT_TEXTS.items()
    )
    assert "At --alpha 0.01, 0.08 of 8 unmarked texts are called marked on average." in words


def test_several_files_and_a_passage(descant, stories, tmp_path, key, marked, detector):
    text = f"{PLAIN} {PLAIN[:120]} {marked['green'][1]} {PLAIN}"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    (tmp_path / "plain.txt").write_text(PLAIN, encoding="utf-8")
    files = (tmp_path / "long.txt", tmp_path / "plain.txt")
    options = ("--model", stories, "--key", key("green"), "--windows", "--alpha", "0.001")
    result = descant("watermark", "detect", *files, *options, "--json")
    expected = [detector("green", alpha=0.001).text(one, windows=True) for one in (text, PLAIN)]
    assert read(result.stdout) == [
        {"file": str(file), **found.to_dict()} for file, found in zip(files, expected, strict=True)
    ]
    assert expected[0].verdict == "marked"
    assert expected[0].span is not None
    table = descant("watermark", "detect", *files, *options).stdout
    assert table.splitlines()[0].endswith("passage")
    assert f"tokens {expected[0].span[0]} to {expected[0].span[1] - 1}" in table


def test_a_wrong_line_is_its_own_and_the_others_are_answered(descant, stories, tmp_path, key, marked):
    good = {"text": marked["green"][1]}
    bad = [
        ("x", "must hold a JSON object in each line (Expecting value"),
        ("[1]", "must hold a JSON object in each line, got [1]"),
        ({"id": 3}, '`text` must be given, or "ids", got neither'),
        ({"text": "a", "ids": [1]}, "got both"),
        ({"text": 5}, "`text` must be text, got 5"),
        ({"text": "a", "prompt": [1]}, "`prompt` must be text, as the text is"),
        ({"ids": ["a"]}, "`ids` must be a list of token ids"),
        ({"ids": [1, 2], "prompt": 3}, "`prompt` must be token ids, or how many of the ids are the prompt's"),
        ({"ids": [99999]}, "`ids` must be between 0 and 31999, got 99999"),
        ({"text": "a\ud800"}, "`text` must hold whole characters"),
        ({"completions": ["a"]}, "must hold a JSON object in each line, got 'a'"),
    ]
    text = "".join(
        (row if isinstance(row, str) else json.dumps(row)) + "\n" + lines([good]) for row, _ in bad
    )
    file = tmp_path / "texts.jsonl"
    file.write_text(text, encoding="utf-8")
    options = ("--model", stories, "--key", key("green"))
    result = descant("watermark", "detect", file, *options, "--json")
    assert result.exit_code == 1
    found = read(result.stdout)
    assert [one["line"] for one in found] == list(range(1, 2 * len(bad) + 1))
    assert all(one["verdict"] == "marked" for one in found[1::2])
    for one, (_, message) in zip(found[::2], bad, strict=True):
        assert message in one["error"]
    assert len(result.stderr.splitlines()) == len(bad)
    assert f"error: {file}:1: " in result.stderr
    shown = descant("watermark", "detect", file, *options)
    assert shown.exit_code == 1
    assert shown.stdout.count(" marked ") >= len(bad)
    assert shown.stderr == result.stderr


def test_an_invalid_call_is_reported_in_one_line(descant, stories, tmp_path, key):
    (tmp_path / "text.txt").write_text("a", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "wrong.json").write_text(json.dumps({"hashing_key": str(SECRET)}))
    file, good = tmp_path / "text.txt", ("--key", key("green"))
    cases = [
        ((file,), "--key must come from exactly one source, got neither a file nor a variable"),
        ((file, "--key", tmp_path / "none.json"), "--key must be a file that can be read (No such file"),
        (
            (file, "--key", tmp_path / "wrong.json"),
            "must have a positive integer below 2^63 as `hashing_key`",
        ),
        ((file, "--key", str(SECRET)), "got 'a value that is not a path'"),
        ((tmp_path / "none.txt", *good), "FILE must be a file that can be opened (No such file"),
        ((tmp_path / "latin.txt", *good), "FILE must be text in UTF-8"),
        ((tmp_path / "empty.jsonl", *good), "FILE must hold a text"),
        (("-", "-", *good), "FILE must be standard input only once"),
        ((file, *good, "--alpha", "2"), "--alpha must be between 0 and 1, got 2.0"),
        ((file, *good, "--html", file), "--html must be another file than FILE"),
        ((file, *good, "--html", tmp_path / "no" / "page.html"), "--html must be a file that can be written"),
        ((file, *good, "--bayes", tmp_path), "--bayes must be the folder of a trained Bayesian detector"),
        ((file, *good, "--model", tmp_path / "none"), "--model must be a folder that exists"),
        ((file, *good, "--keys", "x"), "No such option: --keys"),
    ]
    for arguments, message in cases:
        result = descant("watermark", "detect", "--model", stories, *arguments)
        assert message in result.stderr
        assert result.stderr.startswith("error: "), result.stderr
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), arguments
        assert str(SECRET) not in result.stderr
    assert "Missing option" in descant("watermark", "detect", file, *good).stderr
    twice = tmp_path / "twice.json"
    twice.write_text(json.dumps({"name": "green", "hashing_key": 99}))
    result = descant("watermark", "detect", file, "--model", stories, *good, "--key", twice)
    assert "--key must give each key a name of its own, got 'green'" in result.stderr
    assert descant("watermark", "detect", file, "--model", stories, *good, *good).exit_code == 0


def test_a_short_text_has_no_verdict(descant, stories, key):
    for text in ("", "a", "A short one."):
        asked = ("watermark", "detect", "--model", stories, "--key", key(*KEYS))
        result = descant(*asked, input=text)
        assert result.exit_code == 0, result.stderr
        assert "too short to tell" in result.stdout
        assert "nan" not in result.stdout
        [found] = read(descant(*asked, "--json", input=text).stdout)
        assert found["verdict"] == "too short to tell"


def test_a_tokenizer_alone_needs_the_vocabulary_for_green_lists(descant, stories, tmp_path, key, marked):
    tokenizer, _ = load_tokenizer(stories)
    tokenizer.save_pretrained(tmp_path / "alone")
    options = ("watermark", "detect", "--model", tmp_path / "alone", "--json")
    result = descant(*options, "--key", key("green"), input=marked["green"][1])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--model must have a config that tells how many tokens the model scores" in result.stderr
    known = descant(*options, "--key", key("green"), "--vocabulary", 32000, input=marked["green"][1])
    assert read(known.stdout)[0]["verdict"] == "marked"
    other = descant(*options, "--key", key("gumbel"), input=marked["gumbel"][1])
    assert read(other.stdout)[0]["verdict"] == "marked"


def test_no_weights_are_loaded(descant, stories, key, monkeypatch):
    import transformers

    def refuse(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    assert (
        descant("watermark", "detect", "--model", stories, "--key", key("green"), input=PLAIN).exit_code == 0
    )


def test_a_page_is_written(descant, stories, tmp_path, key, marked):
    ids, text = marked["green"]
    (tmp_path / "a.txt").write_text(text + " <script>", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(lines([{"ids": ids}, {"oops": 1}]), encoding="utf-8")
    target = tmp_path / "page.html"
    result = descant(
        "watermark", "detect", tmp_path / "a.txt", tmp_path / "b.jsonl", "--model", stories,
        "--key", key("green"), "--html", target,
    )  # fmt: skip
    assert result.exit_code == 1
    made = target.read_text(encoding="utf-8")
    assert made.count("<section") == 2
    assert f"{tmp_path / 'a.txt'}</h2>" in made
    assert "&lt;" in made
    assert "<script" not in made
    assert made.count('class="f2" title') > 100
    assert str(SECRET)[:9] not in made


def test_a_public_key_is_warned_of(descant, stories, tmp_path):
    path = tmp_path / "public.json"
    path.write_text(json.dumps({"hashing_key": 15485863}))
    for arguments in (
        ("watermark", "detect", "--model", stories, "--key", path),
        ("generate", stories, "--watermark", path, "--max-new-tokens", 2, "--input", "-"),
    ):
        given = lines([{"prompt": "a"}] * 3) if arguments[0] == "generate" else PLAIN
        result = descant(*arguments, input=given)
        assert result.exit_code == 0
        assert result.stderr.startswith("warning: the key of this watermark (green list) is public")
        assert result.stderr.count("\n") == 1
        assert "15485863" not in result.stderr


def test_other_warnings_are_left_to_python(descant, stories, key, monkeypatch):
    seen = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: seen.append(str(message)))
    monkeypatch.setattr(
        "descant.models.loading.loading.load_tokenizer",
        lambda name: (warnings.warn("odd", stacklevel=1), load_tokenizer(name))[1],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = descant("watermark", "detect", "--model", stories, "--key", key("green"), input=PLAIN)
    assert (result.exit_code, seen) == (0, ["odd"])


# ----------------------------------------------------------------------------- bayes
@pytest.fixture
def trained(tmp_path):
    """A folder with a partly trained detector of the SynthID key."""
    config = BayesianDetectorConfig(30)
    config.key_fingerprint, config.threshold = fingerprint(as_watermarking_config(KEYS["synthid"])), 0.75
    model = BayesianDetectorModel(config)
    with torch.no_grad():
        model.likelihood_model_watermarked.beta.copy_(torch.linspace(0, -4, 30)[None, None])
    save_detector(model, tmp_path / "bayes")
    return tmp_path / "bayes", model


def test_a_bayesian_detector_is_used_too(descant, stories, tmp_path, key, marked, trained):
    folder, model = trained
    ids, _ = marked["synthid"]
    rows = [{"ids": ids}, {"text": PLAIN}, {"ids": [5, 6, 7, *ids], "prompt": 3}, {"ids": [5]}]
    asked = ("watermark", "detect", "-", "--jsonl", "--model", stories, "--bayes", folder)
    result = descant(*asked, "--key", key("synthid", "green"), "--json", input=lines(rows))
    assert result.exit_code == 0, result.stderr
    found = [one["bayes"] for one in read(result.stdout)]
    coins = get_tournament(as_watermarking_config(KEYS["synthid"]))
    line = torch.tensor([ids])
    contexts = coins.context_hashes(line[:, :-1])
    expected = model(coins.g_values(contexts, line[:, 4:]), ~repetition_mask(contexts, 1024))[0]
    assert found[0]["posterior"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert found[0] == {**found[0], "threshold": 0.75, "marked": True}
    assert (found[1]["marked"], found[2]) == (False, found[0])
    assert found[3]["posterior"] == pytest.approx(0.5)
    table = descant(*asked, "--key", key("synthid"), input=lines(rows))
    assert "(1 % of unmarked texts are above 0.7500)" in table.stdout
    wrong = descant(*asked, "--key", key("green"), input=lines(rows))
    assert wrong.exit_code == 2
    assert "--bayes must be the detector of one of the keys, " in wrong.stderr
    assert model.config.key_fingerprint in wrong.stderr


# ------------------------------------------------------------------------------- key
@pytest.mark.parametrize(
    ("scheme", "called"),
    [("green", "green list"), ("selfhash", "green list"), ("synthid", "synthid"), ("gumbel", "gumbel")],
)
def test_a_key_is_made(descant, tmp_path, monkeypatch, scheme, called):
    monkeypatch.chdir(tmp_path)
    result = descant("watermark", "key", "--scheme", scheme)
    [(name, made)] = read_settings("key.json").items()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{called} key {name} in key.json, which only you can read\n"
    assert made.scheme == called
    assert name == fingerprint(made)
    assert stat.S_IMODE((tmp_path / "key.json").stat().st_mode) == 0o600
    kept = (tmp_path / "key.json").read_text()
    again = descant("watermark", "key", "--scheme", scheme)
    assert (again.exit_code, (tmp_path / "key.json").read_text()) == (2, kept)
    assert "`key` must be a file that can be created (File exists), got 'key.json'" in again.stderr
    other = descant("watermark", "key", "--scheme", scheme, "--out", "b.json", "--name", "ours")
    assert other.stdout == f"{called} key ours in b.json, which only you can read\n"
    assert list(read_settings("b.json")) == ["ours"]
    assert read_settings("b.json")["ours"] != made


def test_a_key_may_go_into_a_pipe(descant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = descant("watermark", "key", "--scheme", "gumbel", "--out", "-", "--name", "ours")
    assert list(read_settings(environment={KEY_VARIABLE: result.stdout})) == ["ours"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ((), "Missing option '--scheme'"),
        (("--scheme", "red"), "--scheme must be one of green, selfhash, synthid, gumbel, got 'red'"),
        (("--scheme", "green", "--name", ""), "--name must not be empty"),
        (("--scheme", "green", "--out", "/nowhere/key"), "must be a file that can be created (No such file"),
    ],
)
def test_what_no_key_is_made_of(descant, tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    result = descant("watermark", "key", *line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------- generate
def test_generate_marks_with_a_key_that_is_no_option(descant, loaded, stories, key, marked):
    options = ("--do-sample", "--seed", 3, "--max-new-tokens", 24)
    _, tokenizer = loaded(stories)
    before = tokenizer(PROMPT)["input_ids"]
    expected = {
        name: tokenizer.decode(before + ids[:24], skip_special_tokens=True)[len(PROMPT) :]
        for name, (ids, _) in marked.items()
    }
    assert len(set(expected.values())) == len(KEYS)
    for name in KEYS:
        result = descant("generate", stories, PROMPT, *options, "--watermark", key(name))
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == expected[name].removesuffix("\n") + "\n"
    told = json.dumps(KEYS["synthid"])
    result = descant("generate", stories, PROMPT, *options, "--watermark", "env", env={KEY_VARIABLE: told})
    assert result.stdout == expected["synthid"].removesuffix("\n") + "\n"
    rows = lines([{"prompt": PROMPT}, {"prompt": PROMPT, "watermarking_config": KEYS["gumbel"]}])
    result = descant("generate", stories, "--input", "-", *options, "--watermark", key("green"), input=rows)
    texts = [one["completions"][0]["text"] for one in read(result.stdout)]
    assert texts == [expected["green"], expected["gumbel"]]


def test_generate_needs_one_key(descant, stories, key):
    for option, message in (
        (key("green", "gumbel"), "--watermark must have one key to mark with, got ['green', 'gumbel']"),
        ("env", "--watermark must come from exactly one source"),
        (
            "none.json",
            "--watermark must be a file that can be read (No such file or directory), got 'none.json'",
        ),
    ):
        result = descant("generate", stories, PROMPT, "--watermark", option)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    gumbel = descant("generate", stories, PROMPT, "--watermark", key("gumbel"))
    assert gumbel.exit_code == 2
    assert str(SECRET) not in gumbel.stderr


def test_chat_marks_too_and_tells_no_key(descant, loaded, talker, key):
    result = descant(
        "chat", talker, "--watermark", key("green"), "--max-new-tokens", 8, input="Who?\n/config\n"
    )
    model, tokenizer = loaded(talker)
    given = tokenizer("user: Who?\nassistant:", return_tensors="pt", add_special_tokens=False)
    out = package.generate(model, **given, max_new_tokens=8, watermarking_config=KEYS["green"])
    before = len(tokenizer.decode(given["input_ids"][0], skip_special_tokens=True))
    assert result.stdout.rstrip("\n") == tokenizer.decode(out[0], skip_special_tokens=True)[before:].rstrip(
        "\n"
    )
    assert "watermark" in result.stderr
    assert str(SECRET + 1) not in result.stderr
