"""What comes into a model's head, checked against cutting the model by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from peer.data import Examples, Split
from peer.learner import TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from protocol.errors import ModelError

SHAPE = (1, 8, 8)
CLASSES = 3


def examples(number: int, shape=SHAPE) -> Examples:
    rng = np.random.default_rng(number)
    inputs = rng.random((number, *shape), dtype=np.float32)
    return Examples(inputs, np.arange(number) % CLASSES)


def learner_of(module: nn.Module, shape=SHAPE) -> TorchLearner:
    split = Split(fit=examples(9, shape), holdout=examples(4, shape), test=examples(2, shape))
    return TorchLearner(module, split, CLASSES, TrainingSettings())


def embed(module: nn.Module, number: int = 150) -> np.ndarray:
    learner = learner_of(module)
    return learner.embed(learner.parameters(), examples(number).inputs)


def cut(module: nn.Sequential, number: int) -> np.ndarray:
    with torch.no_grad():
        return module.eval()[:-1](torch.from_numpy(examples(number).inputs)).float().numpy()


def body() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(64, 5), nn.ReLU()]


class Wrapped(nn.Module):
    """A head after a body; each test says what else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*body())
        self.head = nn.Linear(5, CLASSES)

    def forward(self, inputs):
        return self.head(self.body(inputs))


class WithToken(Wrapped):
    """Parameters of its own before the head, as vision transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(5))

    def forward(self, inputs):
        return self.head(input=self.body(inputs) + self.token)


class InPlace(Wrapped):
    def forward(self, inputs):
        hidden = self.body(inputs)
        logits = self.head(hidden)
        if not self.training:
            hidden.zero_()
        return torch.log_softmax(logits, dim=1)


class Functional(Wrapped):
    """Its true head is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES, CLASSES))

    def forward(self, inputs):
        return super().forward(inputs) @ self.weight


class Listed(Functional):
    """The same, with its weight in a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([self.weight])
        del self.weight

    def forward(self, inputs):
        return Wrapped.forward(self, inputs) @ self.weights[0]


class Alone(nn.Module):
    """One module for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(64, 5))
        self.second = nn.Parameter(torch.ones(5, CLASSES))

    def forward(self, inputs):
        return torch.relu(inputs.flatten(1) @ self.first) @ self.second


class Twice(Wrapped):
    def forward(self, inputs):
        return self.head(self.body(inputs)) + self.head(self.body(inputs.flip(1)))


class Pairs(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Bilinear(5, 5, CLASSES)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.head(hidden, hidden)


class Rows(Wrapped):
    """Its head takes two rows an example."""

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.head(torch.cat((hidden, hidden))).reshape(2, -1, CLASSES).mean(dim=0)


@pytest.mark.parametrize(("name", "dim"), [("logistic", 64), ("mlp", 64), ("cnn", 64)])
def test_an_embedding_is_what_the_last_layer_is_given(name, dim):
    embeddings = embed(build_model(name, SHAPE, CLASSES, 0))
    assert embeddings.shape == (150, dim)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(
        embeddings[:64], cut(build_model(name, SHAPE, CLASSES, 0), 150)[:64]
    )


def test_a_recurrent_network_embeds_a_text_by_its_last_step():
    learner = learner_of(build_model("lstm", (6,), CLASSES, 0), (6,))
    assert learner.embed(learner.parameters(), examples(5, (6,)).inputs).shape == (5, 100)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_types_embed_in_f32(dtype):
    class Cast(nn.Module):
        def forward(self, inputs):
            return inputs.to(dtype)

    module = nn.Sequential(Cast(), *[part.to(dtype) for part in body()], nn.Linear(5, 3).to(dtype))
    embeddings = embed(module, 20)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(embeddings, cut(module, 20).astype(np.float32))


def test_any_model_can_embed_and_the_own_one_stays_as_it_is():
    learner = learner_of(nn.Sequential(*body(), nn.Linear(5, CLASSES)))
    own, inputs = learner.parameters(), examples(7).inputs
    before = learner.embed(own, inputs)
    other = learner.train(None, [])
    other["1.weight"][...] *= 2
    other["1.bias"][...] *= 2
    np.testing.assert_allclose(learner.embed(other, inputs), 2 * before, rtol=1e-6)
    np.testing.assert_array_equal(learner.embed(own, inputs), before)
    np.testing.assert_array_equal(learner.parameters().buffer, own.buffer)
    before[...] = 0  # what is handed out is the caller's own
    assert learner.embed(own, inputs).any()


def test_the_head_that_is_found_is_what_makes_the_logits():
    learner = learner_of(WithToken())
    model, inputs = learner.parameters(), examples(30).inputs
    logits = learner.embed(model, inputs) @ model["head.weight"].T + model["head.bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(learner.predict(model, inputs), probabilities, atol=1e-6)


def test_what_comes_after_the_head_does_not_matter():
    assert embed(InPlace(), 20).any()
    assert embed(nn.Sequential(Wrapped(), nn.Dropout(0.5), nn.Softplus()), 20).shape == (20, 5)
    assert embed(nn.Sequential(nn.Upsample(scale_factor=1), WithToken()), 20).shape == (20, 5)
    frozen = nn.Linear(CLASSES, CLASSES).requires_grad_(False)
    assert embed(nn.Sequential(Wrapped(), frozen), 20).shape == (20, 5)


def test_images_before_the_head_are_flattened():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, CLASSES, 6), nn.Flatten())
    assert embed(module, 10).shape == (10, 2 * 6 * 6)


def test_no_inputs_give_no_embeddings_but_their_dimension():
    assert embed(nn.Sequential(*body(), nn.Linear(5, CLASSES)), 0).shape == (0, 5)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Functional, "not its last step"),
        (Listed, "not its last step"),
        (Alone, "no part of its own"),
        (Twice, "'head', is called more than once"),
        (Pairs, "takes 2 tensors"),
        (Rows, "rows for"),
    ],
)
def test_a_model_whose_embedding_can_not_be_told_is_refused_naming_the_setting(module, reason):
    whole = module()
    with pytest.raises(ModelError, match=reason) as caught:
        embed(whole)
    assert "personalization.kind" in str(caught.value)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in whole.modules())
