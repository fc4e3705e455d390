"""One peer process: from settings to a running daemon, its signals, its files and its result."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.allocator import keep_freed_memory
from peer.assembly import new_learner, split_examples, without_holdout
from peer.checkpoint import Checkpoint, load_newest, save_checkpoint
from peer.collection import load_own
from peer.config import PeerSettings, resolve
from peer.core import PeerCore
from peer.daemon import Daemon, RoundReport
from peer.data import Dataset, Split
from peer.evaluate import train_alone
from peer.events import RoundFinished
from peer.federation import Federation
from peer.files import locked, replacing
from peer.inbox import TAKEN
from peer.pace import FreeRunning
from peer.record import (
    CHECKPOINT_FILE,
    READY_FILE,
    RECORD_FILE,
    RESULT_FILE,
    Recorder,
    write_json,
)
from peer.remembering import Intake, Remembering
from peer.result import mixture_of, peer_result
from peer.snapshot import PeerSnapshot
from peer.stopping import stop_signals
from peer.streams import Streams
from peer.torch_learner import TorchLearner
from protocol.digest import digest_of
from protocol.discovery.interface import Discovery
from protocol.discovery.mqtt import MqttDiscovery
from protocol.discovery.presence import Presence, State
from protocol.discovery.static import StaticDiscovery, check_endpoint
from protocol.errors import CheckpointError, ConfigError, CoterieError
from protocol.groups import Groups
from protocol.identity import AllowList, check_secret, read_key_pair
from protocol.membership_settings import MembershipSettings
from protocol.messages import PeerId
from protocol.status import Counted, Learning
from protocol.transport.interface import Address
from protocol.transport.zeromq import ZeroMQTransport

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
_MOST_OF_TIME_SAVING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line or the launcher adds to a peer's settings.

    Attributes:
        ready_file: Where to write the connection facts, too, once the peer listens; they are
            always in the state folder's `ready.json`.
        lifeline: A descriptor that becomes readable when whoever started the peer is gone.
        keep_serving: Whether to go on serving after the last round, until told to stop.
    """

    ready_file: Path | None = None
    lifeline: int | None = None
    keep_serving: bool = False


def run_peer(settings: PeerSettings, base: Path, options: RunOptions) -> None:
    """Run one peer until its last round, a signal or the loss of its lifeline.

    Args:
        settings: The peer's.
        base: The config file's folder, which relative paths start from.
        options: See `RunOptions`.

    Raises:
        CoterieError: Settings, data, model, keys, address or checkpoint can't be used.
    """
    keep_freed_memory()
    torch.set_num_threads(settings.training.threads)
    state = resolve(base, settings.state or f"state/{settings.name}")
    state.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(locked(state, "another running peer"))
        if settings.personalization.watch:
            taken = resolve(base, settings.personalization.watch) / TAKEN
            taken.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(taken, "another running peer"))
        for stale in (state / READY_FILE, options.ready_file):
            if stale is not None:
                stale.unlink(missing_ok=True)
        peer = _Peer(settings, base, state, options)
        try:
            asyncio.run(peer.run())
        except BaseExceptionGroup as group:
            raise _first_of(group) from group
        finally:
            faulthandler.cancel_dump_traceback_later()
            peer.recorder.close()


class _Peer:
    """The parts of one peer, put together."""

    def __init__(
        self, settings: PeerSettings, base: Path, state: Path, options: RunOptions
    ) -> None:
        self._settings = settings
        self._state = state
        self._options = options
        network, algorithm = settings.network, settings.algorithm
        streams = Streams.of(settings.seed, settings.name)
        self._import_paths = (base, *(resolve(base, path) for path in settings.import_paths))
        dataset = load_own(settings, base, self._import_paths)
        self._num_classes = dataset.num_classes
        self._seed = streams.batches
        self._split = self._load(dataset, streams.split)
        intake = None
        if settings.personalization.kind == "knn":
            intake = Intake(settings, base, dataset, self._split, self._seed)
            self._split = intake.collection.split()
        self._learner = self._new_learner(self._split)
        self._initial = self._learner.parameters()
        self._task = self._learner.task
        if algorithm.warm_start == "odcl":  # says nothing of models that started elsewhere
            start = digest_of(self._initial.buffer.data)
            self._task += f", started from {start} (model_seed)"
        self._keys = read_key_pair(resolve(base, network.secret_key))
        self._allowed = AllowList(resolve(base, network.allow))
        check_secret(self._keys, resolve(base, network.secret_key), self._allowed)
        self._operators = AllowList(resolve(base, network.operators)) if network.operators else None
        self._checkpoint_path = state / CHECKPOINT_FILE
        restored = self._restore()
        self._incarnation = _next_incarnation(state / "incarnation")
        self._core = PeerCore(
            peer_id=self._keys.peer_id,
            settings=algorithm,
            model=self._initial,
            incarnation=self._incarnation,
            rounds=settings.rounds or None,
            rng=streams.sampling,
            restored=restored.core if restored else None,
            num_examples=len(self._split.fit) + len(self._split.holdout),
        )
        self._remembering: Remembering | None = None
        if intake is not None:
            self._remembering = Remembering.of(
                settings,
                self._learner,
                intake,
                num_classes=self._num_classes,
                rng=streams.memory,
                horizon=self._core.horizon,
                mixture=partial(mixture_of, self._keys.peer_id, self._core),
                on_examples=self._examples_changed,
            )
            self._remembering.restore(restored.memory if restored else None)
        check_endpoint("network.listen", network.listen)
        if network.advertise:
            check_endpoint("network.advertise", network.advertise)
        self._discovery: Discovery = StaticDiscovery(
            network.neighbors,
            resolve(base, network.allow),
            resolve(base, network.neighbors_file) if network.neighbors_file else None,
            self._keys.peer_id,
            settings.name,
        )
        self._verdicts: Counter[str] = Counter()
        self._last: RoundFinished | None = None
        self._clustering = ""
        self._mqtt: MqttDiscovery | None = None
        self._base = base
        self._network_rng = streams.network
        self._hints: dict[str, Mapping[PeerId, Address]] = {}
        self._federation: Federation | None = None
        if network.membership:
            self._federation = Federation(
                self._allowed, MembershipSettings(), streams.network, self._addresses_changed
            )
        self._names: dict[PeerId, str] = {self._keys.peer_id: settings.name}
        self.recorder = Recorder(state / RECORD_FILE, self._names)
        self._before = restored.totals if restored else {}
        self._stopping = asyncio.Event()
        self._began = time.monotonic()
        self._checkpointed = self._began
        self._saving_s = 0.0
        self._told = self._began
        self._daemon: Daemon
        self._transport: ZeroMQTransport

    async def run(self) -> None:
        settings = self._settings
        self._daemon = Daemon(
            peer_id=self._keys.peer_id,
            core=self._core,
            learner=self._learner,
            labels=self._learner.measured_labels,
            fetch_timeout_s=settings.network.fetch_timeout_s,
            push_timeout_s=settings.network.push_timeout_s,
            pace=FreeRunning(settings.min_round_s),
            on_round=self._round_finished,
        )
        self._transport = ZeroMQTransport(
            key_pair=self._keys,
            allow_list=self._allowed,
            listen=settings.network.listen,
            advertise=settings.network.advertise or None,
            federation_id=settings.network.federation,
            name=settings.name,
            incarnation=self._incarnation,
            layout=self._learner.layout,
            task=self._task,
            listener=self._daemon,
            bits=settings.algorithm.bits,
            initial=self._initial if settings.algorithm.codes_first_models else None,
            operators=self._operators,
            learning=self._learning,
            gossip=self._federation,
        )
        with stop_signals(self._stopping, self._options.lifeline):
            endpoint = await self._transport.start()
            try:
                self._tell_ready(endpoint)
                await self._live(endpoint)
            finally:
                await self._transport.close()

    async def _live(self, endpoint: str) -> None:
        """Learn among the neighbors until done or stopped; leave a checkpoint behind."""
        stop, known = self._stopping, asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._follow(source, discovery, known), name=source)
                for source, discovery in self._discoveries(endpoint).items()
            ]
            if self._federation is not None:
                own = Address(
                    name=self._settings.name, endpoint=endpoint, public_key=self._keys.public_key
                )
                running = self._federation.run(self._transport, own, self._incarnation)
                helpers.append(tasks.create_task(running, name="federation"))
            helpers += [
                tasks.create_task(self._stop_daemon(), name="stop"),
                tasks.create_task(self._finish(), name="finish"),
            ]
            if self._remembering is not None:
                watching = self._remembering.watch(self._daemon)
                helpers.append(tasks.create_task(watching, name="watch"))
            starting = tasks.create_task(known.wait(), name="starting")
            stopping = tasks.create_task(stop.wait(), name="stopping")
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await self._run_daemon()
            for task in (*helpers, starting, stopping):
                task.cancel()
        logger.info("stopped after round %d", self._core.round_number)

    async def _run_daemon(self) -> None:
        """Run the daemon and save where it ended, also when it ended by an error."""
        if self._remembering is not None:
            self._remembering.begin(self._daemon, self._core.round_number)
        if self._settings.algorithm.warm_start == "none":  # else who asks would wait in vain
            self._transport.publish_groups(Groups.of({self._keys.peer_id: 0}))
        try:
            await self._daemon.run(self._transport)
        except BaseException:
            if self._daemon.in_step:
                with suppress(CheckpointError):  # the error that ended it is the one to report
                    self._save(self._core.snapshot())
            raise
        self._save(self._core.snapshot())

    def _discoveries(self, endpoint: str) -> dict[str, Discovery]:
        """Where addresses come from, by name; of one peer, the last one's counts."""
        network = self._settings.network
        found: dict[str, Discovery] = {}
        if network.mqtt.host:
            birth = Presence(
                state=State.UP,
                incarnation=self._incarnation,
                advertise=endpoint,
                public_key=self._keys.public_key,
                layout_fingerprint=self._learner.layout.fingerprint(self._task),
                name=self._settings.name,
            )
            self._mqtt = found["mqtt"] = MqttDiscovery(
                network.mqtt,
                self._base,
                federation=network.federation,
                birth=birth,
                name_of=lambda key: self._allowed.names().get(key),
                rng=self._network_rng,
            )
        return found | {"addresses": self._discovery}

    async def _follow(self, source: str, discovery: Discovery, known: asyncio.Event) -> None:
        """Take the addresses of one source as long as it tells any."""
        async with aclosing(discovery.watch()) as watched:
            async for addresses in watched:
                if self._settings.name in {each.name for each in addresses.values()}:
                    raise ConfigError(
                        f"this peer and a neighbor are both named {self._settings.name!r}: "
                        "rename one"
                    )
                self._hints[source] = addresses
                if source == "addresses" or addresses:
                    known.set()
                self._addresses_changed()

    def _addresses_changed(self) -> None:
        """Tell the transport of all that discovery and the other members know."""
        hints: dict[PeerId, Address] = {}
        for source in sorted(self._hints, reverse=True):  # what people wrote down counts most
            hints |= self._hints[source]
        if self._federation is not None:
            if hints != self._federation.seeds:
                self._federation.set_seeds(hints)
            hints = self._federation.addresses()
        hints.pop(self._keys.peer_id, None)
        self._names.update({peer_id: each.name for peer_id, each in hints.items()})
        self._transport.set_neighbors(hints)

    async def _stop_daemon(self) -> None:
        await self._stopping.wait()
        self._daemon.stop()

    async def _finish(self) -> None:
        """After the last round, save, evaluate and write the result; then serve on, or stop."""
        await self._daemon.finished.wait()
        await self._daemon.call(lambda: self._save(self._core.snapshot()))
        result = await self._daemon.call(self._evaluate)
        if self._stopping.is_set():
            return  # stopped in the middle: the same command evaluates anew
        write_json(self._state / RESULT_FILE, result)
        logger.info("finished: accuracy %s on %d test examples", *_summary(result))
        if not self._options.keep_serving:
            self._stopping.set()

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate on the test examples, in the learner's thread."""
        local = None
        if self._settings.local_baseline:
            local = train_alone(
                self._new_learner(without_holdout(self._split)),
                self._settings.algorithm.steps_after(
                    done := self._core.round_number, closed=done == self._settings.rounds
                ),
                wanted=lambda: not self._stopping.is_set(),
            )
        return peer_result(
            self._settings.name,
            self._core,
            self._learner,
            self._split,
            local=local,
            weights=self.recorder.named(self._core.prediction_weights()),
            totals=self._totals(),
            personal=self._remembering.evaluate(self._split.test) if self._remembering else None,
        )

    def _totals(self) -> dict[str, float]:
        """What this peer spent so far, before it was last started included."""
        counters = self._transport.counters
        now = {
            "bytes_sent": counters.bytes_sent,
            "bytes_received": counters.bytes_received,
            "seconds": round(time.monotonic() - self._began, 3),
        }
        return {key: self._before.get(key, 0) + value for key, value in now.items()}

    def _learning(self) -> Learning:
        """What operators are told of the learning, as of the last round."""
        last = self._last
        return Learning(
            round_number=self._core.round_number,
            rounds=self._settings.rounds,
            loss=last.loss_averages.get(self._keys.peer_id) if last else None,
            weights=last.collaboration_weights if last else {},
            clustering=self._clustering,
            counters=tuple(Counted(name, times) for name, times in self._counters().items()),
        )

    def _counters(self) -> dict[str, int]:
        """What membership and discovery did, and what became of others' gradients."""
        counted = {
            "gradients": self._verdicts,
            "membership": self._federation.counters if self._federation else {},
            "mqtt": self._mqtt.counters if self._mqtt else {},
        }
        return {
            f"{part}_{name}": times
            for part, counters in counted.items()
            for name, times in sorted(counters.items())
        }

    def _round_finished(self, report: RoundReport) -> None:
        now = time.monotonic()
        self._last = report.finished
        self._clustering = report.finished.clustering or self._clustering
        if (teller := report.finished.clustered_by) not in (None, self._keys.peer_id):
            name = self.recorder.name_of(teller)
            logger.info("%s told who belongs together: digest %s", name, self._clustering)
        self._verdicts.update(report.finished.verdicts)
        self.recorder.round_finished(
            report.finished,
            own=self._keys.peer_id,
            validation_accuracy=report.validation_accuracy,
            num_neighbors=len(self._daemon.neighbors),
            totals=self._totals(),
            counters=self._transport.counters.by_name() | self._counters(),
            seconds=report.seconds,
            work=report.work,
            memory=self._remembering.report if self._remembering else None,
        )
        if self._remembering is not None:  # before what is saved below
            self._remembering.round_finished(self._daemon, self._core.round_number)
        if now - self._told >= PROGRESS_S:
            self._told = now
            self._log_progress(report.finished, report.validation_accuracy)
        if now - self._checkpointed >= max(
            self._settings.checkpoint_every_s, self._saving_s / _MOST_OF_TIME_SAVING
        ):
            self._checkpointed = now
            snapshot = self._core.snapshot()
            self._daemon.submit(lambda: self._save(snapshot))

    def _log_progress(self, finished: RoundFinished, accuracy: float | None) -> None:
        others = {
            self.recorder.name_of(peer_id): weight
            for peer_id, weight in finished.collaboration_weights.items()
            if peer_id != self._keys.peer_id
        }
        strongest = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:3]
        logger.info(
            "round %d: loss %s, validation accuracy %s, %d neighbors reachable, collaborators %s",
            finished.round_number,
            _digits(finished.loss_averages.get(self._keys.peer_id)),
            _digits(accuracy),
            len(self._daemon.neighbors),
            ", ".join(f"{name} {weight:.2f}" for name, weight in strongest) or "none yet",
        )

    def _examples_changed(self, examples: Split) -> None:
        self._split = examples
        self._daemon.change_examples(examples)

    def _load(self, dataset: Dataset, rng: np.random.Generator) -> Split:
        """Split the examples, and say what there are too few of."""
        settings = self._settings
        parts = split_examples(dataset, settings.algorithm, rng)
        if settings.algorithm.measure_on == "holdout" and not len(parts.holdout):
            logger.warning(
                "%d training examples are too few for a holdout: models are measured on them, "
                "which favors the own model",
                len(parts.fit),
            )
        if not len(parts.test):
            logger.warning("no test examples: this peer's accuracy stays unknown")
        return parts

    def _new_learner(self, examples: Split) -> TorchLearner:
        settings = self._settings
        return new_learner(
            settings,
            settings.algorithm,
            settings.training,
            examples,
            num_classes=self._num_classes,
            seed=self._seed,
            import_paths=self._import_paths,
        )

    def _restore(self) -> Checkpoint | None:
        checkpoint = load_newest(self._checkpoint_path, self._learner.layout, self._learner.task)
        if checkpoint is None:
            return None
        self._learner.restore(checkpoint.core.model.tensors, checkpoint.optimizer)
        logger.info("resuming from round %d", checkpoint.core.round_number)
        return checkpoint

    def _save(self, core: PeerSnapshot) -> None:
        checkpoint = Checkpoint(
            core,
            self._learner.optimizer_state(),
            self._totals(),
            self._remembering.save() if self._remembering else None,
        )
        began = time.monotonic()
        save_checkpoint(self._checkpoint_path, checkpoint, self._learner.task)
        self._saving_s = time.monotonic() - began

    def _tell_ready(self, endpoint: str) -> None:
        facts = {
            "name": self._settings.name,
            "peer_id": self._keys.peer_id,
            "endpoint": endpoint,
            "public_key": self._keys.public_key,
            "incarnation": self._incarnation,
            "pid": os.getpid(),
        }
        logger.info("%s listens on %s", self._settings.name, endpoint)
        write_json(self._state / READY_FILE, facts)
        if self._options.ready_file is not None:
            write_json(self._options.ready_file, facts)


def _next_incarnation(path: Path) -> int:
    """Count the starts of this peer, so that no two of them publish the same version."""
    try:
        incarnation = int(path.read_text()) + 1
    except FileNotFoundError:
        incarnation = 0
    except (OSError, ValueError) as error:
        raise CoterieError(f"{path} is damaged ({error}): move the folder away") from error
    with replacing(path) as file:
        file.write(str(incarnation).encode())
    return incarnation


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of a group: ours first."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first_of(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, CoterieError)), leaves[0])


def _digits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _summary(result: Mapping[str, Any]) -> tuple[str, int]:
    return _digits(result["accuracy"]), result["num_test"]
