"""Images to train on: scikit-learn's digits, which need no download, and folders of image files.

Both are a `jaxpar.data.Source`, read by grain: batches are {"image": float32 [B, H, W, C] from -1 to 1, "label": int32
[B]}, global, in an order that is shuffled anew in every epoch, and batch i is a function of (seed, i) alone. They need
the packages of the extra `images`.

Dims: B rows, H height, W width (the same), C channels.
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
from pathlib import PurePath
from typing import Any

import numpy as np

from ..backend.buckets import Place, below, is_bucket
from ..backend.files import place, plain
from ..backend.packages import needed
from ..backend.text import did_you_mean, few
from . import Batch, pad_rows

HELD_OUT = 10  # one image of a class in so many is held out
THREADS = 16  # at most, to decode with
BROKEN = ("error", "skip")

# What is decoded, by Pillow's names. It knows 40 more, and one of them, EPS, runs the file as a program of Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_ONE_OF = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
# Pillow's modes of at most 8 bits a channel, which it converts to RGB as they are. In other modes it clips every value
# to 0..255: grey of 16 bits becomes white, a fraction becomes black.
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr", "LAB")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_NUMBERS = {"I": "32-bit or signed integers", "F": "floating-point numbers"}
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF 6.0
_WHITE_IS_ZERO, _UNSIGNED = 0, 1  # values of the last two
# Pixels of a side. Pillow keeps a pointer for each row in every copy: 88,000,000 rows of one bit took 2.6 GB.
_LONGEST = 1_000_000

Item = tuple[Any, int]  # what `read` takes, and the number of its class


@dataclass(frozen=True, eq=False)
class Images:
    """A `Source` of images, from `digits` or `folder`: `read` makes float32 [H, W, C] of what an item holds."""

    description: str
    classes: tuple[str, ...]
    size: int
    channels: int
    train: Sequence[Item]
    rest: Sequence[Item]
    read: Callable[[Any], np.ndarray]

    @property
    def sizes(self) -> Mapping[str, int]:
        """`classes`, `channels` and `size`, which a model must have."""
        return {"classes": len(self.classes), "channels": self.channels, "size": self.size}

    @cached_property
    def fingerprint(self) -> str:
        """What the images are, wherever they lie: how many, and a checksum of all files (or arrays) and labels.

        Every file is read once, as an epoch does.
        """

        def of(item: Item) -> bytes:
            content = item[0].read_bytes() if hasattr(item[0], "read_bytes") else np.ascontiguousarray(item[0]).data
            return hashlib.sha256(content).digest() + item[1].to_bytes(4)

        digest = hashlib.sha256()
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
            for part in (self.train, self.rest):
                digest.update(f"{len(part)} ".encode())
                for found in threads.map(of, part):
                    digest.update(found)
        return f"{len(self.train) + len(self.rest):,} images, sha256 {digest.hexdigest()[:16]}"

    @property
    def baselines(self) -> Mapping[str, float]:
        """How often each class is in the training data, one added to every count, in nats per held-out image."""
        counts = Counter(label for _, label in self.train)
        total = len(self.train) + len(self.classes)
        return {"prior": sum(math.log(total / (counts[label] + 1)) for _, label in self.rest) / len(self.rest)}

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Endless {"image", "label"}; batch i is a function of (seed, i) alone."""
        endless = needed("grain", "images need").MapDataset.source(self.train).shuffle(seed=seed).repeat()
        return self._read(endless[start * rows :], rows)

    def held_out(self, rows: int) -> Iterator[Batch]:
        """What is held out, once and in order: {"image", "label", "mask": float32 [B]}, filled up with zeros."""
        for batch in self._read(needed("grain", "images need").MapDataset.source(self.rest), rows):
            padded, mask = pad_rows(batch, rows)
            yield {**padded, "mask": mask}

    def check_readable(self, rows: int) -> None:
        """Decodes every image once, before a run that draws so many rows; of fewer than there are to train on, it does
        not meet all of them, and nothing is done. Raises ValueError with the number and names of those that cannot be
        read.
        """
        if rows < len(self.train):
            return
        if broken := _broken((*self.train, *self.rest), self.read):
            first = next(iter(broken.values()))
            raise ValueError(
                f"{_counted(broken)}, the first because of this: {first.__cause__}; mend or remove them, or leave them "
                "out with broken='skip'"
            )

    def _read(self, items: Any, rows: int) -> Iterator[Batch]:
        # Images are read ahead one by one, and only then put into batches: two batches' worth is in memory.
        options = needed("grain", "images need").ReadOptions(
            min(THREADS, os.cpu_count() or 1), prefetch_buffer_size=2 * rows
        )
        row = lambda item: {"image": self.read(item[0]), "label": np.int32(item[1])}
        return iter(items.map(row).to_iter_dataset(options).batch(rows))


def digits() -> Images:
    """1,797 handwritten digits of 8 x 8 grey pixels (Alpaydin & Kaynak 1998), every tenth of each held out.

    Raises ValueError where scikit-learn is not installed.
    """
    found = needed("sklearn.datasets", "images need").load_digits()
    images = (found.images[..., None] / 8 - 1).astype(np.float32)  # from 0 to 16
    classes = tuple(map(str, found.target_names))
    groups = [[(image, label) for image in images[found.target == label]] for label in range(len(classes))]
    return _split("digits of scikit-learn", classes, 8, 1, groups, np.asarray)


def folder(path: Place | str, size: int = 224, broken: str = "error") -> Images:
    """Image files, one subfolder for each class.

    Classes are numbered in the order of their names. Files may lie at any depth below; hidden files and those whose
    suffix is not of PNG, JPEG, WebP, BMP, GIF or TIFF are left out. An image (the first, where a file has several) is
    turned as its camera says, cropped at its centre to a square, resized to `size` and made RGB of 8 bits; grey of 12
    or 16 bits is scaled by its range. Of each class, every tenth file in the order of paths is held out.

    Args:
      path: the folder, or its address in s3:// or gs://, from where each image is read whenever it is drawn.
      size: height and width, in pixels.
      broken: what becomes of files that cannot be read: "error", as below; or "skip": all are decoded now, and those
        are left out. `description` has their number and names.

    Raises ValueError where the folder is missing or holds no two classes, where a class is empty or none has ten
    images, where one is a FIFO or a device, and where Pillow is not installed; and on the way, or before a long run
    (`check_readable`), where a file cannot be read, is of another format than these, has pixels whose range is not
    known (32 bits, signed or floating-point numbers), has more pixels than Pillow takes
    (`PIL.Image.MAX_IMAGE_PIXELS`, 89 million), or a side of more than a million, naming it.
    """
    if broken not in BROKEN:
        raise ValueError(f"broken={broken!r}: use {' or '.join(map(repr, BROKEN))}{did_you_mean(broken, BROKEN)}")
    root, pillow = place(path, "path"), needed("PIL.Image", "images need")
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give one that has a subfolder of images for each class")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size={size!r} leaves no pixels; use a whole number from 1, such as 224")
    folders = [sub for sub in root.iterdir() if sub.is_dir() and not sub.name.startswith(".")]
    folders.sort(key=lambda sub: sub.name)
    if len(folders) < 2:
        found = f"one subfolder, {folders[0].name}" if folders else "no subfolders"
        raise ValueError(f"{root} has {found}; put the images of each class into a subfolder of its own, two or more")
    known = {suffix for suffix, format in pillow.registered_extensions().items() if format in FORMATS}
    groups = []
    for label, sub in enumerate(folders):
        found = sorted(below(sub).items(), key=lambda item: item[0].as_posix())
        named = (file for name, file in found if name.suffix.lower() in known and not _hidden(name))
        files = [file if is_bucket(file) else plain(file) for file in named if is_bucket(file) or not file.is_dir()]
        if not files:
            raise ValueError(f"{sub} holds no images; add some ({', '.join(sorted(known)[:8])}, ...), or remove it")
        groups.append([(file, label) for file in files])
    if max(map(len, groups)) < HELD_OUT:
        raise ValueError(
            f"{root} has at most {max(map(len, groups))} images of a class, and none can be held out; "
            f"{HELD_OUT} of one class are needed"
        )
    classes = tuple(sub.name for sub in folders)
    made = _split(str(root), classes, size, 3, groups, lambda file: _decoded(file, size))
    return _readable(made) if broken == "skip" else made


def _readable(images: Images) -> Images:
    """Those that can be read, in the order and on the side where they are; the rest is in the description."""
    broken = _broken((*images.train, *images.rest), images.read)
    train, rest = ([item for item in part if item[0] not in broken] for part in (images.train, images.rest))
    if broken and not (train and rest):
        raise ValueError(f"{_counted(broken)}, and none is left to {'train on' if not train else 'hold out'}")
    about = f"{images.description}; {_counted(broken)} and left out" if broken else images.description
    return replace(images, description=about, train=train, rest=rest)


def _broken(items: Sequence[Item], read: Callable[[Any], np.ndarray]) -> dict[Any, ValueError]:
    """The files that cannot be read, and why; each is decoded once."""

    def why(item: Item) -> ValueError | None:
        try:
            read(item[0])
        except ValueError as error:
            return error
        return None

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        found = zip(items, threads.map(why, items), strict=True)
        return {item[0]: error for item, error in found if error is not None}


def _counted(broken: Mapping[Any, ValueError]) -> str:
    one = len(broken) == 1
    return f"{len(broken):,} image{'' if one else 's'} cannot be read ({few(list(map(str, broken)))})"


def _split(
    source: str, classes: tuple[str, ...], size: int, channels: int, groups: Sequence[Sequence[Item]], read: Any
) -> Images:
    train = [item for group in groups for i, item in enumerate(group, 1) if i % HELD_OUT]
    # One of each class in turn, so that the first of them stand for all.
    turns = itertools.zip_longest(*(group[HELD_OUT - 1 :: HELD_OUT] for group in groups))
    rest = [item for turn in turns for item in turn if item is not None]
    counts = f"{len(train) + len(rest):,} images of {len(classes)} classes, {len(rest):,} of them held out"
    return Images(f"{source}: {counts}", classes, size, channels, train, rest, read)


def _hidden(file: PurePath) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _decoded(file: Place, size: int) -> np.ndarray:
    """A file as float32 [size, size, 3] from -1 to 1."""
    from PIL import Image, ImageOps

    try:
        content = io.BytesIO(file.read_bytes()) if is_bucket(file) else plain(file)
        with Image.open(content, formats=FORMATS) as image:
            count, most = math.prod(image.size), Image.MAX_IMAGE_PIXELS
            if most is not None and count > most:
                raise ValueError(f"its {count:,} pixels are more than PIL.Image.MAX_IMAGE_PIXELS, {most:,}")
            if max(image.size) > _LONGEST:
                raise ValueError(f"one side is {max(image.size):,} pixels long, and {_LONGEST:,} are the most")
            _check_range(image)
            ImageOps.exif_transpose(image, in_place=True)
            # An RGB image is not converted, which would be one more copy of up to 89 million pixels.
            whole = image if image.mode in ("RGB", *_SIXTEEN_BITS) else image.convert("RGB")
            square = ImageOps.fit(whole, (size, size), Image.Resampling.BILINEAR)
            pixels = _eight_bits(square, image) if square.mode in _SIXTEEN_BITS else np.asarray(square)
    except ConnectionError:  # which says nothing of the image
        raise
    except Exception as error:  # each of Pillow's formats raises what it likes
        hint = "mend the file, remove it, or leave it out with broken='skip'"
        raise ValueError(f"cannot read {file} as {_ONE_OF}: {error}; {hint}") from error
    return pixels.astype(np.float32) / 127.5 - 1


def _check_range(image: Any) -> None:
    """Raises ValueError where no mode or tag of an opened image says which values are black and white."""
    known = image.mode in (*_EIGHT_BITS, *_SIXTEEN_BITS)
    if known and set(_tags(image).get(_SAMPLE_FORMAT, [])) <= {_UNSIGNED}:
        return
    numbers = "signed integers" if known else _NUMBERS.get(image.mode, "of another kind")
    raise ValueError(
        f"its pixels are {numbers} (Pillow's mode {image.mode}), and nothing says which values are black and white; "
        "save it as RGB or grey with 8 unsigned bits a channel, or as grey with 16"
    )


def _eight_bits(square: Any, image: Any) -> np.ndarray:
    """Grey pixels of 12 or 16 bits, cut from `image`, as uint8 [H, W, 3]: its range becomes 0..255."""
    tags = _tags(image)
    grey = np.asarray(square).astype(np.uint32) * 255 // (2 ** tags.get(_BITS, (16,))[0] - 1)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # Pillow inverts fewer bits itself
        grey = 255 - grey
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=-1)


def _tags(image: Any) -> Mapping[int, Any]:
    """The tags of a TIFF file; none of others."""
    return getattr(image, "tag_v2", {})
