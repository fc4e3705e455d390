"""Read CIFAR-10 and CIFAR-100 from the binary version of their official archives.

A record is one or two label bytes, then 3072 bytes of pixels: red, green and blue, each 32 rows of
32. The archives of the "python version" hold pickles, which can run any code, and aren't read.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from peer.datasets import RawDataset
from protocol.errors import DataError

PIXEL_BYTES = 3 * 32 * 32
MAX_FILE_BYTES = 50_000 * (2 + PIXEL_BYTES)  # CIFAR-100's train.bin, the largest
MAX_ARCHIVE_BYTES = 1 << 28  # unpacked; over a third more than either has

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edition:
    """How one of the two is published.

    Attributes:
        title: What its home page calls it.
        archive: The archive's file name.
        folder: The folder inside the archive.
        train: The files of the train part.
        test: The file of the test part.
        classes: For each label byte of a record, how many classes it tells apart; the last one's
            are ours.
    """

    title: str
    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    classes: tuple[int, ...]


_EDITIONS: Mapping[str, _Edition] = {
    "cifar-10": _Edition(
        title="CIFAR-10 binary version",
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test="test_batch.bin",
        classes=(10,),
    ),
    "cifar-100": _Edition(
        title="CIFAR-100 binary version",
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        classes=(20, 100),
    ),
}


def read_cifar(name: Literal["cifar-10", "cifar-100"], folder: Path | None = None) -> RawDataset:
    """Read images, (50000 and 10000, 3, 32, 32) as bytes, and labels; of CIFAR-100 the fine ones.

    Files of fewer records are read as well.

    Args:
        name: Which of the two.
        folder: Where the archive lies, or its folder, or the .bin files themselves; None takes
            `data/` and the name.

    Raises:
        DataError: They are missing, truncated, garbled, too large, or a label is out of range.
    """
    edition = _EDITIONS[name]
    folder = folder or Path("data", name)
    files = _find(edition, folder)
    parts = {
        file: _parse(content, edition.classes, f"{file} in {folder}")
        for file, content in files.items()
    }
    images, labels = zip(*(parts[file] for file in edition.train), strict=True)
    return RawDataset(
        name=name,
        train=(np.concatenate(images), np.concatenate(labels)),
        test=parts[edition.test],
        num_classes=edition.classes[-1],
    )


def _find(edition: _Edition, folder: Path) -> dict[str, bytes]:
    """Return the content of each file, from wherever they are."""
    wanted = (*edition.train, edition.test)
    for place in (folder, folder / edition.folder):
        if (place / edition.test).is_file():
            return {name: _read_file(place / name) for name in wanted}
    archive = folder / edition.archive
    if not archive.is_file():
        raise DataError(
            f"{folder} holds neither {edition.archive} nor its files, {edition.train[0]} to "
            f'{edition.test}: get "{edition.title}" from its home page and put it there, or set '
            "data_folder to where it is"
        )
    files = _read_archive(archive, wanted)
    if missing := [name for name in wanted if name not in files]:
        raise DataError(f"{archive} lacks {', '.join(missing)}: fetch it again")
    return files


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror or error}; unpack the archive again"
        ) from error


def _read_archive(path: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    files = {}
    try:
        with (
            _BoundedGzip(path) as unzipped,
            tarfile.open(fileobj=unzipped, mode="r|") as archive,
        ):
            for member in archive:
                name = member.name.rpartition("/")[2]
                file = archive.extractfile(member) if name in wanted else None
                if file is not None:
                    files[name] = file.read(MAX_FILE_BYTES + 1)
            while unzipped.read(_CHUNK_BYTES):  # the checksum of it all comes last
                pass
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    return files


class _BoundedGzip(gzip.GzipFile):
    """A file that unzips to at most `MAX_ARCHIVE_BYTES`: a bomb must not fill the memory."""

    _left = MAX_ARCHIVE_BYTES

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self.name} unpacks to more than {MAX_ARCHIVE_BYTES} bytes: it is not the "
                "official archive"
            )
        return content


def _parse(
    content: bytes, classes: tuple[int, ...], what: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return images, shape (num_records, 3, 32, 32), and labels, shape (num_records,)."""
    size = len(classes) + PIXEL_BYTES
    if len(content) > MAX_FILE_BYTES:
        raise DataError(
            f"{what} has more than {MAX_FILE_BYTES} bytes: this is not the official file"
        )
    if not content or len(content) % size:
        raise DataError(
            f"{what} has {len(content)} bytes, which are no whole number of records of {size}: it "
            "is truncated or another file; fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
    for column, count in enumerate(classes):
        if (largest := int(records[:, column].max())) >= count:
            raise DataError(
                f"{what} holds the label {largest}, where they end at {count - 1}: it is garbled "
                "or another file; fetch it again"
            )
    images = records[:, len(classes) :].reshape(-1, 3, 32, 32)
    return images, records[:, len(classes) - 1]
