"""The learner over torch modules, checked against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from peer.data import Dataset, Examples, Split
from peer.evaluate import train_alone
from peer.learner import Batch, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from protocol.errors import CheckpointError, ModelError
from protocol.tensors import Tensors


def examples(number: int, shape=(1, 8, 8), classes: int = 3, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(number, *shape)).astype(np.float32)
    return Examples(inputs, rng.integers(0, classes, number))


def parts(fit: int = 20, holdout: int = 5, test: int = 5, **kwargs) -> Split:
    return Split(
        fit=examples(fit, seed=1, **kwargs),
        holdout=examples(holdout, seed=2, **kwargs),
        test=examples(test, seed=3, **kwargs),
    )


def learner_of(module: nn.Module, split: Split | None = None, **settings) -> TorchLearner:
    training = TrainingSettings(**{"batch_size": 8, **settings})
    return TorchLearner(module, split or parts(), 3, training)


def module(name: str = "mlp") -> nn.Module:
    return build_model(name, (1, 8, 8), 3, 0)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 3)

    def forward(self, inputs):
        return self.head(torch.relu(self.body(inputs)))


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_a_gradient_is_what_plain_torch_computes(name):
    split = parts(fit=8)
    learner, plain = learner_of(module(name), split), module(name)
    gradient = learner.differentiate(learner.parameters(), Batch(0), own=True)
    loss = functional.cross_entropy(
        plain(torch.from_numpy(split.fit.inputs)), torch.from_numpy(split.fit.labels)
    )
    loss.backward()
    assert gradient.loss == pytest.approx(loss.item(), rel=1e-5)
    assert gradient.num_examples == 8
    for key, parameter in plain.named_parameters():
        # f32 sums over 8 examples in another order
        np.testing.assert_allclose(gradient.tensors[key], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_are_what_plain_torch_takes(optimizer):
    split = parts(fit=8)
    learner, plain = learner_of(module(), split, optimizer=optimizer), module()
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    plain_optimizer = kind(plain.parameters(), lr=0.01)
    model = learner.parameters()
    for number in range(3):
        model = learner.step(learner.differentiate(model, Batch(number), own=True).tensors)
        plain_optimizer.zero_grad()
        functional.cross_entropy(
            plain(torch.from_numpy(split.fit.inputs)), torch.from_numpy(split.fit.labels)
        ).backward()
        plain_optimizer.step()
    for key, parameter in plain.named_parameters():
        np.testing.assert_allclose(model[key], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_models_handed_out_never_change_afterwards():
    learner = learner_of(module())
    first = learner.parameters()
    copy = first.buffer.copy()
    second = learner.step(learner.differentiate(first, Batch(0), own=True).tensors)
    learner.measure(second)
    learner.step(learner.differentiate(second, Batch(1), own=True).tensors)
    np.testing.assert_array_equal(first.buffer, copy)
    assert first != second


def test_measuring_another_model_leaves_the_own_one_alone():
    learner = learner_of(module())
    own = learner.parameters()
    other = Tensors(own.layout, own.buffer.copy())
    other.flat_f32()[:] = 0.0
    assert learner.measure(other).loss == pytest.approx(np.log(3), rel=1e-5)
    learner.differentiate(other, Batch(0), own=False)
    assert learner.parameters() == own


def test_the_loss_is_a_mean_or_a_sum_over_the_holdout_or_the_training_examples():
    split = parts(fit=20, holdout=5)
    losses = {
        (loss, on): TorchLearner(module(), split, 3, TrainingSettings(), loss=loss, measure_on=on)
        for loss in ("mean", "sum")
        for on in ("holdout", "train")
    }
    values = {key: each.measure(each.parameters()).loss for key, each in losses.items()}
    assert values["sum", "holdout"] == pytest.approx(5 * values["mean", "holdout"], rel=1e-5)
    assert values["sum", "train"] == pytest.approx(25 * values["mean", "train"], rel=1e-5)


def test_a_round_has_one_batch_and_an_epoch_has_every_example_once():
    learner = learner_of(module("logistic"), parts(fit=24))
    seen = [learner._examples_of(Batch(number))[0] for number in range(3)]
    assert torch.equal(learner._examples_of(Batch(1))[0], seen[1])
    inputs = torch.cat(seen).reshape(24, -1)
    assert len({tuple(row.tolist()) for row in inputs}) == 24
    assert not torch.equal(learner._examples_of(Batch(3))[0], seen[0])


def test_the_same_seed_gives_the_same_bits_with_dropout_too():
    def trained() -> Tensors:
        torch.rand(1)  # what others draw from the global generator must not matter
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        for number, parameter in enumerate(body.parameters()):
            nn.init.constant_(parameter, 0.01 * (number + 1))
        return train_alone(learner_of(body), 5)

    assert trained() == trained()


def test_buffers_travel_but_take_no_gradient_and_follow_the_own_batches_only():
    torch.manual_seed(0)
    learner = learner_of(WithNorm())
    own = learner.parameters()
    counter = "body.2.num_batches_tracked"
    assert own[counter].shape == ()
    assert counter in own and counter not in learner.layout.gradient.index
    gradient = learner.differentiate(own, Batch(0), own=False)
    assert learner.parameters() == own
    gradient = learner.differentiate(own, Batch(0), own=True)
    stepped = learner.step(gradient.tensors)
    assert stepped[counter] == 1
    assert not np.array_equal(stepped["body.2.running_mean"], own["body.2.running_mean"])


def test_batch_norm_works_on_a_last_batch_of_one_and_on_a_slice_of_one():
    torch.manual_seed(0)
    for fit in (1, 9, 17):
        split = Split(fit=examples(fit), holdout=examples(0), test=examples(0))
        learner = learner_of(WithNorm(), split)
        model = train_alone(learner, 4)
        assert np.isfinite(learner.measure(model).loss)


class Mixed(nn.Module):
    """Every kind of tensor a module may have: tied, frozen, empty, 0-d, bf16, f64, bool."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 4)
        self.tied = self.first
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.narrow = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("empty", torch.zeros(0, 7))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        hidden = torch.relu(self.first(inputs.flatten(1)))
        return hidden @ self.narrow.float() + self.wide.float() * self.frozen


def test_any_torch_module_round_trips_exactly():
    torch.manual_seed(0)
    source = Mixed()
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    learner = learner_of(source)
    sent = learner.parameters()
    assert "passing" not in sent and "tied.weight" not in sent
    assert sent["empty"].shape == (0, 7) and sent["flag"].shape == ()
    assert sent.layout.gradient.index.keys() == {"first.weight", "first.bias", "narrow", "wide"}
    other = learner_of(Mixed())
    received = other.adopt(Tensors(sent.layout, sent.buffer.copy()))
    assert received == sent
    np.testing.assert_array_equal(
        received["narrow"], state["narrow"].view(torch.int16).numpy().view(np.uint16)
    )
    gradient = other.differentiate(received, Batch(0), own=True)
    assert other.step(gradient.tensors) != received


def test_a_peer_restored_continues_with_the_same_bits():
    straight = learner_of(module())
    model = train_alone(straight, 3)
    saved = {key: array.copy() for key, array in straight.optimizer_state().items()}
    restored = learner_of(module())
    restored.restore(model, saved)
    assert restored.parameters() == model
    for number in (3, 4):
        gradients = [
            each.differentiate(each.parameters(), Batch(number), own=True)
            for each in (straight, restored)
        ]
        first, second = (
            each.step(gradient.tensors)
            for each, gradient in zip((straight, restored), gradients, strict=True)
        )
        assert first == second


def test_a_peer_saved_before_its_first_step_begins_with_a_fresh_optimizer():
    learner = learner_of(module())
    model = learner.parameters()
    learner.restore(model, {})
    assert learner.parameters() == model
    assert not any(array.any() for array in learner.optimizer_state().values())


@pytest.mark.parametrize("damage", ["another name", "another shape", "a moment missing", "sgd"])
def test_an_optimizer_state_of_another_model_or_optimizer_is_refused(damage: str):
    learner = learner_of(module(), optimizer="sgd" if damage == "sgd" else "adam")
    state = learner_of(module()).optimizer_state()
    key = sorted(state)[0]
    match damage:
        case "another name":
            state["nowhere/exp_avg"] = state.pop(key)
        case "another shape":
            state[key] = np.zeros((3, 1, 4), np.float32)
        case "a moment missing":
            del state[key]
    with pytest.raises(CheckpointError, match="optimizer state"):
        learner.restore(learner.parameters(), state)


class Wrong(nn.Module):
    def __init__(self, output=4, fail=None, nan=False) -> None:
        super().__init__()
        self.linear = nn.Linear(64, output)
        self.fail, self.nan = fail, nan

    def forward(self, inputs):
        if self.fail:
            raise self.fail
        return self.linear(inputs.flatten(1)) * (float("nan") if self.nan else 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Wrong(output=4), r"must return logits of shape \(n, 3\)"),
        (
            Wrong(output=3, fail=ValueError("boom")),
            r"given inputs of shape \(2, 1, 8, 8\), raised ValueError: boom",
        ),
        (Wrong(output=3, nan=True), "loss on its first batch is nan"),
        (nn.Sequential(nn.Flatten()), "no parameter"),
        (nn.Sequential(nn.Linear(5, 3)), "raised RuntimeError: mat1"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "the shape of .* isn't known"),
        (Wrong(output=3, fail=AssertionError("gray only")), "AssertionError: gray only"),
        (nn.Sequential(nn.Flatten(), nn.LSTM(64, 3)), "returned a tuple"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3, dtype=torch.complex64)), "complex64"),
    ],
)
def test_a_model_that_does_not_fit_is_named_at_once(wrong, message):
    with pytest.raises(ModelError, match=message):
        learner_of(wrong)


def test_a_label_beyond_the_classes_is_named():
    with pytest.raises(ModelError, match="a label is 2, but classes = 2"):
        TorchLearner(build_model("mlp", (1, 8, 8), 2, 0), parts(), 2, TrainingSettings())


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ModelError, match=r"training\.device 'nowhere'"):
        learner_of(module(), device="nowhere")


def test_the_same_seed_builds_the_same_model_whatever_else_is_drawn():
    first = build_model("cnn", (1, 8, 8), 3, seed=4).state_dict()
    torch.rand(3)
    second = build_model("cnn", (1, 8, 8), 3, seed=4).state_dict()
    third = build_model("cnn", (1, 8, 8), 3, seed=5).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("resnet", "not known"),
        ("nowhere.models:build", "nowhere"),
        ("math:sqrt", "math"),
        ("collections:OrderedDict", "torch.nn.Module"),
    ],
)
def test_a_model_reference_that_leads_nowhere_is_named(reference, message):
    with pytest.raises(ModelError, match=message):
        build_model(reference, (1, 8, 8), 3, 0)


def test_a_cnn_needs_images():
    with pytest.raises(ModelError, match="mlp or logistic"):
        build_model("cnn", (64,), 3, 0)
    assert Dataset(name="x", train=examples(3), test=None, num_classes=3).num_classes == 3
