"""API keys: files, the environment, headers."""

from __future__ import annotations

import base64
import hashlib

import pytest

from descant.errors import ConfigError, InputError
from descant.serve.http.errors import ApiError
from descant.serve.http.keys import ApiKey, KeyLimits, KeyRing

KEY = "correct-horse-battery"
OTHER = "another-key-of-mine-1"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("DESCANT_API_KEYS", raising=False)


def write(tmp_path, text):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def test_a_file_has_keys_digests_and_limits(tmp_path):
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path = write(
        tmp_path,
        f'[keys.alice]\nkey = "{KEY}"\ntokens_per_minute = 50\n[keys.bob]\nsha256 = "{digest}"\n',
    )
    ring = KeyRing.load(path, KeyLimits(requests_per_minute=7, tokens_per_minute=9))
    alice, bob = ring.authenticate(f"Bearer {KEY}"), ring.authenticate(f"bearer  {OTHER}")
    assert (alice.name, alice.limits.tokens_per_minute, alice.limits.requests_per_minute) == ("alice", 50, 7)
    assert (bob.name, bob.limits.tokens_per_minute) == ("bob", 9)
    assert alice.salt != bob.salt
    assert KEY.encode() not in repr(vars(alice)).encode()


def test_basic_credentials_carry_the_key_as_password():
    ring = KeyRing([ApiKey("alice", hashlib.sha256(KEY.encode()).digest())])
    token = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    assert ring.authenticate(f"Basic {token}").name == "alice"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Token {KEY}", "Basic !!",
     "Basic " + base64.b64encode(b"no colon").decode(), "Basic " + base64.b64encode(b"\xff\xfe:x").decode(),
     "Bearer \udcff", "Basic \xe9", f"Bearer {KEY} {OTHER}", f"Digest {KEY}",
     "Basic " + base64.b64encode(f"{KEY}:".encode()).decode()],
)  # fmt: skip
def test_other_headers_are_refused(header):
    ring = KeyRing([ApiKey("alice", hashlib.sha256(KEY.encode()).digest())])
    with pytest.raises(ApiError) as caught:
        ring.authenticate(header)
    assert caught.value.status == 401
    assert "www-authenticate" in caught.value.headers
    assert KEY not in caught.value.message


def test_the_environment_has_keys_with_and_without_names(monkeypatch):
    monkeypatch.setenv("DESCANT_API_KEYS", f"alice={KEY}, {OTHER}")
    ring = KeyRing.load()
    assert [key.name for key in ring.keys] == ["alice", "key-2"]


def test_without_keys_everybody_is_anonymous():
    ring = KeyRing.load()
    assert not ring
    assert ring.authenticate(None).name == "anonymous"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table `keys`"),
        ("[other]\nx = 1\n", "table `keys`"),
        ('[keys.a]\nkey = "short"\n', "at least 16"),
        (f'[keys.a]\nkey = "{KEY}"\nlimit = 3\n', r"\['limit'\]"),
        ("[keys.a]\n", "either `key` or `sha256`"),
        ('[keys.a]\nsha256 = "12"\n', "64 hexadecimal"),
        (f'[keys.a]\nkey = "{KEY}"\n[keys.b]\nkey = "{KEY}"\n', "different from each other"),
        (f'[keys."a b"]\nkey = "{KEY}"\n', "names of letters"),
        (f'[keys.a]\nkey = "{KEY}\n', "TOML"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path, text, message):
    with pytest.raises((ConfigError, InputError), match=message) as caught:
        KeyRing.load(write(tmp_path, text))
    assert KEY not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="must be a file that can be read"):
        KeyRing.load(tmp_path / "none.toml")
