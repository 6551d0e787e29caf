"""A Hub of our own on the loopback: repositories in memory, the few endpoints that huggingface_hub asks.

It can fail in the ways in which a real one can. The fixture `hub` starts one and points the client at it,
online, with a cache and a home of its own; `from tests.unit.config.hub.server import Hub` for the type.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

Files = Mapping[str, bytes | str]
FAULTS = ("500", "429", "truncated", "hang", "trickle", "short", "long", "endless", "garbage", "drop")


@dataclass
class Asked:
    """One request that the Hub has seen."""

    method: str
    path: str
    token: str | None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Commit:
    """The files of a repository at one moment."""

    sha: str
    files: dict[str, bytes]
    message: str


@dataclass
class Repo:
    """A repository: commits, the names that point at them, and its faults."""

    id: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    shown: str = ""  # the id that its answers carry, where it is not its own
    sizes: dict[str, int] = field(
        default_factory=dict
    )  # sizes that its listing says, where they are not true
    headers: dict[str, str] = field(default_factory=dict)  # headers of its files, where they are not true

    @property
    def head(self) -> str:
        """The newest commit."""
        return self.refs["main"]

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.commits[self.head].files

    def commit(self, files: Files, message: str = "", *, gone: tuple[str, ...] = ()) -> str:
        """Add or replace files on `main`; the new commit's hash."""
        before = self.commits[self.head] if "main" in self.refs else Commit("", {}, "")
        kept = {name: data for name, data in before.files.items() if name not in gone}
        new = {name: data.encode() if isinstance(data, str) else bytes(data) for name, data in files.items()}
        tree = dict(sorted({**kept, **new}.items()))
        said = repr((self.id, before.sha, message, [(name, oid(data)) for name, data in tree.items()]))
        sha = hashlib.sha1(said.encode("utf-8", "surrogatepass")).hexdigest()
        self.commits[sha] = Commit(sha, tree, message)
        self.refs["main"] = sha
        return sha

    def tag(self, name: str, sha: str | None = None) -> None:
        """A second name for a commit."""
        self.refs[name] = sha or self.head

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch, a tag or a hash means."""
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Fault:
    """A wrong done to requests whose "METHOD /path" holds `where`, `times` over (None: always)."""

    where: str
    how: str
    times: int | None

    def fits(self, asked: Asked) -> bool:
        """Whether it strikes this request; counts it if so."""
        if self.where not in str(asked) or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Hub:
    """The server: `repo` and `user` fill it, `fail`, `rename` and a repository's faults break it."""

    seen: ClassVar[bool] = False  # whether this process has had one

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.users: dict[str, str] = {}  # token -> name
        self.moved: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self.indirect = False  # whether files are sent for at another address of the same repository
        self.closing = threading.Event()
        self.cache = self.home = Path()  # set by the fixture
        self.monkeypatch: pytest.MonkeyPatch | None = None
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """End it; requests that hang are let go."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    # -- what it holds

    def repo(self, name: str, files: Files | None = None, *, private: bool = False) -> Repo:
        """A new repository with one commit."""
        repo = self.repos[name] = Repo(name, private)
        repo.commit(files or {})
        return repo

    def user(self, name: str, token: str) -> None:
        """A user who may read and write everything under their name, with this token."""
        self.users[token] = name

    def rename(self, old: str, new: str) -> None:
        """Redirect `old` to `new`, as the Hub does after a rename."""
        if old in self.repos:
            repo = self.repos[new] = self.repos.pop(old)
            repo.id = new
        self.moved[old] = new

    # -- what it does

    def fail(self, where: str, how: str, times: int | None = None) -> None:
        """Break the answers to requests whose "METHOD /path" holds `where`, see `FAULTS`."""
        assert how in FAULTS, how
        self.faults.append(Fault(where, how, times))

    def since(self, start: int = 0) -> list[str]:
        """The requests, as "METHOD /path", without queries."""
        return [str(asked).split("?")[0] for asked in self.asked[start:]]

    # -- how the client sees it, of the fixture

    def offline(self, on: bool = True) -> None:
        """Switch the client's offline mode, as HF_HUB_OFFLINE would."""
        from huggingface_hub import constants

        assert self.monkeypatch is not None
        self.monkeypatch.setattr(constants, "HF_HUB_OFFLINE", on)
        self.monkeypatch.setenv("HF_HUB_OFFLINE", "1" if on else "0")

    def login(self, token: str) -> None:
        """Give the client a token, as HF_TOKEN would."""
        assert self.monkeypatch is not None
        self.monkeypatch.setenv("HF_TOKEN", token)


def oid(data: bytes) -> str:
    """The name that git gives to a file's bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Refused(Exception):
    """An error response, with the headers that identify it to the client."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status = status
        self.headers = {
            name: value for name, value in (("X-Error-Code", code), ("X-Error-Message", message)) if value
        }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    asked: Asked

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_GET

    # -- routing

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bearer = self.headers.get("Authorization") or ""
        self.asked = Asked(self.command, self.path, bearer.removeprefix("Bearer ") or None)
        self.hub.asked.append(self.asked)
        fault = next((one.how for one in self.hub.faults if one.fits(self.asked)), "")
        try:
            if fault in ("500", "429"):
                raise _Refused(int(fault), message="a fault that was asked for")
            if fault == "drop":
                self.close_connection = True
                return
            if fault == "hang":
                self.hub.closing.wait(60)
                self.close_connection = True
                return
            self.route(body, fault)
        except _Refused as refused:
            data = json.dumps({"error": refused.headers.get("X-Error-Message", "no")}).encode()
            self.send(refused.status, data, {"Content-Type": "application/json", **refused.headers}, "")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def route(self, body: bytes, fault: str) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if url.path == "/api/whoami-v2":
            self.json({"type": "user", "name": self.current_user(), "orgs": []}, fault)
        elif url.path == "/api/repos/create":
            self.create(json.loads(body), fault)
        elif url.path == "/api/validate-yaml":
            self.json({"warnings": [], "errors": []}, fault)
        elif parts[:3] == ["api", "resolve-cache", "models"] and len(parts) >= 7:
            self.file("/".join(parts[3:5]), parts[5], "/".join(parts[6:]), fault)
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self.model("/".join(parts[2:4]), parts[4:], body, fault)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), fault)
        else:
            raise _Refused(404, message="no such endpoint")

    def model(self, name: str, rest: list[str], body: bytes, fault: str) -> None:
        if self.sent_on(name, "/api/models/"):
            return
        repo = self.readable(name)
        what, revision = rest[:2] if len(rest) > 1 else ("revision", "main")
        if what == "preupload":
            self.require_owner(name)
            asked = [one["path"] for one in json.loads(body)["files"]]
            known = {file: oid(data) for file, data in repo.files.items()}
            self.json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False,
                                  "oid": known.get(path)} for path in asked]}, fault)  # fmt: skip
        elif what == "commit":
            self.require_owner(name)
            self.json(self.commit(repo, body), fault)
        elif what == "revision":
            self.json(self.info(repo, self.commit_of(repo, revision)), fault)
        elif what == "tree":
            self.json(self.tree(repo, self.commit_of(repo, revision)), fault)
        else:
            raise _Refused(404, message="no such endpoint")

    # -- authentication

    def current_user(self) -> str:
        if self.asked.token not in self.hub.users:
            raise _Refused(401, message="Invalid user token." if self.asked.token else "Unauthorized")
        return self.hub.users[self.asked.token]

    def require_owner(self, name: str) -> None:
        if self.current_user() != name.partition("/")[0]:
            raise _Refused(403, message="You don't have the rights to write there")

    def readable(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        hidden, owner = repo is not None and repo.private, name.partition("/")[0]
        if repo is None or (hidden and self.hub.users.get(self.asked.token or "") != owner):
            raise _Refused(401 if self.asked.token is None else 404, "RepoNotFound", "Repository not found")
        return repo

    def commit_of(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", "Invalid rev id")
        return commit

    def sent_on(self, name: str, prefix: str) -> bool:
        """The response to a request for a repository under its old name."""
        new = self.hub.moved.get(name)
        if new is None:
            return False
        self.send(307, b"", {"Location": self.path.replace(prefix + name, prefix + new, 1)}, "")
        return True

    # -- what they get

    def info(self, repo: Repo, commit: Commit) -> dict[str, Any]:
        sizes = "blobs" in parse_qs(urlsplit(self.path).query)
        files = {**dict.fromkeys(repo.sizes, b""), **commit.files}
        return {
            "_id": "0", "id": repo.shown or repo.id, "modelId": repo.shown or repo.id, "sha": commit.sha,
            "private": repo.private, "tags": [], "downloads": 0, "likes": 0,
            "siblings": [
                {"rfilename": name, **({"size": repo.sizes.get(name, len(data)), "blobId": oid(data)}
                                       if sizes else {})}
                for name, data in files.items()
            ],
        }  # fmt: skip

    def tree(self, repo: Repo, commit: Commit) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": repo.sizes.get(name, len(data)), "oid": oid(data)}
            for name, data in commit.files.items()
        ]

    def create(self, asked: dict[str, Any], fault: str) -> None:
        owner = asked.get("organization") or self.current_user()
        name = f"{owner}/{asked['name']}"
        self.require_owner(name)
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            data = json.dumps({"error": "You already created this model repo", "url": url}).encode()
            self.send(409, data, {"Content-Type": "application/json"}, fault)
            return
        self.hub.repo(name, private=asked.get("visibility") == "private")
        self.json({"url": url, "name": name, "id": name}, fault)

    def commit(self, repo: Repo, body: bytes) -> dict[str, Any]:
        header: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        gone: list[str] = []
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                gone.append(value["path"])
            else:
                raise _Refused(400, message=f"no {entry['key']} here")
        if header.get("parentCommit", repo.head) != repo.head:
            raise _Refused(412, message="A commit has happened since. Please refresh and try again.")
        sha = repo.commit(files, header["summary"], gone=tuple(gone))
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo.id}/commit/{sha}"}

    def file(self, name: str, revision: str, path: str, fault: str) -> None:
        if self.sent_on(name, "/"):
            return
        repo = self.readable(name)
        commit = self.commit_of(repo, revision)
        if self.hub.indirect and not self.path.startswith("/api/"):
            place = f"/api/resolve-cache/models/{name}/{commit.sha}/{quote(path)}"
            self.send(307, b"", {"Location": place, "X-Repo-Commit": commit.sha}, "")
            return
        if path not in commit.files:
            refused = _Refused(404, "EntryNotFound", "Entry not found")
            refused.headers["X-Repo-Commit"] = commit.sha
            raise refused
        data = commit.files[path]
        headers = {"ETag": f'"{oid(data)}"', "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range") or ""
        if wanted.startswith("bytes=") and fault == "":
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(206, data[start:], {**headers, **repo.headers}, fault)
            return
        self.send(200, data, {**headers, **repo.headers}, fault)

    # -- the wire

    def json(self, data: object, fault: str) -> None:
        self.send(200, json.dumps(data).encode(), {"Content-Type": "application/json"}, fault)

    def send(self, status: int, data: bytes, headers: Mapping[str, str], fault: str) -> None:
        if fault == "garbage":
            data = b"<html>not what was asked for</html>"
        length = {"short": max(len(data) - 5, 0), "long": len(data) + 5, "endless": -1}.get(fault, len(data))
        self.send_response(status)
        if length >= 0:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        if fault in ("truncated", "endless", "long", "short"):
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD" or status == 307:
            return
        if fault == "truncated":
            self.wfile.write(data[: len(data) // 2])
        elif fault == "trickle":
            for at in range(len(data)):
                self.wfile.write(data[at : at + 1])
                if self.hub.closing.wait(0.1):
                    return
        elif fault == "endless":
            while not self.hub.closing.is_set():
                self.wfile.write(b"#" * (1 << 20))
        else:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty Hub; huggingface_hub connects only to it, here and in processes that the test starts."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    server = Hub()
    home = tmp_path_factory.mktemp("hub")
    server.home, server.cache, server.monkeypatch = home, home / "cache", monkeypatch
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    environment = {
        "HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(server.cache),
        "HF_TOKEN_PATH": str(home / "token"), "HF_XET_CACHE": str(home / "xet"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # The client has read the environment at its import, which is long ago.
    within = {
        "ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(server.cache),
        "HUGGINGFACE_HUB_CACHE": str(server.cache), "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": str(home / "token"), "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "AGENT_HARNESSES_PATH": str(home / "harnesses.json"), "HF_HUB_DISABLE_TELEMETRY": True,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
    }  # fmt: skip
    for name, value in within.items():
        monkeypatch.setattr(constants, name, value)
    # transformers keeps a client of its own, which would go on asking the Hub of an earlier test.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    server.offline(False)
    if not Hub.seen:  # the first time only: a client may hold the proxies of before, and to make one is slow
        close_session()
        Hub.seen = True
    yield server
    server.close()
