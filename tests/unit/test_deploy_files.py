"""The manifests of docs/deploy: they parse, and their times fit the server's settings."""

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"


def test_a_pod_lives_longer_than_its_drain() -> None:
    documents: list[Any] = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
    deployment, service = documents
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    drain_s = float(env["DRAIN_DELAY_S"]) + float(env["SHUTDOWN_GRACE_S"])
    assert drain_s < spec["terminationGracePeriodSeconds"]
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * probe.get("failureThreshold", 3) < float(env["DRAIN_DELAY_S"])
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_compose_names_files_that_exist() -> None:
    document: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    build = document["services"]["onequeue"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert (DEPLOY / document["configs"]["alerts"]["file"]).is_file()
    prometheus = yaml.safe_load(document["configs"]["prometheus"]["content"])
    [job] = prometheus["scrape_configs"]
    assert job["job_name"] == "onequeue", "the alert rules name it"


def test_the_image_has_all_packages() -> None:
    copied = (DEPLOY / "Dockerfile").read_text()
    for package in ("server", "batching", "worker"):
        assert f"COPY {package} {package}\n" in copied
