"""The examples of deploy/ name flags, routes, metrics and labels that exist, and stop later than the server drains."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported_metrics import exported_labels
from packages import PACKAGES

from quire.frontend.http.app import ROUTES
from quire.frontend.network_options import check_network
from quire.frontend.serve_options import ServeOptions
from quire.launch.cli import parse
from quire.launch.config.command_line import read_options
from quire.launch.nodes.addresses import parse_address
from quire.launch.nodes.keys import HEAD_SECRET, NODE_PUBLIC
from quire.launch.nodes.sources import parse_sources
from quire.protocol.wire.curve_keys import ALLOWED, SECRET

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
HEALTH_ROUTES = {"/health", "/ready"}


def test_every_file_is_named_in_the_page() -> None:
    named = set(re.findall(r"^\| `([\w.]+)` \|", (DEPLOY / "README.md").read_text(), re.MULTILINE))
    assert named == {file.name for file in DEPLOY.iterdir()} - {"README.md"}


def _docker(text: str, instruction: str) -> list[list[str]]:
    return [json.loads(found) for found in re.findall(rf"^\s*{instruction} (\[.*\])$", text, re.MULTILINE)]


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def _pod() -> dict[str, Any]:
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    spec: dict[str, Any] = objects[0]["spec"]["template"]["spec"]
    return spec


def _on_nodes() -> dict[str, Any]:
    """Return the objects of the example with several pods, by kind and name."""
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes_nodes.yaml").read_text()))
    return {f"{each['kind']} {each['metadata']['name']}": each for each in objects}


def _server_on_nodes() -> dict[str, Any]:
    spec: dict[str, Any] = _on_nodes()["Deployment quire"]["spec"]["template"]["spec"]
    return spec


def _unit() -> dict[str, list[str]]:
    """Return the values of each key of the systemd unit; a line that ends with a backslash continues."""
    text = (DEPLOY / "quire.service").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def _command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield the arguments of each ``quire`` command."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert _docker(dockerfile, "ENTRYPOINT") == [["quire"]]
    for arguments in _docker(dockerfile, "CMD")[:1]:
        yield "Dockerfile", arguments
    services = [service for service in _compose()["services"].values() if "build" in service]
    for service in services:
        yield "compose.yaml", service["command"]
    yield "kubernetes.yaml", _pod()["containers"][0]["args"]
    yield "kubernetes_nodes.yaml", _server_on_nodes()["containers"][0]["args"]
    (start,) = _unit()["ExecStart"]
    program, *arguments = shlex.split(start)
    assert program.endswith("/quire")
    yield "quire.service", arguments


COMMAND_LINES = list(_command_lines())


def _serve_options(arguments: list[str]) -> ServeOptions:
    args = parse(arguments)
    assert args.command == "serve"
    return read_options(args)[1]


def test_each_kind_of_example_has_a_command() -> None:
    files = {"Dockerfile", "compose.yaml", "kubernetes.yaml", "kubernetes_nodes.yaml", "quire.service"}
    assert {file for file, _ in COMMAND_LINES} == files


@pytest.mark.parametrize(("file", "arguments"), COMMAND_LINES)
def test_command_lines_are_valid(file: str, arguments: list[str]) -> None:
    check_network(_serve_options(arguments))


def test_a_release_tries_commands_that_exist() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    tried = re.findall(r'(?:bin/quire"|quire:cpu) ((?:check|generate)[^\n&|;)\\]*)', text)
    assert [parse(shlex.split(command)).command for command in tried] == ["check", "generate", "generate"]


def test_an_unknown_flag_would_be_found() -> None:
    with pytest.raises(SystemExit):
        _serve_options(["serve", "--no-such-flag", "1"])


def test_containers_listen_on_all_addresses_and_the_published_port() -> None:
    for file, arguments in COMMAND_LINES:
        if file != "quire.service":
            options = _serve_options(arguments)
            assert (options.host, options.port) == ("0.0.0.0", 8000), file
    assert _docker((DEPLOY / "Dockerfile").read_text(), "CMD")[1][0] == "python"
    assert "EXPOSE 8000" in (DEPLOY / "Dockerfile").read_text()
    for pod in (_pod(), _server_on_nodes()):
        assert pod["containers"][0]["ports"] == [{"name": "http", "containerPort": 8000}]


@pytest.mark.parametrize("pod", [_pod(), _server_on_nodes()], ids=["one pod", "several"])
def test_probes_ask_health_and_ready(pod: dict[str, Any]) -> None:
    container = pod["containers"][0]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert {row.path for row in ROUTES} >= HEALTH_ROUTES
    assert "127.0.0.1:8000/health'" in (DEPLOY / "Dockerfile").read_text()


def test_sigkill_comes_after_the_drain() -> None:
    waits = {
        "compose.yaml": int(_compose()["services"]["quire"]["stop_grace_period"].removesuffix("s")),
        "kubernetes.yaml": _pod()["terminationGracePeriodSeconds"]
        - int(_pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]),
        "quire.service": int(_unit()["TimeoutStopSec"][0]),
    }
    pod = _server_on_nodes()
    before = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    waits["kubernetes_nodes.yaml"] = pod["terminationGracePeriodSeconds"] - before
    for file, arguments in COMMAND_LINES:
        if file in waits:
            assert _serve_options(arguments).shutdown_timeout + 5 <= waits[file], file
    assert _unit()["KillMode"] == ["mixed"]  # SIGTERM to the supervisor alone
    assert _unit()["RestartPreventExitStatus"] == ["2 78"]


def test_the_server_finds_the_node_pods_and_their_keys_fit() -> None:
    """The name, the port and the key files of the server are those of the nodes and of ``quire node --make-keys``."""
    objects = _on_nodes()
    nodes, service = objects["StatefulSet quire-node"], objects["Service quire-nodes"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == nodes["spec"]["template"]["metadata"]["labels"]
    assert nodes["spec"]["serviceName"] == "quire-nodes"
    options = _serve_options(_server_on_nodes()["containers"][0]["args"])
    (port,) = (each["port"] for each in service["spec"]["ports"])
    assert options.nodes is not None and parse_sources(options.nodes).names == [("quire-nodes", port)]
    pod = nodes["spec"]["template"]["spec"]
    node = parse([argument.replace("$(POD_IP)", "10.0.0.5") for argument in pod["containers"][0]["args"]])
    assert node.command == "node" and parse_address(node.listen, "--listen") == ("10.0.0.5", port)
    assert options.data_parallel_size <= nodes["spec"]["replicas"] * node.devices
    for folder, init, files in (
        (Path(node.keys), pod["initContainers"][0], (SECRET, f"{ALLOWED}/head.key")),
        (Path(options.node_keys), _server_on_nodes()["initContainers"][0], (HEAD_SECRET, NODE_PUBLIC)),
    ):
        script = init["command"][-1]
        assert set(re.findall(r"> (\S+?)(?:;|$)", script)) == {f"{folder / name}" for name in files}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "StatefulSet quire-node", "Deployment quire"])
def test_volumes_of_pods_are_defined(name: str) -> None:
    pod = _pod() if name.endswith(".yaml") else _on_nodes()[name]["spec"]["template"]["spec"]
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_volumes_are_defined() -> None:
    compose = _compose()
    board = (DEPLOY / compose["services"]["grafana"]["volumes"][0].split(":")[0]).resolve()
    assert board == DEPLOY / "grafana.json"
    for config in compose["configs"].values():
        assert yaml.safe_load(config["content"])


def test_image_has_the_torch_and_extras_of_the_repository() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    makefile = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile is not None
    assert set(re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE)) == {makefile[1]}
    project = (ROOT / "pyproject.toml").read_text()
    for extra in {name for found in re.findall(r"\.whl\)\[([\w,-]+)\]", text) for name in found.split(",")}:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    targets = {s["build"]["target"] for s in _compose()["services"].values() if "build" in s}
    assert targets == {"cpu", "cuda"} <= set(stages)


def test_the_build_context_has_what_a_build_reads() -> None:
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert kept >= {"quire", *PACKAGES}
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_the_board_names_metrics_and_labels_that_exist(prefix: str) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text().replace("${prefix}", prefix))
    exported = exported_labels(prefix)
    used = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            names = re.findall(rf"{prefix}:\w+", expression)
            assert names, expression
            assert set(names) <= exported.keys(), set(names) - exported.keys()
            used.update(names)
            labels = {label for found in re.findall(r"by \((\w+)\)", expression) for label in found.split(",")}
            labels |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | {"model_name"}
            assert labels <= set.intersection(*(exported[name] for name in names)), expression
            assert expression.count("(") == expression.count(")")
    assert len(used) > 30
    variable = board["templating"]["list"][2]["query"]["query"]
    assert re.findall(rf"{prefix}:\w+", variable)[0] in exported


def test_panels_of_the_board_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (column, line)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for line in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) == 23
