"""Read the ready-made data sets, digits and Fashion-MNIST, as they lie on the disk.

Digits is packaged with scikit-learn. Fashion-MNIST is four gzipped idx files: they are looked for
in some folders, and downloaded from their official home only when that is asked for.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import importlib.util
import math
import struct
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from peer.files import replacing
from protocol.errors import DataError

FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MNIST_FOLDER = Path("data", "fashion-mnist")
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

# Of the idx files inside the gzip files: Debian's copies and the official ones differ in the gzip
# header, which holds a name and a time, and in nothing else. It is also what makes plain HTTP safe.
FASHION_MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1-ubyte.gz": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}

MAX_IDX_BYTES = 1 << 28  # over five times the largest; what a lying header can make us allocate

_CHUNK_BYTES = 1 << 16
_IDX_UBYTE = 0x08
_REMEDIES = (
    "run `make fashion-mnist`, or `apt install dataset-fashion-mnist`, or set data_folder to the "
    "folder of its four .gz files, or set download = true"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawDataset:
    """A data set before checks and conversion, its pixels still bytes: a quarter of the memory.

    Attributes:
        name: Its name.
        train: Inputs and labels to learn from.
        test: Its own test part, or None.
        num_classes: Number of classes, or None when only the labels tell.
        train_owners: As in `peer.data.Dataset`, like all that follow.
    """

    name: str
    train: tuple[npt.NDArray[Any], npt.NDArray[Any]]
    test: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None
    num_classes: int | None
    train_owners: npt.NDArray[np.int64] | None = None
    test_owners: npt.NDArray[np.int64] | None = None
    owner_names: tuple[str, ...] = ()
    owner_groups: tuple[int, ...] = ()


def read_digits() -> RawDataset:
    """Read scikit-learn's digits: 1797 handwritten ones, inputs (n, 1, 8, 8) in [0, 1].

    They come in one piece; every fifth image of each digit, 355 in all, is made the test part here,
    so that peers with few training examples can be tested on more. The packaged table is read
    directly, as `sklearn.datasets.load_digits` would: importing that costs each process a second
    and 100 MB.

    Raises:
        DataError: scikit-learn isn't installed, or keeps the table elsewhere.
    """
    spec = importlib.util.find_spec("sklearn")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            table = np.loadtxt(path, delimiter=",", dtype=np.float32)  # (1797, 64 pixels + label)
            images = table[:, :-1].reshape(-1, 1, 8, 8) / np.float32(16)
            labels = table[:, -1].astype(np.int64)
            is_test = np.zeros(len(labels), bool)
            for digit in range(10):
                is_test[np.flatnonzero(labels == digit)[4::5]] = True
            return RawDataset(
                name="digits",
                train=(images[~is_test], labels[~is_test]),
                test=(images[is_test], labels[is_test]),
                num_classes=10,
            )
    raise DataError(
        "the digits data set comes with scikit-learn, which "
        + ("holds no datasets/data/digits.csv.gz" if folders else "isn't installed")
        + ": pip install 'scikit-learn>=1.4'"
    )


def read_fashion_mnist(
    folder: Path | None = None,
    *,
    download: bool = False,
    base_url: str = FASHION_MNIST_URL,
    sha256: Mapping[str, str] = FASHION_MNIST_SHA256,
) -> RawDataset:
    """Read Fashion-MNIST: images (60000 and 10000, 1, 28, 28) as bytes, 10 classes of clothing.

    Without a `folder` of the user's own, the files are taken from `data/fashion-mnist` below the
    current one, or else from Debian's package dataset-fashion-mnist.

    Args:
        folder: Where to look, and nowhere else: who names a folder doesn't want another's files.
        download: Whether to fetch the files, into that folder or `data/fashion-mnist`, when they
            aren't there.
        base_url: Where to fetch them from.
        sha256: Checksum of each file's unzipped content, by file name.

    Raises:
        DataError: The files are nowhere, damaged, or can't be fetched.
    """
    candidates = [folder] if folder else [FASHION_MNIST_FOLDER, DEBIAN_FOLDER]
    found = next((path for path in candidates if not _missing(path)), None)
    if found is None and not download:
        reports = []
        for path in candidates:
            missing = _missing(path)
            everything = len(missing) == len(FASHION_MNIST_SHA256)
            reports.append(f"{path}" if everything else f"{path} (lacks {', '.join(missing)})")
        raise DataError(f"Fashion-MNIST isn't in {', '.join(reports)}: {_REMEDIES}")
    if found is None:
        found = candidates[0]
        download_files(found, base_url, sha256)
    return RawDataset(
        name="fashion-mnist",
        train=_read_pair(found, "train"),
        test=_read_pair(found, "t10k"),
        num_classes=10,
    )


def _missing(folder: Path) -> list[str]:
    return [name for name in FASHION_MNIST_SHA256 if not (folder / name).is_file()]


def _read_pair(folder: Path, part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")  # (num_examples, 28, 28)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")  # (num_examples,)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"the {part} files in {folder} don't belong together: images of shape {images.shape}, "
            f"labels of shape {labels.shape}; delete them and fetch them again"
        )
    return images[:, np.newaxis], labels


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read a gzipped idx file of unsigned bytes.

    The content is unzipped straight into the array, so that no second copy of it exists.

    Source: "The IDX file format", at the end of the MNIST database's page.

    Raises:
        DataError: It is missing, unreadable, truncated, garbled, of other numbers than unsigned
            bytes, or larger than `MAX_IDX_BYTES`.
    """
    try:
        with gzip.open(path) as file:
            return _parse_idx(file, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): delete it and fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def _parse_idx(file: gzip.GzipFile, path: Path) -> npt.NDArray[np.uint8]:
    def require(condition: bool, fault: str) -> None:
        if not condition:
            raise DataError(f"{path} is no idx file of images or labels: {fault}")

    magic = file.read(4)
    require(len(magic) == 4 and magic[:2] == b"\0\0", f"it begins with {magic!r}")
    require(magic[2] == _IDX_UBYTE, f"its numbers have the type 0x{magic[2]:02x}, not 0x08")
    num_dimensions = magic[3]
    require(1 <= num_dimensions <= 4, f"it claims {num_dimensions} dimensions")
    sizes = file.read(4 * num_dimensions)
    require(len(sizes) == 4 * num_dimensions, "it ends within its header")
    shape = struct.unpack(f">{num_dimensions}I", sizes)
    num_bytes = math.prod(shape)
    require(num_bytes <= MAX_IDX_BYTES, f"it claims the shape {shape}, over {MAX_IDX_BYTES} bytes")
    content = np.empty(num_bytes, dtype=np.uint8)
    filled = 0
    while chunk := file.read(_CHUNK_BYTES):
        require(filled + len(chunk) <= num_bytes, f"more follows after the shape {shape} is full")
        content[filled : filled + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        filled += len(chunk)
    require(filled == num_bytes, f"{filled} bytes follow where the shape {shape} needs {num_bytes}")
    return content.reshape(shape)


def download_files(
    folder: Path,
    base_url: str = FASHION_MNIST_URL,
    sha256: Mapping[str, str] = FASHION_MNIST_SHA256,
    *,
    timeout_s: float = 30.0,
    deadline_s: float = 900.0,
) -> None:
    """Fetch gzip files over HTTP into a folder, each checked, whole or not at all.

    Files that are there already are left alone, so that a second try goes on where one stopped.

    Args:
        folder: Where they go; made when missing.
        base_url: What the file names are appended to; http or https.
        sha256: Checksum of each file's unzipped content, by file name.
        timeout_s: How long the server may stay silent.
        deadline_s: How long one file may take altogether.

    Raises:
        DataError: The server can't be reached, refuses, stalls or sends other content, or the
            folder can't be written.
    """
    if not base_url.startswith(("http://", "https://")):
        raise DataError(f"{base_url!r} is no download address: it must begin with http(s)://")
    for name, digest in sha256.items():
        if (folder / name).is_file():
            continue
        url = base_url.rstrip("/") + "/" + name
        try:
            with (
                urllib.request.urlopen(url, timeout=timeout_s) as response,
                replacing(folder / name) as file,
            ):
                _receive(response, file, url, digest, time.monotonic() + deadline_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _failed(url, f"the server answered {error.code} {error.reason}") from error
        except TimeoutError as error:
            raise _failed(url, f"no answer within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _failed(url, str(error) or type(error).__name__) from error


def _receive(
    response: http.client.HTTPResponse, file: BinaryIO, url: str, digest: str, deadline: float
) -> None:
    """Copy the body into the file, unzipping on the way to check the content's checksum."""
    unzip = zlib.decompressobj(wbits=31)
    content = hashlib.sha256()
    num_received = num_unzipped = 0
    while chunk := response.read1(_CHUNK_BYTES):
        num_received += len(chunk)
        try:
            piece = unzip.decompress(chunk)
        except zlib.error as error:
            raise _failed(url, f"what came is not a gzip file ({error})") from error
        num_unzipped += len(piece)
        if num_unzipped > MAX_IDX_BYTES or num_received > MAX_IDX_BYTES:
            raise _failed(url, f"the file is larger than {MAX_IDX_BYTES} bytes")
        content.update(piece)
        file.write(chunk)
        if time.monotonic() > deadline:
            raise _failed(url, f"too slow: {num_received} bytes came before the deadline")
    if not unzip.eof:
        raise _failed(url, f"the connection ended early, after {num_received} bytes")
    if content.hexdigest() != digest or unzip.unused_data:
        raise _failed(url, "the content's SHA-256 is not the published one; it was thrown away")


def _failed(url: str, cause: str) -> DataError:
    return DataError(f"can't download {url}: {cause}; try again, or {_REMEDIES}")
