"""Every source: what it reads from small files made here, what it says of missing and damaged ones; real MNIST."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from flcore.core.errors import DataError
from flcore.data.dataset import prepare_dataset
from flcore.data.sources import SOURCES, cifar, mnist
from flcore.data.sources.base import Source
from flcore.data.sources.cifar import Cifar10, Cifar100
from flcore.data.sources.digits import Digits
from flcore.data.sources.femnist import Femnist
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.mnist import Emnist, FashionMnist, Mnist
from tests.flcore.data.image_trees import Packed, as_folder, both


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    """Counts that :func:`write_mnist` changes to those of its files are restored."""
    with patch.dict(mnist.PUBLISHED):
        yield


def test_idx_files_that_are_there_are_read_without_slow_libraries(tmp_path: Path) -> None:
    """torchvision imports torch._dynamo and sympy too; one split of EMNIST stands for the three."""
    for folder, prefixes in (
        ("MNIST", ("train", "t10k")),
        ("FashionMNIST", ("train", "t10k")),
        ("EMNIST", ("emnist-letters-train", "emnist-letters-test")),
    ):
        write_mnist(tmp_path, folder, prefixes, [1, 2])
    check = (
        "import sys; from pathlib import Path\n"
        "from flcore.data.sources.mnist import PUBLISHED, Emnist, FashionMnist, Mnist\n"
        "PUBLISHED.update(dict.fromkeys(PUBLISHED, (2, 2)))\n"
        f"for kind in (Emnist, FashionMnist, Mnist): kind().load(Path({str(tmp_path)!r}), True)\n"
        "print(sorted({'torchvision', 'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


OWN = ("imagefolder", "arrays", "huggingface")
"""Sources of one's own images."""


def test_channels_and_classes_are_known_before_anything_is_read() -> None:
    """As published (data.md, section 1); of one's own images the files say."""
    gray = {"digits", "mnist", "fashionmnist", "emnist", "femnist"}
    for name, kind in SOURCES.items():
        assert kind().channels == (None if name in OWN else 1 if name in gray else 3), name
    published = {"digits": 10, "mnist": 10, "fashionmnist": 10, "emnist": 26, "femnist": 62, "cifar10": 10}
    published |= {"cifar100": 100, "tinyimagenet": 200, "vireofood172": 172, "celeba": 2}
    found = {name: kind().num_classes for name, kind in SOURCES.items()}
    assert found == published | dict.fromkeys(OWN)
    assert [Emnist(split=split).num_classes for split in ("balanced", "byclass")] == [47, 62]
    assert FashionMnist(drop_classes=(0, 9)).num_classes == 8


def test_where_files_lie_is_known_before_anything_is_read(tmp_path: Path) -> None:
    """Below one root as each is published (data.md, section 1); of one's own images all of it, or both splits."""
    published = {"digits": "", "mnist": "MNIST/raw", "fashionmnist": "FashionMNIST/raw", "emnist": "EMNIST/raw"}
    published |= {"femnist": "femnist", "cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
    published |= {"tinyimagenet": "tiny-imagenet-200", "vireofood172": "ready_chinese_food SplitAndIngreLabel"}
    published |= {"celeba": "celeba", **dict.fromkeys(OWN, ".")}
    found = {name: [place.relative_to(tmp_path) for place in kind().places(tmp_path)] for name, kind in SOURCES.items()}
    assert found == {name: list(map(Path, places.split())) for name, places in published.items()}
    assert Femnist(reading="byclass").places(tmp_path) == (tmp_path / "EMNIST" / "raw",)
    as_folder(plain_tree(), tmp_path)
    assert ImageFolder().places(tmp_path) == (tmp_path / "train", tmp_path / "test")


@pytest.mark.parametrize("kind", [kind for name, kind in SOURCES.items() if name != "digits"])
def test_missing_data_name_the_layout_and_the_key(kind: type[Source], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{kind.name}: data.root is not set; expected .*\nset data.root"):
        kind().load(None, False)
    with pytest.raises(DataError, match=r"not found below data.root = .*; expected .*\nset data.root"):
        kind().load(tmp_path / "nowhere", False)


def test_missing_mnist_offers_the_download(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"MNIST/raw/ with train-images-idx3-ubyte.*\n.*data.download=true"):
        Mnist().load(tmp_path, False)


def test_digits_counts() -> None:
    """1,797 images by class 178, 182, 177, 183, 181, 182, 181, 179, 174, 180; a fifth of each is for tests."""
    raw = Digits().load()
    assert raw.train.images.shape == (1437, 8, 8) and len(raw.class_names) == 10
    train, test = np.bincount(raw.train.labels), np.bincount(raw.test.labels)
    assert (train.sum(), test.sum()) == (1437, 360)
    total = train + test
    assert total.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(test - total * 360 / 1797).max() < 1


def test_digits_values_are_sixteenths() -> None:
    """v/16 is stored as round(255 v/16): 0, 16, 32, ..., 112, 128 (8 · 15.9375 = 127.5 goes up), 143, ..., 255."""
    values = np.unique(Digits().load().train.images)
    assert values.tolist() == [0, 16, 32, 48, 64, 80, 96, 112, 128, 143, 159, 175, 191, 207, 223, 239, 255]
    assert np.abs(values / 255 - np.arange(17) / 16).max() <= 0.5 / 255 + 1e-12


def write_idx(path: Path, values: np.ndarray) -> None:
    """IDX: two zero bytes, type 8 (unsigned byte), number of dimensions, sizes big-endian, then the values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + b"".join(struct.pack(">I", size) for size in values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_mnist(root: Path, folder: str, prefixes: tuple[str, str], labels: list[int]) -> np.ndarray:
    """Training and test split alike: image n has the value n everywhere but for its first row, which is 200."""
    images = np.full((len(labels), 28, 28), 0) + np.arange(len(labels))[:, None, None]
    images[:, 0, :] = 200
    published = f"EMNIST {prefixes[0].split('-')[1]}" if folder == "EMNIST" else folder
    mnist.PUBLISHED[published] = (len(labels), len(labels))
    for prefix in prefixes:
        write_idx(root / folder / "raw" / f"{prefix}-images-idx3-ubyte", images)
        write_idx(root / folder / "raw" / f"{prefix}-labels-idx1-ubyte", np.array(labels))
    return images.astype(np.uint8)


@pytest.mark.parametrize(("kind", "folder"), [(Mnist, "MNIST"), (FashionMnist, "FashionMNIST")])
def test_idx_files_are_read(kind: type[Source], folder: str, tmp_path: Path) -> None:
    images = write_mnist(tmp_path, folder, ("train", "t10k"), [3, 1, 9])
    raw = kind().load(tmp_path, False)
    for split in (raw.train, raw.test):
        assert np.array_equal(split.images, images) and split.images.dtype == np.uint8
        assert split.labels.tolist() == [3, 1, 9] and split.labels.dtype == np.int64
    assert len(raw.class_names) == 10


def test_classes_can_be_left_out(tmp_path: Path) -> None:
    """Labels 3, 0, 1, 9 without class 0: images 0, 2, 3 stay, with the classes 1 to 9 numbered 0 to 8."""
    images = write_mnist(tmp_path, "FashionMNIST", ("train", "t10k"), [3, 0, 1, 9])
    source = FashionMnist(drop_classes=(0,))
    raw = source.load(tmp_path, False)
    for split in (raw.train, raw.test):
        assert np.array_equal(split.decoded(), images[[0, 2, 3]])
        assert split.labels.tolist() == [2, 0, 8] and split.labels.dtype == np.int64
    assert raw.class_names == FashionMnist().load(tmp_path, False).class_names[1:]
    assert (source.options(), FashionMnist().options()) == ({"drop_classes": (0,)}, {})
    whole, part = (prepare_dataset(one, tmp_path) for one in (FashionMnist(), source))
    assert (whole.meta.num_classes, part.meta.num_classes, len(part.train)) == (10, 9, 3)
    assert part.meta.fingerprint != whole.meta.fingerprint


@pytest.mark.parametrize(
    ("split", "first", "last", "names"),
    [
        ("letters", 1, 26, "abcdefghijklmnopqrstuvwxyz"),  # its files count from 1
        ("balanced", 0, 46, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),  # lower-case ones that look unlike
        ("byclass", 0, 61, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
    ],
)
def test_emnist_starts_at_zero_and_stands_upright(
    split: Any, first: int, last: int, names: str, tmp_path: Path
) -> None:
    images = write_mnist(tmp_path, "EMNIST", (f"emnist-{split}-train", f"emnist-{split}-test"), [first, last])
    raw = Emnist(split=split).load(tmp_path, False)
    assert raw.train.labels.tolist() == raw.test.labels.tolist() == [0, last - first]
    assert "".join(raw.class_names) == names
    assert np.array_equal(raw.test.images, images.transpose(0, 2, 1))


@pytest.mark.parametrize("keep", [0, 3, 9, 500])
def test_truncated_idx_is_damage_with_the_file_named(keep: int, tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", ("train", "t10k"), [3, 1, 9])
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"t10k-\*: damaged"):
        Mnist().load(tmp_path, False)


@pytest.mark.parametrize(
    ("header", "values", "reason"),
    [
        ([0, 0, 8, 1, 0, 0, 0, 3], 4, "states 3 values and has 4"),
        ([0, 0, 8, 1, 0, 0, 0, 3], 2, "states 3 values and has 2"),
        ([0, 0, 8, 1, 0, 0, 0, 0], 0, "states 0 values and has 0"),
        ([0, 0, 13, 1, 0, 0, 0, 3], 12, "does not begin as an IDX file"),  # 13: floats of four bytes
        ([0, 0, 8, 3, 0, 0, 0, 3], 3, "does not begin as an IDX file"),  # three dimensions
        ([0x1F, 0x8B, 8, 0, 0, 0, 0, 3], 3, "does not begin as an IDX file"),  # still packed by gzip
    ],
)
def test_labels_that_are_not_what_their_header_says_are_damage(
    header: list[int], values: int, reason: str, tmp_path: Path
) -> None:
    write_mnist(tmp_path, "MNIST", ("train", "t10k"), [3, 1, 9])
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(bytes(header) + bytes(values))
    with pytest.raises(DataError, match=rf"train-\*: damaged \(train-labels-idx1-ubyte {reason}"):
        Mnist().load(tmp_path, False)


def test_images_and_labels_of_other_lengths_are_damage(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST", ("train", "t10k"), [3, 1, 9])
    write_idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.array([1, 2]))
    with pytest.raises(DataError, match=r"train-\*: damaged .*do not belong together"):
        Mnist().load(tmp_path, False)


@pytest.mark.parametrize(
    ("kind", "folder", "prefixes"),
    [
        (Mnist, "MNIST", ("train", "t10k")),
        (FashionMnist, "FashionMNIST", ("train", "t10k")),
        (Emnist, "EMNIST", ("emnist-letters-train", "emnist-letters-test")),
    ],
)
def test_other_images_in_idx_files_are_refused(
    kind: type[Source], folder: str, prefixes: tuple[str, str], tmp_path: Path
) -> None:
    """Two images, in files that are whole; or as many as published, of another size."""
    write_mnist(tmp_path, folder, prefixes, [1, 2])
    more = dict.fromkeys(mnist.PUBLISHED, (60000, 10000))
    words = r"2 images of 28 x 28, but .* has 60000 of 28 x 28.*imagefolder"
    with patch.dict(mnist.PUBLISHED, more), pytest.raises(DataError, match=words):
        kind().load(tmp_path)
    write_idx(tmp_path / folder / "raw" / f"{prefixes[1]}-images-idx3-ubyte", np.zeros((2, 32, 30)))
    with pytest.raises(DataError, match=rf"{prefixes[1]}-\*: 2 images of 32 x 30, but"):
        kind().load(tmp_path)


def test_published_counts() -> None:
    """data.md, section 1.1."""
    assert mnist.PUBLISHED["EMNIST letters"] == (26 * 4_800, 26 * 800)
    assert mnist.PUBLISHED["EMNIST byclass"] == (697_932, 116_323)
    assert mnist.PUBLISHED["EMNIST balanced"] == (47 * 2_400, 47 * 400)
    assert mnist.PUBLISHED["MNIST"] == mnist.PUBLISHED["FashionMNIST"] == (60_000, 10_000)


def test_real_mnist_has_the_published_class_counts(real_data: Path) -> None:
    if not (real_data / "MNIST" / "raw" / "train-images-idx3-ubyte").exists():
        pytest.skip("real MNIST not found")
    raw = Mnist().load(real_data, False)
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(raw.train.labels).tolist() == train
    assert np.bincount(raw.test.labels).tolist() == test


def test_cifar_with_other_check_sums_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / name).write_bytes(b"not a batch")
    (folder / "batches.meta").write_bytes(b"not a batch")
    with pytest.raises(DataError, match="cifar-10-batches-py: damaged"):
        Cifar10().load(tmp_path, False)


def write_cifar(root: Path, form: type[cifar._Cifar], classes: int, each: int, sides: tuple[int, ...]) -> None:
    """Binary files of ``each`` images: number n of a file has the fine label n and red n, green 100, blue 200."""
    folder = root / form.binary_folder
    folder.mkdir(parents=True)
    *files, names = form.binary_files
    (folder / names).write_text("".join(f"class {n}\n" for n in range(classes)) + "\n", encoding="utf-8")
    for file in files:
        with (folder / file).open("wb") as opened:
            for n in range(each):
                opened.write(bytes([*sides, n]) + bytes([n]) * 1024 + b"\x64" * 1024 + b"\xc8" * 1024)


@pytest.mark.parametrize(("form", "sides"), [(Cifar10, ()), (Cifar100, (19,))])
def test_binary_cifar_is_read(
    form: type[cifar._Cifar], sides: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 images a file in place of 10,000 (CIFAR-100: 3 in place of 50,000); the coarse label 19 is not used."""
    files, classes = len(form.binary_files) - 2, form.num_classes
    assert classes is not None and (cifar.TRAIN_SIZE, cifar.TEST_SIZE) == (50_000, 10_000)
    monkeypatch.setattr(cifar, "TRAIN_SIZE", 3 * files)
    monkeypatch.setattr(cifar, "TEST_SIZE", 3)
    write_cifar(tmp_path, form, classes, 3, sides)
    assert form().places(tmp_path) == (tmp_path / form.binary_folder,)
    raw = form().load(tmp_path, False)
    assert raw.train.labels.tolist() == [0, 1, 2] * files and raw.test.labels.tolist() == [0, 1, 2]
    assert raw.test.images.shape == (3, 32, 32, 3) and raw.train.decoded()[1, 5, 6].tolist() == [1, 100, 200]
    assert raw.class_names[:2] == ("class 0", "class 1") and len(raw.class_names) == classes
    path = tmp_path / form.binary_folder / form.binary_files[-2]
    whole = path.read_bytes()
    for content, words in (
        (whole[:-1], "expected 3 images of"),
        (b"", "0 bytes"),
        (whole[: len(sides)] + bytes([classes]) + whole[len(sides) + 1 :], f"label {classes}, expected 0 to"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{path.name}: damaged \(.*{words}"):
            form().load(tmp_path, False)
    (tmp_path / form.binary_folder / form.binary_files[-1]).write_text("one\n", encoding="utf-8")
    with pytest.raises(DataError, match="1 names of classes"):
        form().load(tmp_path, False)
    path.unlink()
    with pytest.raises(DataError, match=f"expected {form.folder}/ with .*, or {form.binary_folder}/ with"):
        form().load(tmp_path, False)


def encoded(value: int, kind: str = "PNG", mode: str = "RGB", height: int = 6, width: int = 4) -> bytes:
    """An image file of one colour; PNG keeps it exactly."""
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    file = io.BytesIO()
    Image.fromarray(np.full(shape, value, dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def plain_tree() -> dict[str, bytes]:
    """Two classes; file order 10, 2 because names are compared as text."""
    return {
        "train/dog/b.png": encoded(40),
        "train/cat/2.png": encoded(20),
        "train/cat/10.png": encoded(10),
        "test/cat/x.png": encoded(50),
        "test/dog/x.PNG": encoded(60),
        "train/.DS_Store": b"clutter",
        "train/cat/Thumbs.db": b"clutter",
        "README.txt": b"beside the folders nothing matters",
    }


@both
@pytest.mark.parametrize("below", ["", "cifar10/"])
def test_folder_and_zip_are_read_alike(packed: Packed, below: str, tmp_path: Path) -> None:
    root = packed({below + name: content for name, content in plain_tree().items()}, tmp_path / "images")
    raw = ImageFolder().load(root, False)
    assert raw.class_names == ("cat", "dog")
    assert raw.train.labels.tolist() == [0, 0, 1] and raw.test.labels.tolist() == [0, 1]
    assert raw.train.images.shape == (3, 6, 4, 3) and raw.train.decoded()[:, 0, 0, 0].tolist() == [10, 20, 40]
    assert raw.test.decoded()[:, 5, 3, 2].tolist() == [50, 60]
    assert str(tmp_path) not in raw.source


def test_statistics_of_the_training_images(tmp_path: Path) -> None:
    """Values 10, 20, 40 alike: mean 70/3 = 23.3333, variance (100 + 400 + 1600)/3 - 544.4444 = 155.5556; over 255."""
    meta = prepare_dataset(ImageFolder(), as_folder(plain_tree(), tmp_path)).meta
    assert meta.mean == (round(70 / 3 / 255, 4),) * 3 == (0.0915,) * 3
    assert meta.std == (round(155.5556**0.5 / 255, 4),) * 3 == (0.0489,) * 3


def test_all_gray_stays_gray_and_a_single_colour_image_makes_all_rgb(tmp_path: Path) -> None:
    gray = {name: encoded(7, mode="L") for name in ("train/a/1.png", "train/a/2.png", "test/a/1.png")}
    assert ImageFolder().load(as_folder(gray, tmp_path / "gray"), False).train.images.shape == (2, 6, 4)
    mixed = gray | {"test/a/2.jpg": encoded(90, "JPEG")}
    raw = ImageFolder().load(as_folder(mixed, tmp_path / "mixed"), False)
    assert raw.train.images.shape == (2, 6, 4, 3) and (raw.train.decoded() == 7).all()
    assert raw.test.images.shape == (2, 6, 4, 3)


def test_other_formats_are_read_pixel_by_pixel(tmp_path: Path) -> None:
    """A red, a green, a blue and a gray pixel, in formats that lose nothing; the head alone says size and colour."""
    pixels = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [7, 7, 7]]], dtype=np.uint8)
    for ending, options in {
        "ppm": {"format": "PPM"},
        "bmp": {"format": "BMP"},
        "tif": {"format": "TIFF", "compression": "tiff_lzw"},
        "TIFF": {"format": "TIFF"},
        "gif": {"format": "GIF"},
    }.items():
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, **options)
        tree = {f"{part}/own/1.{ending}": file.getvalue() for part in ("train", "test")}
        raw = ImageFolder().load(as_folder(tree, tmp_path / ending), False)
        assert raw.train.images.shape == (1, 2, 2, 3), ending
        assert (raw.train.decoded()[0] == pixels).all(), ending


def test_a_hand_written_portable_map_is_read(tmp_path: Path) -> None:
    """Of 8 bits as it is, of 10 bits (most 1023) as the upper byte of v · 65535/1023: 1023, 512 and 0 → 255, 128 and 0.

    512 · 65535/1023 = 32799.5…, by 256: 128.1…
    """
    tree = {
        "train/a/plain.pgm": b"P2\n# by hand\n3 1\n255\n9 0 255\n",
        "train/a/ten.pgm": b"P5 3 1 1023\n" + struct.pack(">3H", 1023, 512, 0),
        "test/a/raw.pgm": b"P5 3 1 255\n" + bytes([1, 2, 3]),
    }
    raw = ImageFolder().load(as_folder(tree, tmp_path), False)
    assert raw.train.decoded().tolist() == [[[9, 0, 255]], [[255, 128, 0]]]
    assert raw.test.decoded().tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(("ending", "kind"), [("gif", "GIF"), ("tif", "TIFF")])
def test_of_several_images_the_first_is_read(ending: str, kind: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    first, *others = (Image.fromarray(np.full((2, 3), value, dtype=np.uint8)) for value in (10, 200, 90))
    first.save(file, kind, save_all=True, append_images=others)
    tree = {f"{part}/a/1.{ending}": file.getvalue() for part in ("train", "test")}
    raw = ImageFolder().load(as_folder(tree, tmp_path), False)
    found = raw.train.decoded()
    assert len(found) == 1 and found.shape[1:3] == (2, 3) and (found == 10).all()


def tiff(data: bytes, **tags: int) -> bytes:
    """Little-endian, gray, of 8 x 8 pixels; tags by their number, as whole numbers of 32 bits each."""
    entries = {256: 8, 257: 8, 258: 8, 259: 5, 262: 1, 277: 1} | {int(tag[1:]): value for tag, value in tags.items()}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(entries.items()))
    head = b"II*\0" + struct.pack("<I", 8 + len(data)) + data
    return head + struct.pack("<H", len(entries)) + directory + struct.pack("<I", 0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("1.ppm", b"P6 8192 8193 255\n", "8192 x 8193 pixels, 67108864 are the most"),
        ("1.gif", b"GIF89a" + struct.pack("<HH3xc4H2B", 9, 9, b",", 0, 0, 9000, 9000, 0, 8), "9000 x 9000 pixels"),
        ("1.bmp", b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 9000, 9000, 1, 24, 0) + bytes(24), "9000 x 9000"),
        ("1.tif", tiff(bytes(64), t322=30000, t323=30000, t324=8, t325=64), "tiles of 30000 x 30000 pixels"),
        ("1.tif", tiff(bytes(64), t256=9000, t257=9000, t273=8, t279=64), "9000 x 9000 pixels"),
        ("1.tif", encoded(1, "PNG"), "not a tiff image"),
        ("1.jpg", tiff(bytes(64), t259=1, t273=8, t279=64), "not a jpg, png or webp image"),
        ("1.gif", b"P5 1 1 255\n\1", "not a gif image"),
        ("1.ppm", b"P6 2 2 255\n" + bytes(5), "1 bad file: train/a/1.ppm"),
        ("1.ppm", b"Pf 1 1 -1.0\n" + bytes(4), "pixels of floating point have no known scale"),
        ("1.tif", tiff(bytes(64), t258=12, t259=1, t273=8, t279=96), "pixels of 12 bits have no known scale"),
        ("1.tif", tiff(bytes(64), t258=32, t259=1, t273=8, t279=256, t339=2), "pixels of signed or 32 bit numbers"),
    ],
)
def test_hostile_files_of_other_formats_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    root = as_folder({f"train/a/{name}": content, "test/a/1.png": encoded(1)}, tmp_path)
    with pytest.raises(DataError, match=re.escape(words)):
        prepare_dataset(ImageFolder(), root)


def test_classes_must_agree_between_train_and_test(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="class 'emu' has no images in train"):
        ImageFolder().load(as_folder(plain_tree() | {"test/emu/1.png": encoded(1)}, tmp_path), False)


def test_other_layouts_and_broken_zips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no single pair of folders"):
        ImageFolder().load(as_folder({"cat/1.png": b""}, tmp_path / "flat"), False)
    twice = {f"{side}/train/a/1.png": b"" for side in ("left", "right")}
    with pytest.raises(DataError, match="no single pair of folders"):
        ImageFolder().load(as_folder(twice, tmp_path / "twice"), False)
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(DataError, match=r"broken\.zip: damaged"):
        ImageFolder().load(tmp_path / "broken.zip", False)


def test_a_download_that_fails_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", fail)
    with pytest.raises(DataError, match=r"MNIST/raw: download failed .*copy the files there by hand"):
        Mnist().load(tmp_path, True)
