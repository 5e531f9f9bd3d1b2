"""The manifests in ``contrib/kubernetes`` say what the server does: paths, ports, settings, names of metrics, times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from engine.assembly.assemble import configure
from engine.assembly.gateway import gateway_parts
from engine.counters import declared, fleet, gateway
from engine.http.middleware import OPEN_ROUTES

FOLDER = Path(__file__).parents[1] / "contrib" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
OBJECTS = [found for path in FILES for found in yaml.safe_load_all(path.read_text("utf-8"))]
METRICS = {metric.name: metric for metric in (*declared.METRICS, *fleet.METRICS, *gateway.METRICS)}


def of(kind: str, name: str) -> dict:
    (found,) = [one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(kind: str, name: str) -> tuple[dict, dict]:
    """The spec of its pods, and their container."""
    spec = of(kind, name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


WORKLOADS = {"server": ("StatefulSet", "engine"), "gateway": ("Deployment", "engine-gateway")}


def server_settings(which: str):
    args = [re.sub(r"\$\(\w+\)", "secret", word) for word in pod(*WORKLOADS[which])[1]["args"]]
    words = args[1:]
    if which == "gateway":
        urls = [word for word in words if "://" in word]
        short = [word for word in words if "://" not in word]
        settings = gateway_parts([f"gateway.targets=[{','.join(urls)}]", *short], ()).settings
        assert settings.gateway.targets == urls
        return settings
    return configure(words).composed.settings


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")


@pytest.mark.parametrize("which", WORKLOADS)
def test_settings_are_the_servers_and_the_times_fit_into_each_other(which):
    spec, container = pod(*WORKLOADS[which])
    settings = server_settings(which).server
    (port,) = container["ports"]
    assert container["args"][0] == {"server": "serve", "gateway": "gateway"}[which]
    assert (settings.host, settings.port) == ("0.0.0.0", port["containerPort"])
    assert settings.api_key == "secret"
    assert spec["terminationGracePeriodSeconds"] > settings.lame_duck_s + settings.drain_s
    ready = container["readinessProbe"]
    assert 2 * ready["periodSeconds"] * ready["failureThreshold"] <= settings.lame_duck_s


@pytest.mark.parametrize("which", WORKLOADS)
def test_probes_ask_routes_that_need_no_key(which):
    _, container = pod(*WORKLOADS[which])
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: get["path"] for name, get in asked.items()} == {
        "startup": "/ready", "readiness": "/ready", "liveness": "/health",
    }  # fmt: skip
    assert all(get["path"] in OPEN_ROUTES and get["port"] == container["ports"][0]["name"] for get in asked.values())


def test_services_lead_to_ports_of_pods_that_exist():
    pods = [of(*names)["spec"]["template"] for names in WORKLOADS.values()]
    for service in (one for one in OBJECTS if one["kind"] == "Service"):
        (template,) = [each for each in pods if each["metadata"]["labels"] == service["spec"]["selector"]]
        names = [port["name"] for port in template["spec"]["containers"][0]["ports"]]
        assert [port["targetPort"] for port in service["spec"]["ports"]] == names
    for kind, name in WORKLOADS.values():
        spec = of(kind, name)["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def test_the_gateway_reaches_each_pod_that_there_may_be():
    settings = server_settings("gateway")
    headless = of("Service", of("StatefulSet", "engine")["spec"]["serviceName"])
    assert headless["spec"]["clusterIP"] == "None", "each pod has a name"
    most = of("ScaledObject", "engine")["spec"]["maxReplicaCount"]
    (port,) = headless["spec"]["ports"]
    name = headless["metadata"]["name"]
    assert settings.gateway.targets == [f"http://engine-{i}.{name}:{port['port']}" for i in range(most)]
    assert port["port"] == server_settings("server").server.port, "a pod's name leads to the pod itself"


def test_autoscalers_read_gauges_that_are_declared_and_scale_what_exists():
    hpa, scaled = of("HorizontalPodAutoscaler", "engine")["spec"], of("ScaledObject", "engine")["spec"]
    for target in (hpa["scaleTargetRef"], scaled["scaleTargetRef"]):
        of(target["kind"], target["name"])
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (scaled["minReplicaCount"], scaled["maxReplicaCount"])
    read = [metric["pods"]["metric"]["name"] for metric in hpa["metrics"]]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    assert queries == [f"sum({name})" for name in read]
    assert all(METRICS[name].kind == "gauge" for name in read)


def test_no_other_metric_is_named():
    text = "".join(path.read_text("utf-8") for path in FILES)
    named = {*re.findall(r"\bengine_[a-z_]+[a-z]", text)}
    assert named and named <= {*METRICS}


def test_the_readme_says_what_each_file_does():
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert [path.name for path in FILES] == sorted(re.findall(r"^\| `(\w+\.yaml)` \|", readme, re.MULTILINE))
