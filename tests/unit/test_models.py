"""The ready-made networks: what they take, what they refuse, that they learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_learner
from torch.nn import functional

from peer.data import Dataset, Examples, split
from peer.models import READY_MADE, build_model
from peer.shakespeare import ALPHABET, WINDOW, cut_windows, encode
from protocol.errors import ModelError

INPUT_SHAPES = {"logistic": (1, 8, 8), "mlp": (1, 8, 8), "cnn": (1, 8, 8), "lstm": (20,)}


def texts(num_examples: int) -> Examples:
    """Return examples of a text that repeats itself, as the data set shakespeare has them."""
    spoken = "How now? A baker, and his bread; a baker, and his oven. " * num_examples
    inputs, labels = cut_windows(encode(spoken))
    return Examples(inputs[:num_examples].astype(np.float32), labels[:num_examples])


@pytest.mark.parametrize("name", READY_MADE)
def test_each_maps_inputs_to_logits_and_starts_alike_from_one_seed(name: str) -> None:
    shape = INPUT_SHAPES[name]
    inputs = torch.from_numpy(np.random.default_rng(0).integers(0, 7, (3, *shape))).float()
    before = torch.random.get_rng_state()

    first, second, other = (build_model(name, shape, 7, seed)(inputs) for seed in (1, 1, 2))

    assert first.shape == (3, 7)
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_lstm_has_the_size_that_it_says() -> None:
    model = build_model("lstm", (WINDOW,), len(ALPHABET), 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 133_193


def test_the_lstm_reads_the_order_of_characters() -> None:
    model = build_model("lstm", (4,), 5, 0)
    one, other = model(torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]]))
    assert not torch.allclose(one, other)


def test_the_lstm_learns_what_comes_next() -> None:
    text = torch.tensor([0, 1, 0, 2, 0, 3] * 4)  # what follows a 0 depends on what precedes it
    inputs, labels = text.unfold(0, 6, 1)[:, :5].float(), text[5:]
    model = build_model("lstm", (5,), 4, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert (model(inputs).argmax(dim=1) == labels).all()


def test_the_lstm_works_in_the_learner_that_peers_use() -> None:
    dataset = Dataset(name="text", train=texts(40), test=texts(8), num_classes=len(ALPHABET))
    learner = make_learner(
        split(dataset, 0.2, np.random.default_rng(0)), dataset, model="lstm", seed=3
    )
    model = learner.parameters()

    assert len(model.layout.specs) == 11
    assert np.isfinite(learner.measure(model).loss)
    probabilities = learner.predict(model, texts(8).inputs)
    assert probabilities.shape == (8, len(ALPHABET))
    assert np.allclose(probabilities.sum(axis=1), 1)


@pytest.mark.parametrize(
    ("name", "shape", "fault"),
    [
        ("lstm", (1, 8, 8), r'"lstm" needs inputs of shape \(length,\)'),
        ("cnn", (80,), r'"cnn" needs inputs of shape \(channels, height, width\)'),
        ("cnn", (1, 3, 8), "4x4 pixels or more"),
        ("lstn", (80,), "use one of logistic, mlp, cnn, lstm"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        build_model(name, shape, 7, 0)
