"""The files of docs/deploy, the dashboard and the alert rules: they parse, and agree with each
other and with the server on names, ports, paths, settings, metrics and times."""

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import ProcessCollector

from server.commands.serve import serve_command
from server.core.metrics import Metrics
from server.core.settings import Settings
from server.http.access import OPEN_PATHS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
COMPOSE: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS: dict[str, Any] = {
    document["kind"]: document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]
[CONTAINER] = POD["spec"]["containers"]
ENV = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SETTINGS = {spec.name.upper() for spec in fields(Settings)}
SERIES = re.compile(r"\b((?:onequeue_|vllm:|process_)\w+)(?:\{([^}]*)\})?")
TARGET_LABELS = {"job", "instance"}  # of Prometheus
[PORT] = [param.default for param in serve_command().params if param.name == "port"]


def test_a_pod_lives_longer_than_its_drain() -> None:
    drain_s = float(ENV["DRAIN_DELAY_S"]) + float(ENV["SHUTDOWN_GRACE_S"])
    assert drain_s < POD["spec"]["terminationGracePeriodSeconds"]
    probe = CONTAINER["readinessProbe"]
    assert probe["periodSeconds"] * probe.get("failureThreshold", 3) < float(ENV["DRAIN_DELAY_S"])


def test_a_pod_has_settings_ports_and_paths_of_the_server() -> None:
    assert ENV.keys() <= SETTINGS
    [port] = CONTAINER["ports"]
    assert port["containerPort"] == int(POD["metadata"]["annotations"]["prometheus.io/port"])
    assert port["containerPort"] == PORT
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = CONTAINER[name]["httpGet"]
        assert probe["path"] in OPEN_PATHS
        assert probe["port"] == port["name"]
    [service_port] = MANIFESTS["Service"]["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    labels = POD["metadata"]["labels"]
    assert MANIFESTS["Service"]["spec"]["selector"].items() <= labels.items()
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_pods_keep_weights_and_builds_on_a_claimed_volume() -> None:
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    [folder] = re.findall(r"^VOLUME (.*)", DOCKERFILE, re.MULTILINE)
    claim = volumes[mounts[folder]]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]
    for variable in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        assert f"{variable}={folder}/" in DOCKERFILE


def test_pods_are_added_by_a_metric_that_the_server_exports() -> None:
    scaler = MANIFESTS["HorizontalPodAutoscaler"]["spec"]
    target, deployment = scaler["scaleTargetRef"], MANIFESTS["Deployment"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert target["apiVersion"] == deployment["apiVersion"]
    assert "replicas" not in deployment["spec"], "applying it again would undo the autoscaler's"
    [metric] = [entry["pods"] for entry in scaler["metrics"]]
    assert metric["target"]["averageValue"] == ENV["MAX_RUNNING"]
    name = metric["metric"]["name"]
    assert Metrics(lambda: 3.0).registry.get_sample_value(name) == 3
    adapter = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())
    [rule] = adapter["rules"]["custom"]
    assert rule["seriesQuery"].split("{")[0] == name


def test_compose_serves_the_model_of_a_variable() -> None:
    service = COMPOSE["services"]["onequeue"]
    [model] = service["command"]
    assert model.startswith("${MODEL:?")
    assert re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.MULTILINE) == [
        '["onequeue", "serve", "--host", "0.0.0.0"]'
    ]
    assert service["environment"].keys() - {"HF_TOKEN"} <= SETTINGS  # the hub library reads it
    assert service["ports"] == [f"{PORT}:{PORT}"]
    assert service["volumes"] == [f"{name}:/cache" for name in COMPOSE["volumes"]]


def test_compose_names_files_that_exist() -> None:
    build = COMPOSE["services"]["onequeue"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    for config in COMPOSE["configs"].values():
        assert "content" in config or (DEPLOY / config["file"]).is_file()
    used = {mount["source"] for s in COMPOSE["services"].values() for mount in s.get("configs", ())}
    assert used == COMPOSE["configs"].keys()


def test_two_servers_share_a_database_behind_nginx() -> None:
    compose: Any = yaml.safe_load((DEPLOY / "compose-postgres.yaml").read_text())
    services = compose["services"]
    environment = services["a"]["environment"]
    assert environment.keys() - {"HF_TOKEN", "TMPDIR"} <= SETTINGS
    assert environment == services["b"]["environment"]
    assert f"mkdir /cache {environment['TMPDIR']}" in DOCKERFILE
    assert ",postgres]" in DOCKERFILE
    database, name = environment["STORE"].rpartition("@")[2].split("/")
    assert services[database]["environment"]["POSTGRES_USER"] == name
    for service in services.values():
        volumes = {volume.split(":")[0] for volume in service.get("volumes", ())}
        assert volumes <= compose["volumes"].keys()
        dependencies = service.get("depends_on", ())
        for name in dependencies:
            is_plain = isinstance(dependencies, list)
            assert is_plain or dependencies[name] == {"condition": "service_healthy"}
            assert is_plain or services[name]["healthcheck"]["test"][0] == "CMD-SHELL"
    assert services["a"]["command"][0].startswith("${MODEL:?"), "the entrypoint has the command"
    nginx = (DEPLOY / compose["configs"]["nginx"]["file"]).read_text()
    [script] = [part for part in services["nginx"]["command"] if "sed" in part]
    program = re.sub(r" /onequeue.conf > .*", "", script.strip())
    done = subprocess.run(["sh", "-c", program], input=nginx, capture_output=True, text=True)
    upstreams = [f"server {name}:{PORT} max_fails" for name in ("a", "b")]
    for line in (*upstreams, "listen 8000;"):
        assert line in done.stdout, done.stderr


def test_prometheus_scrapes_the_server_of_compose() -> None:
    prometheus = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    [job] = prometheus["scrape_configs"]
    assert job["job_name"] == "onequeue", "the alert rules name it"
    assert job["static_configs"] == [{"targets": [f"onequeue:{PORT}"]}]
    targets = {mount["target"] for mount in COMPOSE["services"]["prometheus"]["configs"]}
    assert {f"/etc/prometheus/{rules}" for rules in prometheus["rule_files"]} <= targets


def test_grafana_is_provisioned_with_data_source_and_dashboard() -> None:
    grafana = COMPOSE["services"]["grafana"]
    mounts = {mount["source"]: Path(mount["target"]) for mount in grafana["configs"]}
    provisioning = Path("/etc/grafana/provisioning")
    assert mounts["datasource"].parent == provisioning / "datasources"
    assert mounts["dashboards"].parent == provisioning / "dashboards"
    sources = yaml.safe_load((DEPLOY / "grafana-datasource.yaml").read_text())
    [source] = sources["datasources"]
    assert source["type"] == "prometheus"
    [port] = COMPOSE["services"]["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.split(':')[-1]}"
    providers = yaml.safe_load((DEPLOY / "grafana-dashboards.yaml").read_text())
    [provider] = providers["providers"]
    assert Path(provider["options"]["path"]) == mounts["dashboard"].parent
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == str(mounts["dashboard"])


@pytest.mark.parametrize("package", ["server", "batching", "worker"])
def test_the_image_has_all_packages(package: str) -> None:
    assert f"COPY {package} {package}\n" in DOCKERFILE


def test_rays_file_names_the_policy_that_counts_inputs() -> None:
    """The fields that such a file leaves out are Ray's defaults, not those of server/cluster.py."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    [text] = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    [application] = yaml.safe_load(text)["applications"]
    [deployment] = application["deployments"]
    policy = deployment["autoscaling_config"]["policy"]["policy_function"]
    source = (ROOT / "server" / "cluster.py").read_text()
    for path, definition in ((application["import_path"], "{} ="), (policy, "def {}(")):
        module, name = path.split(":")
        assert module == "server.cluster"
        assert f"\n{definition.format(name)}" in source
    assert f"\nclass {deployment['name']}:" in source


# ── the dashboard and the alert rules ──


def expressions() -> list[str]:
    dashboard: dict[str, Any] = json.loads((DEPLOY.parent / "grafana.json").read_text())
    rules: dict[str, Any] = yaml.safe_load((DEPLOY.parent / "alerts.yaml").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def known_series() -> dict[str, set[str]]:
    """Return the labels of each series."""
    metrics = Metrics(lambda: 0.0)
    known: dict[str, set[str]] = {}
    for collector, names in metrics.registry._collector_to_names.items():
        labels = {*getattr(collector, "_labelnames", ())}
        if isinstance(collector, ProcessCollector):
            names = [metric.name for metric in collector.collect()]
        known |= dict.fromkeys(names, labels | TARGET_LABELS)
    return known


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_uses_known_series_and_labels(expression: str) -> None:
    known, found = known_series(), SERIES.findall(expression)
    assert found or expression.startswith("up{")
    for name, matchers in found:
        assert name in known, name
        used = set(re.findall(r"(\w+)=", matchers))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            used |= set(re.split(r",\s*", group)) - {"le"}
        assert used <= known[name], expression


def test_promtool_accepts_the_rules() -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool is not installed")
    command = [promtool, "check", "rules", str(DEPLOY.parent / "alerts.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
