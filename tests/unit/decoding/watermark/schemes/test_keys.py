"""Keys: read from a file or the environment, newly generated, and never shown."""

from __future__ import annotations

import json
import os
import stat
import warnings

import pytest

from descant import ConfigError, InputError
from descant.config.watermarking_config import (
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from descant.decoding.watermark import keys
from descant.decoding.watermark.keys import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    PublicKeyWarning,
    fingerprint,
    new_settings,
    read_settings,
    warn_if_public,
    write_settings,
)

SECRET = 918273645546372819
GREEN = {"hashing_key": SECRET, "greenlist_ratio": 0.5}
TOURNAMENT = {"keys": [SECRET, 5, 7], "ngram_len": 5}
RACE = {"key": SECRET}
MADE = (
    WatermarkingConfig(hashing_key=SECRET, greenlist_ratio=0.5),
    SynthIDTextWatermarkingConfig(ngram_len=5, keys=(SECRET, 5, 7)),
    GumbelWatermarkingConfig(key=SECRET),
)


def write_key(folder, data):
    path = folder / "key.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize(("data", "made"), list(zip((GREEN, TOURNAMENT, RACE), MADE, strict=True)))
def test_a_file_holds_one(tmp_path, data, made):
    [(name, found)] = read_settings(write_key(tmp_path, data)).items()
    assert (name, found) == (fingerprint(made), made)
    assert read_settings(write_key(tmp_path, {"name": "ours", **data})) == {"ours": made}


def test_a_file_holds_several(tmp_path):
    names = ("a", "b", "c")
    listed = [{"name": name, **data} for name, data in zip(names, (GREEN, TOURNAMENT, RACE), strict=True)]
    named = dict(zip(names, (GREEN, TOURNAMENT, RACE), strict=True))
    expected = dict(zip(names, MADE, strict=True))
    assert read_settings(write_key(tmp_path, listed)) == expected
    assert read_settings(str(write_key(tmp_path, named))) == expected
    assert list(read_settings(write_key(tmp_path, named))) == list(names)
    unnamed = read_settings(write_key(tmp_path, [GREEN, TOURNAMENT, RACE]))
    assert unnamed == {fingerprint(made): made for made in MADE}


def test_the_environment_holds_it_or_its_path(tmp_path, monkeypatch):
    path = write_key(tmp_path, {"name": "filed", **RACE})
    assert read_settings(environment={KEY_VARIABLE: json.dumps({"name": "told", **GREEN})}) == {
        "told": MADE[0]
    }
    assert read_settings(environment={KEY_FILE_VARIABLE: str(path)}) == {"filed": MADE[2]}
    assert read_settings(environment={KEY_VARIABLE: "", KEY_FILE_VARIABLE: str(path)}) == {"filed": MADE[2]}
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    assert read_settings() == {"filed": MADE[2]}
    # A file that is named beats the environment, which may be another program's.
    assert read_settings(write_key(tmp_path, GREEN)) == {fingerprint(MADE[0]): MADE[0]}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {},
            "`key` must come from exactly one source, got neither a file nor a variable: set DESCANT",
        ),
        (
            {KEY_VARIABLE: "{}", KEY_FILE_VARIABLE: "x"},
            "got DESCANT_WATERMARK_KEY and DESCANT_WATERMARK_KEY_FILE",
        ),
        (
            {KEY_VARIABLE: "/etc/key.json"},
            f"`{KEY_VARIABLE}` must contain JSON (Expecting value), got 'other text; use",
        ),
        (
            {KEY_FILE_VARIABLE: "/nowhere/key"},
            f"`{KEY_FILE_VARIABLE}` must be a file that can be read (No such file",
        ),
        ({KEY_FILE_VARIABLE: json.dumps(GREEN)}, "got 'a value that is not a path'"),
        ({KEY_FILE_VARIABLE: str(SECRET)}, "got 'a value that is not a path'"),
    ],
)
def test_what_the_environment_may_not_hold(environment, message):
    with pytest.raises(InputError) as caught:
        read_settings(environment=environment)
    assert message in str(caught.value)
    assert str(SECRET) not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "`key` must contain JSON (Expecting value)"),
        (f'{{"key": {SECRET}', "must contain JSON (Expecting ',' delimiter)"),
        ("[" * 100_000, "must contain JSON (nested too deeply)"),
        ([], "must contain an object of settings, a list of them, or an object of them by name"),
        ({}, "must have one of `hashing_key`, `keys`, `key` in the key, got []"),
        (SECRET, "must contain an object of settings"),
        ([SECRET], "must contain an object of settings"),
        ({"bias": 2.0}, "must have one of `hashing_key`, `keys`, `key` in the key, got ['bias']"),
        ({**GREEN, **RACE}, "must have one of"),
        ([GREEN, {"name": "b"}], "in key 2 of 2, got []"),
        ({"a": GREEN, "b": {"bias": 1.0}}, "in the key 'b', got ['bias']"),
        ({**GREEN, "bias": "high"}, "(`watermarking_config` must have a number between -10000.0 and"),
        ({**GREEN, "biass": 1.0}, "got ['biass'])"),
        ({**TOURNAMENT, "ngram_len": 1}, "as `ngram_len`, got 1)"),
        ({"keys": [SECRET]}, "must have all of ngram_len"),
        ({"hashing_key": f"{SECRET}"}, "must have a positive integer below 2^63 as `hashing_key` of the key"),
        ({"hashing_key": -SECRET}, "got 'an invalid int'"),
        ({"key": float(SECRET)}, "as `key` of the key, got 'an invalid float'"),
        (
            {**TOURNAMENT, "keys": [SECRET, "x"]},
            "must have a non-empty list of integers below 2^63 as",
        ),
        ({**TOURNAMENT, "keys": SECRET}, "got 'an invalid int'"),
        ({"name": 5, **GREEN}, "must have text as \"name\" of the key, got 'int'"),
        ({"name": "", **GREEN}, 'must have text as "name"'),
        ([GREEN, GREEN], "must have unique key names"),
        ([{"name": "a", **GREEN}, {"name": "a", **RACE}], "must have unique key names, got 'a'"),
    ],
)
def test_what_a_file_may_not_hold(tmp_path, data, message):
    with pytest.raises(InputError) as caught:
        read_settings(write_key(tmp_path, data))
    assert message in str(caught.value)
    shown = repr(caught.value) + repr(caught.value.__cause__)
    assert str(SECRET) not in shown
    assert "9182736" not in shown
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_must_be_text(tmp_path):
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "key", tmp_path):
        with pytest.raises(InputError, match="must be a file that can be read"):
            read_settings(path)


def test_new_keys_are_new_and_strong():
    for scheme in keys.SCHEMES:
        made = [new_settings(scheme) for _ in range(20)]
        assert len({fingerprint(one) for one in made}) == 20
        assert not any(one.is_public for one in made)
    green = [new_settings("green") for _ in range(200)]
    assert all(one.hashing_key % 2 == 1 for one in green)
    assert sum(one.hashing_key > 2**50 for one in green) > 150
    assert {one.hashing_key // 2 % 8 for one in green} == set(range(8))
    assert {(one.seeding_scheme, one.context_width) for one in green} == {("lefthash", 1)}
    assert new_settings("selfhash").seeding_scheme == "selfhash"
    assert new_settings("selfhash").context_width == 4
    for _ in range(50):
        tournament = new_settings("synthid")
        assert (len(tournament.keys), tournament.ngram_len) == (30, 5)
        assert len({key % 2**16 for key in tournament.keys}) == 30
    assert max(new_settings("gumbel").key for _ in range(50)) > 2**60


def test_keys_alike_in_their_low_bits_are_drawn_again(monkeypatch):
    drawn = iter([3, 3 + 2**16, 3 + 2**40, 4, *range(10, 60)])
    monkeypatch.setattr(keys.secrets, "randbelow", lambda _: next(drawn))
    assert new_settings("synthid").keys == (3, 4, *range(10, 38))


def test_what_a_new_key_may_be_given():
    assert new_settings("green", bias=4.0).bias == 4.0
    assert new_settings("gumbel", nonces=3).nonces == 3
    with pytest.raises(InputError, match="must be one of green, selfhash, synthid, gumbel, got 'red'"):
        new_settings("red")
    with pytest.raises(InputError, match=r"`new_settings` must not be given a key, got \['hashing_key'\]"):
        new_settings("green", hashing_key=5)
    with pytest.raises(InputError, match="accepts only greenlist_ratio, bias, seeding_scheme, context_width"):
        new_settings("green", biass=5)
    with pytest.raises(ConfigError, match="greenlist_ratio"):
        new_settings("green", greenlist_ratio=2.0)


@pytest.mark.parametrize("scheme", keys.SCHEMES)
def test_a_written_key_is_its_owners_and_reads_back(tmp_path, scheme):
    made, path = new_settings(scheme), tmp_path / "key.json"
    before = os.umask(0)
    try:
        write_settings(path, made, "ours")
    finally:
        os.umask(before)
    assert read_settings(path) == {"ours": made}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = path.read_bytes()
    with pytest.raises(InputError, match=r"must be a file that can be created \(File exists\)"):
        write_settings(path, new_settings(scheme))
    assert path.read_bytes() == kept
    write_settings(tmp_path / "other.json", made)
    assert read_settings(tmp_path / "other.json") == {fingerprint(made): made}


def test_a_key_that_others_can_read_is_read(tmp_path):
    path = write_key(tmp_path, RACE)
    path.chmod(0o644)
    assert list(read_settings(path).values()) == [MADE[2]]


def test_a_fingerprint_is_the_keys_alone():
    green = WatermarkingConfig(hashing_key=SECRET)
    assert fingerprint(green) == fingerprint(WatermarkingConfig(hashing_key=SECRET, bias=5.0))
    assert len(fingerprint(green)) == 8
    assert int(fingerprint(green), 16) >= 0
    others = [WatermarkingConfig(hashing_key=SECRET + 1), *MADE[1:]]
    assert len({fingerprint(one) for one in (green, *others)}) == 4


def test_a_public_key_is_warned_of():
    with pytest.warns(PublicKeyWarning, match="is public: it is in documentation") as caught:
        warn_if_public(WatermarkingConfig(), stacklevel=2)
    assert caught[0].filename == __file__
    assert "15485863" not in str(caught[0].message)
    shown = [654, 400, 836, 123, 340, 443, 597, 160, 57]
    with pytest.warns(PublicKeyWarning, match="synthid"):
        warn_if_public(SynthIDTextWatermarkingConfig(ngram_len=5, keys=shown))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheme in keys.SCHEMES:
            warn_if_public(new_settings(scheme))
