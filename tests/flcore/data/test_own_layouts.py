"""Your own images by site, by a CSV and without a test split; files that are no images; natural order of classes."""

from __future__ import annotations

import io
import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flcore.config.schema import Config
from flcore.core.errors import DataError
from flcore.data.dataset import Dataset, prepare_dataset
from flcore.data.dividing import make_partition
from flcore.data.partitioners.simple import ByGroup
from flcore.data.sources.base import hold_out_of_classes
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.layouts import natural_order
from tests.flcore.data.image_trees import Packed, as_folder, both


def png(value: int = 0, mode: str = "L") -> bytes:
    """An image of 2 x 2 pixels of one colour."""
    file = io.BytesIO()
    shape = {"L": (2, 2), "RGB": (2, 2, 3), "RGBA": (2, 2, 4)}[mode]
    Image.fromarray(np.full(shape, value, dtype=np.uint8), mode).save(file, "PNG")
    return file.getvalue()


SITES = ImageFolder(layout="sites")
CSV = ImageFolder(layout="csv")


def refusal(source: ImageFolder, root: Path) -> str:
    with pytest.raises(DataError) as refused:
        source.load(root)
    message = str(refused.value)
    message.encode()  # can be printed
    assert message.count("\n") <= 1
    return message


def values_of(data: Dataset) -> tuple[list[int], list[int]]:
    """The first pixel of each training and test image."""
    train, test = (split.images[:, 0, 0, 0].tolist() for split in (data.train, data.test))
    return train, test


def test_numbers_in_names_are_compared_by_value() -> None:
    assert natural_order(["10", "2", "1", "02"]) == ("1", "02", "2", "10")
    assert natural_order(["b", "a10b", "a2c", "a2", "a"]) == ("a", "a2", "a2c", "a10b", "b")
    assert natural_order(["9" * 5000, "1" + "0" * 5000, "²", "x"])[:2] == ("9" * 5000, "1" + "0" * 5000)


@both
def test_classes_are_numbered_in_natural_order(packed: Packed, tmp_path: Path) -> None:
    tree = {f"{part}/{number}/x.png": png(number) for part in ("train", "test") for number in (1, 2, 10)}
    raw = ImageFolder().load(packed(tree, tmp_path / "images"))
    assert raw.class_names == ("1", "2", "10")
    assert raw.train.labels.tolist() == [0, 1, 2] and raw.train.decoded()[:, 0, 0].tolist() == [1, 2, 10]


def site_tree(
    prefix: str = "", sites: tuple[str, ...] = ("Köln", "site 10", "site 2"), each: int = 3
) -> dict[str, bytes]:
    """Sites with ``each`` images of class a and b; the pixel says which site."""
    return {
        f"{prefix}{site}/{label}/{number}.png": png(10 * place + number)
        for place, site in enumerate(sites)
        for label in "ab"
        for number in range(each)
    }


@both
@pytest.mark.parametrize("below", ["", "images/"])
def test_sites_are_groups_with_names(packed: Packed, below: str, tmp_path: Path) -> None:
    """In natural order: site 2 before site 10. The test split has a site less."""
    tree = site_tree(f"{below}train/") | site_tree(f"{below}test/", ("site 10", "site 2"), each=1)
    data = prepare_dataset(SITES, packed(tree, tmp_path / "packed"), directory=tmp_path / "prepared")
    assert data.meta.group_names == ("Köln", "site 2", "site 10") and data.meta.class_names == ("a", "b")
    assert data.train.groups is not None and data.test.groups is not None
    assert data.train.groups.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert data.test.groups.tolist() == [1, 1, 2, 2]
    assert values_of(data)[0][6:9] == [20, 21, 22]  # site 2, the third of the list
    assert Dataset.load(tmp_path / "prepared").meta == data.meta
    assert json.loads((tmp_path / "prepared" / "meta.json").read_bytes())["group_names"] == [
        "Köln",
        "site 2",
        "site 10",
    ]


def test_clients_are_sites(tmp_path: Path) -> None:
    tree = site_tree("train/") | site_tree("test/", each=1)
    data = prepare_dataset(SITES, as_folder(tree, tmp_path))
    made = make_partition(data, ByGroup(min_size=1), num_clients=3, seed=0, client_test="own_group")
    assert [client.train.tolist() for client in made.clients] == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]
    assert [client.test.tolist() for client in made.clients] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match=r"needs 4 groups .* has 3"):
        make_partition(data, ByGroup(min_size=1), num_clients=4, seed=0)


def test_another_layout_than_said_is_named(tmp_path: Path) -> None:
    by_site = as_folder(site_tree("train/") | site_tree("test/"), tmp_path / "sites")
    assert "data.layout=sites" in refusal(ImageFolder(), by_site)
    by_class = as_folder({f"{part}/a/x.png": png() for part in ("train", "test")}, tmp_path / "classes")
    assert "data.layout=classes" in refusal(SITES, by_class)
    assert "index.csv" in refusal(CSV, by_class)


def test_linked_sites_are_read(tmp_path: Path) -> None:
    away = as_folder(site_tree("", ("s",)), tmp_path / "away")
    for part in ("train", "test"):
        (tmp_path / "images" / part).mkdir(parents=True)
        (tmp_path / "images" / part / "linked").symlink_to(away / "s")
    assert SITES.load(tmp_path / "images").group_names == ("linked",)
    (tmp_path / "images" / "train" / "gone").symlink_to("nowhere")
    assert "train/gone (a link that leads nowhere)" in refusal(SITES, tmp_path / "images")


def test_a_share_of_each_class_and_site_is_held_out() -> None:
    """Of class 0, 40 and 20 images at two sites; of class 1, 30: 0.2 gives 12 (8 and 4) and 6. Of 2, 2: one."""
    labels = np.repeat([0, 0, 1, 2], [40, 20, 30, 2])
    groups = np.repeat([0, 1, 0, 1], [40, 20, 30, 2])
    train, test = hold_out_of_classes(labels, groups, 0.2)
    assert sorted([*train, *test]) == [*range(92)] and (np.diff(test) > 0).all()
    assert np.bincount(labels[test]).tolist() == [12, 6, 1]
    assert np.bincount(groups[test[labels[test] == 0]]).tolist() == [8, 4]
    assert [again.tolist() for again in hold_out_of_classes(labels, groups, 0.2)] == [train.tolist(), test.tolist()]
    assert not (np.diff(test[labels[test] == 1]) == 1).all()  # drawn, not the first ones
    for fraction in (0.001, 0.999):  # one at least, and not all
        _, extreme = hold_out_of_classes(labels, groups, fraction)
        assert np.bincount(labels[extreme]).tolist() == ([1, 1, 1] if fraction < 0.5 else [59, 29, 1])


@both
@pytest.mark.parametrize("prefix", ["", "photographs/", "train/", "below/train/"])
def test_class_folders_without_a_test_split(packed: Packed, prefix: str, tmp_path: Path) -> None:
    tree = {f"{prefix}{label}/{n}.png": png(n) for label in ("cat", "test", "train") for n in range(5)}
    root = packed(tree, tmp_path / "images")
    data = prepare_dataset(ImageFolder(test_fraction=0.4), root)
    assert data.meta.class_names == ("cat", "test", "train")
    assert np.bincount(data.test.labels).tolist() == [2, 2, 2] and np.bincount(data.train.labels).tolist() == [3, 3, 3]
    train, test = values_of(data)
    for label in range(3):
        assert sorted(train[3 * label : 3 * label + 3] + test[2 * label : 2 * label + 2]) == [0, 1, 2, 3, 4]
    assert "data.test_fraction" in refusal(ImageFolder(), root)


def test_sites_without_a_test_split(tmp_path: Path) -> None:
    for prefix in ("", "train/", "images/"):
        data = prepare_dataset(
            ImageFolder(layout="sites", test_fraction=0.3), as_folder(site_tree(prefix), tmp_path / f"x{prefix}")
        )
        assert data.test.groups is not None and np.bincount(data.test.groups * 2 + data.test.labels).tolist() == [1] * 6


def test_a_test_split_of_ones_own_is_not_drawn_from(tmp_path: Path) -> None:
    tree = {f"{part}/a/{n}.png": png() for part in ("train", "test") for n in range(3)}
    assert "set it to null" in refusal(ImageFolder(test_fraction=0.2), as_folder(tree, tmp_path))


def test_a_class_of_one_image_cannot_be_divided(tmp_path: Path) -> None:
    tree = {f"{label}/{n}.png": png() for label, count in (("a", 2), ("b", 1)) for n in range(count)}
    assert "'b'" in refusal(ImageFolder(test_fraction=0.2), as_folder(tree, tmp_path))


def with_index(text: str | bytes, path: Path, packed: Packed = as_folder, **images: bytes) -> Path:
    """``index.csv`` with four grey images of the values 1 to 4."""
    index = text if isinstance(text, bytes) else text.encode()
    tree = {f"img/{n}.png": png(n) for n in range(1, 5)} | {"index.csv": index, "img/unlisted.png": b"not looked at"}
    return packed({**tree, **images}, path)


FULL = "file,label,site,split\nimg/3.png,10,B,train\nimg/1.png,9,A,train\nimg/2.png,9,A,test\nimg/4.png,10,C,test\n"


@both
def test_a_csv_says_label_site_and_split(packed: Packed, tmp_path: Path) -> None:
    """Rows keep their order; classes are numbered in natural order, 9 before 10."""
    data = prepare_dataset(CSV, with_index(FULL, tmp_path / "images", packed))
    assert data.meta.class_names == ("9", "10") and data.meta.group_names == ("A", "B", "C")
    assert values_of(data) == ([3, 1], [2, 4])
    assert data.train.labels.tolist() == [1, 0] and data.test.labels.tolist() == [0, 1]
    assert data.train.groups is not None and data.train.groups.tolist() == [1, 0]


@pytest.mark.parametrize(
    "text",
    [
        FULL.replace("\n", "\r\n"),
        "\ufeff" + FULL,
        FULL.replace(",", '","').replace("\n", '"\n"').replace("file", '"file', 1).removesuffix('"'),
        FULL.replace("\n", "\n\n , ,,\n"),
        FULL.replace("img/", "img\\").replace("file", "./file", 0),
        FULL.replace("img/", "./img/").replace(",9,", ", 9 ,"),
        FULL.replace("file,label", " File,LABEL"),
        FULL.removesuffix("\n"),
    ],
)
def test_a_csv_as_programs_write_it(text: str, tmp_path: Path) -> None:
    assert values_of(prepare_dataset(CSV, with_index(text, tmp_path))) == ([3, 1], [2, 4])


def test_a_csv_of_files_and_labels_alone(tmp_path: Path) -> None:
    rows = "".join(f"img/{n}.png,{'yes' if n % 2 else 'no'}\n" for n in (4, 3, 2, 1))
    root = with_index("file,label\n" + rows, tmp_path)
    data = prepare_dataset(ImageFolder(layout="csv", test_fraction=0.5), root)
    assert data.meta.class_names == ("no", "yes") and data.train.groups is None
    assert sorted(data.train.labels.tolist()) == sorted(data.test.labels.tolist()) == [0, 1]
    assert "data.test_fraction" in refusal(CSV, root)
    assert "set it to null" in refusal(
        ImageFolder(layout="csv", test_fraction=0.5), with_index(FULL, tmp_path / "divided")
    )


def test_names_in_the_other_unicode_form_are_found(tmp_path: Path) -> None:
    """macOS stores Ü as U and two dots."""
    composed, decomposed = (unicodedata.normalize(form, "Übung.png") for form in ("NFC", "NFD"))
    root = with_index(f"file,label,split\n{composed},a,train\nimg/1.png,a,test\n", tmp_path, **{decomposed: png(9)})
    assert values_of(prepare_dataset(CSV, root)) == ([9], [1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"file,label\n\xff.png,a\n", "UTF-8"),
        (FULL.encode("utf-16"), "UTF-8"),
        ("", "no column file"),
        ("file,split\nimg/1.png,train\n", "no column label"),
        ("file;label\nimg/1.png;a\n", "commas"),
        ("file,label,sites\nimg/1.png,a,b\n", "'site'"),
        ("file,label,age\nimg/1.png,a,40\n", "age"),
        ("file,label,label\nimg/1.png,a,a\n", "twice"),
        ('file,label\n"img/1.png,a\n', "line"),
        ("file,label,split\nimg/1.png,a,train\nimg/1.png,a,test\n", "line 3 repeats the file of line 2"),
        ("file,label,split\nimg/1.png,a,train\n./img/1.png,b,train\n", "line 3 repeats the file of line 2"),
        ("file,label\nimg/1.png\n", "line 2 has other columns"),
        ("file,label\nimg/1.png,a,b\n", "line 2 has other columns"),
        ("file,label\nimg/1.png,\n", "line 2 has no label"),
        ("file,label\n,a\n", "line 2 has no file"),
        ("file,label,site\nimg/1.png,a,\n", "line 2 has no site"),
        ("file,label,split\nimg/1.png,a,val\n", "line 2 has split val"),
        ("file,label\n/etc/passwd,a\n", "line 2 names /etc/passwd"),
        ("file,label\nimg/../../x.png,a\n", "line 2 names img/../../x.png"),
        ("file,label\n..\\x.png,a\n", "line 2 names ../x.png"),
        ("file,label\nC:\\x.png,a\n", "line 2 names C:/x.png"),
        ("file,label\n", "no images"),
        (
            "file,label,split\nimg/1.png,a,train\nimg/2.png,b,train\nimg/3.png,a,test\n",
            "class 'b' has no images in test",
        ),
        (
            "file,label,split\nimg/1.png,a,train\nimg/2.png,b,test\nimg/3.png,a,test\n",
            "class 'b' has no images in train",
        ),
        ('file,label,split\nimg/1.png,"a\nb",train\nimg/2.png,"a\nb",test\n', "control characters"),
    ],
)
def test_a_csv_that_cannot_be_followed_says_where(text: str | bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(CSV, with_index(text, tmp_path))


def test_all_wrong_lines_of_a_csv_are_listed(tmp_path: Path) -> None:
    message = refusal(CSV, with_index("file,label\n" + "img/1.png,\n" * 14, tmp_path))
    assert "line 11 has no label" in message and "line 12" not in message and "4 others" in message


def messy() -> dict[str, bytes]:
    """Two good images in each split, and seven names that are none."""
    good = {f"{part}/{label}/1.png": png(7) for part in ("train", "test") for label in "ab"}
    return good | {
        "train/a/notes.txt": b"notes",
        "train/a/nested/1.png": png(),
        "train/b/0.png": b"",
        "train/b/broken.jpg": b"\xff\xd8\xff\xe0 and no more",
        "test/b/half.png": png()[:40],
        "test/labels.csv": b"",
        "test/b/float.tif": b"II*\0",
    }


FAULTS = {
    "train/a/notes.txt": "not an image",
    "train/a/nested": "a folder",
    "train/b/0.png": "empty",
    "train/b/broken.jpg": "",
    "test/b/half.png": "",
    "test/labels.csv": "not in a class folder",
    "test/b/float.tif": "",
}


@both
def test_all_bad_files_are_listed_at_once(packed: Packed, tmp_path: Path) -> None:
    message = refusal(ImageFolder(), packed(messy(), tmp_path / "images"))
    assert "7 bad files" in message and "data.on_bad_file=skip" in message
    for name, reason in FAULTS.items():
        assert f"{name} ({reason}" in message


def test_images_that_cannot_be_decoded_are_listed_at_once(tmp_path: Path) -> None:
    """Nothing but decoding tells these; 13 of them, in both splits."""
    half = png()[:40]
    tree = {f"{part}/a/1.png": png() for part in ("train", "test")}
    tree |= {f"train/a/2{n}.png": half for n in range(10)} | {f"test/a/2{n}.png": half for n in range(3)}
    with pytest.raises(DataError, match=r"13 bad files: test/a/20\.png .*train/a/26\.png .* and 3 others\n.*=skip"):
        prepare_dataset(ImageFolder(), as_folder(tree, tmp_path / "images"), directory=tmp_path / "prepared")
    assert not (tmp_path / "prepared" / "meta.json").exists()


@both
def test_bad_files_are_skipped_and_named(packed: Packed, tmp_path: Path) -> None:
    root = packed(messy(), tmp_path / "images")
    data = prepare_dataset(ImageFolder(on_bad_file="skip"), root, directory=tmp_path / "prepared")
    assert values_of(data) == ([7, 7], [7, 7])
    stored = json.loads((tmp_path / "prepared" / "meta.json").read_bytes())["skipped"]
    assert stored.keys() == FAULTS.keys() and all(stored[name].startswith(reason) for name, reason in FAULTS.items())
    assert Dataset.load(tmp_path / "prepared").meta.skipped == stored


def test_missing_files_of_a_csv_are_bad_files(tmp_path: Path) -> None:
    text = FULL + "img/gone.png,9,A,test\nimg,9,A,test\nindex.csv,9,A,test\n"
    root = with_index(text, tmp_path / "images")
    message = refusal(CSV, root)
    assert "3 bad files" in message and "img/gone.png (does not exist)" in message and "img (a folder)" in message
    data = prepare_dataset(ImageFolder(layout="csv", on_bad_file="skip"), root)
    assert values_of(data) == ([3, 1], [2, 4]) and data.meta.skipped["img/gone.png"] == "does not exist"


def test_a_class_of_bad_files_does_not_vanish(tmp_path: Path) -> None:
    tree = messy() | {"train/c/1.png": png()[:40], "test/c/1.png": png()[:40]}
    assert "class 'c'" in refusal(ImageFolder(on_bad_file="skip"), as_folder(tree, tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_is_a_bad_file(tmp_path: Path) -> None:
    root = as_folder({f"{part}/a/1.png": png() for part in ("train", "test")}, tmp_path)
    os.mkfifo(root / "train" / "a" / "2.png")
    assert "train/a/2.png (not a file)" in refusal(ImageFolder(), root)


def test_an_intact_file_of_another_kind_is_not_called_damaged(tmp_path: Path) -> None:
    for name, content in (("data.h5", b"\x89HDF\r\n\x1a\n" + bytes(500)), ("images.tar", bytes(512))):
        (tmp_path / name).write_bytes(content)
        message = refusal(ImageFolder(), tmp_path / name)
        assert "damaged" not in message and "train/<class>/*" in message


def test_new_options_are_no_part_of_the_identity_at_their_default(tmp_path: Path) -> None:
    plain = {"data": {"name": "imagefolder"}, "partition": {"name": "iid"}}
    data = Config.from_mapping(plain).identity()["data"]
    assert not {"layout", "test_fraction", "on_bad_file"} & data.keys() and data["image_size"] is None
    given = {"layout": "sites", "test_fraction": 0.1, "on_bad_file": "skip"}
    assert (
        Config.from_mapping({**plain, "data": {"name": "imagefolder", **given}}).identity()["data"].items()
        >= given.items()
    )
    tree = {f"{part}/a/x.png": png() for part in ("train", "test")}
    assert prepare_dataset(ImageFolder(), as_folder(tree, tmp_path)).meta.preparation["options"] == {"image_size": None}
