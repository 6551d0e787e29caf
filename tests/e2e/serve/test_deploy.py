"""The files of deploy/: valid by their schemas, and true of the server that they start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from descant.cli.application import build_app
from tests.support.client_programs import ClientEnvironment
from tests.support.http_client import request
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
# Kinds of extensions, whose schemas are not Kubernetes' own.
EXTENSIONS = {"PodMonitor", "InferencePool", "HTTPRoute"}


def objects():
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def of_kind(kind, name="descant"):
    [found] = [one for one in objects() if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def seconds(text):
    return int(re.fullmatch(r"(\d+)s", text)[1])


def option(arguments, name):
    """The value of an option, given as `--name value` or `--name=value`."""
    joined = " ".join(arguments)
    return float(re.search(rf"{name}[ =](\S+)", joined)[1])


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return ClientEnvironment(tmp_path_factory.mktemp("deploy"))


@pytest.fixture(scope="module")
def container():
    [found] = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module")
def secret():
    return of_kind("Secret", "descant-keys")["stringData"]


@pytest.fixture(scope="module")
def deployed(model_folder, container, secret):
    """A server with the arguments of the Deployment and the keys of the Secret, and less memory."""
    folder, *arguments = container["args"]
    assert folder == "/models"
    arguments = [re.sub("--kv-memory=.*", "--kv-memory=0.5", one) for one in arguments]
    with ServerProcess(model_folder, *arguments, env={"DESCANT_API_KEYS": secret["keys"]}) as server:
        yield server


def test_hadolint_finds_nothing_in_the_dockerfile(programs):
    assert programs.run("hadolint", DEPLOY / "Dockerfile") == ""


def test_the_variants_of_the_image_have_the_torch_of_the_tests():
    pin = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    stages = re.findall(r"FROM base AS torch-(\w+)\n(?:RUN .*) (torch==\S+)\n", DOCKERFILE)
    assert stages == [("cpu", pin), ("cuda", pin)]
    assert "FROM torch-${VARIANT} AS server" in DOCKERFILE
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)[-1] == "10001:10001"


def test_compose_is_valid(programs):
    programs.run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_manifests_are_valid(programs):
    done = subprocess.run(
        [programs.bin / "kubernetes-validate", "--strict", *MANIFESTS],
        check=False,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count(" passed for resource ") == sum(one["kind"] not in EXTENSIONS for one in objects())
    assert {one["kind"] for one in objects()} >= EXTENSIONS


def test_every_option_and_variable_exists():
    shown = CliRunner().invoke(
        build_app(), ["serve", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
    )
    known = set(re.findall(r"--[a-z][a-z-]*", shown.output))
    assert "--grace-seconds" in known
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    given = [json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])]
    given += [one["command"] for one in services]
    given += [one["args"] for one in of_kind("Deployment")["spec"]["template"]["spec"]["containers"]]
    options = {text.partition("=")[0] for arguments in given for text in arguments if text.startswith("--")}
    assert options - known == set()
    assert len(options) >= 6
    mentioned = set()
    for path in (DEPLOY / "README.md", *MANIFESTS, DEPLOY / "compose.yaml"):
        mentioned |= set(re.findall(r"\bDESCANT_[A-Z_]+", path.read_text()))
    # The model's folder is compose's own variable.
    assert mentioned - {"DESCANT_MODEL"} == {"DESCANT_API_KEYS"}


def test_there_is_time_to_finish(container):
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > wait + option(container["args"], "--grace-seconds")
    for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values():
        assert seconds(service["stop_grace_period"]) > option(service["command"], "--grace-seconds")
    memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert memory > 2 * option(container["args"], "--kv-memory")


def test_probes_are_answered_without_a_key(deployed, container):
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert request(deployed.port, "GET", path).status == 200, path
    command = json.loads(re.search(r"^    CMD (.*)$", DOCKERFILE, re.MULTILINE)[1])
    script = command[2].replace("127.0.0.1:8000", f"127.0.0.1:{deployed.port}")
    assert command[0] == "python"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert subprocess.run(
        [sys.executable, "-c", script.replace("/health", "/nothing")], check=False, capture_output=True
    ).returncode


def test_the_metrics_that_scale_and_route_exist(deployed, secret):
    assert request(deployed.port, "GET", "/metrics").status == 401
    shown = request(deployed.port, "GET", "/metrics", key=secret["metrics-key"]).body.decode()
    names = set(re.findall(r"^([a-z_:]+)(?:\{| )", shown, re.MULTILINE))
    adapter = yaml.safe_load(of_kind("ConfigMap", "descant-adapter-rules")["data"]["config.yaml"])
    [rule] = adapter["rules"]
    assert rule["seriesQuery"].partition("{")[0] in names
    [metric] = of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    picker = of_kind("Deployment", "descant-picker")["spec"]["template"]["spec"]["containers"][0]["args"]
    read = {argument.partition("=")[2] for argument in picker if "-metric=" in argument}
    assert read == {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert read <= names


def test_the_manifests_refer_to_each_other(container):
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    port = container["ports"][0]
    service = of_kind("Service")["spec"]
    assert service["selector"] == labels
    assert service["ports"][0]["targetPort"] == port["name"]
    pool = of_kind("InferencePool")["spec"]
    assert pool["selector"]["matchLabels"] == labels
    assert pool["targetPorts"] == [{"number": port["containerPort"]}]
    picker = of_kind("Service", pool["endpointPickerRef"]["name"])["spec"]
    assert picker["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    source = container["env"][0]["valueFrom"]["secretKeyRef"]
    assert source["key"] in of_kind("Secret", source["name"])["stringData"]
