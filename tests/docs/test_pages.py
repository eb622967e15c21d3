"""The tutorial and the how-to pages: their commands run in order, and print what the pages show."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.docs.pages import HOW_TO, ROOT, TUTORIAL, Shell, blocks

RUNNABLE = ("sh", "console", "python")
PAGES = {page.stem: page for folder in (TUTORIAL, HOW_TO) for page in sorted(folder.glob("*.md"))}
WITH_SERVERS = ("mlflow", "schedule")
ELSEWHERE = ("fifteen-minutes",)
"""Pages with a test of their own."""

AS_SHIPPED = ("first-run", "compare", "own-method", "latex-table", "failed-client")
"""Pages that print results: typed with the project's params.yaml. The others have fewer images and rounds."""

USUAL = {
    "prefect": "http://127.0.0.1:4200",
    "mlflow": "http://127.0.0.1:5000",
    "dashboard": "http://127.0.0.1:8080",
    "worker": "http://127.0.0.1:8090/health",
}
"""Addresses on the pages; where a port is in use, the server has another one."""

SMALLER = {
    "class_heatmap,tsne,inversion": "class_heatmap,tsne",
    "--tuned 12": "--tuned 3",
    "--trials 20": "--trials 3",
    "--trials 30": "--trials 3",
    "federation.rounds=50": "federation.rounds=2",
    "task_schedule=blocked": "task_schedule=blocked --set federation.rounds=5 --methods fedavg,fedmlp --seeds 0",
    " --set engine.compile=default": "",
    'weights="DEFAULT"': "weights=None",
}
"""Changes of commands with which a page takes seconds."""


def pixels(rng: np.random.Generator, label: int) -> np.ndarray[Any, Any]:
    """Return a colour image whose brightness tells its class."""
    return np.clip(rng.normal(60 + 60 * label, 30, (36, 40, 3)), 0, 255).astype(np.uint8)


def write_images(folder: Path) -> None:
    """Write three classes of images in the five forms of the page: by class, by site, as arrays, as a dataset."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in {"train": 150, "test": 60}.items():
        rows: dict[str, list[Any]] = {"image": [], "label": []}
        for number in range(count):
            label = number % 3
            image = pixels(rng, label)
            for tree in ("images", f"sites/{split}/site {number // 3 % 3}"):
                name = f"class {label}" if tree != "images" else f"{split}/class {label}"
                file = folder / tree / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(file)
            png = io.BytesIO()
            Image.fromarray(image).save(png, "PNG")
            rows["image"].append({"bytes": png.getvalue(), "path": None})
            rows["label"].append(label)
            arrays.setdefault(f"{split}_images", []).append(image)
            arrays.setdefault(f"{split}_labels", []).append([label])
        features = {"image": {"_type": "Image"}, "label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}
        table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        name = {"train": "train", "test": "validation"}[split]
        (folder / "beans" / "data").mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, folder / "beans" / "data" / f"{name}-00000-of-00001.parquet")
    np.savez(folder / "pathmnist.npz", **{name: np.array(values) for name, values in arrays.items()})


PREPARED = {
    "analyses": "protofl run --out runs/first",
    "prove": "protofl run --out runs/first\nprotofl compare --methods local,fedavg --seeds 0 --out runs/comparison",
    "own-images": "git init -q && dvc init -q",
    "mlflow": "protofl run --out runs/mine\nprotofl compare --methods fedavg,fedpa --seeds 0,1 --out runs/comparison\n"
    "protofl sweep --vary local.epochs=1,2 --out runs/sweep\n"
    "protofl tune --method fedprox --trials 2 --out runs/tune-fedprox",
}
"""What a page says that its reader has already."""


@pytest.fixture
def shell(tmp_path: Path, request: pytest.FixtureRequest) -> Shell:
    """A project's folder, with what the page needs."""
    name = request.getfixturevalue("name")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    if name not in AS_SHIPPED:
        params["data"]["limit_per_class"] = None if name == "own-images" else 20
        params["partition"]["min_size"] = 5
        params["federation"]["rounds"] = 10
        params["tracking"] = {"enabled": name in WITH_SERVERS}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    if name == "own-images":
        write_images(tmp_path)
    typing = Shell(tmp_path)
    typing.type(PREPARED.get(name, ""))
    return typing


def type_page(name: str, shell: Shell) -> None:
    replaced = dict(SMALLER)
    for block in blocks(PAGES[name]):
        if block.reason is None:
            shell.type_block(block, replaced)
            if "protofl up" in block.text:
                printed = shell.printed
                running = json.loads(shell.type("protofl status --json 2>/dev/null"))
                replaced |= {USUAL[entry["name"]]: entry["address"] for entry in running if entry["name"] in USUAL}
                shell.printed = printed


def test_the_table_of_the_readme_is_of_the_last_comparison() -> None:
    """Means over seeds in %, and up + down in MB of 10⁶ bytes, from the file that `make run` writes and git has."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    metrics = json.loads((ROOT / "artifacts" / "comparison" / "metrics.json").read_text(encoding="utf-8"))
    for name, values in metrics.items():
        [row] = re.findall(rf"^\| {name} \| (.*) \|$", readme, re.MULTILINE)
        global_model, clients, _, traffic = row.split(" | ")
        if "top1_global" in values:
            assert global_model.startswith(f"{100 * values['top1_global']:.1f} ")
        assert clients.startswith(f"{100 * values['mean_local']:.1f} ")
        if name != "local":
            assert traffic == f"{(values['bytes_up'] + values['bytes_down']) / 1e6:.1f} MB"


def has_commands(name: str) -> bool:
    return any(block.kind in RUNNABLE and block.reason is None for block in blocks(PAGES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PAGES if has_commands(n) and n not in (*WITH_SERVERS, *ELSEWHERE)])
def test_a_page_from_top_to_bottom(name: str, shell: Shell) -> None:
    type_page(name, shell)


@pytest.mark.services
@pytest.mark.parametrize("name", WITH_SERVERS)
def test_a_page_with_servers(name: str, shell: Shell) -> None:
    try:
        type_page(name, shell)
    finally:
        shell.type("protofl down", may_fail=True)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_typed_or_says_why_not(name: str) -> None:
    """A command in a block of another kind would never be typed."""
    found = blocks(PAGES[name])
    assert len(found) == len(re.findall(r"^ *```\w", PAGES[name].read_text(encoding="utf-8"), re.MULTILINE))
    for block in found:
        assert block.kind in RUNNABLE or not block.text.startswith(("protofl ", "$ ")), block.text
        if block.kind == "yaml":
            yaml.safe_load(block.text)
