"""The Hub client: its requests, its cache, and faults of a server."""

import builtins
import json
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from descant.config import hub as face
from descant.errors import DescantError, HubError
from tests.unit.config.hub.server import Hub

FILES = {"generate.py": "def generate(model): ...\n", "README.md": "# one\n", "big.bin": b"0" * 2_000_000}


@pytest.fixture(autouse=True)
def nothing_else_is_written(hub, tmp_path, monkeypatch):
    """In all cases only the cache grows, and nothing is read from standard input."""
    monkeypatch.chdir(tmp_path)

    def refused(*_args):
        raise AssertionError("standard input was read")

    monkeypatch.setattr(builtins, "input", refused)
    monkeypatch.setattr(sys, "stdin", type("Closed", (), {"read": refused, "readline": refused})())
    yield
    assert {path.name for path in hub.home.iterdir()} <= {"cache"}
    assert not list(tmp_path.iterdir())


@pytest.fixture
def hasty(monkeypatch):
    """A client that gives up in about a second."""
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)


def refusal(call) -> str:
    """The one line that a call fails with."""
    with pytest.raises(HubError) as error:
        call()
    text = str(error.value)
    assert isinstance(error.value, DescantError | OSError)
    assert text.isprintable(), text
    assert len(text) < 600
    return text


def snapshots(hub: Hub) -> list[str]:
    """The files that the cache offers."""
    return sorted(path.name for path in hub.cache.glob("*/snapshots/*/**/*") if path.is_file())


# -- commits and files


def test_a_revision_is_a_commit_with_its_files(hub):
    repo = hub.repo("ann/rec", FILES)
    old = repo.head
    repo.tag("v1")
    new = repo.commit({"generate.py": "x = 2\n", "sub/a b.py": "y = 3\n"}, gone=("big.bin",))
    assert face.resolve_commit("ann/rec", "v1").sha == face.resolve_commit("ann/rec", old).sha == old
    commit = face.resolve_commit("ann/rec")
    assert (commit.repo, commit.sha) == ("ann/rec", new)
    assert commit.files == {"README.md": 6, "generate.py": 6, "sub/a b.py": 6}
    assert face.resolve_commit("ann/rec", "main") == face.resolve_commit("ann/rec", new) == commit
    assert face.fetch_files("ann/rec", old, ["generate.py"]) == {"generate.py": FILES["generate.py"].encode()}
    assert face.fetch_files("ann/rec", new, ["generate.py", "sub/a b.py"]) == {
        "generate.py": b"x = 2\n",
        "sub/a b.py": b"y = 3\n",
    }


def test_only_what_is_named_is_downloaded(hub):
    sha = hub.repo("ann/rec", {**FILES, "empty.py": b""}).head
    face.resolve_commit("ann/rec")
    assert face.fetch_files("ann/rec", sha, ["README.md", "empty.py"]) == {
        "README.md": b"# one\n",
        "empty.py": b"",
    }
    assert snapshots(hub) == ["README.md", "empty.py"]
    assert not [asked for asked in hub.since() if "generate.py" in asked or "big.bin" in asked]
    assert face.fetch_files("ann/rec", sha, []) == {}


def test_what_is_cached_is_not_asked_for(hub):
    repo = hub.repo("ann/rec", FILES)
    commit = face.resolve_commit("ann/rec")
    face.fetch_files("ann/rec", commit.sha, ["generate.py"])
    seen = len(hub.asked)
    assert face.resolve_commit("ann/rec") == commit
    assert hub.since(seen) == ["GET /api/models/ann/rec/revision/main"]  # it may have moved
    assert face.resolve_commit("ann/rec", commit.sha) == commit
    face.fetch_files("ann/rec", commit.sha, ["generate.py"])
    assert len(hub.asked) == seen + 1
    face.fetch_files("ann/rec", commit.sha, ["generate.py", "README.md"])
    assert {asked.split("/")[-1] for asked in hub.since(seen + 1)} == {"README.md"}
    newer = repo.commit({"README.md": "# two\n"})
    assert face.resolve_commit("ann/rec").sha == newer
    assert face.fetch_files("ann/rec", newer, ["README.md"]) == {"README.md": b"# two\n"}
    assert face.fetch_files("ann/rec", commit.sha, ["README.md"]) == {"README.md": b"# one\n"}


def test_offline_is_what_was_seen(hub):
    repo = hub.repo("ann/rec", FILES)
    repo.tag("v1")
    hub.repo("ann/unseen", FILES)
    commit = face.resolve_commit("ann/rec")
    face.fetch_files("ann/rec", commit.sha, ["generate.py"])
    seen = len(hub.asked)
    hub.offline()
    assert face.resolve_commit("ann/rec") == face.resolve_commit("ann/rec", "main") == commit
    assert face.resolve_commit("ann/rec", commit.sha) == commit
    assert set(face.fetch_files("ann/rec", commit.sha, ["generate.py"])) == {"generate.py"}
    text = refusal(lambda: face.fetch_files("ann/rec", commit.sha, ["generate.py", "README.md"]))
    assert "README.md; run it once without HF_HUB_OFFLINE" in text
    assert "generate.py" not in text
    assert "revision v1 is not cached" in refusal(lambda: face.resolve_commit("ann/rec", "v1"))
    assert "is not cached" in refusal(lambda: face.resolve_commit("ann/rec", "0" * 40))
    assert "ann/unseen" in refusal(lambda: face.resolve_commit("ann/unseen"))
    for call in (
        lambda: face.create_repo("ann/rec", token="hf_x"),
        lambda: face.upload_files(commit, {"a": b""}, token="hf_x"),
        lambda: face.full_repo_id("rec", "hf_x"),
    ):
        assert "nothing can be pushed offline" in refusal(call)
    assert len(hub.asked) == seen


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(hub):
    hub.repo("ann/rec", FILES)
    hub.cache.mkdir()
    (hub.cache / "models--ann--rec").write_text("a file, where a folder should be")
    assert "README.md" in face.resolve_commit("ann/rec").files
    refusal(lambda: face.fetch_files("ann/rec", face.resolve_commit("ann/rec").sha, ["README.md"]))


def test_a_cache_that_cannot_be_read_is_named(hub, monkeypatch):
    sha = hub.repo("ann/rec", FILES).head

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    assert "the cache cannot be read" in refusal(lambda: face.fetch_files("ann/rec", sha, ["README.md"]))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"sha": "0", "files": {}}', '{"files": {"a": []}}', "[" * 99999]
)
def test_a_damaged_memory_is_named(hub, content):
    commit = (hub.repo("ann/rec", FILES), face.resolve_commit("ann/rec"))[1]
    (path,) = hub.cache.glob("*/listings/*.json")
    path.write_text(content)
    assert f"delete {path}"[:100] in refusal(lambda: face.resolve_commit("ann/rec", commit.sha))
    path.write_text(json.dumps({"sha": commit.sha, "files": {"../evil.py": 1}}))
    assert "refused" in refusal(lambda: face.resolve_commit("ann/rec", commit.sha))


def test_a_private_repository_needs_a_token(hub, monkeypatch):
    sha = hub.repo("ann/secret", FILES, private=True).head
    hub.user("ann", "hf_anns")
    hub.user("eve", "hf_eves")
    for token in (None, False, "hf_eves", "hf_wrong"):
        text = refusal(lambda token=token: face.resolve_commit("ann/secret", token=token))
        assert "private" in text
        assert "HF_TOKEN" in text
        assert "hf_wrong" not in text
        assert "private" in refusal(
            lambda token=token: face.fetch_files("ann/secret", sha, ["README.md"], token=token)
        )
    assert snapshots(hub) == []
    assert face.resolve_commit("ann/secret", token="hf_anns").sha == sha
    hub.login("hf_anns")
    assert face.fetch_files("ann/secret", sha, ["README.md"]) == {"README.md": b"# one\n"}
    assert {asked.token for asked in hub.asked[-3:]} == {"hf_anns"}


def test_what_is_not_there_is_named(hub):
    sha = hub.repo("ann/rec", FILES).head
    assert "no such repository" in refusal(lambda: face.resolve_commit("ann/other"))
    assert "no such revision" in refusal(lambda: face.resolve_commit("ann/rec", "v9"))
    assert "no such file" in refusal(lambda: face.fetch_files("ann/rec", sha, ["gone.py"]))
    face.resolve_commit("ann/rec")
    seen = len(hub.asked)
    assert "no file gone.py" in refusal(lambda: face.fetch_files("ann/rec", sha, ["gone.py"]))
    assert len(hub.asked) == seen  # the listing says so


# -- another repository than the one that was asked for


@pytest.mark.parametrize("shown", ["eve/rec", "Ann/rec", "rec", "ann/rec\n\x1b[31m"])
def test_an_answer_under_another_name_is_refused(hub, shown):
    hub.repo("ann/rec", FILES).shown = shown
    assert "renamed" in refusal(lambda: face.resolve_commit("ann/rec"))


def test_a_repository_that_moves_away_before_the_download_is_refused(hub):
    hub.repo("ann/rec", FILES)
    commit = face.resolve_commit("ann/rec")
    hub.rename("ann/rec", "eve/rec")
    assert "has moved to /eve/rec/" in refusal(
        lambda: face.fetch_files("ann/rec", commit.sha, ["generate.py"])
    )
    assert not [asked for asked in hub.since() if asked.startswith("GET /eve/rec/resolve")]
    assert snapshots(hub) == []


def test_another_address_of_the_same_repository_is_none_of_another(hub):
    sha = hub.repo("ann/rec", {"a b.py": "1\n"}).head
    hub.indirect = True
    assert face.fetch_files("ann/rec", sha, ["a b.py"]) == {"a b.py": b"1\n"}
    assert f"GET /api/resolve-cache/models/ann/rec/{sha}/a%20b.py" in hub.since()


@pytest.mark.parametrize("said", ["0" * 40, "", "../../../evil"])
def test_a_file_of_another_commit_is_refused(hub, said):
    repo = hub.repo("ann/rec", FILES)
    repo.headers = {"X-Repo-Commit": said}
    assert "another commit" in refusal(lambda: face.fetch_files("ann/rec", repo.head, ["README.md"]))
    assert snapshots(hub) == []


@pytest.mark.parametrize("sha", [None, "main", "", "0" * 39, 7])
def test_a_commit_must_be_a_hash(hub, sha, monkeypatch):
    hub.repo("ann/rec", FILES)
    model_info = HfApi.model_info

    def other(*args, **options):
        info = model_info(*args, **options)
        info.sha = sha
        return info

    monkeypatch.setattr(HfApi, "model_info", other)
    assert "names no commit" in refusal(lambda: face.resolve_commit("ann/rec"))


# -- hostile names and sizes

HOSTILE = [
    "../evil.py", "a/../../evil.py", "/etc/evil", "a//b.py", "./a.py", "a/.", "..", "", "a\\b.py",
    "C:/evil.py", "a\0.py", "a\n.py", "\x1b[2Ja.py", "a\u202eyp.txt", "a\u200b.py", "\ud800.py",
    "a/ /b.py", "x" * 256,
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_listing_with_a_hostile_name_is_refused(hub, name):
    repo = hub.repo("ann/rec", {"generate.py": "", name: "evil\n"})
    assert "name that is refused" in refusal(lambda: face.resolve_commit("ann/rec"))
    assert len(hub.asked) == 1
    text = refusal(lambda: face.fetch_files("ann/rec", repo.head, ["generate.py", name]))
    assert "name that is refused" in text
    assert len(hub.asked) == 1
    assert snapshots(hub) == []
    there = face.HubCommit("ann/rec", repo.head, {})
    assert "name that is refused" in refusal(lambda: face.upload_files(there, {name: b""}, token="hf_x"))
    assert "name that is refused" in refusal(
        lambda: face.upload_files(there, {}, deleted=[name], token="hf_x")
    )
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    "etag", ['"../../../../evil"', '"/etc/evil"', '""', '".."', '"a\\b"', '"' + "e" * 300 + '"']
)
def test_a_hostile_etag_names_no_file(hub, etag):
    repo = hub.repo("ann/rec", FILES)
    repo.headers = {"ETag": etag}
    assert "ETag that is refused" in refusal(lambda: face.fetch_files("ann/rec", repo.head, ["README.md"]))
    assert snapshots(hub) == []


@pytest.mark.parametrize(
    "name",
    ["rec", "a/b/c", "ann/", "/rec", "ann/../rec", "ann/rec ", "ann/a--b", "ann/.rec", "ann/rec.git",
     "änn/rec", "ann/" + "r" * 97, "ann/rec@main", "", "https://x/y", None, 3],
)  # fmt: skip
def test_a_repository_has_an_owner_and_a_plain_name(hub, name):
    for call in (
        lambda: face.resolve_commit(name),
        lambda: face.fetch_files(name, "0" * 40, ["a"]),
        lambda: face.create_repo(name, token="hf_x"),
    ):
        assert "write owner/name" in refusal(call)
    assert not face.is_repo_id(name)
    assert hub.asked == []


@pytest.mark.parametrize(
    "revision",
    ["", "../x", "a..b", "a//b", "/a", "a/", "-a", "a b", "a\nb", "a/.b", "x" * 201, "a.lock", "a\\b"],
)
def test_a_revision_is_a_plain_name(hub, revision):
    hub.repo("ann/rec", FILES)
    assert "must be a branch" in refusal(lambda: face.resolve_commit("ann/rec", revision))
    refusal(lambda: face.fetch_files("ann/rec", revision, ["README.md"]))
    assert "whole hash" in refusal(lambda: face.fetch_files("ann/rec", "main", ["README.md"]))
    assert hub.asked == []


def test_branches_and_pull_requests_are_revisions(hub):
    repo = hub.repo("ann/rec", FILES)
    for name in ("refs/pr/1", "feature/x-1.2+a", "v1.0"):
        repo.tag(name)
        assert face.resolve_commit("ann/rec", name).sha == repo.head
    hub.offline()
    assert face.resolve_commit("ann/rec", "refs/pr/1").sha == repo.head


@pytest.mark.parametrize("name", ["model.safetensors", "a/pytorch_model.BIN", "x.pt", "x.pkl", "m.gguf"])
def test_weights_are_never_downloaded(hub, name):
    repo = hub.repo("ann/rec", {name: b"\x80\x04."})
    assert "weights" in refusal(lambda: face.fetch_files("ann/rec", repo.head, [name], limit=1 << 40))
    assert hub.asked == []


def test_a_large_file_is_refused_before_it_is_downloaded(hub):
    repo = hub.repo("ann/rec", {"generate.py": b"#" * 2000})
    text = refusal(lambda: face.fetch_files("ann/rec", repo.head, ["generate.py"], limit=1999))
    assert "2,000 bytes or more, and 1,999 are allowed" in text
    assert {asked.split()[0] for asked in hub.since()} == {"HEAD"}
    assert len(face.fetch_files("ann/rec", repo.head, ["generate.py"], limit=2000)["generate.py"]) == 2000
    seen = len(hub.asked)
    assert "2,000 bytes" in refusal(
        lambda: face.fetch_files("ann/rec", repo.head, ["generate.py"], limit=1999)
    )
    assert len(hub.asked) == seen  # of the cache the limit holds too
    repo.sizes["generate.py"] = 10**12
    assert face.resolve_commit("ann/rec").files["generate.py"] == 10**12
    seen = len(hub.asked)
    assert "1,000,000,000,000" in refusal(lambda: face.fetch_files("ann/rec", repo.head, ["generate.py"]))
    assert len(hub.asked) == seen


def test_a_file_larger_than_it_says_is_refused_while_it_is_downloaded(hub):
    repo = hub.repo("ann/rec", {"generate.py": b"#" * 2000})
    hub.fail("GET /ann/rec/resolve", "endless")
    began = time.monotonic()
    assert "are allowed" in refusal(lambda: face.fetch_files("ann/rec", repo.head, ["generate.py"]))
    assert time.monotonic() - began < 10
    assert snapshots(hub) == []
    assert not [path for path in hub.cache.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


# -- a server that fails


@pytest.mark.parametrize(
    ("where", "how"),
    [
        *(
            ("GET /api/models", how)
            for how in ("500", "429", "drop", "hang", "trickle", "truncated", "garbage")
        ),
        *(("GET /api/models", how) for how in ("short", "long")),
        *(("HEAD /ann/rec", how) for how in ("500", "429", "drop", "hang")),
        *(("GET /ann/rec/resolve", how) for how in ("500", "429", "drop", "hang", "trickle", "truncated")),
        *(("GET /ann/rec/resolve", how) for how in ("garbage", "short", "long")),
    ],
)
def test_a_fault_is_an_error_of_one_line_within_seconds(hub, request, where, how):
    if how not in ("500", "garbage", "short"):  # which no client tries again
        request.getfixturevalue("hasty")
    repo = hub.repo("ann/rec", FILES)
    hub.fail(where, how)
    began = time.monotonic()
    if "api" in where:
        text = refusal(lambda: face.resolve_commit("ann/rec"))
    else:
        text = refusal(lambda: face.fetch_files("ann/rec", repo.head, ["generate.py"]))
    assert time.monotonic() - began < 10
    assert "`ann/rec` on the Hub: " in text
    if how == "500":
        assert "status 500" in text
    if how in ("hang", "trickle"):
        waits = how == "hang" and "resolve" not in where  # for an answer; a download is tried again and again
        assert "did not answer in time" in text or (not waits and "no answer after" in text)
    assert snapshots(hub) == []


def test_a_hub_that_is_not_there_is_named(hub, monkeypatch):
    url = "http://127.0.0.1:1"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    assert "cannot be reached" in refusal(lambda: face.resolve_commit("ann/rec"))
    assert "HF_HUB_OFFLINE=1" in refusal(lambda: face.fetch_files("ann/rec", "0" * 40, ["a.py"]))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a\x1b[31m\nb"), ValueError("x" * 9999), KeyError(), SystemExit(3), KeyboardInterrupt(),
     MemoryError(), RecursionError(), AssertionError(), OSError(28, "No space left"), GeneratorExit(),
     UnicodeDecodeError("utf-8", b"", 0, 1, "no"), StopIteration(), EOFError(), TimeoutError()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_the_client_raises_is_a_hub_error(hub, error, monkeypatch):
    hub.user("ann", "hf_anns")
    sha = hub.repo("ann/rec", FILES).head

    def fail(*_args, **_options):
        raise error

    for name in ("model_info", "hf_hub_download", "create_repo", "create_commit", "whoami"):
        monkeypatch.setattr(HfApi, name, fail)
    there = face.HubCommit("ann/rec", sha, {})
    for call in (
        lambda: face.resolve_commit("ann/rec"),
        lambda: face.fetch_files("ann/rec", sha, ["README.md"]),
        lambda: face.full_repo_id("rec", "hf_anns"),
        lambda: face.create_repo("ann/rec", token="hf_anns"),
        lambda: face.upload_files(there, {"a": b""}, token="hf_anns"),
    ):
        assert "`" in refusal(call)


def test_nothing_is_shown_and_nothing_is_asked(hub, capfd, monkeypatch):
    """Also on a terminal, where the client would draw bars: its own way to force them stands in for one."""
    monkeypatch.setenv("TQDM_POSITION", "-1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(import_module("huggingface_hub.utils.tqdm"), "HF_HUB_DISABLE_PROGRESS_BARS", None)
    repo = hub.repo("ann/rec", FILES)
    hub.user("ann", "hf_anns")
    face.fetch_files("ann/rec", face.resolve_commit("ann/rec").sha, ["generate.py"])
    refusal(lambda: face.resolve_commit("ann/secret"))
    refusal(lambda: face.fetch_files("ann/rec", repo.head, ["generate.py"], limit=3))
    refusal(lambda: face.create_repo("ann/rec"))
    face.upload_files(
        face.create_repo("ann/new", token="hf_anns"), {"README.md": b"# new\n"}, token="hf_anns"
    )
    assert capfd.readouterr() == ("", "")


# -- pushing


def test_a_push_makes_the_repository_and_commits_the_files(hub):
    hub.user("ann", "hf_anns")
    there = face.create_repo("ann/new", token="hf_anns", private=True)
    assert (there.repo, there.files, hub.repos["ann/new"].private) == ("ann/new", {}, True)
    sha = face.upload_files(there, {"a.py": b"1", "b/c.txt": b""}, token="hf_anns", message="the first")
    repo = hub.repos["ann/new"]
    assert (repo.head, repo.files, repo.commits[sha].message) == (
        sha,
        {"a.py": b"1", "b/c.txt": b""},
        "the first",
    )
    hub.login("hf_anns")
    there = face.create_repo("ann/new")
    assert (there.sha, there.files) == (sha, {"a.py": 1, "b/c.txt": 0})
    face.upload_files(there, {"a.py": b"22"}, deleted=["b/c.txt"])
    assert repo.files == {"a.py": b"22"}
    assert len(repo.commits) == 3
    assert face.upload_files(face.create_repo("ann/new"), {"a.py": b"22"}) == repo.head  # nothing to do
    assert len(repo.commits) == 3


def test_a_push_takes_a_token_that_may(hub, monkeypatch):
    repo = hub.repo("ann/rec", FILES)
    hub.user("eve", "hf_eves")
    there = face.HubCommit("ann/rec", repo.head, {})
    for token in (None, False, True, ""):
        for call in (
            lambda token=token: face.create_repo("ann/rec", token=token),
            lambda token=token: face.upload_files(there, {"a": b""}, token=token),
            lambda token=token: face.full_repo_id("rec", token),
        ):
            text = refusal(call)
            assert "there is none" in text
            assert "hf auth login" in text
    assert hub.asked == []
    for token in ("hf_eves", "hf_wrong"):
        assert "the token may not" in refusal(
            lambda token=token: face.upload_files(there, {"a": b""}, token=token)
        )
    assert "the token may not" in refusal(lambda: face.create_repo("ann/none", token="hf_eves"))
    assert "the token may not" in refusal(lambda: face.full_repo_id("rec", "hf_wrong"))
    assert repo.files.keys() == FILES.keys()
    hub.login("hf_eves")
    seen = len(hub.asked)
    assert "there is none" in refusal(lambda: face.create_repo("eve/rec", token=False))  # said not to use it
    assert len(hub.asked) == seen


def test_a_name_without_an_owner_is_the_users(hub):
    hub.user("ann", "hf_anns")
    assert face.full_repo_id("rec", "hf_anns") == "ann/rec"
    hub.login("hf_anns")
    assert face.full_repo_id("rec") == face.full_repo_id("rec", True) == "ann/rec"
    seen = len(hub.asked)
    assert face.full_repo_id("bob/rec") == "bob/rec"
    assert len(hub.asked) == seen
    hub.user("a b/c", "hf_odd")
    assert "whose token" in refusal(lambda: face.full_repo_id("rec", "hf_odd"))
    for odd in ("", ".", "a b", "a--b", "x/y/z"):
        assert "write owner/name" in refusal(lambda odd=odd: face.full_repo_id(odd, "hf_anns"))


def test_a_push_to_a_renamed_repository_is_refused(hub):
    hub.user("ann", "hf_anns")
    hub.repo("ann/rec", FILES)
    hub.rename("ann/rec", "ann/new")
    hub.repos["ann/rec"] = hub.repos["ann/new"]  # the name is not free
    assert "renamed" in refusal(lambda: face.create_repo("ann/rec", token="hf_anns"))


def test_a_push_goes_on_top_of_what_was_seen(hub):
    hub.user("ann", "hf_anns")
    repo = hub.repo("ann/rec", FILES)
    there = face.create_repo("ann/rec", token="hf_anns")
    repo.commit({"generate.py": "# of somebody else\n"})
    assert "status 412" in refusal(lambda: face.upload_files(there, {"generate.py": b""}, token="hf_anns"))
    assert repo.files["generate.py"] == b"# of somebody else\n"


@pytest.mark.parametrize("where", ["whoami", "create", "GET /api/models", "preupload", "commit/main"])
@pytest.mark.parametrize("how", ["500", "hang", "garbage", "drop"])
def test_a_push_that_fails_is_an_error_within_seconds(hub, hasty, where, how):
    hub.user("ann", "hf_anns")
    hub.repo("ann/rec", {})
    hub.fail(where, how)
    began = time.monotonic()
    text = refusal(
        lambda: face.upload_files(
            face.create_repo(face.full_repo_id("rec", "hf_anns"), token="hf_anns"),
            {"a": b"1"},
            token="hf_anns",
        )
    )
    assert "rec` on the Hub: " in text
    assert time.monotonic() - began < 20
    assert how in ("garbage", "drop") or hub.repos["ann/rec"].files == {}


def test_a_push_that_has_failed_does_not_happen_later(hub, hasty):
    """The client would try a third time, after 3 s, and succeed."""
    hub.user("ann", "hf_anns")
    hub.repo("ann/rec", {})
    hub.fail("preupload", "500", times=2)
    there = face.create_repo("ann/rec", token="hf_anns")
    assert "no answer after" in refusal(lambda: face.upload_files(there, {"a": b"1"}, token="hf_anns"))
    for thread in threading.enumerate():
        if thread.name == "descant-hub":
            thread.join(20)
            assert not thread.is_alive()
    assert hub.repos["ann/rec"].files == {}
    assert [asked.split("/")[-2] for asked in hub.since()].count("preupload") == 2


def test_http_errors_carry_no_token(hub):
    hub.repo("ann/rec", FILES)
    hub.fail("GET /api/models", "500")
    with pytest.raises(HubError) as error:
        face.resolve_commit("ann/rec", token="hf_very_secret")
    assert isinstance(error.value.__cause__, HfHubHTTPError)
    assert "hf_very_secret" not in f"{error.value} {error.value.__cause__}"
