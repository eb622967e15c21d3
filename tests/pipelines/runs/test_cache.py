"""What was made before is found again by everything that could change it, and by nothing else."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flcore import running
from flcore.io import disk
from flcore.config.schema import Config
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.sources.digits import Digits
from flcore.core.errors import DataError, RunError
from flcore.experiment.run_folder import RunFiles
from pipelines.runs import cache as caches
from pipelines.runs.cache import Cache, Cost, has_finished, kind_of, place
from pipelines.runs.folder import RunFolder
from pipelines.runs.inputs import Inputs, write_inputs

SMALL: dict[str, Any] = {
    "data": {"limit_per_class": 20},
    "partition": {"num_clients": 3, "alpha": 1.0, "min_size": 5},
    "federation": {"rounds": 1},
    "model": {"name": "fedgen_cnn"},
    "engine": {"workers": 0},
}


def config(**sections: Mapping[str, Any]) -> Config:
    """The small one with keys of some sections changed."""
    return Config.from_mapping(SMALL | {name: {**SMALL.get(name, {}), **keys} for name, keys in sections.items()})


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_prepared_data_are_made_once_for_all_who_need_the_same(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    read = caches.read_source

    def counted(asked: Config, folder: Path) -> Dataset:
        made.append(folder)
        return read(asked, folder)

    monkeypatch.setattr(caches, "read_source", counted)
    first = cache.prepared(config())
    # Augmentation happens in training, and another method or seed reads the same images.
    others = [config(data={"augmentation": "crop_flip"}), config(method={"name": "local"}), config(local={"lr": 0.3})]
    assert {cache.prepared(other) for other in others} == {first}
    assert len(made) == 1
    assert cache.prepared(config(data={"limit_per_class": 10})) != first
    assert len(made) == 2
    assert Dataset.load(first).meta.fingerprint.startswith(first.name)


def test_damaged_data_are_made_again(cache: Cache) -> None:
    folder = cache.prepared(config())
    images = folder / "train.safetensors"
    content = images.read_bytes()
    images.write_bytes(content[:100])
    assert cache.prepared(config()) == folder
    assert images.read_bytes() == content


def test_a_flipped_bit_is_refused_where_data_are_divided_and_mended_by_the_stage(cache: Cache) -> None:
    """One pixel, of which no size tells."""
    folder = cache.prepared(config())
    images = folder / "train.safetensors"
    whole = images.read_bytes()
    images.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="content differs from the fingerprint"):
        cache.partition(config(), folder)
    assert cache.prepared(config(), look=True) == folder and images.read_bytes() == whole


def test_other_code_gives_another_request_with_the_same_answer(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed comment in what prepares data: prepared again, found to be the same, and nobody's files are moved."""
    folder = cache.prepared(config())
    inode = (folder / "train.safetensors").stat().st_ino
    monkeypatch.setattr(caches, "preparation_fingerprint", lambda asked: "other code")
    assert cache.prepared(config()) == folder
    assert (folder / "train.safetensors").stat().st_ino == inode


def test_partitions_differ_by_seed_options_and_data(cache: Cache) -> None:
    prepared = cache.prepared(config())
    fewer = cache.prepared(config(data={"limit_per_class": 10}))
    asked = [
        (config(), prepared),
        (Config.from_mapping({**SMALL, "seed": 1}), prepared),
        (config(partition={"num_clients": 4}), prepared),
        (config(), fewer),
    ]
    assert len({cache.partition(*request) for request in asked}) == 4
    assert cache.partition(config(method={"name": "local"}), prepared) == cache.partition(config(), prepared)


def test_an_image_that_is_overwritten_in_place_is_read_again_and_a_link_that_leads_nowhere_is_no_error(
    cache: Cache, tmp_path: Path
) -> None:
    """Below ``<root>/one/train/<class>``, where no folder that holds another one changes with it."""
    root = tmp_path / "images"
    for part in ("train", "test"):
        for shade, kind in enumerate(("cats", "dogs")):
            (root / "one" / part / kind).mkdir(parents=True)
            Image.new("L", (8, 8), 100 * shade).save(root / "one" / part / kind / "1.png")
    (root / "notes").symlink_to(tmp_path / "gone")
    asked = config(data={"name": "imagefolder", "root": str(root), "limit_per_class": None})
    first = cache.prepared(asked)
    assert cache.prepared(asked) == first
    Image.new("L", (8, 8), 50).save(root / "one" / "train" / "cats" / "1.png")
    changed = cache.prepared(asked)
    assert changed != first
    assert Dataset.load(changed).train.images[:, 0, 0, 0].tolist() == [50, 100]


def test_images_that_change_names_are_read_again(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one size and one time, below a home folder that is written ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "images"
    for part in ("train", "test"):
        for shade, kind in ((10, "cats"), (20, "dogs")):
            (root / part / kind).mkdir(parents=True)
            Image.new("L", (8, 8), shade).save(root / part / kind / "1.bmp")
            os.utime(root / part / kind / "1.bmp", ns=(0, 0))
    asked = config(data={"name": "imagefolder", "root": "~/images", "limit_per_class": None})
    assert Dataset.load(cache.prepared(asked)).train.images[:, 0, 0, 0].tolist() == [10, 20]
    first, second = (root / "train" / kind / "1.bmp" for kind in ("cats", "dogs"))
    first.rename(root / "between")
    second.rename(first)
    (root / "between").rename(second)
    assert Dataset.load(cache.prepared(asked)).train.images[:, 0, 0, 0].tolist() == [20, 10]


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROTOFL_CACHE", raising=False)
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=r"caf.*UTF-8; rename"):
        Cache.here()
    with pytest.raises(DataError, match=r"caf.*UTF-8; rename"):
        prepare_dataset(Digits(), directory=folder)
    assert list(folder.iterdir()) == []
def test_images_that_change_while_they_are_read_are_not_kept(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them would be old, and all of them be found again where the files are as they were at first."""
    root = tmp_path / "images"
    for part, shade in (("train", 0), ("train", 100), ("test", 0), ("test", 100)):
        folder = root / part / str(shade)
        folder.mkdir(parents=True)
        Image.new("L", (8, 8), shade).save(folder / "1.png")
    asked = config(data={"name": "imagefolder", "root": str(root), "limit_per_class": None})
    read = caches.read_source

    def slowly(asked: Config, folder: Path) -> Dataset:
        found = read(asked, folder)
        Image.new("L", (8, 8), 7).save(root / "train" / "0" / "2.png")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(caches, "read_source", slowly)
        with pytest.raises(DataError, match="changed while they were read"):
            cache.prepared(asked)
    (root / "train" / "0" / "2.png").unlink()
    assert len(Dataset.load(cache.prepared(asked)).train) == 2


def test_other_data_sets_below_the_root_change_nothing(cache: Cache, tmp_path: Path) -> None:
    """Digits read no file, whatever the root."""
    asked = config(data={"root": str(tmp_path)})
    cache.prepared(asked)
    (tmp_path / "CIFAR").mkdir()
    (tmp_path / "CIFAR" / "batch").write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(caches, "read_source")
        cache.prepared(asked)


def test_another_package_that_decodes_images_prepares_again(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    read = caches.read_source
    monkeypatch.setattr(caches, "read_source", lambda asked, folder: made.append(folder) or read(asked, folder))
    folder = cache.prepared(config())
    monkeypatch.setattr(caches, "package_versions", lambda names: {"pillow": "0"} if "pillow" in names else {})
    assert cache.prepared(config()) == folder and len(made) == 2


def test_two_processes_prepare_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    read = caches.read_source

    def counted(asked: Config, folder: Path) -> Dataset:
        made.append(folder)
        return read(asked, folder)

    monkeypatch.setattr(caches, "read_source", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(cache.prepared(config()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1


@pytest.mark.parametrize("operation", ["remove_tree", "rename"])
def test_two_requests_for_the_same_images_do_not_take_the_folder_from_each_other(
    operation: str, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One names a root, which digits do not read: two locks, one place.

    The first is about to clear that place, or to move its folder there, when the second has its own ready. Let to go
    on, the second would be robbed of what it was given, or the first would find the place taken.
    """
    found: list[Path] = []
    robbed: list[Path] = []
    is_ready = threading.Event()
    second = threading.Thread(target=lambda: found.append(cache.prepared(config(data={"root": str(tmp_path)}))))
    read, change = caches.read_source, getattr(disk, operation)

    def read_and_tell(asked: Config, folder: Path) -> Dataset:
        made = read(asked, folder)
        if asked.data.root is not None:
            is_ready.set()
        return made

    def change_late(*paths: Path) -> None:
        is_to_the_place = paths[-1].parent == cache.root / "prepared" and not paths[-1].name.startswith(".")
        if is_to_the_place and second.ident is None:
            second.start()
            assert is_ready.wait(60)
            second.join(0.5)
        change(*paths)
        if operation == "remove_tree":
            robbed.extend(place for place in found if not place.exists())

    monkeypatch.setattr(caches, "read_source", read_and_tell)
    monkeypatch.setattr(disk, operation, change_late)
    found.append(cache.prepared(config()))
    second.join(60)
    assert not robbed
    assert len(found) == 2 and found[0] == found[1]
    assert Dataset.load(found[0]).meta.fingerprint.startswith(found[0].name)
    assert [path.name for path in (cache.root / "prepared").iterdir()] == [found[0].name]


def test_a_finished_run_is_found_by_its_hash_and_code(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running.run(config(), folder)
    about = running.read_json(RunFiles(folder).config, "")
    assert cache.finished_run(about["config_hash"], about["code"]) is None
    cache.note_run(folder, config())
    assert cache.finished_run(about["config_hash"], about["code"]) == folder
    assert cache.finished_run(about["config_hash"], "other code") is None
    assert has_finished(folder, about["config_hash"], about["code"])
    # How long it took is known for other seeds too, not for other work.
    known = cache.cost(kind_of(config()))
    assert known.seconds == pytest.approx(sum(running.read_json(RunFiles(folder).timing, "")["seconds"].values()))
    assert kind_of(Config.from_mapping({**SMALL, "seed": 5})) == kind_of(config())
    assert cache.cost(kind_of(config(federation={"rounds": 2}))) == Cost()
    # Two workers inside for as many seconds are twice the work, and say nothing of the memory of one that has none.
    shared = config(engine={"workers": 2})
    cache.note_peak(shared, 5)
    assert cache.cost(kind_of(shared)) == known
    cache.note_run(folder, shared)
    cache.note_peak(config(), 7)
    assert known.seconds is not None and known.peak is None
    assert cache.cost(kind_of(config())) == Cost(2 * known.seconds, 7)
    # A model that somebody has altered, or deleted, is not handed on.
    model = RunFiles(folder).model.read_bytes()
    RunFiles(folder).model.write_bytes(model[:-1] + bytes([model[-1] ^ 1]))
    assert cache.finished_run(about["config_hash"], about["code"]) is None
    RunFiles(folder).model.write_bytes(model)
    assert cache.finished_run(about["config_hash"], about["code"]) == folder
    RunFiles(folder).metrics.unlink()
    assert cache.finished_run(about["config_hash"], about["code"]) is None


def test_a_run_where_nobody_may_look_is_none_to_take(cache: Cache) -> None:
    """As below another's home, with a cache that is shared; to the superuser too, a name of 300 letters is an error."""
    entry = cache.root / "index" / "runs" / "hash.json"
    entry.parent.mkdir(parents=True)
    entry.write_text(json.dumps({"code": [f"/elsewhere/{300 * 'x'}/run", "results"]}))
    assert cache.finished_run("hash", "code") is None


def test_what_is_placed_elsewhere_shares_large_files_and_replaces_what_was_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "clients").mkdir(parents=True)
    (source / "clients" / "0000.safetensors").write_bytes(b"weights")
    (source / "metrics.json").write_text("{}")
    target.mkdir()
    (target / "curves.csv").write_text("")
    place("run", source, target)
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert names == ["clients/0000.safetensors", "metrics.json"]
    assert (source / "clients" / "0000.safetensors").samefile(target / "clients" / "0000.safetensors")
    assert not (source / "metrics.json").samefile(target / "metrics.json")


def test_what_is_placed_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the files of a run: half of it would look finished. The same again puts all of it there."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("history.jsonl", "metrics.json", "model.safetensors", ".metrics.json.1.2.tmp"):
        (source / name).write_text(name)
    target.mkdir()
    (target / "curves.csv").write_text("")

    def stop(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "link", stop)  # of the model, which comes last
        with pytest.raises(KeyboardInterrupt):
            place("run", source, target)
    assert [path.name for path in target.iterdir()] == ["curves.csv"]
    place("run", source, target, lambda folder: (folder / "inputs.json").write_text("{}"))
    names = ["history.jsonl", "inputs.json", "metrics.json", "model.safetensors"]
    assert sorted(path.name for path in target.iterdir()) == names
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


def test_one_at_a_time_places_something_and_looks_first_whether_another_has(tmp_path: Path) -> None:
    """Whoever comes while a copy is made is told; who had to be quicker finds the target as the other has left it."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "metrics.json").write_text("{}")

    def come_meanwhile(copy: Path) -> None:
        with pytest.raises(RunError, match="target: another process is at work"):
            place("run", source, target)
        assert (copy / "metrics.json").exists()

    place("run", source, target, come_meanwhile)
    assert [path.name for path in target.iterdir()] == ["metrics.json"]
    (source / "metrics.json").write_text("later")
    place("run", source, target, unless=(target / "metrics.json").exists)
    assert (target / "metrics.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


def test_inputs_are_found_where_they_are_said_to_be(cache: Cache, tmp_path: Path) -> None:
    prepared = cache.prepared(config())
    inputs = Inputs(prepared, cache.partition(config(), prepared))
    folder = tmp_path / "runs" / "one"
    running.run(config(), folder, prepared=inputs.prepared, partition=inputs.partition)
    with pytest.raises(DataError, match=r"its prepared data lay in .* and are not there any more; the command that"):
        _ = RunFolder(folder).inputs
    write_inputs(folder, inputs)
    assert str(tmp_path) not in (folder / "inputs.json").read_text()
    assert RunFolder(folder).inputs == inputs
    for damaged in ("x", "[]", "{}", '{"partition": "p", "preparee": "q"}', '{"partition": 1, "prepared": "q"}'):
        (tmp_path / "said.json").write_text((folder / "inputs.json").read_text())
        (folder / "inputs.json").write_text(damaged)
        with pytest.raises(DataError, match=r"inputs\.json: damaged, .*; the command that made the run makes them again"):
            _ = RunFolder(folder).inputs
        (tmp_path / "said.json").replace(folder / "inputs.json")
    # Moved together, they are found again.
    tmp_path.joinpath("runs").rename(tmp_path / "kept")
    assert RunFolder(tmp_path / "kept" / "one").inputs == inputs
    write_inputs(
        tmp_path / "kept" / "one", Inputs(cache.prepared(config(data={"limit_per_class": 10})), inputs.partition)
    )
    with pytest.raises(DataError, match="is not what the run was made from"):
        _ = RunFolder(tmp_path / "kept" / "one").inputs


def test_a_run_of_flcore_alone_has_its_inputs_beside_it(tmp_path: Path) -> None:
    running.run(config(), tmp_path / "run")
    assert RunFolder(tmp_path / "run").inputs == Inputs(tmp_path / "run" / "prepared", tmp_path / "run" / "partition")
