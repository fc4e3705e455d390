"""Data sources: names, npz files and the user's own functions, checked, selected and converted."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.hooks import load_hook
from peer.sources import load_source, save_npz
from protocol.errors import DataError, ModelError
from sim.partition import PartitionSettings, partition

INPUTS = np.arange(12, dtype=np.float32).reshape(6, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def saved(folder: Path, **changes: object) -> str:
    """Write an npz file of six examples, with changes; None leaves an array out."""
    arrays = {"train_inputs": INPUTS, "train_labels": LABELS} | changes
    path = folder / "mine.npz"
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return str(path)


# npz files


def test_an_npz_file_without_a_test_part_has_as_many_classes_as_labels(tmp_path: Path) -> None:
    dataset = load_source(saved(tmp_path))

    assert dataset.name == "mine"
    assert np.array_equal(dataset.train.inputs, INPUTS)
    assert np.array_equal(dataset.train.labels, LABELS)
    assert dataset.test is None
    assert dataset.num_classes == 3


@given(
    num_train=st.integers(1, 6),
    num_test=st.none() | st.integers(0, 4),
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_what_is_saved_is_loaded_again_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory,
    num_train: int,
    num_test: int | None,
    shape: list[int],
    seed: int,
) -> None:
    folder, rng = tmp_path_factory.mktemp("npz"), np.random.default_rng(seed)
    changes: dict[str, object] = {}
    for part, count in (("train", num_train), ("test", num_test)):
        if count is not None:
            changes[f"{part}_inputs"] = rng.normal(size=(count, *shape))
            changes[f"{part}_labels"] = rng.integers(0, 4, count)
    first = load_source(saved(folder, **changes), num_classes=4)

    save_npz(first, folder / "new" / "again.npz")
    again = load_source(str(folder / "new" / "again.npz"))

    assert again.num_classes == 4
    assert (again.test is None) == (first.test is None)
    for one, other in ((first.train, again.train), (first.test, again.test)):
        if one is not None and other is not None:
            assert one.inputs.tobytes() == other.inputs.tobytes()
            assert one.inputs.shape == other.inputs.shape
            assert np.array_equal(one.labels, other.labels)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    dataset = load_source(saved(tmp_path))
    with pytest.raises(DataError, match="can't be written"):
        save_npz(dataset, tmp_path / "mine.npz" / "below-a-file.npz")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"train_labels": None}, "lacks train_labels (it holds train_inputs)"),
        ({"test_inputs": INPUTS}, "lacks test_labels"),
        ({"train_inputs": np.array(["a"] * 6)[:, None]}, "inputs are <U1"),
        ({"train_inputs": INPUTS * 1j}, "inputs are complex"),
        ({"train_inputs": np.array([{}] * 6)[:, None]}, "plain arrays"),
        ({"train_inputs": np.array(1.0)}, "don't fit"),
        ({"train_inputs": np.ones((6, 0))}, "don't fit"),
        ({"train_inputs": INPUTS[:5]}, "inputs of shape (5, 2) and labels of shape (6,)"),
        ({"train_inputs": INPUTS + np.nan}, "mine: an input holds a number that is not finite"),
        ({"train_inputs": INPUTS * np.float64(1e300)}, "not finite"),
        ({"train_labels": LABELS.astype(np.float32)}, "labels are float32: give whole numbers"),
        ({"train_labels": np.eye(3)[LABELS].astype(int)}, "not one-hot"),
        ({"train_labels": LABELS - 1}, "labels go from -1 to 1"),
        ({"train_labels": LABELS.astype(np.uint64) + 2**63}, "labels go from"),
        ({"train_inputs": INPUTS[:0], "train_labels": LABELS[:0]}, "no training example"),
        ({"num_classes": np.array(2)}, "a label is 2, but with num_classes = 2"),
        ({"num_classes": np.array([2, 3])}, "num_classes must be one whole number"),
        ({"num_classes": np.array(3.0)}, "num_classes must be one whole number"),
        (
            {"test_inputs": np.ones((1, 3)), "test_labels": np.array([0])},
            "test inputs have the shape (3,), the train inputs (2,)",
        ),
        (
            {"test_inputs": INPUTS, "test_labels": LABELS + 2, "num_classes": np.array(3)},
            "a label is 4, but with num_classes = 3",
        ),
    ],
)
def test_a_faulty_npz_file_is_refused_with_the_fault(
    tmp_path: Path, changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_source(saved(tmp_path, **changes))
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"no zip file", b"PK\x03\x04 and then nothing", b"\x93NUMPY\x01\x00"]
)
def test_a_file_that_is_no_npz_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mine\.npz.*save"):
        load_source(str(path))


def test_a_truncated_npz_file_is_refused(tmp_path: Path) -> None:
    path = Path(saved(tmp_path))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"mine\.npz can't be read"):
        load_source(str(path))


def test_a_bare_array_under_an_npz_name_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "mine.npz", "wb") as file:
        np.save(file, INPUTS)
    with pytest.raises(DataError, match="one bare array"):
        load_source(str(tmp_path / "mine.npz"))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"nowhere/mine\.npz isn't there"):
        load_source("nowhere/mine.npz")


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("digit", "did you mean 'digits'"),
        ("Fashion-MNIST", "did you mean"),
        ("cifar10", "did you mean 'cifar-10'"),
        ("Shakespear", "did you mean 'shakespeare'"),
        ("speech?", "write digits, fashion-mnist, cifar-10, cifar-100, shakespeare, a file"),
    ],
)
def test_an_unknown_source_is_refused_with_advice(source: str, advice: str) -> None:
    with pytest.raises(DataError, match=f"is no data source: {advice}"):
        load_source(source)


# Conversion


def test_bytes_become_pixels_from_0_to_1_and_other_numbers_stay(tmp_path: Path) -> None:
    pixels = np.array([[0, 51], [255, 102]] * 3, dtype=np.uint8)
    scaled = load_source(saved(tmp_path, train_inputs=pixels)).train.inputs
    assert scaled.dtype == np.float32
    assert np.array_equal(scaled[:2], np.array([[0, 0.2], [1, 0.4]], dtype=np.float32))

    for dtype in (np.int64, np.float64, np.float16, ">f4", np.int8):
        same = load_source(saved(tmp_path, train_inputs=INPUTS.astype(dtype))).train.inputs
        assert same.dtype == np.float32
        assert np.array_equal(same, INPUTS)


def test_fortran_order_makes_no_difference(tmp_path: Path) -> None:
    inputs = load_source(saved(tmp_path, train_inputs=np.asfortranarray(INPUTS))).train.inputs
    assert inputs.flags.c_contiguous
    assert np.array_equal(inputs, INPUTS)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_pooling_averages_squares_of_pixels(tmp_path: Path, dtype: type) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 6)).astype(dtype)
    scale = 255 if dtype is np.uint8 else 1
    expected = images.astype(np.float64).reshape(6, 1, 2, 2, 3, 2).mean(axis=(3, 5)) / scale

    pooled = load_source(saved(tmp_path, train_inputs=images), pool=2).train.inputs

    assert pooled.shape == (6, 1, 2, 3)
    assert np.allclose(pooled, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "pool", "fault"),
    [
        ((4,), 2, "needs images"),
        ((8, 8, 3), 2, "needs images"),
        ((1, 8, 8), 3, "doesn't divide"),
        ((1, 8, 8), 0, "doesn't divide"),
    ],
)
def test_what_cannot_be_pooled_is_refused(
    tmp_path: Path, shape: tuple[int, ...], pool: int, fault: str
) -> None:
    with pytest.raises(DataError, match=f"pool = {pool} {fault}"):
        load_source(saved(tmp_path, train_inputs=np.ones((6, *shape))), pool=pool)


# Selection


@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=60),
    count=st.integers(1, 4),
)
def test_parts_are_disjoint_cover_everything_and_share_each_label_equally(
    tmp_path_factory: pytest.TempPathFactory, labels: list[int], count: int
) -> None:
    ids = np.arange(len(labels), dtype=np.float32)[:, np.newaxis]
    source = saved(tmp_path_factory.mktemp("npz"), train_inputs=ids, train_labels=np.array(labels))
    parts = [load_source(source, part=(index, count)).train for index in range(count)]

    assert sorted(np.concatenate([part.inputs for part in parts]).ravel()) == list(range(len(ids)))
    frequencies = np.array([np.bincount(part.labels, minlength=5) for part in parts])
    assert np.ptp(frequencies, axis=0).max() <= 1


def test_both_halves_of_digits_hold_all_ten_digits() -> None:
    halves = [load_source("digits", part=(index, 2)) for index in range(2)]

    assert sum(len(half.train) for half in halves) == 1442
    for half in halves:
        assert np.bincount(half.train.labels).min() >= 69
        assert half.test is not None and np.bincount(half.test.labels).min() >= 17


def test_labels_are_kept_in_train_and_test_and_the_classes_stay(tmp_path: Path) -> None:
    source = saved(tmp_path, test_inputs=INPUTS, test_labels=LABELS)

    dataset = load_source(source, labels=[0, 2], part=(1, 2))

    assert dataset.train.labels.tolist() == [0, 2]
    assert dataset.test is not None and dataset.test.labels.tolist() == [0, 2]
    assert dataset.num_classes == 3


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ({"labels": [0, 3]}, "has no label 3, only 0 to 2"),
        ({"labels": []}, "no training example is left"),
        ({"labels": [1], "part": (2, 3)}, "no training example is left"),
        ({"part": (2, 2)}, "part = [2, 2]: the first must be from 0 to 1"),
        ({"part": (-1, 2)}, "part = [-1, 2]"),
        ({"part": (0, 0)}, "part = [0, 0]"),
        ({"num_classes": 2}, "a label is 2, but with num_classes = 2"),
        ({"num_classes": -1}, "num_classes = -1"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(
    tmp_path: Path, wanted: dict[str, object], fault: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_source(saved(tmp_path), **wanted)  # type: ignore[arg-type]
    assert fault in str(caught.value)


def test_fashion_mnist_is_scaled_and_pooled_from_its_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 10)):
        images, labels = rng.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        for name, magic, values in (("images-idx3", 3, images), ("labels-idx1", 1, labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
            content = bytes([0, 0, 8, magic]) + sizes + values.astype(np.uint8).tobytes()
            (tmp_path / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))

    dataset = load_source("fashion-mnist", folder=tmp_path, pool=2, labels=[3, 4])

    assert dataset.train.inputs.shape == (4, 1, 14, 14)
    assert dataset.test is not None and dataset.test.labels.tolist() == [3, 4]
    assert 0 < dataset.train.inputs.max() <= 1
    assert dataset.num_classes == 10


# Hooks


def module(folder: Path, name: str, text: str) -> str:
    """Write a module of the user's; each test has a name of its own, since imports last."""
    (folder / f"{name}.py").write_text(text)
    return name


def test_a_hook_gives_arrays_or_tensors_with_or_without_a_test_part(tmp_path: Path) -> None:
    module(
        tmp_path,
        "hook_good",
        "import numpy, torch\n"
        "x, y = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 1, 0, 1])\n"
        "def tensors(): return (x, y), (x[:2], y[:2])\n"
        "def arrays(): return [[numpy.ones((4, 3)), [0, 1, 0, 1]], None]\n",
    )
    tensors = load_source("hook_good:tensors", import_paths=[tmp_path])
    arrays = load_source("hook_good:arrays", import_paths=[tmp_path])

    assert tensors.test is not None and len(tensors.test) == 2
    assert arrays.test is None
    assert np.array_equal(tensors.train.inputs, arrays.train.inputs)
    assert tensors.name == "hook_good:tensors"
    assert tensors.num_classes == 2


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return None", "returned a NoneType: return ((train_inputs, train_labels)"),
        ("return {'train': 1}", "returned a dict"),
        ("return 1, 2, 3", "returned a tuple of (int, int, int)"),
        ("return (1, 2), 3", "returned a tuple of (tuple, int)"),
        ("return 'ab'", "returned a str"),
        ("return ([[1.0], [2.0, 3.0]], [0, 0]), None", "that is no array"),
        ("import torch; return (torch.ones(2, 2).bfloat16(), [0, 1]), None", "that is no array"),
        ("return ([[1.0]], ['cat']), None", "labels are <U3"),
        ("raise KeyError('column')", "raised KeyError: 'column' (at "),
        ("raise SystemExit('usage: …')", "raised SystemExit: usage: …"),
        ("return open('/no/such/file')", "raised FileNotFoundError"),
    ],
)
def test_a_faulty_hook_is_refused_with_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fault: str
) -> None:
    monkeypatch.delitem(sys.modules, "hook_faulty", raising=False)
    module(tmp_path, "hook_faulty", f"def load():\n    {body}\n")
    with pytest.raises(DataError) as caught:
        load_source("hook_faulty:load", import_paths=[tmp_path])
    assert "hook_faulty:load" in str(caught.value)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_line_that_raised_is_told_even_when_a_library_did(tmp_path: Path) -> None:
    module(tmp_path, "hook_line", "import json\ndef load():\n    return json.loads('{')\n")
    with pytest.raises(DataError, match=r"raised JSONDecodeError: .*\(at .*hook_line\.py:3\)"):
        load_source("hook_line:load", import_paths=[tmp_path])


def test_imports_inside_a_hook_see_the_import_paths_which_then_go_again(tmp_path: Path) -> None:
    module(tmp_path, "hook_sibling", "data = ([[1.0]], [0]), None\n")
    module(
        tmp_path,
        "hook_lazy",
        "def load():\n    import hook_sibling\n    return hook_sibling.data\n",
    )
    before = list(sys.path)

    assert len(load_source("hook_lazy:load", import_paths=[tmp_path]).train) == 1
    assert sys.path == before


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("no_such_module_here:f", "there is no module 'no_such_module_here' (looked in"),
        ("json.no_such_part:f", "there is no module 'json.no_such_part'"),
        ("json:lods", "did you mean 'loads'?"),
        ("json:zzz", "there is no function 'zzz' in"),
        ("json:__name__", "is a str, not a function"),
        ("json", "is no reference: write it as package.module:function"),
        ("json:dumps()", "is no reference"),
        (":f", "is no reference"),
        ("a:b:c", "is no reference"),
        ("../a:b", "is no reference"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_as_the_caller_blames_it(
    reference: str, fault: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load_hook(reference, (), ModelError)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import no_such_dependency", "raised ModuleNotFoundError: No module named"),
        ("x = 1 / 0", "raised ZeroDivisionError: division by zero (at "),
        ("def load(:", "raised SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
    ],
)
def test_a_module_that_fails_to_import_is_refused_with_its_own_fault(
    tmp_path: Path, text: str, fault: str
) -> None:
    name = module(tmp_path, "hook_broken", text)
    with pytest.raises(DataError) as caught:
        load_hook(f"{name}:load", [tmp_path])
    assert f"importing {name} {fault}" in str(caught.value)


def test_an_import_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"import path .*gone is no folder"):
        load_hook("json:loads", [tmp_path / "gone"])


def test_a_hook_passes_arguments_on_and_keyboard_interrupts_through(tmp_path: Path) -> None:
    name = module(
        tmp_path,
        "hook_model",
        "def build(shape, *, classes): return shape, classes\n"
        "def stop(): raise KeyboardInterrupt\n",
    )
    assert load_hook(f"{name}:build", [tmp_path])((1, 8), classes=3) == ((1, 8), 3)
    with pytest.raises(KeyboardInterrupt):
        load_hook(f"{name}:stop", [tmp_path])()
    with pytest.raises(ModelError, match="hook_model:build raised TypeError"):
        load_hook(f"{name}:build", [tmp_path], ModelError)(1, 2, 3)


def test_a_class_is_a_hook_too() -> None:
    build = load_hook("torch.nn:Identity", (), ModelError)
    assert isinstance(build(), torch.nn.Identity)


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("kind", ["iid", "rotated", "permuted", "mixture", "dirichlet"])
def test_bytes_converted_when_they_are_taken_make_the_same_slices(
    tmp_path: Path, kind: str, pool: int
) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{part}_{what}": rng.integers(0, high, (200, *shape)).astype(np.uint8)
        for part in ("train", "test")
        for what, high, shape in (("inputs", 256, (1, 4, 4)), ("labels", 4, ()))
    }
    np.savez(tmp_path / "pixels.npz", **arrays)
    settings = PartitionSettings(
        **({"kind": kind} if kind == "iid" else {"kind": kind, "groups": 2})
    )
    stored, converted = (
        partition(
            load_source(str(tmp_path / "pixels.npz"), pool=pool, as_stored=as_stored),
            4,
            settings,
            np.random.default_rng(1),
        )
        for as_stored in (True, False)
    )
    for one, other in zip(stored, converted, strict=True):
        for part in ("train", "test"):
            mine, theirs = getattr(one.dataset, part), getattr(other.dataset, part)
            assert mine.inputs.dtype == np.float32
            np.testing.assert_array_equal(mine.inputs, theirs.inputs)
            np.testing.assert_array_equal(mine.labels, theirs.labels)


def test_pooling_bytes_that_are_no_images_is_refused_before_any_are_taken(tmp_path: Path) -> None:
    inputs, labels = np.zeros((9, 5), np.uint8), np.arange(9) % 2
    np.savez(tmp_path / "rows.npz", train_inputs=inputs, train_labels=labels)
    with pytest.raises(DataError, match="pool = 2 needs images"):
        load_source(str(tmp_path / "rows.npz"), pool=2, as_stored=True)
