"""Digits and Fashion-MNIST: the idx files, where they are looked for, and their download."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peer.datasets
from peer.datasets import (
    DEBIAN_FOLDER,
    FASHION_MNIST_FOLDER,
    FASHION_MNIST_SHA256,
    MAX_IDX_BYTES,
    download_files,
    read_digits,
    read_fashion_mnist,
    read_idx,
)
from protocol.errors import DataError

NAMES = list(FASHION_MNIST_SHA256)


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def small_files() -> dict[str, bytes]:
    """Return the four idx files of a Fashion-MNIST with 12 and 4 images."""
    rng = np.random.default_rng(0)
    files = {}
    for part, count in (("train", 12), ("t10k", 4)):
        files[f"{part}-images-idx3-ubyte.gz"] = idx(rng.integers(0, 256, (count, 28, 28)))
        files[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(count) % 10)
    return files


SMALL = small_files()
SMALL_GZ = {name: gzip.compress(content, mtime=0) for name, content in SMALL.items()}
SMALL_SHA256 = {name: hashlib.sha256(content).hexdigest() for name, content in SMALL.items()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder on a machine without Debian's package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peer.datasets, "DEBIAN_FOLDER", tmp_path / "usr")
    return tmp_path


# Digits


def test_digits_are_those_of_scikit_learn() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    published = sklearn_datasets.load_digits()

    digits = read_digits()

    assert digits.test is not None and digits.num_classes == 10
    parts = {"train": digits.train, "test": digits.test}
    for images, labels in parts.values():
        assert images.dtype == np.float32 and images.shape == (len(labels), 1, 8, 8)
    ours = [
        (*image.ravel(), label)
        for part in parts.values()
        for image, label in zip(*part, strict=True)
    ]
    theirs = zip(published.data / 16, published.target, strict=True)
    assert sorted(ours) == sorted((*image, label) for image, label in theirs)
    assert len(digits.test[1]) == 355
    assert np.bincount(digits.test[1]).min() >= 34


# idx files


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_an_idx_file_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], seed: int
) -> None:
    values = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path_factory.mktemp("idx") / "file.gz"
    path.write_bytes(gzip.compress(idx(values)))

    assert np.array_equal(read_idx(path), values)


WHOLE = idx(np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "begins with b''"),
        (b"\x89PNG", "begins with"),
        (b"\0\0\x0d\x01" + bytes(8), "type 0x0d"),
        (b"\0\0\x08\x00", "claims 0 dimensions"),
        (b"\0\0\x08\xff", "claims 255 dimensions"),
        (WHOLE[:10], "ends within its header"),
        (WHOLE[:-1], "5 bytes follow where the shape (2, 3) needs 6"),
        (WHOLE + b"x", "more follows after the shape (2, 3)"),
        (struct.pack(">HBB4I", 0, 8, 4, *[2**32 - 1] * 4), f"over {MAX_IDX_BYTES} bytes"),
    ],
)
def test_a_garbled_idx_file_is_refused_with_its_name_and_fault(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "bad.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda file: file[:-9], lambda file: b"<html>" + file, lambda file: file[:30] * 2]
)
def test_a_damaged_gzip_file_is_refused_and_the_remedy_said(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "bad.gz"
    path.write_bytes(damage(gzip.compress(WHOLE * 20)))
    with pytest.raises(DataError, match=r"bad\.gz.*damaged.*fetch it again"):
        read_idx(path)


@given(content=st.binary(max_size=60))
def test_any_bytes_give_an_array_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("idx") / "file.gz"
    for data in (content, gzip.compress(content), gzip.compress(b"\0\0\x08" + content)):
        path.write_bytes(data)
        with contextlib.suppress(DataError):
            assert read_idx(path).dtype == np.uint8


def test_a_missing_idx_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.gz can't be read: No such file"):
        read_idx(tmp_path / "none.gz")


# Where Fashion-MNIST is looked for


def test_fashion_mnist_is_taken_from_the_first_folder_that_has_it(nowhere: Path) -> None:
    places = [FASHION_MNIST_FOLDER, nowhere / "usr"]
    for number, place in reversed(list(enumerate(places))):
        marked = {**SMALL, "t10k-labels-idx1-ubyte.gz": idx(np.full(4, number))}
        write(place, {name: gzip.compress(content) for name, content in marked.items()})

        raw = read_fashion_mnist()

        assert raw.test is not None
        assert raw.test[1].tolist() == [number] * 4


def test_a_folder_that_is_named_is_the_only_place(nowhere: Path) -> None:
    write(FASHION_MNIST_FOLDER, SMALL_GZ)
    with pytest.raises(DataError, match=r"isn't in .*own"):
        read_fashion_mnist(nowhere / "own")
    write(nowhere / "own", SMALL_GZ)
    assert read_fashion_mnist(nowhere / "own").num_classes == 10


def test_fashion_mnist_images_have_a_channel_and_stay_bytes(nowhere: Path) -> None:
    raw = read_fashion_mnist(write(nowhere / "own", SMALL_GZ))

    assert raw.test is not None
    assert raw.train[0].shape == (12, 1, 28, 28) and raw.test[0].shape == (4, 1, 28, 28)
    assert raw.train[0].dtype == np.uint8
    assert raw.num_classes == 10


def test_without_its_files_every_place_and_remedy_is_named(nowhere: Path) -> None:
    partial = {name: content for name, content in SMALL_GZ.items() if name != NAMES[1]}
    write(FASHION_MNIST_FOLDER, partial)
    with pytest.raises(DataError) as caught:
        read_fashion_mnist()
    for text in (
        f"{FASHION_MNIST_FOLDER} (lacks {NAMES[1]})",
        str(nowhere / "usr"),
        "make fashion-mnist",
        "apt install dataset-fashion-mnist",
        "data_folder",
        "download = true",
    ):
        assert text in str(caught.value)


def test_images_and_labels_of_different_numbers_are_refused(nowhere: Path) -> None:
    files = {**SMALL_GZ, NAMES[1]: gzip.compress(idx(np.arange(5)))}
    with pytest.raises(DataError, match=r"train files in .* don't belong together"):
        read_fashion_mnist(write(nowhere / "own", files))


@pytest.mark.parametrize("folder", [FASHION_MNIST_FOLDER, DEBIAN_FOLDER])
def test_the_published_files_have_the_published_checksums(folder: Path) -> None:
    folder = Path(__file__).parents[2] / folder  # an absolute one stays itself
    if not all((folder / name).is_file() for name in NAMES):
        pytest.skip(f"no Fashion-MNIST in {folder}")
    for name, digest in FASHION_MNIST_SHA256.items():
        with gzip.open(folder / name) as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest


# Download


@dataclass
class Home:
    """A local HTTP server that misbehaves on request.

    Attributes:
        url: Its address.
        files: What it serves.
        requests: The paths that were asked for.
        status: Answer with this instead of 200.
        cut: Close the connection so many bytes before the end.
        stalled: Accept a request and then say nothing.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(SMALL_GZ))
    requests: list[str] = field(default_factory=list)
    status: int = 200
    cut: int = 0
    stalled: bool = False
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("no_proxy", "*")
    home = Home()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            home.requests.append(self.path)
            if home.stalled:
                home.released.wait(timeout=60)
                return
            name = self.path.removeprefix("/fashion/")
            if home.status != 200 or name not in home.files:
                self.send_error(home.status if home.status != 200 else 404)
                return
            content = home.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - home.cut])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        home.url = f"http://127.0.0.1:{server.server_port}/fashion"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield home
        home.released.set()
        server.shutdown()
        thread.join(timeout=10)


def assert_no_files(folder: Path) -> None:
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_download_brings_the_checked_files_and_nothing_else(home: Home, nowhere: Path) -> None:
    raw = read_fashion_mnist(nowhere / "own", download=True, base_url=home.url, sha256=SMALL_SHA256)

    assert raw.train[0].shape == (12, 1, 28, 28)
    assert sorted(path.name for path in (nowhere / "own").iterdir()) == sorted(NAMES)
    assert all((nowhere / "own" / name).read_bytes() == SMALL_GZ[name] for name in NAMES)


def test_without_a_folder_a_download_goes_below_the_current_one(home: Home, nowhere: Path) -> None:
    read_fashion_mnist(download=True, base_url=home.url, sha256=SMALL_SHA256)

    assert sorted(path.name for path in FASHION_MNIST_FOLDER.iterdir()) == sorted(NAMES)


def test_nothing_is_downloaded_unless_asked_for_or_when_the_files_are_there(
    home: Home, nowhere: Path
) -> None:
    with pytest.raises(DataError):
        read_fashion_mnist(nowhere / "own", base_url=home.url)
    write(nowhere / "own", SMALL_GZ)
    read_fashion_mnist(nowhere / "own", download=True, base_url=home.url)

    assert home.requests == []


def test_a_second_try_fetches_only_what_is_missing(home: Home, tmp_path: Path) -> None:
    write(tmp_path, {name: SMALL_GZ[name] for name in NAMES[:3]})

    download_files(tmp_path, home.url + "/", SMALL_SHA256)

    assert home.requests == [f"/fashion/{NAMES[3]}"]


@pytest.mark.parametrize(
    ("served", "fault"),
    [
        (gzip.compress(b"other content"), "SHA-256"),
        (SMALL_GZ[NAMES[0]] + b"trailing", "SHA-256"),
        (b"<html>sign in to the hotel's network</html>", "not a gzip file"),
        (SMALL_GZ[NAMES[0]][:-4], "ended early"),
        (b"", "ended early, after 0 bytes"),
    ],
)
def test_content_other_than_the_published_one_is_thrown_away(
    home: Home, tmp_path: Path, served: bytes, fault: str
) -> None:
    home.files[NAMES[0]] = served
    with pytest.raises(DataError, match=fault) as caught:
        download_files(tmp_path / "own", home.url, SMALL_SHA256)
    assert f"{home.url}/{NAMES[0]}" in str(caught.value)
    assert_no_files(tmp_path / "own")


def test_a_connection_that_breaks_leaves_no_part_of_a_file(home: Home, tmp_path: Path) -> None:
    home.cut = 20
    with pytest.raises(DataError, match="ended early"):
        download_files(tmp_path / "own", home.url, SMALL_SHA256)
    assert_no_files(tmp_path / "own")


def test_a_bomb_is_cut_off_at_the_size_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.datasets, "MAX_IDX_BYTES", 1 << 20)
    home.files[NAMES[0]] = gzip.compress(bytes(1 << 22))
    with pytest.raises(DataError, match="larger than 1048576 bytes"):
        download_files(tmp_path / "own", home.url, SMALL_SHA256)
    assert_no_files(tmp_path / "own")


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_refusal_is_told_with_its_status(home: Home, tmp_path: Path, status: int) -> None:
    home.status = status
    with pytest.raises(DataError, match=f"the server answered {status} .*try again, or"):
        download_files(tmp_path / "own", home.url, SMALL_SHA256)
    assert_no_files(tmp_path / "own")


def test_a_silent_server_is_given_up_after_the_timeout(home: Home, tmp_path: Path) -> None:
    home.stalled = True
    with pytest.raises(DataError, match=r"no answer within 0\.2 s"):
        download_files(tmp_path / "own", home.url, SMALL_SHA256, timeout_s=0.2)
    assert_no_files(tmp_path / "own")


def test_a_server_that_trickles_is_given_up_at_the_deadline(home: Home, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too slow"):
        download_files(tmp_path / "own", home.url, SMALL_SHA256, deadline_s=0)
    assert_no_files(tmp_path / "own")


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with socket.socket() as silent:  # holds its port without listening, so connections are refused
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DataError, match=rf"can't download {url}.*refused"):
            download_files(tmp_path / "own", url, SMALL_SHA256)
    assert_no_files(tmp_path / "own")


def test_only_http_addresses_are_downloaded_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="http"):
        download_files(tmp_path / "own", "file:///etc", SMALL_SHA256)


def test_a_folder_that_cannot_be_written_is_told(home: Home, tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"a file where a folder should be")
    with pytest.raises(DataError, match="can't download"):
        download_files(tmp_path / "own", home.url, SMALL_SHA256)
