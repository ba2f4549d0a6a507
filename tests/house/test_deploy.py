"""Tests that deploy/ and the compose files use existing options and metrics."""

from __future__ import annotations

import argparse
import importlib
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from prometheus_client import CollectorRegistry

from dynatree.cli import draft as draft_command
from dynatree.draft.metrics import DraftMetrics
from dynatree.gateway.description import description
from dynatree.gateway.metrics import GatewayMetrics
from dynatree.serving.grpc_options import QUEUE, REFUSED
from dynatree.serving.metrics import new_registry
from dynatree.verify.metrics import VerifyMetrics
from tests.support.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
PARTS = ("verify", "draft", "gateway")
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.tls.yml", "docker-compose.gpu.yml")
VARIABLE = re.compile(r"\$\{(\w+)(?:(:\+|:?-)([^${}]*))?\}")
METRIC = re.compile(r"\bdynatree_[a-z0-9_]+")
SCRAPED = re.compile(r"\b(?:process|python)_[a-z0-9_]+")


def reported(registry: CollectorRegistry) -> set[str]:
    """Return the sample names of a registry, as in a scrape."""
    names = set()
    for family in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.fixture(name="metrics")
def metrics_fixture() -> set[str]:
    draft, verify, gateway = new_registry(), new_registry(), new_registry()
    replicas = Mock(all=[])
    DraftMetrics(draft, Mock(running=0, waiting=0, usage=0.0), replicas, Mock(tokens=0, hits=0))
    VerifyMetrics(verify, Mock(running=0, waiting=0, usage=0.0))
    GatewayMetrics(gateway)
    return reported(draft) | reported(verify) | reported(gateway)


def expressions(panel: Any) -> Iterator[str]:
    """Return every query of a dashboard's panels."""
    for target in panel.get("targets", ()):
        yield target["expr"]
    for inner in panel.get("panels", ()):
        yield from expressions(inner)


def names_of(queries: list[str]) -> set[str]:
    """Return the metrics in queries; a pattern such as "dynatree_request_(success|failure)_total" gives both names."""
    pattern = re.compile(r"(dynatree_\w+_)\((\w+)\|(\w+)\)(\w+)")
    plain = [pattern.sub(r"\1\2\4 \1\3\4", query) for query in queries]
    return {name for query in plain for name in METRIC.findall(query) + SCRAPED.findall(query)}


def test_the_dashboard_asks_for_metrics_that_there_are(metrics: set[str]) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dynatree.json").read_text())
    queries = [query for panel in dashboard["panels"] for query in expressions(panel)]
    queries += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    asked = names_of(queries)
    assert len(asked) > 20
    assert asked <= metrics, asked - metrics


def test_alerts_watch_metrics_that_there_are(metrics: set[str]) -> None:
    [group] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"]
    asked = names_of([rule["expr"] for rule in group["rules"]])
    assert len(asked) > 6
    assert asked <= metrics, asked - metrics


def test_every_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    folder = ROOT / "deploy" / "prometheus"
    [group] = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    cases = [
        case
        for test in yaml.safe_load((folder / "alerts_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    alerts = {rule["alert"] for rule in group["rules"]}
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case.get("exp_alerts")) is fires} == alerts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_where_they_should_and_nowhere_else() -> None:
    command = ["promtool", "test", "rules", str(ROOT / "deploy" / "prometheus" / "alerts_test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guide_lists_every_metric(metrics: set[str]) -> None:
    guide = (ROOT / "docs" / "guides" / "operate.md").read_text()
    listed = set(re.findall(r"^\| `(dynatree_\w+)`", guide, re.MULTILINE))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics if name.startswith("dynatree_")}
    assert listed == families


def services() -> Iterator[tuple[str, list[str]]]:
    """Return the command lines in manifests and compose files."""
    base = {part: yaml_documents(KUBERNETES / "base" / f"{part}.yaml")[0] for part in PARTS}
    literals = yaml_documents(KUBERNETES / "base" / "kustomization.yaml")[0]["configMapGenerator"][0]["literals"]
    values = dict(literal.split("=", 1) for literal in literals)
    for part, deployment in base.items():
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        [secured] = yaml_documents(KUBERNETES / "components" / "tls" / f"{part}.yaml")
        [patch] = secured["spec"]["template"]["spec"]["containers"]
        for command in (container["command"], patch["command"]):
            arguments = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], each) for each in container["args"]]
            assert command[:2] == ["dynatree", part]
            yield part, [*command[2:], *arguments]
    for file in ("docker-compose.yml", "docker-compose.tls.yml"):
        for part, service in yaml_documents(ROOT / file)[0]["services"].items():
            if "command" not in service:
                continue
            for variables in ({}, {"POLICY": "linear", "KV_TOKENS": "4096", "WEIGHTS": "int8"}):
                command = interpolated(service["command"], variables).split()
                assert command[0] == part
                yield part, command[1:]


def interpolated(text: str, variables: dict[str, str]) -> str:
    """Return compose's text with its variables replaced, inner ones first."""

    def value(match: re.Match[str]) -> str:
        name, operator, other = match.groups(default="")
        given = variables.get(name, "")
        if operator == ":+":
            return other if given else ""
        return given or other

    while VARIABLE.search(text):
        text = VARIABLE.sub(value, text)
    return text


def yaml_documents(path: Path) -> list[Any]:
    """Return the documents of a file; compose's tags are read as the tagged values."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, _, node: loader.construct_sequence(node))  # type: ignore[no-untyped-call]
    return list(yaml.load_all(path.read_text(), Loader))


@pytest.mark.parametrize(("part", "arguments"), list(services()))
def test_services_take_the_options_of_deployments(part: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"dynatree.cli.{part}").add_arguments(parser)
    options, unknown = parser.parse_known_args(arguments)
    assert unknown == []
    assert options.listen


def test_the_draft_waits_for_loading_pods() -> None:
    """A draft that finds no verify service ends with a reason before its startup probe ends it."""
    [draft, *_] = yaml_documents(KUBERNETES / "base" / "draft.yaml")
    [container] = draft["spec"]["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    draft_command.add_arguments(parser)
    [waits] = [float(each.split("=")[1]) for each in container["args"] if each.startswith("--verify-timeout")]
    probe = container["startupProbe"]
    assert waits < probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("part", ["draft", "gateway"])
def test_pods_have_the_time_to_stop(part: str) -> None:
    [deployment, *_] = yaml_documents(KUBERNETES / "base" / f"{part}.yaml")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    grace = max(float(each.split("=")[1]) for each in container["args"] if each.startswith("--grace"))
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace + pause < deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_probes_of_the_gateway_ask_for_routes_that_there_are() -> None:
    [gateway, *_] = yaml_documents(KUBERNETES / "base" / "gateway.yaml")
    [container] = gateway["spec"]["template"]["spec"]["containers"]
    routes = {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")}
    routes.add(gateway["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"])
    assert routes <= set(description()["paths"])


def test_envoy_sends_on_what_a_full_queue_refused_and_not_what_a_quota_did() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())
    (listener,) = config["static_resources"]["listeners"]
    (filter_,) = listener["filter_chains"][0]["filters"]
    (host,) = filter_["typed_config"]["route_config"]["virtual_hosts"]
    policy = host["routes"][0]["route"]["retry_policy"]
    conditions = policy["retry_on"].split(",")
    assert "resource-exhausted" not in conditions
    assert "retriable-headers" in conditions
    assert policy["retriable_headers"] == [{"name": REFUSED, "string_match": {"exact": QUEUE}}]


def test_every_service_has_an_image_and_is_deployed_and_scraped() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    compose = yaml_documents(ROOT / "docker-compose.yml")[0]["services"]
    secured = yaml_documents(ROOT / "docker-compose.tls.yml")[0]["services"]
    [kustomization] = yaml_documents(KUBERNETES / "base" / "kustomization.yaml")
    [prometheus] = yaml_documents(ROOT / "deploy" / "prometheus" / "prometheus.yaml")
    assert {service["build"]["target"] for service in compose.values()} <= set(re.findall(r" AS (\w+)", dockerfile))
    assert set(compose) == set(secured) == set(PARTS)
    assert {image["name"] for image in kustomization["images"]} == {f"dynatree-{part}" for part in PARTS}
    assert {job["dns_sd_configs"][0]["names"][0] for job in prometheus["scrape_configs"]} == set(PARTS)


def test_no_service_of_the_secured_files_is_plain() -> None:
    commands = [
        service["command"] for service in yaml_documents(ROOT / "docker-compose.tls.yml")[0]["services"].values()
    ]
    for part in PARTS:
        [patch] = yaml_documents(KUBERNETES / "components" / "tls" / f"{part}.yaml")
        [container] = patch["spec"]["template"]["spec"]["containers"]
        commands.append(" ".join(container["command"]))
    assert len(commands) == 2 * len(PARTS)
    for command in commands:
        assert "--insecure" not in command
        assert "--tls-cert" in command


def test_a_container_sees_its_own_secrets_alone() -> None:
    """Secrets are mounted as folders, since a container does not notice the replacement of a single mounted file."""
    services = yaml_documents(ROOT / "docker-compose.tls.yml")[0]["services"]
    assert set(services) == set(PARTS)
    for part, service in services.items():
        [mount] = [each for each in service["volumes"] if isinstance(each, dict)]
        assert interpolated(mount["source"], {"SECRETS": "/secrets"}) == f"/secrets/{part}"
        assert mount["read_only"]
        others = [each for each in service["volumes"] if isinstance(each, str)]
        assert others in ([], ["huggingface:/var/cache/huggingface"])
        files = re.findall(re.escape(mount["target"]) + r"/([\w.-]+)", service["command"])
        header = (ROOT / "docker-compose.tls.yml").read_text().split("\nservices:")[0]
        assert set(files) == set(re.findall(rf"\b{part}/([\w.-]+)", header))


# Allowed connections: a pod is its namespace and its component; an outside place is its address

METRICS_PORTS = {"verify": "metrics", "draft": "metrics", "gateway": "http"}


def policies(overlay: str) -> dict[str, Any]:
    """Return each component's network policy in an overlay."""
    found = {each["metadata"]["name"]: each["spec"] for each in yaml_documents(KUBERNETES / "base/network-policy.yaml")}
    if overlay == "tls":
        for each in yaml_documents(KUBERNETES / "components/tls/network-policy.yaml"):
            found[each["metadata"]["name"]] |= each["spec"]
    return found


def admits(rule: Any, side: str, who: tuple[str, str] | str, port: object) -> bool:
    """Whether a rule of `from` or `to` matches a pod (namespace, component) or an address, and the port."""
    assert rule[side], "an empty list is everybody"
    assert rule["ports"]
    if port not in [each["port"] for each in rule["ports"]]:
        return False
    for peer in rule[side]:
        if "ipBlock" in peer:
            if isinstance(who, str) and ipaddress.ip_address(who) in ipaddress.ip_network(peer["ipBlock"]["cidr"]):
                excepted = peer["ipBlock"].get("except", [])
                if not any(ipaddress.ip_address(who) in ipaddress.ip_network(each) for each in excepted):
                    return True
        elif not isinstance(who, str):
            namespace, component = who
            selector = peer.get("namespaceSelector")
            wanted = "dynatree"  # the policy's own namespace
            if selector is not None:
                wanted = selector.get("matchLabels", {}).get("kubernetes.io/metadata.name", namespace)
            labels = {"app.kubernetes.io/name": "dynatree", "app.kubernetes.io/component": component}
            if component == "prometheus":
                labels = {"app.kubernetes.io/name": "prometheus"}
            selected = peer.get("podSelector", {}).get("matchLabels", {})
            if namespace == wanted and selected.items() <= labels.items():
                return True
    return False


@pytest.mark.parametrize("overlay", ["base", "tls"])
def test_pods_reach_and_are_reached_by_what_they_need(overlay: str) -> None:
    found = policies(overlay)
    assert set(found) == set(PARTS)
    reached: dict[str, set[object]] = {part: set() for part in PARTS}
    reaches: dict[str, set[object]] = {part: set() for part in PARTS}
    pods = [
        (namespace, component) for namespace in ("dynatree", "other") for component in (*PARTS, "prometheus", "any")
    ]
    pods += [("monitoring", "prometheus"), ("monitoring", "any"), ("kube-system", "any")]
    outside = ("93.184.216.34", "10.1.2.3", "192.168.1.1", "172.20.0.1", "169.254.169.254", "2606:2800::1", "fd00::1")
    for part, spec in found.items():
        assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
        for port in ("grpc", "metrics", "http"):
            for pod in pods:
                if any(admits(rule, "from", pod, port) for rule in spec["ingress"]):
                    reached[part].add((*pod, port))
        for port in ("grpc", "metrics", "http", 53, 443, 80):
            for who in (*pods, *outside):
                if any(admits(rule, "to", who, port) for rule in spec["egress"]):
                    reaches[part].add((who, port))
    prometheus = {part: {("monitoring", "prometheus", METRICS_PORTS[part])} for part in PARTS}
    own = {(*pod, "grpc") for pod in pods if pod[0] == "dynatree"}
    everybody = {(*pod, "grpc") for pod in pods}
    assert reached["verify"] == {("dynatree", "draft", "grpc")} | prometheus["verify"]
    assert reached["draft"] == (everybody if overlay == "tls" else own) | prometheus["draft"]
    http = {(*pod[:2], "http") for pod in (everybody if overlay == "tls" else own)}
    assert reached["gateway"] == http | prometheus["gateway"]
    dns = {(("kube-system", "any"), 53)}
    hub = {("93.184.216.34", 443), ("2606:2800::1", 443)}
    assert reaches["verify"] == dns | hub
    assert reaches["draft"] == dns | hub | {(("dynatree", "verify"), "grpc")}
    assert reaches["gateway"] == dns | {(("dynatree", "draft"), "grpc")}


def test_images_are_built_on_one_base_that_can_be_pinned() -> None:
    """No registry is contacted: the default is a tag, and the argument accepts a digest after it."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", dockerfile, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE))
    assert bases - stages == {"${BASE_IMAGE}"}
    default = re.search(r"^ARG BASE_IMAGE=(\S+)", dockerfile, re.MULTILINE)
    assert default is not None
    compose = yaml_documents(ROOT / "docker-compose.yml")[0]["services"]
    for service in compose.values():
        argument = service["build"]["args"]["BASE_IMAGE"]
        assert interpolated(argument, {}) == default[1]
        pinned = f"{default[1]}@sha256:{'0' * 64}"
        assert interpolated(argument, {"BASE_IMAGE": pinned}) == pinned


def pins(path: Path) -> dict[str, str]:
    """Return versions by normalised names, without packages that are not installed on Linux."""
    found = {}
    for line in path.read_text().splitlines():
        match = re.match(r"([\w.-]+)==([\w.!+-]+)(.*)", line)
        if match and not re.search(r"sys_platform == '(win32|emscripten)'", match[3]):
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


@pytest.mark.parametrize("image", ["build", "gateway", "serve"])
def test_images_install_by_hashes_what_was_tested(image: str) -> None:
    """`make hashes` writes them. pip itself refuses a file that lacks a dependency of its packages."""
    path = ROOT / "deploy" / "hashes" / f"{image}.txt"
    hashed = pins(path)
    assert hashed.items() <= pins(ROOT / "constraints.txt").items()
    for entry in re.split(r"\n(?=\S)", path.read_text().strip()):
        assert re.fullmatch(r"[\w.-]+==[^\n]*( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry
    written = subprocess.run([sys.executable, str(path.parent / "wanted.py"), image], capture_output=True, text=True)
    wanted = {
        re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", each)[0]).lower() for each in written.stdout.split("\n") if each
    }  # type: ignore[index]
    assert wanted <= set(hashed)
    assert len(wanted) == {"build": 1, "gateway": 6, "serve": 13}[image]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(rf"--require-hashes -r \S*{image}\.txt", dockerfile)


def test_images_fetch_nothing_but_torch_without_hashes() -> None:
    """The hash of torch depends on its build, which the builder chooses; its own dependencies come with it."""
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    commands = re.findall(r"\bpip (?:install|wheel|download)\b[^\n&]*", dockerfile)
    open_ = [each for each in commands if "--require-hashes" not in each and "--no-deps" not in each]
    assert len(commands) == 7
    assert len(open_) == 1
    assert "-c constraints.txt -r /tmp/requirements.txt" in open_[0]


def test_draft_and_verify_are_given_the_same_pool() -> None:
    """On one GPU a growing pool takes the other's memory, so one variable limits both."""
    for file in ("docker-compose.yml", "docker-compose.tls.yml"):
        services = yaml_documents(ROOT / file)[0]["services"]
        for part in ("verify", "draft"):
            assert "--kv-tokens" not in interpolated(services[part]["command"], {})
            assert "--kv-tokens 4096" in interpolated(services[part]["command"], {"KV_TOKENS": "4096"})


@pytest.mark.parametrize(
    ("variables", "verify", "draft"),
    [
        ({}, "0", "0"),
        ({"VERIFY_GPU": "1"}, "1", "1"),
        ({"DRAFT_GPU": "1"}, "0", "1"),
        ({"VERIFY_GPU": "2", "DRAFT_GPU": "3"}, "2", "3"),
    ],
)
def test_one_gpu_is_enough(variables: dict[str, str], verify: str, draft: str) -> None:
    services = yaml_documents(ROOT / "docker-compose.gpu.yml")[0]["services"]
    devices = {}
    for part, service in services.items():
        [reservation] = service["deploy"]["resources"]["reservations"]["devices"]
        devices[part] = [interpolated(each, variables) for each in reservation["device_ids"]]
    assert devices == {"verify": [verify], "draft": [draft]}


def test_kernels_are_compiled_where_they_can_be_written_and_loaded() -> None:
    """Triton loads what it has compiled from a volume, since the root is read-only and compose's /tmp is noexec."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    [folder] = re.findall(r"\bTRITON_CACHE_DIR=(\S+)", dockerfile)
    [owned] = re.findall(r"^RUN install --directory --owner dynatree .*", dockerfile, re.MULTILINE)
    assert '"$TRITON_CACHE_DIR"' in owned
    compose = yaml_documents(ROOT / "docker-compose.gpu.yml")[0]
    mounts = [mount for service in compose["services"].values() for mount in service["volumes"]]
    assert sorted(mounts) == sorted(f"{volume}:{folder}" for volume in compose["volumes"])
    for part in ("verify", "draft"):
        [patch] = yaml_documents(KUBERNETES / "components" / "gpu" / f"{part}.yaml")
        [container] = patch["spec"]["template"]["spec"]["containers"]
        [mount] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
        [volume] = patch["spec"]["template"]["spec"]["volumes"]
        assert volume["name"] == mount["name"]
        assert "emptyDir" in volume


@pytest.fixture(name="compose", scope="module")
def compose_fixture() -> list[str]:
    command = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("Docker's compose is not installed")
    return [*command, "--project-directory", str(ROOT), "--env-file", os.devnull]


@pytest.mark.parametrize("files", [COMPOSE_FILES[:1], COMPOSE_FILES[:2], COMPOSE_FILES[::2], COMPOSE_FILES])
@pytest.mark.parametrize("variables", [{}, {"DRAFT_GPU": "1", "KV_TOKENS": "4096"}], ids=["defaults", "two GPUs"])
def test_no_file_on_top_softens_the_containers(
    compose: list[str], files: tuple[str, ...], variables: dict[str, str]
) -> None:
    known = {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_CONFIG") if name in os.environ}
    named = [argument for file in files for argument in ("--file", str(ROOT / file))]
    config = subprocess.run(
        [*compose, *named, "config", "--format", "json"], env=known | variables, check=True, capture_output=True
    )
    services = json.loads(config.stdout)["services"]
    assert set(services) == set(PARTS)
    for service in services.values():
        assert service["read_only"]
        assert service["tmpfs"] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
