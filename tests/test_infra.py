"""What runs the servers elsewhere: images are pinned, services are watched, secrets stand in no file, names agree."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
INFRA = ROOT / "infra"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
JOB = json.loads((INFRA / "kubernetes" / "job-template.json").read_text())
ONCE = {"bucket", "deploy", "run"}
"""What ends by itself when its work is done."""
UNWATCHED = ONCE | {"shell"}


def manifests() -> list[dict[str, Any]]:
    files = [INFRA / "kubernetes" / name for name in ("servers.yaml", "workers.yaml")]
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text())]


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, labels and specification of each pod."""
    for manifest in manifests():
        template = manifest.get("spec", {}).get("template")
        if template is not None:
            labels = template.get("metadata", {}).get("labels", {})
            yield manifest["metadata"]["name"], labels, template["spec"]
    yield "run", {}, JOB["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_service_is_watched_pinned_and_holds_no_secret(name: str) -> None:
    service = COMPOSE["services"][name]
    if name not in ONCE:
        assert service["healthcheck"]["test"] and service["restart"] == "unless-stopped"
    image = service["image"]
    assert image in ("protofl", "protofl-servers") or re.fullmatch(r"[a-z/]+:(RELEASE\.)?[0-9][\w.-]+", image), image
    for key, value in service.get("environment", {}).items():
        if re.search("PASSWORD|SECRET|ACCESS_KEY|ROOT_USER", key):
            assert re.fullmatch(r"\$\{\w+:\?set it in the environment\}", value), f"{name}: {key}"
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), f"{name}: {port} is open to the network"


def test_services_wait_for_those_that_they_need() -> None:
    """A condition names a service that can meet it: one that ends, or one that is watched."""
    services = COMPOSE["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if needed in ONCE else "service_healthy"
            assert how["condition"] == wanted and needed in services, f"{name}: {needed}"
    volumes = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])}
    assert {volume for volume in volumes if not volume.startswith(".")} == set(COMPOSE["volumes"])
    assert all((INFRA / volume).exists() for volume in volumes if volume.startswith("."))


def test_parameters_images_and_deployments_are_mounted_and_not_in_the_image() -> None:
    """Other values, own images or another schedule need no other image, with compose and with Kubernetes."""
    read = {"/app/params.yaml", "/app/images", "/app/infra/prefect.yaml"}
    assert not any(name in (INFRA / "Dockerfile").read_text() for name in ("COPY params.yaml", "COPY images"))
    for name in ("worker", "gpu-worker"):
        mounts = dict(reversed(mount.split(":", 1)) for mount in COMPOSE["services"][name]["volumes"])
        assert read <= {place.removesuffix(":ro") for place in mounts}
    made = set(re.findall(r"--from-file=(?:\S*/)?([\w.]+)", (INFRA / "README.md").read_text()))
    pod_mounts = {name: pod["containers"][0].get("volumeMounts", []) for name, _, pod in pods()}
    assert read <= {mount["mountPath"] for mount in pod_mounts["shell"]}
    assert read - {"/app/infra/prefect.yaml"} <= {mount["mountPath"] for mount in pod_mounts["run"]}
    of_project = {mount["subPath"] for mounts in pod_mounts.values() for mount in mounts if "subPath" in mount}
    assert of_project == made == {"params.yaml", "prefect.yaml"}


def test_a_killed_server_knows_who_holds_a_deployment() -> None:
    """Leases are files below Prefect's home, which is a volume: in memory they are lost, and the place stays taken."""
    key, home = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", "/home/protofl/.prefect"
    [server] = [pod["containers"][0] for name, _, pod in pods() if name == "prefect"]
    by_name = {variable["name"]: variable.get("value") for variable in server["env"]}
    service = COMPOSE["services"]["prefect"]
    for said, mounted in (
        (by_name[key], [mount["mountPath"] for mount in server["volumeMounts"]]),
        (service["environment"][key], [mount.split(":")[1] for mount in service["volumes"]]),
    ):
        assert said.endswith(".filesystem") and mounted == [home]


def test_the_registering_job_does_not_stop_a_second_apply() -> None:
    """Kubernetes refuses to change a job; one that removes itself is made anew, with the new image."""
    [job] = [manifest for manifest in manifests() if manifest["kind"] == "Job"]
    assert job["spec"]["ttlSecondsAfterFinished"] <= 60


def test_servers_have_no_packages_that_only_training_needs() -> None:
    """By the filter of the Dockerfile, run on the lock: whole entries go, and no other package with them."""
    lock = INFRA / "requirements-production.lock"
    [without] = re.findall(r"without='(\^\(torch[^']*)'", (INFRA / "Dockerfile").read_text())
    [program] = re.findall(r"awk -v without=\"\$without\" '([^']*)'", (INFRA / "Dockerfile").read_text())
    command = ["awk", "-v", f"without={without}", program, str(lock)]
    left = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before, after = pins(lock), pins_of(left)
    gone = {"torch", "torchvision", "triton", "ray"}
    assert before.keys() - after.keys() == {name for name in before if name in gone or re.match("nvidia-|cuda-", name)}
    assert {name: after[name] for name in after} == {name: before[name] for name in after}
    assert {"prefect", "mlflow", "optuna-dashboard", "psycopg2-binary", "boto3"} <= after.keys()
    assert left.count("--hash=") > 2 * len(after) and not left.startswith(" ")
    kinds = {name: service["image"] for name, service in COMPOSE["services"].items()}
    trains = {"deploy", "worker", "gpu-worker"}  # to deploy is to import the flows
    assert {name for name, image in kinds.items() if image == "protofl"} == trains
    assert {name for name, _, pod in pods() if pod["containers"][0]["image"] == "protofl"} == {"deploy", "shell"}


def test_the_kubernetes_job_of_a_flow_run_is_filled_in_completely() -> None:
    """Its variables are those that it uses, its image is the pushed one, and Prefect's worker has Prefect's version."""
    variables = JOB["variables"]["properties"]
    assert set(re.findall(r"{{ (\w+) }}", json.dumps(JOB["job_configuration"]))) == variables.keys()
    kustomization = yaml.safe_load((INFRA / "kubernetes" / "kustomization.yaml").read_text())
    pushed = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in kustomization["images"]}
    assert variables["image"]["default"] == pushed["protofl"]
    claims = {manifest["metadata"]["name"] for manifest in manifests() if manifest["kind"] == "PersistentVolumeClaim"}
    [run] = [pod for name, _, pod in pods() if name == "run"]
    assert {volume["persistentVolumeClaim"]["claimName"] for volume in run["volumes"][:2]} <= claims
    [worker] = [pod["containers"][0] for name, _, pod in pods() if name == "worker"]
    [version] = pins(INFRA / "requirements-production.lock")["prefect"]
    assert worker["image"] == f"prefecthq/prefect:{version}-python3.11-kubernetes"


def test_the_image_holds_what_runs_and_not_what_tests_need() -> None:
    """Of the lock of development it leaves out the tools; where both have a package, they have the same version."""
    production, development = (pins(INFRA / name) for name in ("requirements-production.lock", "requirements.lock"))
    wanted = {"prefect", "mlflow", "optuna", "dvc", "numpy", "torch", "ray", "psycopg2-binary", "boto3", "dvc-s3"}
    assert wanted <= set(production)
    tools = {"pytest", "pytest-xdist", "hypothesis", "mypy", "ruff", "sphinx", "uv", "jsonschema"}
    assert tools <= set(development)
    assert tools & set(production) <= {"jsonschema"}  # which Prefect needs
    assert [name for name in production if production[name] != development.get(name, production[name])] == []
    dockerfile = (INFRA / "Dockerfile").read_text()
    assert re.findall(r"^COPY infra/(requirements\S+) \.$", dockerfile, re.MULTILINE) == [
        "requirements-production.lock"
    ]
    assert len(set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE))) == 1
    assert re.search(r"^FROM python:3\.11\.\d+-slim-\w+", dockerfile, re.MULTILINE)


def test_the_environment_begins_with_the_installer_of_the_lock() -> None:
    """pip is given the version and the hashes that the lock has of uv, and no lock is upgraded unless that is said."""
    makefile = (ROOT / "Makefile").read_text()
    [(program, lock)] = re.findall(r"^UV_OF_LOCK = sed -n '(\S+)' (\S+)$", makefile, re.MULTILINE)
    command = ["sed", "-n", program.replace("$$", "$"), str(ROOT / lock)]
    first, *hashes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(pins_of(first)) == {"uv"} and len(hashes) > 1
    assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes)
    assert [line.endswith("\\") for line in (first, *hashes)] == [True] * len(hashes) + [False]
    [install] = [line for line in makefile.splitlines() if "-m pip install" in line]
    assert "$(UV_OF_LOCK) |" in install and "--require-hashes" in install
    assert re.findall(r"\S*--upgrade\S*", makefile) == ["$(UPGRADE),--upgrade)"]


def test_runs_of_the_image_can_be_traced() -> None:
    """It has no git: the commit comes in when it is built, by hand or by compose, and the lock is where it is read."""
    dockerfile = (INFRA / "Dockerfile").read_text()
    assert re.search(r"^ARG COMMIT=\nENV PROTOFL_COMMIT=\$COMMIT$", dockerfile, re.MULTILINE)
    assert "infra/requirements.lock" in re.findall(r"^COPY (.*) infra/$", dockerfile, re.MULTILINE)[0].split()
    assert COMPOSE["x-image"]["build"]["args"] == {"COMMIT": "${COMMIT:-}"}


def test_of_every_deployment_one_flow_at_a_time_is_carried_out() -> None:
    """One that is started by hand while the night's is at work would go on in the same folder."""
    deployments = yaml.safe_load((INFRA / "prefect.yaml").read_text())["deployments"]
    assert len(deployments) == 4
    for deployment in deployments:
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}, deployment["name"]


def pins(lock: Path) -> dict[str, set[str]]:
    """Package → versions, of which there may be one for each Python."""
    return pins_of(lock.read_text())


def pins_of(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", text, re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def test_every_pod_is_watched_and_reads_its_secrets_from_the_one_that_the_readme_makes() -> None:
    made = set(re.findall(r"--from-literal=([\w-]+)=", (INFRA / "README.md").read_text()))
    used = set()
    for name, _, pod in pods():
        [container] = pod["containers"]
        assert "readinessProbe" in container or name in UNWATCHED, name
        assert container["resources"]["requests"], name
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("secretKeyRef")
            if source is not None:
                assert source["name"] == "protofl"
                used.add(source["key"])
            assert not re.search("PASSWORD|SECRET|ACCESS_KEY", variable["name"]) or source is not None
    assert used == made


def test_every_selector_finds_a_pod_and_every_address_a_service() -> None:
    labels = [labels for _, labels, _ in pods()]
    services = {}
    for manifest in manifests():
        if manifest["kind"] == "Service":
            assert manifest["spec"]["selector"] in labels, manifest["metadata"]["name"]
            services[manifest["metadata"]["name"]] = manifest["spec"]["ports"][0]["port"]
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert manifest["spec"]["selector"]["matchLabels"] == manifest["spec"]["template"]["metadata"]["labels"]
    said = "\n".join(str(container["env"]) for _, _, pod in pods() for container in pod["containers"])
    addressed = dict(re.findall(r"http://(\w+):(\d+)", said))
    assert {name: services[name] for name in addressed} == {name: int(port) for name, port in addressed.items()}
    assert set(addressed) == {"prefect", "mlflow"} and "@postgres/" in said and services["postgres"] == 5432


@pytest.mark.slow  # what it imports of Ray takes seconds
def test_ray_takes_the_cluster_file() -> None:
    """By Ray's own schema, as ``ray up`` checks it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    described = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    validate_config(prepare_config(described))
    described["worker_commands"] = []
    with pytest.raises(Exception, match="worker_commands"):
        validate_config(prepare_config(described))
