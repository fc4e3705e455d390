"""Make next-character examples of plays, each owned by the role that speaks it."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from peer.datasets import RawDataset
from peer.plays import Role, read_roles
from protocol.errors import DataError

SHAKESPEARE_FOLDER = Path("data", "shakespeare")
MAX_BYTES = 1 << 25  # six times all of Shakespeare

OTHER = "\N{REPLACEMENT CHARACTER}"
ALPHABET = "\n !\"&'(),-.:;?" + string.digits + string.ascii_letters + OTHER
"""A character's id is its position here, for all peers alike; what isn't here has that of OTHER.
A line break ends a speech. Typographic quotes, dashes and accented letters become plain ones."""

WINDOW = 80
"""Characters that the next one is predicted from, as in LEAF."""

STRIDE = 10
"""Characters from one window's beginning to the next one's. At 1, as in LEAF, the plays are over
four million examples and 1.3 GB; at 10, a tenth of both, and no role lacks examples for it."""

TRAIN_FRACTION = 0.8
"""Part of a role's text, from its beginning, that is learned from; the rest is for testing."""

_PLAIN = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "--",
        "æ": "ae",
        "Æ": "AE",
        "œ": "oe",
        "Œ": "OE",
    }
)
_IDS = np.full(128, ALPHABET.index(OTHER), dtype=np.int8)  # by the code of a character
_IDS[[ord(character) for character in ALPHABET[:-1]]] = np.arange(len(ALPHABET) - 1)

_Windows = tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]


def read_shakespeare(folder: Path | None = None) -> RawDataset:
    """Read plays as windows of `WINDOW` characters, labeled with the next one.

    Inputs are ids of the characters, shape (num_examples, 80); classes are the characters of
    `ALPHABET`. No window crosses from a role's train text into its test text. An owner is a role,
    its group the play; roles too short for a window in their train text are left out.

    Args:
        folder: Where the plays lie, a file NAME.txt each; None takes `data/shakespeare`.

    Raises:
        DataError: There are none, one holds no speech or can't be read, they are larger than
            `MAX_BYTES`, or all roles are too short.
    """
    folder = folder or SHAKESPEARE_FOLDER
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise DataError(
            f"there are no plays, NAME.txt, in {folder}: run `make shakespeare`, or set "
            "data_folder to a folder of your own"
        )
    roles, train, test = [], [], []
    for role in _read_files(paths):
        ids = encode("\n".join(role.speeches))
        cut = int(TRAIN_FRACTION * len(ids))
        windows = cut_windows(ids[:cut])
        if len(windows[1]):
            roles.append(role)
            train.append(windows)
            test.append(cut_windows(ids[cut:]))
    if not roles:
        raise DataError(f"all roles of the plays in {folder} are too short: add plays")
    numbers = {play: number for number, play in enumerate(dict.fromkeys(r.play for r in roles))}
    return RawDataset(
        name="shakespeare",
        train=_join(train),
        test=_join(test),
        num_classes=len(ALPHABET),
        train_owners=_owners(train),
        test_owners=_owners(test),
        owner_names=tuple(f"{role.name} in {role.play}" for role in roles),
        owner_groups=tuple(numbers[role.play] for role in roles),
    )


def encode(text: str) -> npt.NDArray[np.int8]:
    """Return the id of each character of a text, made plain. Shape (num_characters,)."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text.translate(_PLAIN))
        text = "".join(character for character in text if not unicodedata.combining(character))
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), dtype=np.uint32)
    ids: npt.NDArray[np.int8] = _IDS[np.minimum(codes, len(_IDS) - 1)]
    return ids


def cut_windows(ids: npt.NDArray[np.int8]) -> _Windows:
    """Cut a text into windows, shape (num_windows, 80), and what follows each of them."""
    if len(ids) <= WINDOW:
        return np.empty((0, WINDOW), dtype=np.int8), np.empty(0, dtype=np.int64)
    whole = np.lib.stride_tricks.sliding_window_view(ids, WINDOW + 1)[::STRIDE]
    return whole[:, :WINDOW], whole[:, WINDOW].astype(np.int64)


def _read_files(paths: Sequence[Path]) -> list[Role]:
    left, roles = MAX_BYTES, []
    for path in paths:
        try:
            with path.open("rb") as file:
                content = file.read(left + 1)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}") from error
        left -= len(content)
        if left < 0:
            raise DataError(
                f"the plays in {path.parent} are larger than {MAX_BYTES} bytes altogether: take "
                "fewer of them"
            )
        try:
            roles += read_roles(_decode(content), path.stem.replace("_", " "))
        except DataError as error:
            raise DataError(f"{path} is no play: {error}; else move it elsewhere") from error
    return roles


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:  # texts from before Unicode, which hold any byte
        return content.decode("latin-1")


def _join(windows: Sequence[_Windows]) -> _Windows:
    inputs, labels = zip(*windows, strict=True)
    return np.concatenate(inputs), np.concatenate(labels)


def _owners(windows: Sequence[_Windows]) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(windows)), [len(labels) for _, labels in windows])
