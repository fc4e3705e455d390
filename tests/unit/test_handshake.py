"""A newcomer is welcomed when version, federation and layout fit, else told why not."""

from __future__ import annotations

import msgspec
import pytest
from helpers_transport import OTHER, SMALL

from protocol import handshake
from protocol.errors import RemoteProtocolError
from protocol.handshake import Credentials, answer, check_welcome, layout_misfit
from protocol.messages import Hello, Refusal, RefusalCode, Welcome
from protocol.tensors import Layout, TensorSpec


def credentials(layout: Layout = SMALL, task: str = "digits") -> Credentials:
    return Credentials(
        federation_id="home",
        name="ada",
        incarnation=3,
        advertise="tcp://127.0.0.1:7001",
        layout=layout,
        task=task,
    )


OURS = credentials().hello(0)


def hello(**changes: object) -> Hello:
    return msgspec.structs.replace(credentials().hello(5), **changes)


def test_a_newcomer_that_fits_is_welcomed_under_its_request_id() -> None:
    welcome = answer(hello(), OURS)
    assert isinstance(welcome, Welcome)
    assert (welcome.request_id, welcome.version, welcome.name) == (5, 1, "ada")
    check_welcome(welcome, OURS)


@pytest.mark.parametrize(
    ("changes", "code", "hint"),
    [
        ({"protocol_min": 2, "protocol_max": 3}, RefusalCode.VERSION, "speaks protocol 1"),
        ({"protocol_min": 0, "protocol_max": 0}, RefusalCode.VERSION, "same release"),
        ({"federation_id": "away"}, RefusalCode.FEDERATION, "'home', not 'away'"),
        ({"layout_fingerprint": "x"}, RefusalCode.LAYOUT, "another layout or task"),
        ({"protocol_min": 2, "federation_id": "away"}, RefusalCode.VERSION, "protocol"),
    ],
)
def test_a_newcomer_that_does_not_fit_is_told_why(
    changes: dict[str, object], code: RefusalCode, hint: str
) -> None:
    refusal = answer(hello(**changes), OURS)
    assert isinstance(refusal, Refusal)
    assert (refusal.request_id, refusal.code) == (5, code)
    assert hint in refusal.text
    assert refusal.retry_after_s > 0


def test_the_highest_version_that_both_speak_is_chosen() -> None:
    newer = hello(protocol_min=1, protocol_max=9)
    welcome = answer(newer, OURS)
    assert isinstance(welcome, Welcome)
    assert welcome.version == 1
    ours = msgspec.structs.replace(OURS, protocol_max=4)
    welcome = answer(newer, ours)
    assert isinstance(welcome, Welcome)
    assert welcome.version == 4


def test_a_refusal_stays_within_its_bounds_whatever_the_newcomer_is_called() -> None:
    refusal = answer(hello(federation_id="x" * 512), OURS)
    assert isinstance(refusal, Refusal)
    assert len(refusal.text) <= 512


def test_the_codecs_that_we_read_are_announced_and_those_that_both_read_are_agreed_on() -> None:
    assert OURS.features == ["deflate-4", "deflate-8", "groups-1", "sizes-1"]
    welcome = answer(hello(features=["deflate-9", "deflate-8", "else"]), OURS)
    assert isinstance(welcome, Welcome)
    assert welcome.features == ["deflate-8"]
    welcome = answer(hello(features=[]), OURS)
    assert isinstance(welcome, Welcome)
    assert welcome.features == []


@pytest.mark.parametrize("changes", [{"version": 7}, {"version": 0}, {"max_chunk_bytes": 10}])
def test_a_welcome_that_was_not_offered_is_refused(changes: dict[str, int]) -> None:
    welcome = msgspec.structs.replace(answer(hello(), OURS), **changes)
    with pytest.raises(RemoteProtocolError):
        check_welcome(welcome, OURS)


def test_another_task_has_another_fingerprint() -> None:
    other = credentials(task="letters").hello(1)
    assert isinstance(answer(other, OURS), Refusal)
    misfit = layout_misfit("bob", credentials(), credentials(task="letters").description())
    assert "task: ours is 'digits', theirs 'letters'" in str(misfit)


def test_a_misfit_names_the_peer_and_the_first_tensor_that_differs() -> None:
    misfit = layout_misfit("bob", credentials(), credentials(OTHER).description())
    assert misfit.code == RefusalCode.LAYOUT
    assert misfit.retry_after_s == handshake.RETRY_MISFIT_S
    assert "bob" in str(misfit)
    assert "ours is head.weight f32[20, 10], theirs head.weight f32[20, 11]" in str(misfit)


def test_a_layout_too_long_for_one_message_is_not_described() -> None:
    long = credentials(Layout(TensorSpec(f"{i:0500}", "f32", ()) for i in range(3000)))
    assert long.description() == b""
    assert "too many tensors" in str(layout_misfit("bob", long, b""))


def test_a_malformed_layout_is_a_remote_fault() -> None:
    with pytest.raises(RemoteProtocolError):
        layout_misfit("bob", credentials(), b"{}")
