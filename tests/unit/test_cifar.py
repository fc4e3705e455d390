"""CIFAR-10 and CIFAR-100: small archives in the format of the official binary ones."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import peer.cifar
from peer.cifar import PIXEL_BYTES, read_cifar
from peer.sources import load_source
from protocol.errors import DataError

Name = Literal["cifar-10", "cifar-100"]
NAMES: tuple[Name, ...] = ("cifar-10", "cifar-100")
TRAIN = {
    "cifar-10": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "cifar-100": ["train.bin"],
}
TEST = {"cifar-10": "test_batch.bin", "cifar-100": "test.bin"}
INSIDE = {"cifar-10": "cifar-10-batches-bin", "cifar-100": "cifar-100-binary"}
CLASSES = {"cifar-10": (10,), "cifar-100": (20, 100)}


def small_files(name: Name, seed: int = 0) -> dict[str, bytes]:
    """Return the published files, of six records each, labels first."""
    rng = np.random.default_rng(seed)
    files = {}
    for file in (*TRAIN[name], TEST[name]):
        labels = np.stack([rng.integers(0, count, 6) for count in CLASSES[name]], axis=1)
        pixels = rng.integers(0, 256, (6, PIXEL_BYTES))
        files[file] = np.concatenate([labels, pixels], axis=1).astype(np.uint8).tobytes()
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def archive(name: Name, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        folder = tarfile.TarInfo(INSIDE[name])
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for file, content in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"{INSIDE[name]}/{file}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_the_archive_its_folder_and_the_bare_files_are_read_alike(
    tmp_path: Path, name: Name
) -> None:
    files = small_files(name)
    places = [
        write(tmp_path / "archive", {f"{name}-binary.tar.gz": archive(name, files)}),
        write(tmp_path / "folder" / INSIDE[name], files).parent,
        write(tmp_path / "bare", files),
    ]
    joined = np.frombuffer(b"".join(files[file] for file in TRAIN[name]), dtype=np.uint8)
    records = joined.reshape(-1, len(CLASSES[name]) + PIXEL_BYTES)
    for place in places:
        raw = read_cifar(name, place)

        assert raw.num_classes == CLASSES[name][-1]
        assert np.array_equal(raw.train[1], records[:, len(CLASSES[name]) - 1])
        assert np.array_equal(raw.train[0].reshape(len(records), -1), records[:, -PIXEL_BYTES:])
        assert raw.test is not None
        assert raw.test[0].shape == (6, 3, 32, 32) and raw.test[0].dtype == np.uint8


def test_pixels_are_red_green_and_blue_in_rows(tmp_path: Path) -> None:
    files = small_files("cifar-10")
    record = bytearray(1 + PIXEL_BYTES)
    record[0] = 7
    record[1 + 2 * 32 * 32 + 5 * 32 + 9] = 255  # blue, row 5, column 9
    write(tmp_path, {**files, "test_batch.bin": bytes(record)})

    raw = read_cifar("cifar-10", tmp_path)

    assert raw.test is not None
    assert np.argwhere(raw.test[0]).tolist() == [[0, 2, 5, 9]]
    assert raw.test[1].tolist() == [7]


@pytest.mark.parametrize("name", NAMES)
def test_images_are_scaled_selected_and_pooled_as_a_source(tmp_path: Path, name: Name) -> None:
    write(tmp_path, small_files(name))

    dataset = load_source(name, folder=tmp_path, pool=2, part=(0, 2))

    assert dataset.input_shape == (3, 16, 16)
    assert 0 < dataset.train.inputs.max() <= 1
    assert dataset.num_classes == CLASSES[name][-1]
    assert dataset.train_owners is None


def test_the_usual_place_is_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        read_cifar("cifar-100")
    for text in (
        "data/cifar-100 holds neither cifar-100-binary.tar.gz",
        "train.bin",
        '"CIFAR-100 binary version"',
        "data_folder",
    ):
        assert text in str(caught.value)
    write(Path("data", "cifar-100"), small_files("cifar-100"))
    assert len(read_cifar("cifar-100").train[1]) == 6


def cut(content: bytes) -> bytes:
    return content[:-1]


def relabel(content: bytes) -> bytes:
    return b"\x0a" + content[1:]


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "files"])
@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut, "has 18437 bytes, which are no whole number of records of 3073: it is truncated"),
        (lambda _: b"", "has 0 bytes"),
        (relabel, "holds the label 10, where they end at 9"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(
    tmp_path: Path, packed: bool, damage: Callable[[bytes], bytes], fault: str
) -> None:
    files = small_files("cifar-10")
    files["data_batch_3.bin"] = damage(files["data_batch_3.bin"])
    if packed:
        files = {"cifar-10-binary.tar.gz": archive("cifar-10", files)}
    with pytest.raises(DataError) as caught:
        read_cifar("cifar-10", write(tmp_path, files))
    assert f"data_batch_3.bin in {tmp_path}" in str(caught.value)
    assert fault in str(caught.value)


def test_a_coarse_label_out_of_range_tells_that_it_is_another_file(tmp_path: Path) -> None:
    files = small_files("cifar-100")
    files["test.bin"] = b"\x14" + files["test.bin"][1:]
    with pytest.raises(DataError, match="holds the label 20, where they end at 19"):
        read_cifar("cifar-100", write(tmp_path, files))


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "files"])
def test_a_missing_file_is_named(tmp_path: Path, packed: bool) -> None:
    files = small_files("cifar-10")
    del files["data_batch_4.bin"]
    if packed:
        files = {"cifar-10-binary.tar.gz": archive("cifar-10", files)}
    with pytest.raises(DataError, match=r"data_batch_4\.bin.*(fetch it|unpack the archive) again"):
        read_cifar("cifar-10", write(tmp_path, files))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-4],
        lambda content: content[:-8] + bytes(4) + content[-4:],
        lambda content: b"<html>" + content,
        lambda content: gzip.compress(b"no tar file " * 400),
        lambda content: gzip.compress(gzip.decompress(content)[:5000]),
        lambda _: b"",
    ],
    ids=["half", "no end", "checksum", "no gzip", "no tar", "half a tar", "empty"],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    content = damage(archive("cifar-10", small_files("cifar-10")))
    write(tmp_path, {"cifar-10-binary.tar.gz": content})
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz (is damaged|lacks).*fetch it"):
        read_cifar("cifar-10", tmp_path)


def test_a_bomb_is_cut_off_at_the_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.cifar._BoundedGzip, "_left", 1 << 20)
    bomb = {**small_files("cifar-100"), "readme.txt": bytes(1 << 22)}
    write(tmp_path, {"cifar-100-binary.tar.gz": archive("cifar-100", bomb)})
    with pytest.raises(DataError, match="unpacks to more than"):
        read_cifar("cifar-100", tmp_path)


def test_a_file_above_the_size_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.cifar, "MAX_FILE_BYTES", 10_000)
    with pytest.raises(DataError, match="has more than 10000 bytes"):
        read_cifar("cifar-100", write(tmp_path, small_files("cifar-100")))


def test_a_link_inside_the_archive_is_not_followed(tmp_path: Path) -> None:
    files = small_files("cifar-100")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-100-binary/train.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
        member = tarfile.TarInfo("cifar-100-binary/test.bin")
        member.size = len(files["test.bin"])
        tar.addfile(member, io.BytesIO(files["test.bin"]))
    write(tmp_path, {"cifar-100-binary.tar.gz": buffer.getvalue()})
    with pytest.raises(DataError, match=r"train\.bin|damaged"):
        read_cifar("cifar-100", tmp_path)


@settings(max_examples=60)
@given(content=st.binary(max_size=600), at=st.integers(0, 1500), flip=st.integers(1, 255))
def test_any_bytes_give_images_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, at: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("cifar")
    tar = bytearray(gzip.decompress(archive("cifar-100", small_files("cifar-100"))))
    tar[at] ^= flip
    for data in (content, gzip.compress(content), gzip.compress(bytes(tar))):
        write(folder, {"cifar-100-binary.tar.gz": data})
        with contextlib.suppress(DataError):
            assert read_cifar("cifar-100", folder).num_classes == 100
