"""Files that were damaged, exchanged or made up: refused in a line, or the work goes on to the same result.

A case is a number: from it follow which artefact, which of its files, and what happens to that. Thirty cases belong
to the default suite; ``make fuzz`` runs two thousand. What was changed at random must be noticed or do no harm; of what
somebody made up with care, only a traceback is a fault.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import optuna
import pytest
from PIL import Image

from flcore import run
from flcore.config.schema import Config
from flcore.core.errors import DataError, ProtoflError
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.partitioners import PARTITIONERS
from flcore.data.sources import SOURCES, mnist
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.experiment.experiment import Experiment
from flcore.experiment.inputs import divide
from flcore.io.files import NOT_JSON, sealed
from flcore.running import evaluate
from pipelines.runs.cache import Cache
from pipelines.runs.folder import RunFolder
from pipelines.runs.record import record_of
from pipelines.tracking.metrics import points_by_round, summary_points
from pipelines.tuning.storage import open_storage

COUNTS = [30, pytest.param(2000, marks=pytest.mark.slow)]
RAW: dict[str, Any] = {
    "data": {"limit_per_class": 6},
    "partition": {"name": "iid", "num_clients": 2},
    "model": {"name": "fedgen_cnn", "feature_dim": 4},
    "method": {"name": "moon"},
    "federation": {"rounds": 3},
    "local": {"batch_size": 16, "steps": 1, "lr": 0.1},
}


_JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "\x00",
    "../../x",
    [],
    [[]],
    {},
    {"a": 1},
]


def _truncated(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 8])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _zeroed(content: bytes, rng: random.Random) -> bytes:
    first = rng.randrange(len(content) + 1)
    size = min(rng.choice([1, 8, 512]), len(content) - first)
    return content[:first] + bytes(size) + content[first + size :]


def _lengthened(content: bytes, rng: random.Random) -> bytes:
    place = rng.choice([0, len(content), rng.randrange(len(content) + 1)])
    return content[:place] + rng.choice([b"\x00" * 8, b"{}\n", b"\xff\xfe", content[:64]]) + content[place:]


def _emptied(content: bytes, rng: random.Random) -> bytes:
    return b""


RANDOM = (_truncated, _flipped, _flipped, _flipped, _zeroed, _lengthened, _emptied)
"""Accidents; that two files are exchanged is one more."""


def _made_up_json(content: bytes, rng: random.Random) -> bytes:
    """JSON that is none, or has another value, key or kind of value somewhere."""
    lines = content.splitlines() or [b"{}"]
    number = rng.randrange(len(lines)) if _parsed(lines[0]) is not None and len(lines) > 1 else None
    text = content if number is None else lines[number]
    texts = [
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"9" * 6_000,
        b"[1]",
        b"null",
        b'"text"',
        b"NaN",
        b"\xef\xbb\xbf" + text,
        text.replace(b":", b": 9" + b"9" * 5_000 + b', "x":', 1),
        b'{"\\ud800": "\\ud800"}',
        text.decode("utf-8", "replace").encode("utf-16"),
    ]
    parsed = _parsed(text)
    made = rng.choice(texts) if parsed is None or rng.random() < 0.3 else json.dumps(_changed(parsed, rng)).encode()
    return made if number is None else b"\n".join([*lines[:number], made, *lines[number + 1 :], b""])


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except NOT_JSON:
        return None


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {other: own for other, own in value.items() if other != key}
        return {**value, key: _changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(value[place], rng), *value[place + 1 :]]
    return rng.choice(_JUNK)


def _made_up_tensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says what cannot be, or what nobody asked for."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if rng.random() < 0.2:
        return struct.pack("<Q", rng.choice([0, 1, 2**63, 2**64 - 1, len(content), 100_000_001])) + content[8:]
    name = rng.choice(sorted(header))
    if name == "__metadata__":
        header[name] = rng.choice([{}, {"protofl": "[" * 5_000}, {"protofl": "[]"}, {"protofl": "{}"}, {"a": 1}, 3])
    else:
        entry = header[name]
        match rng.randrange(6):
            case 0:
                entry["dtype"] = rng.choice(["F8_E4M3", "U16", "C64", "F64", "BOOL", "I8", "X", 3, "F4"])
            case 1:
                entry["shape"] = rng.choice([[], [2**62, 4], [-1], [0], ["a"], [1, 2, 3, 4, 5], entry["shape"][::-1]])
            case 2:
                entry["data_offsets"] = rng.choice([[0, 0], [0, 2**63], [8, 0], [-8, 0], [0, len(data)], [1]])
            case 3:
                del header[name]
            case 4:
                header["\ud800" if rng.random() < 0.3 else rng.choice(["../x", "", "client/9999/train"])] = header.pop(
                    name
                )
            case _:
                header[name] = rng.choice(_JUNK)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _made_up(path: Path, rng: random.Random) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return _made_up_tensors(content, rng)
    if path.suffix in (".json", ".jsonl", ".journal"):
        made = _made_up_json(content, rng)
        parsed = _parsed(made)
        # With its check sum put right: what a reader meets that trusts it.
        return json.dumps(sealed(parsed)).encode() if isinstance(parsed, dict) and "check" in parsed else made
    return _flipped(content, rng)


def happen(folder: Path, rng: random.Random) -> tuple[str, bool]:
    """Something happens to one file of a folder: what, in words; and whether it was an accident."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".lock", ".request.json"))
    )
    path = rng.choice(files)
    name = path.relative_to(folder).as_posix()
    match rng.randrange(10):
        case 0 if len(files) > 1:
            other = rng.choice([file for file in files if file != path])
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)
            return f"{name} and {other.relative_to(folder).as_posix()} exchanged", True
        case 1:
            path.unlink()
            if rng.random() < 0.3:
                path.mkdir()
            return f"{name} gone", True
        case 2 | 3 | 4 | 5:
            path.write_bytes(_made_up(path, rng))
            (folder / "seal.json").unlink(missing_ok=True)  # as whoever makes results up would see to
            return f"{name} made up", False
    change = rng.choice(RANDOM)
    path.write_bytes(change(path.read_bytes(), rng))
    return f"{name} {change.__name__.strip('_')}", True


@dataclass(frozen=True)
class Artefact:
    """Something on the disk.

    Attributes:
        made: fills a folder.
        result: what comes of it; the same for the same content.
        is_checked: whether accidents must be noticed; files of others have no check sum.
    """

    made: Callable[[Path], None]
    result: Callable[[Path], Any]
    is_checked: bool = True


class _Stopped(BaseException):
    """As a kill would."""


class _StopsInRoundTwo(InlineOrchestrator):
    """Ends when all replies of the second round are on the disk, and before anything is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self._aggregations = 0

    def call(self, name: str, function: Any, *arguments: Any, **keywords: Any) -> Any:
        self._aggregations += name == "aggregate"
        if self._aggregations == 2:
            raise _Stopped
        return super().call(name, function, *arguments, **keywords)


class Made:
    """Every artefact, made once and copied for each case."""

    def __init__(self, root: Path) -> None:
        self.config = Config.from_mapping(RAW)
        self.root = root
        self.prepared, self.partition = root / "data" / "prepared", root / "data" / "partition"
        prepare_dataset(SOURCES["digits"](), limit_per_class=6, directory=self.prepared)
        divide(self.config, self.prepared, self.partition)
        self.artefacts: Mapping[str, Artefact] = {
            "prepared": Artefact(lambda folder: _copy(self.prepared, folder), self._divided),
            "partition": Artefact(lambda folder: _copy(self.partition, folder), self._opened),
            "checkpoint": Artefact(self._interrupted, self._finished),
            "checkpoint, again": Artefact(self._interrupted, self._finished),
            "run": Artefact(self._run, self._read),
            "scores": Artefact(self._run, self._scored),
            "journal": Artefact(_journal, _journal_read, is_checked=False),
            "cache": Artefact(self._cached, self._from_cache),
            "imported": Artefact(self._import, self._imported, is_checked=False),
            **{
                name: Artefact(made, lambda folder, name=name: _source(name, folder), is_checked=False)
                for name, made in {
                    "mnist": _mnist,
                    "femnist": _femnist,
                    "imagefolder": _images,
                    "imagefolder.zip": _zip,
                    "images by csv": _by_csv,
                    "celeba": _celeba,
                    "tinyimagenet": _tinyimagenet,
                    "vireofood172": _vireofood,
                }.items()
            },
        }
        self.expected: dict[str, Any] = {}
        for name, artefact in self.artefacts.items():
            artefact.made(root / name / "whole")
            _copy(root / name / "whole", root / "case")
            self.expected[name] = artefact.result(root / "case")

    def case(self, number: int) -> str | None:
        """What is wrong with how a damaged artefact was taken, in words."""
        rng = random.Random(number)
        name = list(self.artefacts)[number % len(self.artefacts)]
        artefact, folder = self.artefacts[name], self.root / "case"
        _copy(self.root / name / "whole", folder)
        what, accident = happen(folder, rng)
        where = f"case {number}, {name}, {what}"
        try:
            found = artefact.result(folder)
        except ProtoflError as error:
            lines = str(error).splitlines()
            return f"{where}: {len(lines)} lines" if len(lines) > 3 or len(str(error)) > 1500 else None
        except OSError as error:  # a folder where a file should be: the command names it and says what to do
            return None if error.filename is not None else f"{where}: {error!r}"
        except Exception as error:
            return f"{where}: {type(error).__name__}: {error}"
        if accident and artefact.is_checked and found != self.expected[name]:
            return f"{where}: taken, and another result"
        return None

    def _divided(self, folder: Path) -> Any:
        divide(self.config, folder, self.root / "divided")
        return _contents(self.root / "divided")

    def _opened(self, folder: Path) -> Any:
        experiment = Experiment.open(self.config, self.prepared, folder)
        division = experiment.partition
        arrays = [array.tolist() for client in division.clients for _, array in client.arrays()]
        return arrays, division.counts.tolist(), division.test_source

    def _interrupted(self, folder: Path) -> None:
        with pytest.raises(_Stopped):
            self._trained(folder, _StopsInRoundTwo())

    def _trained(self, folder: Path, orchestrator: InlineOrchestrator | None = None) -> dict[str, Any]:
        return run(self.config, folder, prepared=self.prepared, partition=self.partition, orchestrator=orchestrator)

    def _finished(self, folder: Path) -> Any:
        self._trained(folder)
        return {
            path: content for path, content in _contents(folder).items() if path not in ("config.json", "timing.json")
        }

    def _run(self, folder: Path) -> None:
        self._trained(folder)

    def _read(self, folder: Path) -> Any:
        """What tables, pages and MLflow are told."""
        read = RunFolder(folder)
        points = [
            (at, [(p.name, p.value, p.step) for p in points if "/" in p.name])
            for at, points in points_by_round(read, -1)
        ]
        told = [(p.name, p.value) for p in summary_points(read)]
        timed = ("time/", "energy/")
        return (
            record_of(read),
            [(at, [p for p in points if not p[0].startswith(timed)]) for at, points in points],
            [p for p in told if not p[0].startswith(timed)],
        )

    def _scored(self, folder: Path) -> Any:
        """As after a kill between training and scores."""
        (folder / "metrics.json").unlink(missing_ok=True)
        evaluate(self.config, self.prepared, self.partition, folder)
        return (folder / "metrics.json").read_bytes()

    def _cached(self, folder: Path) -> None:
        self._from_cache(folder)

    def _from_cache(self, folder: Path) -> Any:
        cache = Cache(folder)
        prepared = cache.prepared(self.config)
        partition = cache.partition(self.config, prepared)
        return Dataset.load(prepared).meta.fingerprint, Partition.load(partition).fingerprint

    def _import(self, folder: Path) -> None:
        clients = [{"train": [0, 1, 2, 3], "tasks": [[0, 1], [2, 3]]}, {"train": [8, 9], "tasks": [[8], [9]]}]
        folder.mkdir(parents=True)
        (folder / "clients.json").write_text(json.dumps({"clients": clients, "test_source": "test"}))

    def _imported(self, folder: Path) -> Any:
        partitioner = PARTITIONERS["imported"](path=str(folder / "clients.json"))
        return make_partition(Dataset.load(self.prepared), partitioner, num_clients=2, seed=0).fingerprint


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _journal(folder: Path) -> None:
    folder.mkdir(parents=True)
    study = optuna.create_study(storage=open_storage(str(folder / "x.journal")), study_name="s", direction="maximize")
    for _ in range(3):
        trial = study.ask()
        study.tell(trial, trial.suggest_float("x", 0, 1))


def _journal_read(folder: Path) -> Any:
    storage = open_storage(str(folder / "x.journal"))
    return [
        (trial.number, trial.state, trial.params, trial.values)
        for name in optuna.get_all_study_names(storage)
        for trial in optuna.load_study(storage=storage, study_name=name).trials
    ]


def _source(name: str, folder: Path) -> Any:
    kind = name.partition(".")[0]
    root = folder / "images.zip" if name.endswith(".zip") else folder
    options: dict[str, Any] = {"vireofood172": {"image_size": 8}, "celeba": {"image_size": 8, "min_images": 2}}.get(
        kind, {}
    )
    if name == "images by csv":
        kind, options = "imagefolder", {"layout": "csv"}
    with patch.dict(mnist.PUBLISHED, {"MNIST": (4, 4)}):
        return prepare_dataset(SOURCES[kind](**options), root).meta.fingerprint


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _mnist(folder: Path) -> None:
    for prefix in ("train", "t10k"):
        _write(folder / f"MNIST/raw/{prefix}-images-idx3-ubyte", struct.pack(">4I", 0x803, 4, 28, 28) + bytes(3136))
        _write(folder / f"MNIST/raw/{prefix}-labels-idx1-ubyte", struct.pack(">2I", 0x801, 4) + bytes([0, 1, 2, 3]))


def _femnist(folder: Path) -> None:
    for part in ("train", "test"):
        data = {writer: {"x": [[0.25] * 784, [1.0] * 784], "y": [1, 2]} for writer in ("f1", "f2")}
        content = {"users": ["f1", "f2"], "num_samples": [2, 2], "user_data": data}
        _write(folder / f"femnist/{part}/a.json", json.dumps(content).encode())


def _png(value: int, kind: str = "PNG", side: int = 9) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), value, dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def _images(folder: Path) -> None:
    for number, (part, own, kind) in enumerate(
        (part, own, kind)
        for part in ("train", "test")
        for own in "ab"
        for kind in ("png", "jpg", "webp", "ppm", "bmp", "tiff", "gif")
    ):
        _write(folder / part / own / f"{number}.{kind}", _png(number * 9, "JPEG" if kind == "jpg" else kind.upper()))


def _zip(folder: Path) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for part in ("train", "test"):
            for own in "ab":
                archive.writestr(f"{part}/{own}/0.png", _png(ord(own)))


def _by_csv(folder: Path) -> None:
    _images(folder)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*/*"))
    rows = [
        f"{file},{Path(file).parent.name},site {place % 2},{file.partition('/')[0]}" for place, file in enumerate(files)
    ]
    _write(folder / "index.csv", "\n".join(["file,label,site,split", *rows]).encode())


def _celeba(folder: Path) -> None:
    names = [f"{number:06d}.jpg" for number in range(1, 9)]
    identity = "".join(f"{name} {number // 4}\n" for number, name in enumerate(names))
    smiling = "".join(f"{name} {1 if number % 2 else -1} 1\n" for number, name in enumerate(names))
    _write(folder / "celeba/identity_CelebA.txt", identity.encode())
    _write(folder / "celeba/list_attr_celeba.txt", f"8\nSmiling Young\n{smiling}".encode())
    for name in names:
        _write(folder / "celeba/img_align_celeba" / name, _png(7, "JPEG"))


def _tinyimagenet(folder: Path) -> None:
    home = folder / "tiny-imagenet-200"
    _write(home / "wnids.txt", b"n01\nn02\n")
    for wnid in ("n01", "n02"):
        _write(home / f"train/{wnid}/images/{wnid}_0.JPEG", _png(3, "JPEG", 64))
        _write(home / f"val/images/val_{wnid}.JPEG", _png(5, "JPEG", 64))
    _write(home / "val/val_annotations.txt", b"val_n01.JPEG\tn01\t0\t0\t1\t1\nval_n02.JPEG\tn02\t0\t0\t1\t1\n")


def _vireofood(folder: Path) -> None:
    for number in (1, 2):
        for image in (0, 1):
            _write(folder / f"ready_chinese_food/{number}/{number}_{image}.jpg", _png(4, "JPEG"))
    for name, image in (("TR", 0), ("VAL", 0), ("TE", 1)):
        _write(folder / f"SplitAndIngreLabel/{name}.txt", f"/1/1_{image}.jpg\n/2/2_{image}.jpg\n".encode())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("artefacts"))


@pytest.mark.parametrize("cases", COUNTS)
def test_damage_is_refused_in_a_line_or_does_no_harm(
    cases: int, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [found for found in map(made.case, range(cases)) if found is not None] == []
    assert list(tmp_path.iterdir()) == [], "nothing is unpacked, and no pickle is obeyed"


@pytest.mark.slow  # torchvision takes seconds to import
def test_a_pickle_is_read_only_after_its_published_check_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        _write(tmp_path / "cifar-10-batches-py" / name, b"cos\nsystem\n(S'touch unpickled'\ntR.")
    with pytest.raises(DataError, match="a check sum differs from the published files"):
        prepare_dataset(SOURCES["cifar10"](), tmp_path)
    assert not (tmp_path / "unpickled").exists()
