"""Archives: what is in one and what is not, the same bytes for the same run, and reading one of somebody else."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flcore import run
from flcore.core.errors import DataError
from flcore.experiment.run_folder import read_run_config
from flcore.io.files import read_json, sealed, write_json
from pipelines.cli.app import main
from pipelines.cli.commands import make_app
from pipelines.proof.archive import archive
from pipelines.proof.contents import read_archive
from pipelines.proof.stored_zip import read_zip
from pipelines.runs.layout import RunFiles
from pipelines.runs.provenance import LOCK
from tests.cases import quick
from tests.pipelines.proof.conftest import SMALL

Forge = Callable[[Callable[[dict[str, bytes]], object]], Path]


def entries(path: Path) -> dict[str, bytes]:
    whole = read_zip(path)
    return {name: whole.read(name) for name in whole.namelist()}


def test_it_has_what_is_needed_and_no_data(archived: Path, finished: Path) -> None:
    """Data by fingerprint; of the digits themselves, 200 training images of 64 bytes, not one is in the file."""
    found = entries(archived)
    header = read_json(RunFiles(finished).config, "")
    run = f"fedproto-s0-{header['config_hash'][:8]}"
    assert {name for name in found if name.startswith("runs/")} == {
        f"runs/{run}/{name}"
        for name in ("config.json", "metrics.json", "history.jsonl", "curves.csv", "model.safetensors")
    }
    assert found["code/infra/requirements.lock"] == LOCK.read_bytes()
    assert {"README.md", "proof.json", "ro-crate-metadata.json", "code/pyproject.toml", "code/LICENSE"} <= found.keys()
    assert not [name for name in found if "__pycache__" in name or name.endswith(".pyc")]
    proof = json.loads(found["proof.json"])
    assert proof["files"] == {
        name: hashlib.sha256(content).hexdigest() for name, content in found.items() if name != "proof.json"
    }
    (said,) = proof["runs"].values()
    results = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    own = {name for name in results if not name.startswith(("prepared", "partition/"))}
    assert said["results"].keys() == own - {"config.json", "timing.json", "seal.json"}
    assert said["results"]["clients/0001.safetensors"] == digest(finished / "clients/0001.safetensors")
    assert said["data"] == read_json(finished / "prepared/meta.json", "")["fingerprint"]
    from flcore.data.dataset import Dataset

    images = Dataset.load(finished / "prepared").train.images
    whole = archived.read_bytes()
    assert len(images) == 200
    assert not [number for number, image in enumerate(images) if image.numpy().tobytes() in whole]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_no_place_of_the_machine_is_in_it(archived: Path, finished: Path) -> None:
    for name, content in entries(archived).items():
        if not name.startswith("code/"):
            assert str(finished.parent).encode() not in content, name


def test_the_same_run_gives_the_same_bytes_wherever_it_lies_and_whatever_the_file_is_called(
    archived: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "elsewhere")
    archive(tmp_path / "elsewhere", tmp_path / "other.zip", licence="CC-BY-4.0")
    assert (tmp_path / "other.zip").read_bytes() == archived.read_bytes()


@pytest.mark.slow
def test_it_takes_the_place_of_an_archive_that_is_named_and_of_nothing_else(
    archived: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --out the file is called after the folder, as may be that of many others."""
    monkeypatch.chdir(tmp_path)
    command = ["archive", str(finished), "--licence", "CC-BY-4.0"]
    for name, content in (("params.yaml", b"seed: 1\n"), ("cut.zip", archived.read_bytes()[:-1])):
        Path(name).write_bytes(content)
        assert main([*command, "--out", name]) == 2
        assert f"{name}: is there and is no whole archive of protofl" in capsys.readouterr().err
        assert Path(name).read_bytes() == content
    default = Path(f"{finished.name}.zip")
    for _ in range(2):
        assert main(command) == 0
        assert default.read_bytes() == archived.read_bytes()
    assert main([*command[:2], "--licence", "MIT"]) == 2  # an archive of something else
    assert f"{default}: holds an archive of something else; name another file with --out" in capsys.readouterr().err
    assert default.read_bytes() == archived.read_bytes()
    assert main([*command[:2], "--licence", "MIT", "--out", str(default)]) == 0
    assert default.read_bytes() != archived.read_bytes()


@pytest.mark.parametrize("licence", ["", "no such licence", "MIT OR Apache-2.0", "../MIT"])
def test_a_licence_is_an_identifier_of_the_spdx_list(
    licence: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["archive", str(finished), "--out", str(tmp_path / "x.zip"), "--licence", licence]) == 2
    assert "no identifier of https://spdx.org/licenses" in capsys.readouterr().err
    assert not (tmp_path / "x.zip").exists()


def test_its_metadata_are_an_ro_crate(archived: Path) -> None:
    """What RO-Crate 1.2 says must be ("Root Data Entity"), and that every part is there and is what it says."""
    found = entries(archived)
    crate = json.loads(found["ro-crate-metadata.json"])
    assert crate["@context"] == "https://w3id.org/ro/crate/1.2/context"
    graph = {entity["@id"]: entity for entity in crate["@graph"]}
    assert len(graph) == len(crate["@graph"])
    descriptor, root = graph["ro-crate-metadata.json"], graph["./"]
    assert descriptor["@type"] == "CreativeWork"
    assert descriptor["about"] == {"@id": "./"}
    assert descriptor["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.2"}
    assert root["@type"] == "Dataset"
    assert root["name"] and root["description"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", root["datePublished"])
    licence = graph[root["license"]["@id"]]
    assert licence["name"] == "CC-BY-4.0" and licence["description"]
    parts = {part["@id"] for part in root["hasPart"]}
    for name in parts - {"code/"}:
        assert graph[name]["@type"] == "File"
        if "sha256" in graph[name]:
            assert graph[name]["sha256"] == hashlib.sha256(found[name]).hexdigest()
            assert graph[name]["contentSize"] == str(len(found[name]))
    assert {name for name in found if not name.startswith("code/")} - {"ro-crate-metadata.json"} <= parts
    referred = re.findall(r'\{"@id": "([^"]+)"\}', json.dumps(crate))
    assert not [name for name in referred if name not in graph and not name.startswith("https://w3id.org/")]


def test_without_a_licence_it_says_that_none_is_stated(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RO-Crate requires the property `license`, and allows a text where no licence can be named."""
    path = tmp_path / "x.zip"
    assert main(["archive", str(finished), "--out", str(path)]) == 0
    assert "licence of the results: not stated (--licence)\n" in capsys.readouterr().out
    found = entries(path)
    graph = {entity["@id"]: entity for entity in json.loads(found["ro-crate-metadata.json"])["@graph"]}
    assert graph["./"]["license"] == "not stated"
    assert not [name for name in graph if "spdx" in name]
    assert "Licence of the results: not stated." in found["README.md"].decode()


def test_the_command_of_an_archive_of_own_images_names_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(24):
        image = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 10 * number).save(image)
    data = {"name": "imagefolder", "root": str(tmp_path / "images"), "test_fraction": 0.25}
    run({"data": data, "partition": {"name": "iid", "num_clients": 2}, "federation": {"rounds": 1}}, tmp_path / "run")
    assert main(["archive", str(tmp_path / "run"), "--out", str(tmp_path / "x.zip")]) == 0
    assert capsys.readouterr().out.endswith("x.zip --check --set data.root=FOLDER\n")


def test_it_conforms_to_the_profile_of_federated_learning_if_one_model_was_trained(
    archived: Path, tmp_path: Path
) -> None:
    """Musts of both profiles: tool, data and model of the action, and addresses at the root. FedProto has no model."""
    run({**SMALL, "method": {"name": "fedavg"}}, tmp_path / "run")
    archive(tmp_path / "run", tmp_path / "x.zip", licence="MIT")
    for path, fits in ((archived, False), (tmp_path / "x.zip", True)):
        graph = {one["@id"]: one for one in json.loads(entries(path)["ro-crate-metadata.json"])["@graph"]}
        profiles = [graph[profile["@id"]]["name"] for profile in graph["./"].get("conformsTo", ())]
        assert profiles == ["Process Run Crate", "Federated Learning RO-Crate Profile"] * fits
        action = graph["#run"]
        inputs, results = ([graph[one["@id"]]["@id"] for one in action[key]] for key in ("object", "result"))
        assert {Path(name).name for name in results} >= {"model.safetensors", "metrics.json"}
        assert {Path(name).name for name in inputs} >= {"config.json", "manifest.json"}
        assert any(name.startswith("data/") for name in inputs)
        assert graph[action["instrument"]["@id"]]["@type"] == "SoftwareApplication"


def test_its_page_has_commands_that_are_ones(archived: Path) -> None:
    page = entries(archived)["README.md"].decode()
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [shlex.split(line) for line in block.splitlines()]
    _, bound, _ = make_app().parse_args(lines[1][1:])
    assert bound.arguments == {"path": Path("../../archive.zip"), "check": True}
    assert "CC BY 4.0 (UCI data), BSD-3 (scikit-learn)" in page
    assert "https" not in page and "data.root" not in page


@pytest.mark.slow
def test_the_code_in_it_can_be_installed_and_repeats_it(archived: Path, tmp_path: Path) -> None:
    """The two commands of its page, in a folder of their own; the packages come from the cache of the installer."""
    page = entries(archived)["README.md"].decode()
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    shutil.copy(archived, tmp_path / "archive.zip")
    done = subprocess.run(
        ["bash", "-ec", block], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "files of results are the same to the byte" in done.stdout


# ---- what cannot be archived ---------------------------------------------------------------------------------------


def test_folders_that_are_no_finished_run_are_refused(finished: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(DataError) as caught:
            archive(folder, tmp_path / "x.zip", licence="CC-BY-4.0")
        assert not (tmp_path / "x.zip").exists()
        return str(caught.value).removeprefix(f"{folder}: ")

    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith("no run (config.json) and no comparison (comparison.json) there")
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    header = read_run_config(copy)
    committed = {**header["environment"], "code_version": "c" * 40}  # as if this were a checkout, with git there
    write_json(copy / "config.json", sealed({**header, "code": "0" * 64, "environment": committed}))
    assert refused(copy).startswith("was made by other code than what is here; archive it with the code of commit cccc")
    other = {**header["environment"], "lock_hash": "0" * 64, "code_version": None}
    write_json(copy / "config.json", sealed({**header, "environment": other}))
    assert refused(copy) == (
        "was made by other packages (infra/requirements.lock) than what is here; carry it out again"
    )
    write_json(copy / "config.json", sealed(header))
    (copy / "history.jsonl").unlink()
    assert refused(copy) == "has not finished; repeat the command that began it"


@pytest.mark.parametrize("stray", ["x.py~", "x copy.py", "#x#"])
def test_what_an_editor_has_left_among_the_code_is_named(
    stray: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could be read by the code, so nothing is archived without it; what is hidden is left out."""
    home = tmp_path / "checkout"
    for name in ("pyproject.toml", "Makefile", "README.md", "LICENSE", "infra/requirements.lock", "flcore/x.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(LOCK, home / name)
    (home / "pipelines" / ".hidden").mkdir(parents=True)
    (home / "pipelines" / ".hidden" / "x.py").touch()
    monkeypatch.setattr("pipelines.proof.archive.ROOT", home)
    monkeypatch.setattr("pipelines.proof.archive.LOCK", home / "infra/requirements.lock")
    archive(finished, tmp_path / "x.zip", licence="CC-BY-4.0")
    assert [name for name in entries(tmp_path / "x.zip") if name.endswith(".py")] == ["code/flcore/x.py"]
    (tmp_path / "x.zip").unlink()
    (home / "flcore" / stray).touch()
    assert main(["archive", str(finished), "--out", str(tmp_path / "x.zip")]) == 3
    said = "has a name that not every system can unpack; rename it, or move it away"
    assert capsys.readouterr().err == f"protofl: {home / 'flcore' / stray}: {said}\n"
    assert not (tmp_path / "x.zip").exists()


# ---- reading one of somebody else ----------------------------------------------------------------------------------


def proof_of(contents: dict[str, bytes]) -> dict[str, Any]:
    return json.loads(contents["proof.json"])  # type: ignore[no-any-return]


def set_proof(contents: dict[str, bytes], **values: Any) -> None:
    contents["proof.json"] = json.dumps({**proof_of(contents), **values}).encode()


def of_config(**values: Any) -> Callable[[dict[str, bytes]], None]:
    def change(contents: dict[str, bytes]) -> None:
        (name,) = (name for name in contents if name.endswith("/config.json"))
        contents[name] = json.dumps({**json.loads(contents[name]), **values}).encode()

    return change


def without(ending: str) -> Callable[[dict[str, bytes]], None]:
    def change(contents: dict[str, bytes]) -> None:
        for name in [name for name in contents if name.endswith(ending)]:
            del contents[name]

    return change


def renamed(contents: dict[str, bytes], name: str = "x") -> None:
    (said,) = proof_of(contents)["runs"].values()
    set_proof(contents, runs={name: said})


def outside(contents: dict[str, bytes]) -> None:
    renamed(contents, "../x")


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
HOSTILE: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "no proof": (without("proof.json"), "has no proof.json; it is no archive of protofl"),
    "no JSON": (lambda c: c.update({"proof.json": b"\xff\xfe"}), "proof.json is no JSON that can be read"),
    "nested deeply": (lambda c: c.update({"proof.json": DEEP}), "proof.json is no JSON that can be read"),
    "another format": (lambda c: set_proof(c, version=2), "proof.json is of another version of archives"),
    "a version that is a truth": (lambda c: set_proof(c, version=True), "version: "),
    "a run outside": (outside, "proof.json: runs: "),
    "a run that is not there": (renamed, "has no runs/x/config.json"),
    "a config that is none": (of_config(config=[]), "config: "),
    "a plug-in outside": (
        of_config(config={"plugins": [{"path": "../../x.py", "sha256": "0" * 64}]}),
        "plugins: expected files such as plugins/mine.py",
    ),
    "a plug-in that is missing": (
        of_config(config={"plugins": [{"path": "plugins/x.py", "sha256": "0" * 64}]}),
        "/plugins/x.py, which is not there",
    ),
    "no partition": (without("indices.safetensors"), "/indices.safetensors, which is not there"),
    "no metrics": (without("metrics.json"), "/metrics.json, which is not there"),
}


@pytest.mark.parametrize("kind", quick(HOSTILE, 4))
def test_what_is_not_as_expected_is_refused_in_a_line(kind: str, forged: Forge) -> None:
    change, said = HOSTILE[kind]
    path = forged(change)
    with pytest.raises(DataError) as caught:
        read_archive(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_file_that_was_exchanged_is_named(archived: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a zip file's checksums mended, but not the hashes; and one that was added."""
    from pipelines.proof.stored_zip import write_zip

    contents = entries(archived)
    (name,) = (name for name in contents if name.endswith("metrics.json"))
    write_zip(tmp_path / "x.zip", {**contents, name: contents[name].replace(b"digits", b"digitz")})
    assert main(["reproduce", str(tmp_path / "x.zip"), "--out", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    said = f"{name} was changed, its SHA-256 is not that of proof.json; get the archive again"
    assert error == f"protofl: {tmp_path / 'x.zip'}: {said}\n"
    assert not (tmp_path / "out").exists()
    write_zip(tmp_path / "x.zip", {**contents, "more": b""})
    with pytest.raises(DataError, match=r"x\.zip: more is named nowhere in proof\.json"):
        read_archive(tmp_path / "x.zip")
    del contents[name]
    write_zip(tmp_path / "x.zip", contents)
    with pytest.raises(DataError, match=r"metrics\.json is missing"):
        read_archive(tmp_path / "x.zip")


@pytest.mark.parametrize("name", ["metrics.json", "history.jsonl"])
def test_a_run_that_has_changed_since_it_finished_is_not_archived(name: str, finished: Path, tmp_path: Path) -> None:
    """With it the proof of everything would be a proof of what somebody has written into a file."""
    damaged = tmp_path / "damaged"
    shutil.copytree(finished, damaged)
    (damaged / name).write_text((damaged / name).read_text().replace("0.", "0.9", 1))
    with pytest.raises(DataError, match=rf"{name}: damaged, its content is not what was written"):
        archive(damaged, tmp_path / "x.zip", licence="CC-BY-4.0")
    assert not (tmp_path / "x.zip").exists()
