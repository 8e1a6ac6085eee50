"""Images: a step has the same batch on every machine, and errors name files that are missing or broken."""

import os
import shutil
import struct
import sys
import zlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import jaxpar as jp
from jaxpar.data import images
from jaxpar.data.images import Images
from jaxpar.models import named


@pytest.fixture(scope="module")
def digits() -> Images:
    return images.digits()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two classes: 20 wide red images, and 11 tall blue ones in a folder of their class."""
    root = tmp_path_factory.mktemp("photos")
    for name, color, size, subfolder, files in (
        ("red", (255, 0, 0), (9, 4), "", 20),
        ("blue", (0, 0, 255), (4, 9), "x", 11),
    ):
        (root / name / subfolder).mkdir(parents=True)
        for i in range(files):
            suffix = (".png", ".JPG")[i % 2]
            image = Image.new("RGB", size, (color[0], 10 * i, color[2]))
            image.save(root / name / subfolder / f"{i:02}{suffix}", quality=95)
    (root / "red" / "notes.txt").write_text("no image")
    (root / "red" / ".hidden.png").write_text("no image")
    (root / ".cache").mkdir()
    return root


def test_digits_are_ten_classes_of_grey_pixels(digits: Images) -> None:
    assert digits.sizes == {"classes": 10, "channels": 1, "size": 8}
    assert "1,797 images of 10 classes" in digits.description
    dataset = load_digits()
    pixels = (dataset.images[..., None] / 8 - 1).astype(np.float32)
    expected = {image.tobytes(): label for image, label in zip(pixels, dataset.target, strict=True)}
    assert {image.tobytes(): label for image, label in [*digits.train, *digits.rest]} == expected
    assert len(digits.train) + len(digits.rest) == 1797
    assert {label for _, label in digits.rest} == set(range(10))
    assert digits.baselines["prior"] == pytest.approx(np.log(10), abs=0.1)
    batch = next(digits.batches(64, seed=0))
    assert (batch["image"].shape, batch["image"].dtype) == ((64, 8, 8, 1), np.float32)
    assert (batch["label"].shape, batch["label"].dtype) == ((64,), np.int32)
    assert (batch["image"].min(), batch["image"].max()) == (-1, 1)
    assert not np.array_equal(batch["image"], next(digits.batches(64, seed=1))["image"])


def labelled(batches: Iterable[Any]) -> list[tuple[np.ndarray, int]]:
    """Return the images of batches, each with its label."""
    return [pair for batch in batches for pair in zip(batch["image"], batch["label"], strict=True)]


def test_an_epoch_holds_every_training_image_once_and_none_that_is_held_out(photos: Path) -> None:
    source = images.folder(photos, 4)
    epoch = labelled(islice(source.batches(7, seed=0), 4))
    pairs = sorted((image.tobytes(), label) for image, label in epoch)
    assert len(set(pairs)) == len(source.train) == 28
    assert pairs == sorted((source.read(file).tobytes(), label) for file, label in source.train)
    assert not {file for file, _ in source.train} & {file for file, _ in source.rest}


def test_held_out_images_come_once_in_order_and_padded(photos: Path, digits: Images) -> None:
    batches = list(images.folder(photos, 4).held_out(2))
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 0]]
    assert [batch["label"].tolist() for batch in batches] == [[0, 1], [1, 0]]
    assert batches[0]["image"].shape == batches[1]["image"].shape == (2, 4, 4, 3)
    digit_batches = list(digits.held_out(100))
    assert sum(batch["mask"].sum() for batch in digit_batches) == 176
    pairs = labelled(digit_batches)
    assert [label for _, label in pairs[:176]] == [label for _, label in digits.rest]
    np.testing.assert_array_equal([image for image, _ in pairs[:176]], [item for item, _ in digits.rest])


def test_a_folder_is_its_classes_in_order(photos: Path) -> None:
    source = images.folder(str(photos), size=4)
    assert source.classes == ("blue", "red")
    assert source.sizes == {"classes": 2, "channels": 3, "size": 4}
    assert "31 images of 2 classes, 3 of them held out" in source.description
    assert [file.name for file, label in source.rest] == ["09.JPG", "09.JPG", "19.JPG"]
    for file, label in (source.train[0], source.train[-1]):
        mean = source.read(file).mean(axis=(0, 1))
        assert mean[0] == pytest.approx(1 if label else -1, abs=0.05)
        assert mean[2] == pytest.approx(-1 if label else 1, abs=0.05)


def test_images_are_cropped_at_the_centre_and_turned_as_the_camera_says(tmp_path: Path) -> None:
    pixels = np.zeros((6, 10, 3), np.uint8)
    pixels[:, 2:8] = 255
    pixels[0] = 0
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    wide, turned = (images._decode(tmp_path / f"{name}.png", 6) for name in ("wide", "turned"))
    assert wide.dtype == np.float32
    assert (wide[0] == -1).all()
    assert (wide[1:] == 1).all()
    np.testing.assert_array_equal(turned, wide[::-1])


def test_what_is_no_folder_of_classes_says_what_would_be(tmp_path: Path) -> None:
    says = r"no folder .*nowhere; give one that has a subfolder of images for each class"
    with pytest.raises(ValueError, match=says):
        images.folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no subfolders; put the images of each class into a subfolder"):
        images.folder(tmp_path)
    (tmp_path / "cats").mkdir()
    with pytest.raises(ValueError, match=r"has one subfolder, cats; put .* two or more"):
        images.folder(tmp_path)
    (tmp_path / "dogs").mkdir()
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"cats holds no images; add some \(\..*\), or remove it"):
        images.folder(tmp_path)
    for name in ("cats", "dogs"):
        Image.new("L", (2, 2)).save(tmp_path / name / "1.png")
    with pytest.raises(ValueError, match=r"at most 1 images of a class, .*; add images until one class has 10"):
        images.folder(tmp_path)
    with pytest.raises(ValueError, match=r"size=0 leaves no pixels"):
        images.folder(tmp_path, size=0)


def copy_with_broken_files(photos: Path, root: Path) -> Path:
    """Copy the photos, with one file cut short and two that are no images, one of them held out."""
    shutil.copytree(photos, root)
    (root / "red" / "04.png").write_bytes((root / "red" / "04.png").read_bytes()[:44])
    (root / "red" / "09.JPG").write_bytes(b"not a jpeg")
    (root / "blue" / "x" / "03.JPG").write_bytes(b"")
    return root


def test_images_that_cannot_be_read_end_a_long_run_before_it_begins(photos: Path, tmp_path: Path) -> None:
    """A run once ended at the step that drew such a file, hours later."""
    source = images.folder(copy_with_broken_files(photos, tmp_path / "photos"), 4)
    source.check_readable(27)  # a run that reads fewer than all 28 images may never meet one
    says = r"cannot read .*04\.png as PNG, .*; mend the file, remove it, or leave it out"
    with pytest.raises(ValueError, match=says):
        source.read(tmp_path / "photos" / "red" / "04.png")
    says = r"3 images cannot be read \(.*03\.JPG, .*04\.png, .*09\.JPG\), the first because of this: .*; mend or remove"
    with pytest.raises(ValueError, match=says):
        source.check_readable(28)
    images.folder(photos, 4).check_readable(10**9)
    net = named("mlp-tiny", **source.sizes)
    trainer = jp.Trainer(net.model, optax.sgd(0.1), source, "ddp", jp.Loop(steps=4, rows=8, quiet=True))
    with pytest.raises(ValueError, match="3 images cannot be read"):
        trainer.run()
    assert trainer.state is None


def test_images_that_cannot_be_read_are_left_out_by_name_where_that_is_asked_for(photos: Path, tmp_path: Path) -> None:
    root = copy_with_broken_files(photos, tmp_path / "photos")
    source, unchecked = images.folder(root, 4, broken="skip"), images.folder(root, 4)
    assert source.description.endswith("3 images cannot be read (" + ", ".join(
        str(root / name) for name in ("blue/x/03.JPG", "red/04.png", "red/09.JPG")) + ") and left out")  # fmt: skip
    broken = {root / "blue/x/03.JPG", root / "red/04.png", root / "red/09.JPG"}
    for items, all_items in ((source.train, unchecked.train), (source.rest, unchecked.rest)):
        assert items == [item for item in all_items if item[0] not in broken]  # the split of the others is unchanged
    assert (len(source.train), len(source.rest)) == (26, 2)
    assert len(list(islice(source.batches(26, seed=0), 3))) == 3
    assert images.folder(photos, 4, broken="skip").description == images.folder(photos, 4).description
    with pytest.raises(ValueError, match=r"broken='skpi': use 'error' or 'skip' .did you mean 'skip'"):
        images.folder(photos, broken="skpi")
    for file in root.rglob("09.JPG"):
        file.write_bytes(b"")
    (root / "red" / "19.JPG").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cannot be read .*, and none is left to hold out; mend them, or add images"):
        images.folder(root, 4, broken="skip")


@pytest.mark.slow
def test_a_run_goes_on_with_mended_images(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Once a run could not continue at all after a file had been mended or removed."""
    root = tmp_path / "photos"
    shutil.copytree(photos, root)

    def run(steps: int, **options: object) -> jp.Trainer:
        source, out = images.folder(root, 4), tmp_path / "run"
        loop = jp.Loop(steps=steps, rows=8, out=out, save_every=2, **options)
        trainer = jp.Trainer(named("mlp-tiny", **source.sizes).model, optax.sgd(0.1), source, "single", loop)
        trainer.run()
        return trainer

    run(2)
    (root / "red" / "04.png").unlink()
    with pytest.raises(ValueError, match=r"another run: data '31 images, .*' there and '30 images, .* with changed"):
        run(4, resume=True)
    capsys.readouterr()
    trainer = run(4, resume=True, changed_data=True, on_nonfinite="rollback")
    assert (trainer.number, trainer.position["batches"]) == (4, 4)
    assert "was saved with data '31 images" in capsys.readouterr().out
    run(6, resume=True)  # the checkpoint is of the new data
    with pytest.raises(ValueError, match="changed_data=True is for a run that goes on"):
        jp.Loop(changed_data=True)


@pytest.mark.parametrize(
    ("package", "module", "load"),
    [
        ("scikit-learn", "sklearn.datasets", images.digits),
        ("pillow", "PIL.Image", lambda: images.folder(".")),
        ("grain", "grain", lambda: Images("", ("a",), 1, 1, [(0, 0)], [], np.asarray).batches(1, 0)),
    ],
)
def test_missing_packages_are_named(package: str, module: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"need {package}, which is not installed: pip install {package}"):
        load()


def test_files_that_are_no_image_are_refused_before_a_program_runs_them(photos: Path, tmp_path: Path) -> None:
    # Pillow starts Ghostscript for EPS files with any suffix. Once a FIFO blocked forever, and any number of pixels was
    # decoded.
    shutil.copytree(photos, root := tmp_path / "photos")
    (root / "red" / "folder.png").mkdir()
    (root / "red" / "drawing.eps").write_text(eps := "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    source = images.folder(root, size=8)
    assert not any(file.suffix == ".eps" or file.is_dir() for file, _ in (*source.train, *source.rest))
    (drawing := root / "red" / "drawing.png").write_text(eps)
    with pytest.raises(ValueError, match=r"cannot read .*drawing\.png as PNG, JPEG, .* or TIFF: cannot identify"):
        source.read(drawing)
    Image.new("1", (9500, 9500)).save(bomb := root / "red" / "bomb.png")
    with pytest.raises(ValueError, match=r"bomb\.png as .*: its 90,250,000 pixels are more than|decompression bomb"):
        source.read(bomb)
    os.mkfifo(fifo := root / "red" / "fifo.png")
    with pytest.raises(ValueError, match="is a FIFO"):
        images.folder(root, size=8)
    with pytest.raises(ValueError, match="is a FIFO"):
        source.read(fifo)


GREY = np.linspace(0, 1, 8)


def tiff(row: np.ndarray, bits: int, sample_format: int = 1, photometric: int = 1) -> bytes:
    """Return a TIFF file of eight such rows of eight grey pixels. Pillow can read more kinds of them than write."""
    data = 8 * row.tobytes()
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: photometric, 277: 1, 278: 8, 279: len(data), 339: sample_format}
    tags[273] = 8 + 2 + 12 * (len(tags) + 1) + 4  # the offset of the pixels, after the tags
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + data


def twelve_bits(values: np.ndarray) -> np.ndarray:
    """Pack pairs of values into three bytes."""
    first, second = values.astype(int).reshape(-1, 2).T
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=-1).astype(np.uint8)


SCALED = {
    "8 bits": tiff((255 * GREY).astype("<u1"), 8),
    "8 bits, 0 is white": tiff(255 - (255 * GREY).astype("<u1"), 8, photometric=0),
    "16 bits": tiff((65535 * GREY).astype("<u2"), 16),
    "16 bits, 0 is white": tiff(65535 - (65535 * GREY).astype("<u2"), 16, photometric=0),
    "12 bits": tiff(twelve_bits(4095 * GREY), 12),
}
REFUSED = {
    "signed 8 bits": (tiff((255 * GREY - 128).astype("<i1"), 8, 2), r"signed integers \(Pillow's mode L\)"),
    "signed 16 bits": (tiff((65535 * GREY - 32768).astype("<i2"), 16, 2), r"signed integers \(Pillow's mode I\)"),
    "32 bits": (tiff(((2**32 - 1) * GREY).astype("<u4"), 32), r"32-bit or signed integers \(Pillow's mode I\)"),
    "signed 32 bits": (tiff((2**31 * GREY - 2**30).astype("<i4"), 32, 2), r"signed integers \(Pillow's mode I\)"),
    "floats": (tiff(GREY.astype("<f4"), 32, 3), r"floating-point numbers \(Pillow's mode F\)"),
    "floats, 0 is white": (tiff(GREY.astype("<f4"), 32, 3, 0), r"floating-point numbers \(Pillow's mode F\)"),
}


@pytest.mark.parametrize("kind", SCALED)
def test_grey_of_more_than_8_bits_is_scaled_by_its_range(kind: str, tmp_path: Path) -> None:
    """Grey of 12 and 16 bits once became white, or black if 0 is white, as Pillow's conversion to RGB clips it."""
    (tmp_path / "ramp.tiff").write_bytes(SCALED[kind])
    pixels = (images._decode(tmp_path / "ramp.tiff", 8) + 1) * 127.5
    expected = np.broadcast_to(np.array([0, 36, 72, 109, 145, 182, 218, 255])[:, None], (8, 8, 3))
    np.testing.assert_allclose(pixels, expected, atol=1)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_grey_of_16_bits_is_the_picture_of_8_bits_that_shows_the_same(suffix: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50))
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"8.{suffix}")
    Image.fromarray((257 * pixels).astype(np.uint16)).save(tmp_path / f"16.{suffix}")
    eight, sixteen = (images._decode(tmp_path / f"{bits}.{suffix}", 20) for bits in (8, 16))
    np.testing.assert_allclose(eight, sixteen, atol=1.01 / 127.5)


@pytest.mark.parametrize("kind", REFUSED)
def test_pixels_without_a_known_range_are_refused_by_name(kind: str, photos: Path, tmp_path: Path) -> None:
    """Such pixels once became black and white silently: in training, before a long run, and with broken="skip"."""
    shutil.copytree(photos, root := tmp_path / "photos")
    data, says = REFUSED[kind]
    (file := root / "red" / "ramp.tiff").write_bytes(data)
    source = images.folder(root, 4)
    with pytest.raises(ValueError, match=rf"cannot read .*ramp\.tiff as .* its pixels are .*{says}, and nothing says"):
        source.read(file)
    with pytest.raises(ValueError, match=rf"1 image cannot be read \(.*ramp\.tiff\), the first because .*{says}"):
        source.check_readable(10**9)
    assert "1 image cannot be read" in images.folder(root, 4, broken="skip").description
    # Follow the error's advice: grey with 16 unsigned bits.
    with Image.open(file) as image:
        values = np.asarray(image).astype(float)
    scaled = (values - values.min()) / (values.max() - values.min()) * 65535
    Image.fromarray(scaled.astype(np.uint16)).save(file)
    assert images.folder(root, 4).read(file).shape == (4, 4, 3)


def test_an_image_of_very_many_rows_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """88,000,000 rows of one bit pass the limit of pixels, but Pillow's pointers to the rows took 2.6 GB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for width, height in ((1, 88_000_000), (88_000_000, 1), (1_000_001, 80)):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
        (file := tmp_path / "long.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b""))
        with pytest.raises(ValueError, match=r"long\.png as .*: one side is [\d,]+ pixels long, and 1,000,000 are"):
            images._decode(file, 4)
