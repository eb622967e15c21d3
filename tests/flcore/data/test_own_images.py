"""Images as people have them: of any size, rotated by EXIF, transparent, of more bits, linked, with odd names."""

from __future__ import annotations

import io
import os
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError
from flcore.data.dataset import prepare_dataset
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.on_request import CelebA, VireoFood172
from tests.flcore.data.image_trees import Packed, as_folder, as_zip, both


def file_of(values: Any, kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    """An image file; ``values`` uint8 or uint16 HxW or HxWxC."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(values), mode).save(file, kind, **options)
    return file.getvalue()


def stripes(height: int, width: int) -> np.ndarray:
    """Columns of 4 black and 4 white pixels in turn, uint8: mean 127.5 and deviation 127.5."""
    return np.broadcast_to((np.arange(width) // 4 % 2 * 255).astype(np.uint8), (height, width))


def one_each(content: bytes, ending: str) -> dict[str, bytes]:
    return {f"{part}/a/1.{ending}": content for part in ("train", "test")}


def decoded(tree: Mapping[str, bytes], path: Path) -> np.ndarray:
    return ImageFolder().load(as_folder(tree, path)).train.decoded()


@both
def test_a_small_first_image_does_not_blur_the_others(packed: Packed, tmp_path: Path) -> None:
    """Half of the size keeps stripes of two pixels, 32 and 223: deviation 96. By way of 8 x 8 it would be below 5."""
    tree = {
        "train/a/000.png": file_of(stripes(8, 8)),
        "train/a/001.png": file_of(stripes(128, 128)),
        "test/a/1.png": file_of(stripes(128, 128)),
    }
    data = prepare_dataset(ImageFolder(), packed(tree, tmp_path / "images"), size=64)
    for large in (data.train.images[1], data.test.images[0]):
        assert large.shape == (1, 64, 64) and large.float().std() > 90
    # Each as if it were alone.
    alone = prepare_dataset(
        ImageFolder(), as_folder(one_each(tree["train/a/001.png"], "png"), tmp_path / "alone"), size=64
    )
    assert (data.train.images[1] == alone.train.images[0]).all()


@both
def test_images_of_several_sizes_need_one(packed: Packed, tmp_path: Path) -> None:
    tree = one_each(file_of(stripes(6, 4)), "png") | {"test/a/wide.png": file_of(stripes(6, 9))}
    root = packed(tree, tmp_path / "images")
    with pytest.raises(DataError) as refused:
        prepare_dataset(ImageFolder(), root, directory=tmp_path / "prepared")
    message = str(refused.value)
    assert "\n" not in message and not (tmp_path / "prepared" / "meta.json").exists()
    for part in ("test/a/wide.png", "9 x 6", "train/a/1.png", "4 x 6", "data.size"):
        assert part in message
    assert prepare_dataset(ImageFolder(), root, size=8).meta.shape == (1, 8, 8)
    assert prepare_dataset(ImageFolder(image_size=5), root).meta.shape == (1, 5, 5)


def test_a_size_asked_for_goes_before_that_of_the_source(tmp_path: Path) -> None:
    """Photographs of 128 x 128 are not first made 8 x 8 because the source's own option says so."""
    photograph = file_of(stripes(128, 128), "JPEG", quality=95)
    faces = {f"celeba/img_align_celeba/{number}.jpg": photograph for number in range(2)}
    faces |= {
        "celeba/identity_CelebA.txt": b"0.jpg 1\n1.jpg 1\n",
        "celeba/list_attr_celeba.txt": b"2\nSmiling\n0.jpg 1\n1.jpg -1\n",
    }
    data = prepare_dataset(CelebA(image_size=8, min_images=2), as_folder(faces, tmp_path), size=64)
    assert data.meta.shape == (3, 64, 64) and data.train.images.float().std() > 90
    dishes = {"ready_chinese_food/1/1.jpg": photograph, "ready_chinese_food/172/1.jpg": photograph}
    dishes |= {f"SplitAndIngreLabel/{name}.txt": b"/1/1.jpg\n/172/1.jpg\n" for name in ("TR", "TE")}
    root = as_folder(dishes, tmp_path / "dishes")
    asked, own = prepare_dataset(VireoFood172(), root, size=64), prepare_dataset(VireoFood172(image_size=64), root)
    assert (asked.train.images == own.train.images).all()  # with the same margin


def test_a_title_names_the_data_and_runs_on_them(tmp_path: Path) -> None:
    """Without one, data and runs keep their names; the same images with a title are other data."""
    root = as_folder(one_each(file_of(stripes(6, 9)), "png"), tmp_path)
    plain, titled = prepare_dataset(ImageFolder(), root), prepare_dataset(ImageFolder(title="Ward 3"), root)
    assert (plain.meta.name, titled.meta.name) == ("imagefolder", "Ward 3")
    assert plain.meta.fingerprint != titled.meta.fingerprint
    assert "title" not in ImageFolder().options() and ImageFolder(title="Ward 3").options()["title"] == "Ward 3"


@pytest.mark.parametrize("title", ["", " a", "a ", "a/b", "models:/a", "it's", "$x_1$", "a\nb", "x" * 61])
def test_a_title_that_a_store_or_a_page_would_refuse_is_refused_first(title: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.title|data: title"):
        Config.from_mapping({"data": {"name": "imagefolder", "title": title}})
    assert (
        Config.from_mapping({"data": {"name": "imagefolder", "title": "Кошки (1) +_"}}).source.display_name
        == "Кошки (1) +_"
    )


@pytest.mark.parametrize(("ending", "kind"), [("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"), ("tif", "TIFF")])
def test_images_are_rotated_as_their_exif_orientation_says(ending: str, kind: str, tmp_path: Path) -> None:
    """Orientation 6: the first row of the file is the right-hand side. 16 high and 24 wide become 24 high."""
    values = np.zeros((16, 24), dtype=np.uint8)
    values[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(kind, {})
    (image,) = decoded(one_each(file_of(values, kind, exif=exif, **options), ending), tmp_path)
    assert image.shape[:2] == (24, 16)
    assert image[:, 8:].min() > 240 and image[:, :8].max() < 15


def test_unreadable_exif_data_are_ignored(tmp_path: Path) -> None:
    broken = file_of(stripes(8, 16), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(9))
    assert decoded(one_each(broken, "jpg"), tmp_path).shape == (1, 8, 16)


_ALPHA = np.array([[0, 128, 255]], dtype=np.uint8)
_BLENDED = [[255, 132, 9]]  # 9 on white: 255, (9 · 128 + 255 · 127) / 255 = 131.5, 9


def test_transparent_images_are_blended_onto_white(tmp_path: Path) -> None:
    nine = np.full((1, 3), 9, dtype=np.uint8)
    palette = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8), "P")
    palette.putpalette([9] * 9)
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=bytes([0, 128, 255]))
    for name, content, gray in (
        ("rgba.png", file_of(np.dstack([nine, nine, nine, _ALPHA]), mode="RGBA"), False),
        ("la.png", file_of(np.dstack([nine, _ALPHA]), mode="LA"), True),
        ("palette.png", file.getvalue(), False),
        ("rgba.webp", file_of(np.dstack([nine, nine, nine, _ALPHA]), "WEBP", "RGBA", lossless=True), False),
        ("rgba.tif", file_of(np.dstack([nine, nine, nine, _ALPHA]), "TIFF", "RGBA"), False),
    ):
        (image,) = decoded(one_each(content, name.partition(".")[2]), tmp_path / name)
        assert image.shape == ((1, 3) if gray else (1, 3, 3)), name
        assert (image if gray else image[..., 0]).tolist() == _BLENDED, name


def png_of(width: int, bits: int, colour: int, row: bytes, **more: bytes) -> bytes:
    """A PNG of one row, by hand: Pillow writes none of 2 bits, nor of 16 for each colour."""
    parts = {"IHDR": struct.pack(">2I5B", width, 1, bits, colour, 0, 0, 0), **more}
    parts |= {"IDAT": zlib.compress(b"\0" + row), "IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + kind.encode() + data + struct.pack(">I", zlib.crc32(kind.encode() + data))
        for kind, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_one_transparent_value_is_white_at_any_depth(tmp_path: Path) -> None:
    """As PNG and GIF have it: 7 is transparent. 0x4567 of 16 bits is 0x45 = 69."""
    seven = np.array([[7, 9]], dtype=np.uint8)
    gif = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    gif.putpalette([7, 7, 7, 9, 9, 9])
    file = io.BytesIO()
    gif.save(file, "GIF", transparency=0, save_all=True, append_images=[gif.rotate(180)])
    for name, content, expected in (
        ("gray.png", file_of(seven, transparency=7), [[255, 9]]),
        ("deep.png", file_of(np.array([[7, 0x4567]], dtype=np.uint16), transparency=7), [[255, 69]]),
        ("moving.gif", file.getvalue(), [[255, 9]]),
        # Four pixels of 2 bits, 0 to 3, of which 1 is transparent: 2 is 2 x 85.
        ("two.png", png_of(4, 2, 0, b"\x1b", tRNS=b"\0\1"), [[0, 255, 170, 255]]),
    ):
        (image,) = decoded(one_each(content, name.partition(".")[2]), tmp_path / name)
        assert (image if image.ndim == 2 else image[..., 0]).tolist() == expected, name


@both
@pytest.mark.parametrize(
    ("brightest", "shades"),
    [
        (255, [0, 64, 255]),  # 8 bits: as they are
        (4095, [0, 4, 255]),  # 12: by 16, so that 64 is 4 and 4095 is 255
        (65535, [0, 0, 255]),  # 16: by 256
    ],
)
def test_values_of_16_bits_are_scaled_by_the_bits_in_use(
    brightest: int, shades: list[int], packed: Packed, tmp_path: Path
) -> None:
    """In all images together: the dark one is not brightened more than the other."""
    tree = {
        "train/a/dark.png": file_of(np.array([[0, 64, 64]], dtype=np.uint16)),
        "test/a/bright.tif": file_of(np.array([[0, 64, brightest]], dtype=np.uint16), "TIFF"),
    }
    raw = ImageFolder().load(packed(tree, tmp_path / "images"))
    assert raw.test.decoded().tolist() == [[shades]]
    assert raw.train.decoded().tolist() == [[[shades[0], shades[1], shades[1]]]]


def test_colours_of_16_bits_are_read_where_they_use_them(tmp_path: Path) -> None:
    deep, twelve = (png_of(1, 16, 2, struct.pack(">3H", 64, 64, brightest)) for brightest in (0x4567, 4095))
    assert decoded(one_each(deep, "png"), tmp_path / "all").tolist() == [[[[0, 0, 0x45]]]]
    with pytest.raises(DataError, match=r"train/a/1\.png: .*16-bit"):
        decoded(one_each(twelve, "png"), tmp_path / "twelve")


def test_pixels_whose_scale_or_colour_is_not_known_are_refused_by_name(tmp_path: Path) -> None:
    gray = np.array([[0, 0x4567]], dtype=np.uint16)
    lab = io.BytesIO()
    Image.new("LAB", (2, 2)).save(lab, "TIFF")
    for name, content in {
        "floating": file_of(np.zeros((2, 2), dtype=np.float32), "TIFF"),
        "negative": file_of(gray, "TIFF", tiffinfo={262: 0}),  # 0 is white
        "lab": lab.getvalue(),
    }.items():
        with pytest.raises(DataError, match=r"(train|test)/a/1\.tif \(pixels of"):
            decoded(one_each(content, "tif"), tmp_path / name)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = [f"{part}/{name}/1.png" for part in ("train", "test") for name in ("a", "b")]
    return as_folder(dict.fromkeys(names, file_of(stripes(8, 8))), tmp_path / "images")


def test_linked_classes_splits_and_files_are_read(tree: Path, tmp_path: Path) -> None:
    as_folder({"train/1.png": file_of(stripes(8, 8)), "test/1.png": file_of(stripes(8, 8))}, tmp_path / "away")
    for part in ("train", "test"):
        (tree / part / "linked").symlink_to(tmp_path / "away" / part)
        (tree / part / "a" / "2.png").symlink_to(tmp_path / "away" / part / "1.png")
    raw = ImageFolder().load(tree)
    assert raw.class_names == ("a", "b", "linked") and raw.train.labels.tolist() == [0, 0, 1, 2]
    other = tmp_path / "other" / "below"
    other.mkdir(parents=True)
    for part in ("train", "test"):
        (other / part).symlink_to(tree / part)
    for root in (other, other.parent):
        found = ImageFolder().load(root)
        assert found.class_names == raw.class_names
        assert (found.test.decoded() == raw.test.decoded()).all()


@pytest.mark.parametrize("place", ["train/a/9.png", "train/c", "train"])
def test_a_link_to_nothing_is_named(place: str, tree: Path) -> None:
    if place == "train":
        (tree / "train").rename(tree / "elsewhere")
    (tree / place).symlink_to("gone")
    with pytest.raises(DataError, match=rf"{place}(: | \()a link"):
        ImageFolder().load(tree)


@pytest.mark.parametrize("target", ["..", ".", "9.png"])
def test_a_link_back_ends(target: str, tree: Path) -> None:
    (tree / "train" / "a" / "9.png").symlink_to(target)
    with pytest.raises(DataError, match=r"train/a/9\.png"):
        ImageFolder().load(tree)


def test_links_beside_the_images_do_not_matter(tree: Path) -> None:
    (tree / "notes").symlink_to("gone")
    (tree / "train" / "a" / ".hidden.png").symlink_to("gone")
    (tree / "round").symlink_to(".")
    assert len(ImageFolder().load(tree).train.labels) == 2


def test_a_name_of_zeros_in_a_zip_is_damage(tmp_path: Path) -> None:
    """As a bad block leaves it: the name ends at its first zero, so it is empty."""
    path = as_zip(one_each(file_of(stripes(8, 8)), "png"), tmp_path / "images")
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        name = archive.infolist()[-1].filename.encode()
    assert content.count(name) == 2  # before the file, and in the directory
    path.write_bytes(content.replace(name, bytes(len(name))))
    with pytest.raises(DataError, match=r"images\.zip: damaged"):
        ImageFolder().load(path)


def test_a_link_in_a_zip_is_named(tmp_path: Path) -> None:
    path = as_zip(one_each(file_of(stripes(8, 8)), "png"), tmp_path / "images")
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("train/a/2.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "1.png")
    with pytest.raises(DataError, match=r"train/a/2\.png is a link"):
        ImageFolder().load(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anywhere")
def test_a_class_that_may_not_be_read_is_named(tree: Path) -> None:
    (tree / "train" / "a").chmod(0)
    with pytest.raises(DataError, match="train/a: cannot be read"):
        ImageFolder().load(tree)


def test_a_class_whose_name_is_no_text_is_named(tree: Path) -> None:
    for part in ("train", "test"):
        (tree / part / "a").rename(tree / part / os.fsdecode(b"caf\xe9"))
    with pytest.raises(DataError, match="UTF-8") as refused:
        ImageFolder().load(tree)
    str(refused.value).encode()  # can be printed
    assert r"caf\udce9" in str(refused.value)


def test_files_may_have_names_that_are_no_text(tree: Path) -> None:
    (tree / "train" / "a" / "1.png").rename(tree / "train" / "a" / os.fsdecode(b"caf\xe9.png"))
    assert prepare_dataset(ImageFolder(), tree).meta.train_size == 2


@both
def test_one_class_in_two_unicode_forms_is_named_twice(packed: Packed, tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    image = file_of(stripes(8, 8))
    root = packed({f"train/{composed}/1.png": image, f"test/{decomposed}/1.png": image}, tmp_path / "images")
    with pytest.raises(DataError) as refused:
        ImageFolder().load(root)
    assert ascii(composed) in str(refused.value) and ascii(decomposed) in str(refused.value)
