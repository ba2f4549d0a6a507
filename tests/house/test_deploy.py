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
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from prometheus_client import CollectorRegistry

from dynatree.cli import draft as draft_command
from dynatree.cli.checks import check_policy
from dynatree.cli.parser import PREFIX, Parser
from dynatree.cli.settings import draft_settings, verify_settings
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.policies import policy_names
from dynatree.engine.gpu import kept_rows
from dynatree.engine.offload import layer_cache
from dynatree.engine.settings import DTYPES, WEIGHTS
from dynatree.gateway.description import description
from dynatree.gateway.errors import ApiError
from dynatree.gateway.hosts import Hosts
from dynatree.gateway.metrics import GatewayMetrics
from dynatree.serving.grpc_options import QUEUE, REFUSED
from dynatree.serving.metrics import new_registry
from dynatree.verify.metrics import VerifyMetrics
from tests.support.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
PARTS = ("verify", "draft", "gateway")
MODELS = ("verify", "draft")
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.tls.yml", "docker-compose.gpu.yml")
VARIANTS = (COMPOSE_FILES[:1], COMPOSE_FILES[:2], COMPOSE_FILES[::2], COMPOSE_FILES)
OVERLAYS: tuple[tuple[str, ...], ...] = ((), ("gpu",), ("tls",), ("gpu", "tls"))  # the components of each
# Values that the guide gives for the variables of compose. Those of manifests have the same names.
CHOICES = {
    "DTYPE": (*DTYPES, "auto"),
    "DEVICE": ("cpu", "cuda", "auto"),
    "WEIGHTS": (*WEIGHTS, "auto"),
    "DRAFT_WEIGHTS": (*WEIGHTS, "auto"),
    "KV_TOKENS": ("4096",),
    "LOG_FORMAT": ("text", "json"),
    "TARGET_MODEL": ("EleutherAI/pythia-2.8b",),
    "DRAFT_MODEL": ("EleutherAI/pythia-70m", "none"),
}
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


def choices() -> Iterator[dict[str, str]]:
    """Yield the variables of deployments: none, each value alone, each beside no draft model, and each policy."""
    yield {}
    for name, values in CHOICES.items():
        for value in values:
            yield {name: value}
            yield {name: value, "DRAFT_MODEL": "none"}
    for policy in policy_names():
        yield {"POLICY": policy}
        if policy in ("throughput", "ngram", "autoregressive"):
            yield {"POLICY": policy, "DRAFT_MODEL": "none"}


def merged(below: Any, above: Any) -> Any:
    """Return what compose makes of two files: mappings and volumes add up, other values are replaced."""
    both = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            both[key] = merged(old, value)
        elif key == "volumes" and isinstance(value, list):
            both[key] = [*(old or []), *value]
        else:
            both[key] = value
    return both


def composed(files: tuple[str, ...], variables: dict[str, str]) -> dict[str, Any]:
    """Return the services of compose files."""
    found: Any = {}
    for file in files:
        found = merged(found, yaml_documents(ROOT / file)[0]["services"])
    return {part: replaced(service, variables) for part, service in found.items()}


def replaced(value: Any, variables: dict[str, str]) -> Any:
    """Return a value of compose with its variables replaced in every text."""
    if isinstance(value, dict):
        return {key: replaced(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, variables) for each in value]
    return interpolated(value, variables) if isinstance(value, str) else value


def pod(part: str, components: tuple[str, ...]) -> Any:
    """Return the pod of a service with components on the base: lists of things with names add up, as in kustomize."""

    def patched(below: Any, above: Any) -> Any:
        if isinstance(below, dict) and isinstance(above, dict):
            both = below | {key: patched(below.get(key), value) for key, value in above.items()}
            return {key: value for key, value in both.items() if value is not None}
        if isinstance(below, list) and isinstance(above, list) and all(isinstance(each, dict) for each in above):
            named = {each["name"]: each for each in below}
            return list((named | {each["name"]: patched(named.get(each["name"]), each) for each in above}).values())
        return above

    template = yaml_documents(KUBERNETES / "base" / f"{part}.yaml")[0]["spec"]["template"]
    for component in components:
        path = KUBERNETES / "components" / component / f"{part}.yaml"
        if path.exists():
            template = patched(template, yaml_documents(path)[0]["spec"]["template"])
    return template


def literals(components: tuple[str, ...]) -> dict[str, str]:
    """Return the values that manifests have for their variables."""
    found: dict[str, str] = {}
    for folder in ("base", *(f"components/{component}" for component in components)):
        [kustomization] = yaml_documents(KUBERNETES / folder / "kustomization.yaml")
        for generator in kustomization.get("configMapGenerator", ()):
            found |= dict(literal.split("=", 1) for literal in generator["literals"])
    return found


def started(part: str, words: list[str], environment: dict[str, Any]) -> argparse.Namespace:
    """Return the options of a service with this command and environment; every variable must be one of its options."""
    parser = Parser(allow_abbrev=False, exit_on_error=False)
    importlib.import_module(f"dynatree.cli.{part}").add_arguments(parser)
    given = {name: str(value) for name, value in environment.items() if name.startswith(PREFIX)}
    assert set(given) <= set(option_variables(parser))
    parser.environment = given
    return parser.parse_args(words)


def option_variables(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options by the variables that set them."""
    return {
        PREFIX + name.removeprefix("--").replace("-", "_").upper(): action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def in_compose(files: tuple[str, ...], variables: dict[str, str]) -> dict[str, argparse.Namespace]:
    """Return the options of each service of compose files."""
    options = {}
    for part, service in composed(files, variables).items():
        command, *words = service["command"].split()
        assert command == part
        options[part] = started(part, words, service.get("environment", {}))
    return options


def in_pods(components: tuple[str, ...], variables: dict[str, str]) -> dict[str, argparse.Namespace]:
    """Return the options of each service of manifests; `variables` are further literals."""
    values = literals(components)
    values |= {name: value for name, value in variables.items() if name in values}
    options = {}
    for part in PARTS:
        [container] = pod(part, components)["spec"]["containers"]
        program, command, *words = container["command"]
        assert (program, command) == ("dynatree", part)
        words += [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], each) for each in container["args"]]
        keys = {
            each["name"]: each["valueFrom"]["configMapKeyRef"]["key"]
            for each in container.get("env", ())
            if "configMapKeyRef" in each.get("valueFrom", ())
        }
        environment = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        options[part] = started(part, words, environment | {name: values[key] for name, key in keys.items()})
    return options


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


@pytest.mark.parametrize("variant", [*VARIANTS, *OVERLAYS], ids="+".join)
def test_services_take_the_options_of_deployments(variant: tuple[str, ...]) -> None:
    for variables in choices():
        options = (in_compose if variant in VARIANTS else in_pods)(variant, variables)
        assert set(options) == set(PARTS)
        verify_settings(options["verify"])
        settings = draft_settings(options["draft"])
        check_policy(settings.policy.name, settings.policy.settings, has_model=settings.model is not None)
        given = {"DTYPE": "dtype", "DEVICE": "device", "WEIGHTS": "weights", "LOG_FORMAT": "log_format"}
        for name, value in variables.items():
            if name in given:
                assert getattr(options["verify"], given[name]) == value


@pytest.mark.parametrize("files", VARIANTS, ids="+".join)
def test_another_file_can_set_every_option_of_compose(files: tuple[str, ...]) -> None:
    """A command would take precedence over the variables."""
    for part, service in composed(files, {}).items():
        assert service["command"] == part


def test_no_variable_of_compose_means_something_else_to_a_command() -> None:
    """A variable inside another one's default is an older name of that one."""
    names = {name for file in COMPOSE_FILES for name in re.findall(r"(?<!:-)\$\{(\w+)", (ROOT / file).read_text())}
    assert len(names) > 15
    for part in (*PARTS, "serve"):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"dynatree.cli.{part}").add_arguments(parser)
        assert not names & set(option_variables(parser))


def test_every_deployment_has_the_metrics_that_prometheus_asks_for() -> None:
    [prometheus] = yaml_documents(ROOT / "deploy" / "prometheus" / "prometheus.yaml")
    [jobs] = zip(*[job["dns_sd_configs"] for job in prometheus["scrape_configs"]], strict=True)
    ports = {part: job["port"] for job in jobs for part in job["names"]}
    assert set(ports) == set(PARTS)
    for files in VARIANTS:
        for part, options in in_compose(files, {}).items():
            assert (options.listen if part == "gateway" else options.metrics) == f"0.0.0.0:{ports[part]}"
    for components in OVERLAYS:
        for part, options in in_pods(components, {}).items():
            annotations = pod(part, components)["metadata"]["annotations"]
            address = f"0.0.0.0:{annotations['prometheus.io/port']}"
            assert (options.listen if part == "gateway" else options.metrics) == address
            assert annotations.get("prometheus.io/scheme", "http") == ("https" if "tls" in components else "http")


def certificate_names() -> dict[str, dict[str, set[str]]]:
    """Return the names that certificates have, by the file whose head asks for them."""
    compose = (ROOT / "docker-compose.tls.yml").read_text()
    kubernetes = (KUBERNETES / "components" / "tls" / "kustomization.yaml").read_text()
    [*groups] = re.findall(r"DNS:\w+(?:,DNS:\w+)*", kubernetes)
    return {
        "compose": {
            part: set(re.findall(r"`(\w+)`", line))
            for part, line in re.findall(r"^#   (\w+)/tls\.pem, \w+/tls\.key (.*)", compose, re.MULTILINE)
        },
        "kubernetes": {group.split(":")[1].split(",")[0]: set(re.findall(r"DNS:(\w+)", group)) for group in groups},
    }


def test_certificates_have_every_name_that_they_are_checked_for() -> None:
    """Health checks, the other services, and Prometheus check names. Kubernetes' own HTTPS probes check none."""
    names = certificate_names()
    checked: dict[str, list[tuple[str, str]]] = {"compose": [], "kubernetes": []}
    secured = composed(COMPOSE_FILES[:2], {})
    checks = [("compose", part, service["healthcheck"]["test"]) for part, service in secured.items()]
    for part in PARTS:
        [container] = pod(part, ("tls",))["spec"]["containers"]
        probes = [
            container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in container
        ]
        checks += [("kubernetes", part, probe["exec"]["command"]) for probe in probes if "exec" in probe]
    for where, part, command in checks:
        [address] = [each for each in command if re.search(r":\d+$", each)]
        checked[where].append((part, address.removeprefix("https://").split(":")[0]))
    for where, options in (("compose", in_compose(COMPOSE_FILES[:2], {})), ("kubernetes", in_pods(("tls",), {}))):
        for called in (options["draft"].verify, options["gateway"].server):
            name = called.removeprefix("dns:///").split(":")[0]
            checked[where].append((name, name))
    for where, file in (("compose", "prometheus.yaml"), ("kubernetes", "kubernetes.yaml")):
        [name] = re.findall(r"tls_config: \{.*server_name: (\w+)", (ROOT / "deploy" / "prometheus" / file).read_text())
        checked[where] += [(part, name) for part in PARTS]
    assert len(checked["compose"]) == 8
    assert len(checked["kubernetes"]) == 11
    for where, pairs in checked.items():
        for part, name in pairs:
            assert name in names[where][part], (where, part, name)


def test_secrets_are_made_from_files_of_their_own_in_the_namespace_of_the_pods(tmp_path: Path) -> None:
    head = (KUBERNETES / "components" / "tls" / "kustomization.yaml").read_text().split("\napiVersion")[0]
    indented = "\n".join(re.findall(r"^#   (.*)", head, re.MULTILINE))
    script = indented[re.search(r"^(?:for|kubectl)\b", indented, re.MULTILINE).start() :]  # type: ignore[union-attr]
    command = ["bash", "-euc", 'kubectl() { echo "$*"; }\n' + script]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    made = {}
    for line in said:
        words = line.split()
        assert words[:3] == ["create", "secret", "generic"]
        assert "--namespace dynatree" in line
        made[words[3]] = re.findall(r"--from-file=(?:[\w.]+=)?(\S+)", line)
    sources = [source for each in made.values() for source in each]
    assert len(sources) == len(set(sources)), "two Secrets are made from one file"
    read: dict[str, set[str]] = {}
    for part in PARTS:
        spec = pod(part, ("tls",))["spec"]
        [container] = spec["containers"]
        folders = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        for volume in spec["volumes"]:
            if "secret" in volume:
                files = re.findall(re.escape(folders[volume["name"]]) + r"/([\w.]+)", json.dumps(container))
                read[volume["secret"]["secretName"]] = set(files)
    assert set(made) == set(read)
    for name, files in read.items():
        [listed] = re.findall(rf"^{name}/ +(.*)", indented, re.MULTILINE)
        assert set(listed.split()) == files


def test_compose_publishes_a_gateway_on_loopback_under_names_of_this_machine() -> None:
    """A page whose name resolves to this machine would be of the gateway's origin (DNS rebinding)."""

    def answers(options: argparse.Namespace, host: str) -> bool:
        try:
            Hosts(options.listen, options.allow_host).check(host.encode())
        except ApiError:
            return False
        return True

    own = ("localhost:8000", "127.0.0.1:8000", "gateway:8000", "host.docker.internal:8000", "172.18.0.5:8000")
    for files in VARIANTS:
        local = in_compose(files, {})["gateway"]
        published = in_compose(files, {"DYNATREE_BIND": "0.0.0.0"})["gateway"]
        assert all(answers(local, host) and answers(published, host) for host in own)
        assert answers(published, "model.example")
        assert answers(local, "model.example") == ("docker-compose.tls.yml" in files)
    for components in OVERLAYS:
        assert answers(in_pods(components, {})["gateway"], "model.example")


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
    secured = [in_compose(files, {}) for files in VARIANTS if "docker-compose.tls.yml" in files]
    secured += [in_pods(components, {}) for components in OVERLAYS if "tls" in components]
    assert len(secured) == 4
    for services in secured:
        assert set(services) == set(PARTS)
        for options in services.values():
            assert not options.insecure
            assert options.tls_cert


def test_a_container_sees_its_own_secrets_alone() -> None:
    """Secrets are mounted as folders, since a container does not notice the replacement of a single mounted file."""
    services = yaml_documents(ROOT / "docker-compose.tls.yml")[0]["services"]
    assert set(services) == set(PARTS)
    for part, service in services.items():
        [mount] = service["volumes"]
        assert interpolated(mount["source"], {"SECRETS": "/secrets"}) == f"/secrets/{part}"
        assert mount["read_only"]
        files = re.findall(re.escape(mount["target"]) + r"/([\w.-]+)", json.dumps(service))
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
    assert len(wanted) == {"build": 1, "gateway": 6, "serve": 16}[image]
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
    for files in VARIANTS:
        for part in MODELS:
            assert in_compose(files, {})[part].kv_tokens is None
            assert in_compose(files, {"KV_TOKENS": "4096"})[part].kv_tokens == 4096


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


def test_caches_are_kept_where_they_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is read-only. Triton loads what it has compiled, and compose's /tmp is noexec."""
    dockerfile = (ROOT / "Dockerfile").read_text().split("\nFROM python AS serve\n")[1]
    variables = dict(re.findall(r"^(?:ENV| ) +(\w+)=(/\S+)", dockerfile, re.MULTILINE))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/dynatree")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    written = [Path(variables["HF_HOME"]), Path(variables["TRITON_CACHE_DIR"])]
    written += [kept_rows.default_path(), layer_cache.default_folder()]
    [owned] = re.findall(r"^RUN install --directory --owner dynatree .*", dockerfile, re.MULTILINE)
    folders = {Path(os.path.expandvars(each)) for each in re.findall(r'"([^"]+)"', owned)}
    for files in VARIANTS:
        services = composed(files, {})
        mounts = {
            part: dict(each.split(":") for each in services[part]["volumes"] if isinstance(each, str))
            for part in MODELS
        }
        for part in MODELS:
            targets = {Path(target) for target in mounts[part].values()}
            assert targets <= folders, "a new volume has the owner of the image's folder"
            for path in written:
                assert targets & {path, *path.parents}, (files, part, path)
        shared = set(mounts["verify"]) & set(mounts["draft"])
        assert shared == {"huggingface"}, "a service runs code that the other wrote"
    for components in OVERLAYS:
        for part in MODELS:
            spec = pod(part, components)["spec"]
            empty = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
            [container] = spec["containers"]
            targets = {Path(each["mountPath"]) for each in container["volumeMounts"] if each["name"] in empty}
            for path in written:
                assert targets & {path, *path.parents}, (components, part, path)


def test_images_have_what_options_need() -> None:
    """But for the extra parallel, whose accelerate needs torch, which has no hash here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed: dict[str, set[str]] = {"gateway": set(), "serve": set()}
    for part in PARTS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"dynatree.cli.{part}").add_arguments(parser)
        texts = " ".join(action.help or "" for action in parser._actions)
        needed["gateway" if part == "gateway" else "serve"] |= set(re.findall(r"needs the extra (\w+)", texts))
    assert needed == {"gateway": set(), "serve": {"otel", "parallel"}}
    hashed = pins(ROOT / "deploy" / "hashes" / "serve.txt")
    for requirement in project["optional-dependencies"]["otel"]:
        assert re.match(r"[\w-]+", requirement)[0] in hashed  # type: ignore[index]


@pytest.fixture(name="compose", scope="module")
def compose_fixture() -> list[str]:
    command = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("Docker's compose is not installed")
    return [*command, "--project-directory", str(ROOT), "--env-file", os.devnull]


@pytest.mark.parametrize("files", VARIANTS)
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
