"""Sources whose files cannot be shipped: small files of the real form, made here, and a damaged variant of each."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flcore.core.errors import DataError
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.partitioners.simple import ByGroup
from flcore.data.sources.base import hold_out_of_groups
from flcore.data.sources.femnist import Femnist
from flcore.data.sources.imagefiles import ImageFiles
from flcore.data.sources.mnist import PUBLISHED
from flcore.data.sources.on_request import CelebA, TinyImageNet, VireoFood172


def write_jpeg(path: Path, value: int, height: int = 64, width: int = 64, mode: str = "RGB") -> None:
    """One colour: JPEG keeps a constant image exactly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    Image.fromarray(np.full(shape, value, dtype=np.uint8)).save(path, "JPEG", quality=95)


def leaf(writers: dict[str, list[int]], ink: float = 0.0) -> dict[str, object]:
    """LEAF's form: white images whose first pixel is ``ink`` (0 is black), with the given labels by writer."""
    image = [ink] + [1.0] * 783
    return {
        "users": list(writers),
        "num_samples": [len(labels) for labels in writers.values()],
        "user_data": {writer: {"x": [image] * len(labels), "y": labels} for writer, labels in writers.items()},
    }


def write_leaf(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_leaf_files_give_bright_ink_and_writers_numbered_in_order_of_their_names(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist/train/a.json", leaf({"f9_1": [0, 61], "f1_2": [10, 36]}))
    write_leaf(tmp_path / "femnist/train/b.json", leaf({"f3_3": [5]}, ink=0.25))
    write_leaf(tmp_path / "femnist/test/a.json", leaf({"f9_1": [7], "f4_4": [8]}))
    raw = Femnist().load(tmp_path)
    images = raw.train.decoded()
    assert images.shape == (5, 28, 28) and images.dtype == np.uint8
    # Ink: 255 · (1 - 0) = 255 and 255 · (1 - 0.25) = 191.25; paper: 0.
    assert images[:, 0, 0].tolist() == [255, 255, 255, 255, 191] and images[:, 0, 1:].max() == 0
    assert raw.train.labels.tolist() == [0, 61, 10, 36, 5]
    assert [raw.class_names[label] for label in raw.train.labels] == ["0", "z", "A", "a", "5"]
    assert raw.train.groups is not None and raw.test.groups is not None
    # Sorted: f1_2, f3_3, f4_4, f9_1.
    assert raw.train.groups.tolist() == [3, 3, 0, 0, 1] and raw.test.groups.tolist() == [3, 2]
    assert "4 writers" in raw.source


def test_all_data_is_divided_writer_by_writer(tmp_path: Path) -> None:
    """A fifth, rounded, at least one and not all: 2 of 10, 1 of 3 (0.6), 1 of 2 (0.4), none of 1."""
    sizes = {"a": 10, "b": 3, "c": 2, "d": 1}
    write_leaf(tmp_path / "femnist/all_data/x.json", leaf({writer: [4] * size for writer, size in sizes.items()}))
    raw = Femnist().load(tmp_path)
    assert np.bincount(raw.train.groups).tolist() == [8, 2, 1, 1]
    assert np.bincount(raw.test.groups).tolist() == [2, 1, 1]
    data = prepare_dataset(Femnist(), tmp_path)
    made = ByGroup(min_size=1).split(data.train.labels.numpy(), 4, np.random.default_rng(0), data.train.groups.numpy())
    assert list(map(len, made.clients)) == [8, 2, 1, 1]


def without(content: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in content.items() if name != key}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (without(leaf({"a": [1]}), "users"), "not JSON with users"),
        (leaf({"a": [1]}) | {"num_samples": [1, 2]}, "1 users and 2 num_samples"),
        (leaf({"a": [1]}) | {"num_samples": [2]}, "writer a"),
        (leaf({"a": [62]}), "labels beyond 0..61"),
        (leaf({"a": [1]}, ink=1.5), "values beyond 0..1"),
        (leaf({"a": [1]}) | {"user_data": {"a": {"x": [[0.0] * 100], "y": [1]}}}, r"x \(1, 100\)"),
        (leaf({"a": [1]}) | {"user_data": {}}, "writer a"),
    ],
)
def test_damaged_leaf_files_are_named_with_the_writer(content: object, words: str, tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist/all_data/x.json", content)
    with pytest.raises(DataError, match=rf"x\.json: damaged \(.*{words}"):
        Femnist().load(tmp_path)


def test_truncated_and_missing_leaf_files(tmp_path: Path) -> None:
    (tmp_path / "femnist/all_data").mkdir(parents=True)
    with pytest.raises(DataError, match=r"femnist/train/\*\.json"):
        Femnist().load(tmp_path)
    (tmp_path / "femnist/all_data/x.json").write_text(json.dumps(leaf({"a": [1]}))[:-9])
    with pytest.raises(DataError, match=r"x\.json: damaged"):
        Femnist().load(tmp_path)


def write_byclass(root: Path, per_class: int) -> None:
    labels = np.tile(np.arange(62), per_class).astype(np.uint8)
    images = np.zeros((len(labels), 28, 28), dtype=np.uint8)
    images[:, 0, 1] = labels
    folder = root / "EMNIST/raw"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        head = b"\0\0\x08"
        (folder / f"emnist-byclass-{part}-images-idx3-ubyte").write_bytes(
            head + b"\x03" + np.array(images.shape, dtype=">u4").tobytes() + images.tobytes()
        )
        (folder / f"emnist-byclass-{part}-labels-idx1-ubyte").write_bytes(
            head + b"\x01" + np.array(labels.shape, dtype=">u4").tobytes() + labels.tobytes()
        )


def test_the_two_readings_of_femnist_without_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_byclass(tmp_path, per_class=4)
    monkeypatch.setitem(PUBLISHED, "EMNIST byclass", (248, 248))
    drawn = Femnist(reading="class_balanced", train_per_class=3, test_per_class=2).load(tmp_path)
    assert np.bincount(drawn.train.labels).tolist() == [3] * 62 and np.bincount(drawn.test.labels).tolist() == [2] * 62
    assert drawn.train.groups is None
    assert (drawn.train.decoded()[:, 1, 0] == drawn.train.labels).all()  # upright: row and column are exchanged
    whole = Femnist(reading="byclass").load(tmp_path)
    assert len(whole.train.labels) == 248
    with pytest.raises(DataError, match=r"data\.train_per_class = 600: class '0' has 4 train images; use fewer"):
        Femnist(reading="class_balanced").load(tmp_path)
    with pytest.raises(DataError, match="emnist-byclass-train-images"):
        Femnist(reading="byclass").load(tmp_path / "nowhere")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Two classes, listed in another order than sorted; the second has a gray image."""
    folder = tmp_path / "tiny-imagenet-200"
    for wnid, values, mode in (("n02", (20, 21), "RGB"), ("n01", (10, 11), "L")):
        for number, value in enumerate(values):
            write_jpeg(folder / f"train/{wnid}/images/{wnid}_{number}.JPEG", value, mode=mode)
        (folder / f"train/{wnid}/{wnid}_boxes.txt").write_text("n_0.JPEG\t0\t0\t63\t63\n")
    for number, value in enumerate((50, 60)):
        write_jpeg(folder / f"val/images/val_{number}.JPEG", value)
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t63\t63\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    (folder / "wnids.txt").write_text("n02\nn01\n")
    return tmp_path


def test_tiny_imagenet_labels_follow_sorted_wnids(tiny: Path) -> None:
    data = prepare_dataset(TinyImageNet(), tiny)
    assert data.meta.class_names == ("n01", "n02") and data.meta.shape == (3, 64, 64)
    assert data.train.labels.tolist() == [0, 0, 1, 1] and data.train.images[:, 2, 9, 9].tolist() == [10, 11, 20, 21]
    assert data.test.labels.tolist() == [1, 0] and data.test.images[:, 0, 0, 0].tolist() == [50, 60]


def _remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def _write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove("wnids.txt"), r"expected tiny-imagenet-200/ with wnids\.txt"),
        (_remove("val"), r"expected tiny-imagenet-200/"),
        (_write("wnids.txt", "\n"), "names no classes"),
        (_remove("train/n01/images"), "class n01 of wnids.txt has no images"),
        (_remove("val/images/val_1.JPEG"), r"line 2: val/images/val_1\.JPEG does not exist"),
        (_write("val/val_annotations.txt", "val_0.JPEG\tn07\t0\n"), "line 1: 'n07' is not in wnids"),
        (_write("val/val_annotations.txt", "garbage\n"), "line 1: '' is not in wnids"),
        (_write("train/n01/images/n01_0.JPEG", "no image"), r"n01_0\.JPEG \(not a jpg"),
    ],
)
def test_damaged_tiny_imagenet(damage: Callable[[Path], None], words: str, tiny: Path) -> None:
    damage(tiny / "tiny-imagenet-200")
    with pytest.raises(DataError, match=words):
        prepare_dataset(TinyImageNet(), tiny)


def test_hidden_files_beside_the_images_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    """As macOS leaves them on other disks: none of them is an image, or JSON."""
    before = [len(split.labels) for split in (TinyImageNet().load(tiny).train, TinyImageNet().load(tiny).test)]
    (tiny / "tiny-imagenet-200/train/n01/images/._n01_0.JPEG").write_bytes(b"\0\5\x16\7")
    assert [
        len(split.labels) for split in (prepare_dataset(TinyImageNet(), tiny).train, TinyImageNet().load(tiny).test)
    ] == before
    for part in ("train", "test"):
        write_leaf(tmp_path / f"femnist/{part}/a.json", leaf({"f1_1": [0, 1]}))
        (tmp_path / f"femnist/{part}/._a.json").write_bytes(b"\0\5\x16\7")
    assert len(Femnist().load(tmp_path).train.labels) == 2


@pytest.fixture
def vireo(tmp_path: Path) -> Path:
    """A wide, a tall and a small image; lists as published, with a slash in front."""
    images = tmp_path / "ready_chinese_food"
    write_jpeg(images / "1/1_0.jpg", 10, height=300, width=500)
    write_jpeg(images / "172/172_3.jpg", 30, height=700, width=400)
    write_jpeg(images / "2/2_9.jpg", 20, height=40, width=90)
    (tmp_path / "SplitAndIngreLabel").mkdir()
    for name, lines in (("TR", "/1/1_0.jpg\n/172/172_3.jpg\n"), ("VAL", "/2/2_9.jpg\n"), ("TE", "/2/2_9.jpg\n")):
        (tmp_path / f"SplitAndIngreLabel/{name}.txt").write_text(lines)
    return tmp_path


def test_vireo_lists_sizes_and_labels(vireo: Path) -> None:
    data = prepare_dataset(VireoFood172(image_size=64), vireo)
    assert data.meta.num_classes == 172 and data.meta.shape == (3, 64, 64)
    assert data.train.labels.tolist() == [0, 171] and data.test.labels.tolist() == [1]
    assert data.train.images[:, 0, 63, 0].tolist() == [10, 30] and (data.test.images == 20).all()
    assert prepare_dataset(VireoFood172(image_size=64, train_on_val=True), vireo).train.labels.tolist() == [0, 171, 1]
    assert VireoFood172().load(vireo).train.images.shape == (2, 224, 224, 3)


def test_the_square_is_cut_out_of_the_middle_at_a_fixed_scale() -> None:
    """80 x 40 becomes 16 x 8 (factor 1/5), of which the middle 6 x 6 stays: rows 5..10, that is rows 25 to 54."""
    values = np.zeros((80, 40, 3), dtype=np.uint8)
    values[25:55, 5:35] = 200
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    cut = ImageFiles(("a",), lambda name: file.getvalue(), (6, 6), 3, margin=8 / 6).decode()
    assert cut.shape == (1, 6, 6, 3) and (cut[0, 1:-1, 1:-1] == 200).all()
    assert cut[0, 0].mean() > 100  # antialiasing lets a little of the frame in


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove("ready_chinese_food"), "expected ready_chinese_food/<class from 1 to 172>"),
        (_remove("SplitAndIngreLabel/TE.txt"), r"expected .* with TR\.txt, VAL\.txt and TE\.txt"),
        (_remove("ready_chinese_food/1/1_0.jpg"), r"TR\.txt: damaged \(line 1: ready_chinese_food/1/1_0\.jpg does not"),
        (_write("SplitAndIngreLabel/TR.txt", "/173/1.jpg\n"), "line 1: '/173/1.jpg' does not begin with a class"),
        (_write("SplitAndIngreLabel/TE.txt", "\n"), "line 1"),
        (_write("SplitAndIngreLabel/TE.txt", ""), "test split has no images"),
        (_write("ready_chinese_food/1/1_0.jpg", ""), r"1/1_0\.jpg \(empty\)"),
    ],
)
def test_damaged_vireo(damage: Callable[[Path], None], words: str, vireo: Path) -> None:
    damage(vireo)
    with pytest.raises(DataError, match=words):
        prepare_dataset(VireoFood172(image_size=64), vireo)


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    """Persons 7 (6 images, values 1 to 6), 3 (5 images, 7 to 11) and 9 (4 images); even values smile."""
    folder = tmp_path / "celeba"
    persons = [7] * 6 + [3] * 5 + [9] * 4
    identities, attributes = [], ["15", "Bald Smiling Young"]
    for value, person in enumerate(persons, 1):
        name = f"{value:06d}.jpg"
        write_jpeg(folder / "img_align_celeba" / name, value * 10, height=218, width=178)
        identities.append(f"{name} {person}")
        attributes.append(f"{name} -1  {1 if value % 2 == 0 else -1} -1")
    (folder / "identity_CelebA.txt").write_text("\n".join(identities) + "\n")
    (folder / "list_attr_celeba.txt").write_text("\n".join(attributes) + "\n")
    return tmp_path


def test_celeba_by_person(celeba: Path) -> None:
    """Person 9 has too few images; 6 and 5 images give one test image each (1.2 and 1.0)."""
    data = prepare_dataset(CelebA(), celeba)
    assert data.meta.shape == (3, 84, 84) and data.meta.class_names == ("not smiling", "smiling")
    assert np.bincount(data.train.groups).tolist() == [0, 0, 0, 4, 0, 0, 0, 5]
    assert np.bincount(data.test.groups).tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    values = data.train.images[:, 0, 40, 40] // 10
    assert (values % 2 == 0).long().tolist() == data.train.labels.tolist()
    assert all((value <= 6) == (group == 7) for value, group in zip(values, data.train.groups, strict=True))


def test_celeba_draws_users_and_refuses_more_than_there_are(celeba: Path) -> None:
    assert len(np.unique(CelebA(users=1).load(celeba).train.groups)) == 1
    assert len(np.unique(CelebA(min_images=4).load(celeba).train.groups)) == 3
    with pytest.raises(DataError, match=r"data\.users = 3: 2 persons have at least 5 images; lower"):
        CelebA(users=3).load(celeba)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove("identity_CelebA.txt"), r"expected celeba/ with identity_CelebA\.txt"),
        (_remove("img_align_celeba/000002.jpg"), "000002.jpg is not in img_align_celeba"),
        (_write("identity_CelebA.txt", "000001.jpg\n"), "line 1: '000001.jpg' is not a file name and a person"),
        (_write("list_attr_celeba.txt", "15\nBald Young\n"), "does not name the attribute Smiling"),
        (_write("list_attr_celeba.txt", "15\nBald Smiling\n000001.jpg 1 0\n"), "line 3: expected a file name and 2"),
        (_write("list_attr_celeba.txt", "15\nSmiling\n000001.jpg 1\n"), r"000002\.jpg is not in list_attr"),
        (_write("img_align_celeba/000001.jpg", "x"), r"000001\.jpg \(not a jpg"),
    ],
)
def test_damaged_celeba(damage: Callable[[Path], None], words: str, celeba: Path) -> None:
    damage(celeba / "celeba")
    with pytest.raises(DataError, match=words):
        prepare_dataset(CelebA(), celeba)


def test_hold_out_of_groups_takes_some_of_every_group_and_never_all() -> None:
    groups = np.random.default_rng(0).integers(0, 40, size=500)
    train, test = hold_out_of_groups(groups, 0.3)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(500))
    sizes, held = np.bincount(groups), np.bincount(groups[test], minlength=40)
    assert (held == np.clip(np.floor(0.3 * sizes + 0.5), 1, sizes - 1)).all()
    assert all(np.array_equal(a, b) for a, b in zip((train, test), hold_out_of_groups(groups, 0.3), strict=True))
    fifty = np.zeros(50, dtype=np.int64)
    assert len(hold_out_of_groups(fifty, 0.29)[1]) == 15  # 14.5 is rounded up, which 0.29 · 50 in binary is below


def test_written_while_made_is_the_same_as_made_and_saved(tiny: Path, celeba: Path) -> None:
    for source, root in ((TinyImageNet(), tiny), (CelebA(image_size=20), celeba)):
        made = prepare_dataset(source, root, size=16, channels=1)
        made.save(root / "saved")
        mapped = prepare_dataset(source, root, size=16, channels=1, directory=root / "streamed")
        assert mapped.meta == made.meta
        for name in ("train.safetensors", "test.safetensors", "meta.json"):
            assert (root / "saved" / name).read_bytes() == (root / "streamed" / name).read_bytes()
        Dataset.load(root / "streamed").check_content(root / "streamed")
