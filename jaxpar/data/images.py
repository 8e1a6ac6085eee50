"""Sources of images: scikit-learn's digits, which need no download, and folders of image files.

Both are a `jaxpar.data.Source`, read by grain. Batches are {"image": float32 [B, H, W, C] from -1 to 1, "label": int32
[B]}, global. Every epoch has another order, and batch i depends only on (seed, i). They need the packages of the extra
`images`. A file becomes a row in these steps:

    open (one of `FORMATS`) -> check size and value range -> turn by EXIF -> crop and resize -> 8 bits -> float32

Dims: B rows, H height, W width (equal), C channels.
"""

import hashlib
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..backend.buckets import Place, below, is_bucket
from ..backend.counts import is_count
from ..backend.files import place, plain
from ..backend.packages import needed
from ..backend.text import few
from . import Batch, pad_rows
from .corpus import check_broken

HELD_OUT = 10  # one image in 10 of each class is held out
THREADS = min(16, os.cpu_count() or 1)  # threads that decode images

# The formats that are decoded, by Pillow's names. Pillow has 40 others. One of them, EPS, runs the file as a program of
# Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_FORMAT_LIST = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
# Pillow's modes of at most 8 bits a channel, which it converts to RGB correctly. In other modes it clips every value to
# 0..255: 16-bit grey becomes white, a fraction becomes black.
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr", "LAB")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_MODE_NUMBERS = {"I": "32-bit or signed integers", "F": "floating-point numbers"}
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF 6.0
_WHITE_IS_ZERO, _UNSIGNED = 0, 1  # values of _PHOTOMETRIC and _SAMPLE_FORMAT
# The largest height and width. Pillow stores a pointer for each row in every copy of an image: 88,000,000 rows of one
# bit took 2.6 GB.
_MAX_SIDE = 1_000_000

Item = tuple[Any, int]  # (argument of `Images.read`, number of the class)


@dataclass(frozen=True, eq=False)
class Images:
    """A `Source` of images, built by `digits` or `folder`.

    Attributes:
      description: one line for people.
      classes: the name of each class; labels are their indices.
      size, channels: H = W, and C.
      train, rest: the items to train on, and those held out.
      read: returns an item's image, float32 [H, W, C] from -1 to 1.
    """

    description: str
    classes: tuple[str, ...]
    size: int
    channels: int
    train: Sequence[Item]
    rest: Sequence[Item]
    read: Callable[[Any], np.ndarray]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that a model needs: `classes`, `channels` and `size`."""
        return {"classes": len(self.classes), "channels": self.channels, "size": self.size}

    @cached_property
    def fingerprint(self) -> str:
        """The number of images and a checksum of all files (or arrays) and labels, wherever they are stored.

        Computing it reads every file once, as an epoch does.
        """

        # An item is a path with `folder` and an array with `digits`.
        def digest_item(item: Item) -> bytes:
            content = item[0].read_bytes() if hasattr(item[0], "read_bytes") else np.ascontiguousarray(item[0]).data
            return hashlib.sha256(content).digest() + item[1].to_bytes(4)

        digest = hashlib.sha256()
        with ThreadPoolExecutor(THREADS) as threads:
            # The threads return digests in the order of the items, so that the checksum does not depend on their speed.
            for items in (self.train, self.rest):
                digest.update(f"{len(items)} ".encode())
                for item_digest in threads.map(digest_item, items):
                    digest.update(item_digest)
        return f"{len(self.train) + len(self.rest):,} images, sha256 {digest.hexdigest()[:16]}"

    @property
    def baselines(self) -> Mapping[str, float]:
        """The held-out loss of the classes' frequencies in `train`, one added to every count, in nats per image."""
        # One is added to every count: a class that `train` lacks would cost infinitely many nats.
        counts = Counter(label for _, label in self.train)
        total = len(self.train) + len(self.classes)
        return {"prior": sum(math.log(total / (counts[label] + 1)) for _, label in self.rest) / len(self.rest)}

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Return endless batches {"image", "label"}; batch i depends only on (seed, i)."""
        endless = needed("grain", "images need").MapDataset.source(self.train).shuffle(seed=seed).repeat()
        # Slicing reads nothing: grain shuffles indices, and an image is read when its row is drawn.
        return self._read(endless[start * rows :], rows)

    def held_out(self, rows: int) -> Iterator[Batch]:
        """Yield the held-out images once, in order: {"image", "label", "mask": float32 [B]}, filled up with zeros."""
        for batch in self._read(needed("grain", "images need").MapDataset.source(self.rest), rows):
            padded, mask = pad_rows(batch, rows)
            yield {**padded, "mask": mask}

    def check_readable(self, rows: int) -> None:
        """Decode every image once, before a run that reads `rows` rows in total.

        Does nothing if the run reads fewer rows than there are images to train on: it would not read all of them.

        Raises:
          ValueError: images cannot be read. The error has their number and names.
        """
        if rows < len(self.train):
            return
        if broken := _find_broken((*self.train, *self.rest), self.read):
            first = next(iter(broken.values()))
            raise ValueError(
                f"{_describe_broken(broken)}, the first because of this: {first.__cause__}; mend or remove them, "
                "or leave them out with broken='skip'"
            )

    def _read(self, items: Any, rows: int) -> Iterator[Batch]:
        """Read items in threads, in order, as batches of `rows` rows."""
        # Read images ahead, not batches: memory then holds the images of two batches.
        options = needed("grain", "images need").ReadOptions(THREADS, prefetch_buffer_size=2 * rows)
        read_row = lambda item: {"image": self.read(item[0]), "label": np.int32(item[1])}
        return iter(items.map(read_row).to_iter_dataset(options).batch(rows))


def digits() -> Images:
    """Return 1,797 handwritten digits of 8 x 8 grey pixels (Alpaydin & Kaynak 1998); every tenth of each is held out.

    Raises:
      ValueError: scikit-learn is not installed.
    """
    dataset = needed("sklearn.datasets", "images need").load_digits()
    images = (dataset.images[..., None] / 8 - 1).astype(np.float32)  # pixels are 0 to 16
    classes = tuple(map(str, dataset.target_names))
    groups = [[(image, label) for image in images[dataset.target == label]] for label in range(len(classes))]
    return _split("digits of scikit-learn", classes, 8, 1, groups, np.asarray)


def folder(path: Place | str, size: int = 224, broken: str = "error") -> Images:
    """Return a source of image files, with one subfolder for each class.

    Classes are numbered in the order of their names. Files may be at any depth below their class. Hidden files are left
    out, and so are files without a suffix of PNG, JPEG, WebP, BMP, GIF or TIFF. Every tenth file of a class, in the
    order of paths, is held out.

    An image (the first one of a file) is turned as its EXIF data say, cropped at its centre to a square, resized to
    `size` and converted to RGB with 8 bits. Grey of 12 or 16 bits is scaled by its range.

    Args:
      path: the folder, or its address in s3:// or gs://. An image is read from there every time it is drawn.
      size: height and width, in pixels.
      broken: the treatment of files that cannot be read. "error" raises an error when they are drawn, or before a long
        run (`check_readable`). "skip" decodes all files now and leaves them out; `description` has their number and
        names.

    Raises:
      ValueError: the folder does not exist or has fewer than two classes, a class is empty, no class has ten images, a
        file is a FIFO or a device, or Pillow is not installed. Later, if a file cannot be read, has another format, has
        pixels without a known range (32 bits, signed or floating-point numbers), has more pixels than Pillow takes
        (`PIL.Image.MAX_IMAGE_PIXELS`, 89 million) or a side of more than a million. The error names the file.
    """
    check_broken(broken)
    root, pillow = place(path, "path"), needed("PIL.Image", "images need")
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give one that has a subfolder of images for each class")
    if not is_count(size):
        raise ValueError(f"size={size!r} leaves no pixels; use a whole number from 1, such as 224")
    # 1. The classes.
    folders = [subfolder for subfolder in root.iterdir() if subfolder.is_dir() and not subfolder.name.startswith(".")]
    folders.sort(key=lambda subfolder: subfolder.name)
    if len(folders) < 2:
        contents = f"one subfolder, {folders[0].name}" if folders else "no subfolders"
        raise ValueError(
            f"{root} has {contents}; put the images of each class into a subfolder of its own, two or more"
        )
    # 2. The files of each class.
    suffixes = {suffix for suffix, format in pillow.registered_extensions().items() if format in FORMATS}
    groups = []
    for label, subfolder in enumerate(folders):
        listing = sorted(below(subfolder).items(), key=lambda item: item[0].as_posix())
        is_hidden = lambda name: any(part.startswith(".") for part in name.parts)
        candidates = (file for name, file in listing if name.suffix.lower() in suffixes and not is_hidden(name))
        # In a bucket there are no FIFOs, devices or folders, and asking for each file's kind would take a request.
        files = [
            file if is_bucket(file) else plain(file) for file in candidates if is_bucket(file) or not file.is_dir()
        ]
        if not files:
            raise ValueError(
                f"{subfolder} holds no images; add some ({', '.join(sorted(suffixes)[:8])}, ...), or remove it"
            )
        groups.append([(file, label) for file in files])
    if max(map(len, groups)) < HELD_OUT:
        raise ValueError(
            f"{root} has at most {max(map(len, groups))} images of a class, and none can be held out; add images "
            f"until one class has {HELD_OUT}"
        )
    # 3. The source.
    classes = tuple(subfolder.name for subfolder in folders)
    images = _split(str(root), classes, size, 3, groups, lambda file: _decode(file, size))
    return _drop_broken(images) if broken == "skip" else images


def _drop_broken(images: Images) -> Images:
    """Return the readable images, in the same order and split; the description names the others."""
    broken = _find_broken((*images.train, *images.rest), images.read)
    train, rest = ([item for item in items if item[0] not in broken] for items in (images.train, images.rest))
    if broken and not (train and rest):
        raise ValueError(
            f"{_describe_broken(broken)}, and none is left to {'train on' if not train else 'hold out'}; mend them, or "
            "add images"
        )
    description = f"{images.description}; {_describe_broken(broken)} and left out" if broken else images.description
    return replace(images, description=description, train=train, rest=rest)


def _find_broken(items: Sequence[Item], read: Callable[[Any], np.ndarray]) -> dict[Any, ValueError]:
    """Decode every file once; return the files that cannot be read, with their errors."""

    def read_error(item: Item) -> ValueError | None:
        try:
            read(item[0])
        except ValueError as error:
            return error
        return None

    with ThreadPoolExecutor(THREADS) as threads:
        errors = zip(items, threads.map(read_error, items), strict=True)
        return {item[0]: error for item, error in errors if error is not None}


def _describe_broken(broken: Mapping[Any, ValueError]) -> str:
    """Return the number and names of unreadable files, for errors and descriptions."""
    plural = "" if len(broken) == 1 else "s"
    return f"{len(broken):,} image{plural} cannot be read ({few(list(map(str, broken)))})"


def _split(
    source: str, classes: tuple[str, ...], size: int, channels: int, groups: Sequence[Sequence[Item]], read: Any
) -> Images:
    """Build a source from the items of each class, holding out every tenth of them."""
    train = [item for group in groups for i, item in enumerate(group, 1) if i % HELD_OUT]
    # Interleave the classes, so that the first held-out batches have all of them.
    rounds = itertools.zip_longest(*(group[HELD_OUT - 1 :: HELD_OUT] for group in groups))
    rest = [item for items in rounds for item in items if item is not None]
    counts = f"{len(train) + len(rest):,} images of {len(classes)} classes, {len(rest):,} of them held out"
    return Images(f"{source}: {counts}", classes, size, channels, train, rest, read)


def _decode(file: Place, size: int) -> np.ndarray:
    """Return the image in a file, float32 [size, size, 3] from -1 to 1; raise ValueError if it cannot be read."""
    from PIL import Image, ImageOps

    try:
        content = io.BytesIO(file.read_bytes()) if is_bucket(file) else plain(file)
        with Image.open(content, formats=FORMATS) as image:
            # Opening reads the header only: check it before pixels are allocated.
            # Pillow itself only warns from this number of pixels on, and refuses at twice the number.
            num_pixels, max_pixels = math.prod(image.size), Image.MAX_IMAGE_PIXELS
            if max_pixels is not None and num_pixels > max_pixels:
                raise ValueError(f"its {num_pixels:,} pixels are more than PIL.Image.MAX_IMAGE_PIXELS, {max_pixels:,}")
            if max(image.size) > _MAX_SIDE:
                raise ValueError(f"one side is {max(image.size):,} pixels long, and {_MAX_SIDE:,} are the most")
            _check_range(image)
            ImageOps.exif_transpose(image, in_place=True)
            # An RGB image is not converted: that would copy up to 89 million pixels.
            rgb_or_grey = image if image.mode in ("RGB", *_SIXTEEN_BITS) else image.convert("RGB")
            square = ImageOps.fit(rgb_or_grey, (size, size), Image.Resampling.BILINEAR)
            pixels = _to_eight_bits(square, image) if square.mode in _SIXTEEN_BITS else np.asarray(square)
    except ConnectionError:  # the bucket does not answer: the image may be fine
        raise
    except Exception as error:  # every format of Pillow raises other types
        hint = "mend the file, remove it, or leave it out with broken='skip'"
        raise ValueError(f"cannot read {file} as {_FORMAT_LIST}: {error}; {hint}") from error
    return pixels.astype(np.float32) / 127.5 - 1


def _check_range(image: Any) -> None:
    """Raise ValueError unless mode and tags of an opened image say which values are black and white."""
    has_known_range = image.mode in (*_EIGHT_BITS, *_SIXTEEN_BITS)
    # A TIFF without this tag has unsigned values; with it, the tag has one number for each channel.
    if has_known_range and set(_tags(image).get(_SAMPLE_FORMAT, [])) <= {_UNSIGNED}:
        return
    numbers = "signed integers" if has_known_range else _MODE_NUMBERS.get(image.mode, "of another kind")
    raise ValueError(
        f"its pixels are {numbers} (Pillow's mode {image.mode}), and nothing says which values are black and white; "
        "save it as RGB or grey with 8 unsigned bits a channel, or as grey with 16"
    )


def _to_eight_bits(square: Any, image: Any) -> np.ndarray:
    """Convert grey pixels of 12 or 16 bits, cropped from `image`, to uint8 [H, W, 3]: their range becomes 0..255."""
    tags = _tags(image)
    # uint32: 65,535 times 255 does not fit into 16 bits.
    grey = np.asarray(square).astype(np.uint32) * 255 // (2 ** tags.get(_BITS, (16,))[0] - 1)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow inverts only images of fewer bits
        grey = 255 - grey
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=-1)


def _tags(image: Any) -> Mapping[int, Any]:
    """Return the tags of a TIFF file; other formats have none."""
    return getattr(image, "tag_v2", {})
