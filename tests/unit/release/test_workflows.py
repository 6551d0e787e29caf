"""Files that GitHub reads: valid by the published schemas, and with no more rights than they need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ci_slices import WEEKLY_FOLDERS

ROOT = Path(__file__).resolve().parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
MKDOCS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
# An action is pinned by a version or by the hash of a commit, not by a branch.
PINNED = re.compile(r"[\w-]+/[\w/-]+@(v\d+(\.\d+)*|[0-9a-f]{40})")


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_every_file_fits_its_schema(schema: str, files: list[Path]) -> None:
    assert files
    done = check(schema, *files)
    assert done.returncode == 0, done.stdout + done.stderr


def read(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((GITHUB / "workflows" / name).read_text(encoding="utf-8"))
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_actions_are_pinned_and_rights_are_few(name: str) -> None:
    workflow = read(name)
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [action for action in used if not PINNED.fullmatch(action)] == []
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        assert set(job.get("permissions", {})) <= {"id-token", "contents"}
        if job.get("permissions", {}).get("contents") == "write":  # it pushes, and runs nothing else
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            commands = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
            assert all(
                action.startswith(("actions/checkout@", "actions/download-artifact@")) for action in used
            )
            assert all(command.startswith("git ") for command in commands)


def test_ci_runs_both_tiers() -> None:
    jobs = read("ci.yml")["jobs"]
    commands = [step["run"] for step in steps(read("ci.yml")) if step.get("run", "").startswith(".ci/")]
    assert commands == [".ci/run quick", ".ci/run ${{ matrix.part }}", ".ci/run"]
    assert {row["os"] for row in jobs["quick"]["strategy"]["matrix"]["include"]} == {"macos-15"}
    assert [jobs[name]["timeout-minutes"] for name in ("quick", "part")] == [15, 15]


def test_the_parts_of_ci_are_the_whole_run() -> None:
    checks, *tests = read("ci.yml")["jobs"]["part"]["strategy"]["matrix"]["part"]
    assert checks == "checks"
    assert tests == [f"tests {number}/{len(tests)}" for number in range(1, len(tests) + 1)]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    whole = set(
        re.findall(r"^\s*(?:start|stage) (\w+) ", script.rpartition("start browser browser")[2], re.MULTILINE)
    )
    whole |= {"browser", *re.findall(r"^    stage (\w+) ", script, re.MULTILINE)}
    for_tests, for_checks = (set(names.split()) for names in re.findall(r"LEFT_OUT='([^']*)'", script))
    assert for_tests < whole
    assert for_checks < whole
    assert for_tests & for_checks == set()  # each stage of the whole run is in a part


def test_a_release_keeps_its_documentation() -> None:
    workflow = read("docs.yml")
    [build] = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "mike" in step.get("run", "")]
    assert 'mike deploy --update-aliases "${version%.*}" latest' in build
    assert workflow[True]["release"] == {"types": ["published"]}
    assert yaml.safe_load(re.search(r"^extra:\n(?:  .*\n)+", MKDOCS, re.MULTILINE)[0])["extra"][
        "version"
    ] == {
        "provider": "mike",
        "default": ["latest", "dev"],
    }


@pytest.mark.parametrize("name", ["versions.yml", "release.yml"])
def test_the_oldest_and_the_newest_versions_run_weekly_and_before_a_release(name: str) -> None:
    job = read(name)["jobs"]["versions"]
    assert job["strategy"]["matrix"] == {"versions": ["oldest", "newest"]}
    assert job["steps"][-1] == {"run": ".ci/versions ${{ matrix.versions }}"}


def test_folders_that_ci_leaves_out_run_weekly() -> None:
    command = read("versions.yml")["jobs"]["tools"]["steps"][-1]["run"].splitlines()[-1]
    assert '-m "not hqq"' in command
    assert sorted(command.split()[-3:]) == sorted(f"tests/{folder}" for folder in WEEKLY_FOLDERS)


def test_only_the_job_that_publishes_gets_an_identity() -> None:
    jobs = read("release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert "permissions" not in jobs["build"]
    [download, publish] = jobs["publish"]["steps"]  # nothing of the repository runs with that identity
    assert download["uses"].startswith("actions/download-artifact@")
    assert publish["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert publish["with"] == {"attestations": True, "print-hash": True}  # and no password


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "run",
            "a tier must be quick or whole, got: fast; run .ci/run [quick | checks | tests PART/PARTS]\n",
        ),
        ("versions", "the versions must be oldest or newest, got: fast; run .ci/versions oldest\n"),
    ],
)
def test_an_unknown_argument_is_refused(script: str, message: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / script), "fast"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, message)
