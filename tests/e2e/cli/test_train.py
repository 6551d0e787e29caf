"""`descant watermark train`: from prompts and from files, what its folder holds, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from descant.config.watermarking_config import SynthIDTextWatermarkingConfig
from descant.decoding.watermark.keys import fingerprint, new_settings, write_settings
from descant.decoding.watermark.synthid import (
    SynthIDTextWatermarkDetector,
    SynthIDTextWatermarkLogitsProcessor,
    Tournament,
)
from descant.decoding.watermark.training import compute_metrics
from descant.models.bayesian_detector import BayesianDetectorModel, load_detector

SETTINGS = SynthIDTextWatermarkingConfig(ngram_len=3, keys=(70001, 80021, 90007, 60013, 50021, 40009))
STARTS = ("Once upon a time", "One day", "Lily and Tim", "The dog", "In the park", "Mom said")
PROMPTS = [f"{start}, {rest}" for start in STARTS for rest in ("there was", "they saw")]


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key.json"
    write_settings(path, SETTINGS)
    return path


def lines(path, objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
    return path


def ids(count, marked, seed, length=40, settings=SETTINGS):
    """Texts of random tokens; of marked ones each is that of three with most coins."""
    tournament, chance = Tournament(settings), torch.Generator().manual_seed(seed)
    made = torch.randint(100, 20000, (count, length), generator=chance)
    for place in range(tournament.context_size, length) if marked else ():
        context = tournament.context_hashes(made[:, place - tournament.context_size : place])
        offered = torch.randint(100, 20000, (count, 3), generator=chance)
        best = tournament.g_values(context, offered).sum(2).argmax(1)
        made[:, place] = offered[torch.arange(count), best]
    return made.tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Marked and unmarked texts, as numbers."""
    folder = tmp_path_factory.mktemp("texts")
    marked, unmarked = ids(60, True, 1), ids(80, False, 2)
    return {
        "--marked": lines(folder / "marked.jsonl", [{"ids": one} for one in marked]),
        "--unmarked": lines(folder / "unmarked.jsonl", [{"ids": one} for one in unmarked]),
    }


def options(given):
    return [part for pair in given.items() for part in pair]


def test_from_prompts(descant, stories, key, tmp_path):
    prompts = lines(tmp_path / "prompts.jsonl", [{"prompt": one} for one in PROMPTS])
    state = torch.get_rng_state()
    given = (
        "--key",
        key,
        "--prompts",
        prompts,
        "--num-return-sequences",
        2,
        "--tokens",
        28,
        "--epochs",
        15,
        "--seed",
        3,
    )
    result = descant("watermark", "train", stories, "--out", tmp_path / "out", *given)
    assert result.exit_code == 0, result.stderr
    assert torch.equal(torch.get_rng_state(), state)
    table = result.stdout.splitlines()
    assert table[1].split() == ["tokens", "marked", "unmarked", "AUC", "Bayes", "weighted", "mean", "mean"]
    assert [line.split()[0] for line in table[2:]] == ["25", "whole", "threshold", "detector"]
    assert "figures are rough" in result.stderr

    config = load_detector(tmp_path / "out").config
    assert config.validation_metrics["overall"]["auc"] > 0.7, "what was generated as marked is not"
    whole = config.validation_metrics["lengths"]["whole"]
    assert whole["marked"] == whole["unmarked"] == round(0.3 * 2 * len(PROMPTS))
    assert (config.watermarking_depth, config.model_name) == (len(SETTINGS.keys), stories)
    assert config.threshold == config.validation_metrics["overall"]["threshold"]


def test_a_seed_determines_the_result(descant, stories, key, tmp_path):
    prompts = lines(tmp_path / "prompts.jsonl", [{"prompt": one} for one in PROMPTS[:5]])
    common = ("--key", key, "--prompts", prompts, "--tokens", 10, "--epochs", 2)
    found = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        result = descant("watermark", "train", stories, "--out", tmp_path / name, *common, "--seed", seed)
        assert result.exit_code == 0, result.stderr
        found.append(load_detector(tmp_path / name))
        torch.rand(7)
    first, same, other = ([value.tolist() for value in model.state_dict().values()] for model in found)
    assert first == same
    assert first != other
    assert found[0].config.validation_metrics == found[1].config.validation_metrics


def test_from_files_it_learns_and_the_key_stays_out(descant, stories, key, files, tmp_path):
    out = tmp_path / "detector"
    result = descant(
        "watermark", "train", stories, "--key", key, "--out", out, "--epochs", 15, *options(files)
    )
    assert result.exit_code == 0, result.stderr
    model = BayesianDetectorModel.from_pretrained(out)
    tournament = Tournament(SETTINGS)

    def posteriors(texts):
        line = torch.tensor(texts)
        contexts = tournament.context_hashes(line[:, :-1])
        coins = tournament.g_values(contexts, line[:, tournament.context_size :])
        with torch.no_grad():
            return model(coins, torch.ones(contexts.shape))[0]

    fresh = compute_metrics(posteriors(ids(200, True, 5)), posteriors(ids(200, False, 6)))
    assert fresh.auc > 0.99
    assert float((posteriors(ids(400, False, 7)) > model.config.threshold).float().mean()) < 0.08

    assert model.config.watermarking_config is None
    assert model.config.key_fingerprint == fingerprint(SETTINGS)
    for file in out.iterdir():
        stored = file.read_bytes()
        assert not any(str(one).encode() in stored for one in SETTINGS.keys)


def test_the_key_is_included_on_request(descant, stories, loaded, key, files, tmp_path):
    given = ("--key", key, "--out", tmp_path, "--epochs", 10, "--with-key", *options(files))
    assert descant("watermark", "train", stories, *given).exit_code == 0
    model = BayesianDetectorModel.from_pretrained(tmp_path)
    processor = SynthIDTextWatermarkLogitsProcessor(**model.config.watermarking_config, device="cpu")
    detector = SynthIDTextWatermarkDetector(model, processor, loaded(stories)[1])
    with torch.no_grad():
        (marked,), (unmarked,) = (detector(torch.tensor(ids(50, kind, 9))) for kind in (True, False))
    assert marked.median() > 0.9
    assert unmarked.median() < 0.3


def test_texts_as_generate_writes_them_and_as_lines_of_text(descant, stories, loaded, key, tmp_path):
    tokenizer = loaded(stories)[1]
    texts = [tokenizer.decode(one) for one in ids(12, False, 3)]
    counts = [len(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts]
    written = [
        {"prompt": "x", "completions": [{"text": one}, {"text": two}]}
        for one, two in zip(texts[::2], texts[1::2], strict=True)
    ]
    given = {
        "--marked": lines(tmp_path / "one.jsonl", written),
        "--unmarked": lines(tmp_path / "two.jsonl", [{"text": one} for one in texts]),
    }
    common = ("--key", key, "--epochs", 1, "--tokens", 30)
    result = descant("watermark", "train", stories, *common, "--out", tmp_path / "out", *options(given))
    assert result.exit_code == 0, result.stderr
    whole = load_detector(tmp_path / "out").config.validation_metrics["lengths"]["whole"]
    assert whole["marked"] == whole["unmarked"] == round(0.3 * 12)
    assert min(counts) > 30, "else --tokens is not shown to cut"
    assert [line for line in result.stdout.splitlines() if line.startswith(("50", "100"))] == []


def test_the_key_of_the_environment(descant, stories, files, tmp_path, monkeypatch):
    monkeypatch.setenv("DESCANT_WATERMARK_KEY", SETTINGS.to_json_string())
    given = ("--out", tmp_path, "--epochs", 1, *options(files))
    assert descant("watermark", "train", stories, *given).exit_code == 0
    assert load_detector(tmp_path).config.key_fingerprint == fingerprint(SETTINGS)


def test_detect_uses_it(descant, stories, key, files, tmp_path):
    folder = tmp_path / "detector"
    made = descant(
        "watermark", "train", stories, "--key", key, "--out", folder, "--epochs", 10, *options(files)
    )
    assert made.exit_code == 0, made.stderr
    texts = lines(tmp_path / "texts.jsonl", [{"ids": ids(1, kind, 11)[0]} for kind in (True, False)])
    asked = ("watermark", "detect", "--model", stories, "--bayes", folder, "--json", texts)
    result = descant(*asked, "--key", key)
    assert result.exit_code == 0, result.stderr
    marked, unmarked = (json.loads(line)["bayes"] for line in result.stdout.splitlines())
    assert marked["posterior"] > 0.9 > 0.2 > unmarked["posterior"]
    assert (marked["marked"], unmarked["marked"]) == (True, False)

    other = tmp_path / "other.json"
    write_settings(other, new_settings("synthid"))
    wrong = descant(*asked, "--key", other)
    assert wrong.exit_code == 2
    assert fingerprint(SETTINGS) in wrong.stderr


REFUSED = {
    "no texts": ((), "--prompts must be given, or both --marked and --unmarked"),
    "one file": (("--marked", "M"), "got ['--marked']"),
    "a length": (("--marked", "M", "--unmarked", "M", "--max-new-tokens", 9), "use --tokens"),
    "no use": (("--marked", "M", "--unmarked", "M", "--top-k", 9), "--top-k has no use"),
    "no file": (("--marked", "nowhere", "--unmarked", "M"), "nowhere"),
    "a bad line": (("--marked", "BAD", "--unmarked", "M"), "--marked must hold texts in line 2"),
    "a bad prompt": (("--prompts", "BAD"), '"prompt" in line 1'),
    "too few": (("--marked", "FEW", "--unmarked", "M"), "--marked must contain at least 4 texts"),
    "none": (("--marked", "M", "--unmarked", "NONE"), "--unmarked must contain at least 4 texts"),
    "no prompts": (("--prompts", "NONE"), "--marked must contain at least 4 texts"),
    "another scheme": (("--marked", "M", "--unmarked", "M", "--key", "GREEN"), "must be one SynthID key"),
    "not empty": (("--marked", "M", "--unmarked", "M", "--out", "HERE"), "new or empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case, descant, stories, key, files, tmp_path):
    given, said = REFUSED[case]
    green = tmp_path / "green.json"
    write_settings(green, new_settings("green"))
    stand = {
        "M": files["--marked"],
        "BAD": lines(tmp_path / "bad.jsonl", [{"text": "good"}, {"tokens": [1]}]),
        "FEW": lines(tmp_path / "few.jsonl", [{"ids": one} for one in ids(3, True, 1)]),
        "NONE": lines(tmp_path / "none.jsonl", []),
        "GREEN": green,
        "HERE": tmp_path,
    }
    defaults = ("--key", key, "--out", tmp_path / "out")
    result = descant("watermark", "train", stories, *defaults, *(stand.get(one, one) for one in given))
    assert result.exit_code == 2, result.stderr
    assert said in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "config.json").exists()
