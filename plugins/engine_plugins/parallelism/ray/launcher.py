"""Workers, and whole engines, on the machines of a Ray cluster.

Ray only finds the machines: it reserves a bundle of resources on each, and runs an actor in it for every rank, which
starts the rank's worker as its child; an engine has one actor, on any machine that has what it needs. Workers connect
to the engine process by themselves, engines to their server; plans, tensors, tokens and signs of life never pass
through Ray, whose own signs of life take long: a machine may be gone for ten seconds and more before Ray says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contracts.parallelism import (
    TOKEN,
    EngineJob,
    LauncherError,
    StartedEngine,
    StartedWorker,
    WorkerJob,
    WorkerStart,
)
from engine.contracts.provider import BuildContext
from engine_plugins.parallelism.listening import Listener
from engine_plugins.parallelism.ray import actor as in_ray
from engine_plugins.parallelism.ray.config import INSTALL, RayConfig
from engine_plugins.parallelism.ray.nodes import (
    CPU,
    GPU,
    Node,
    Wanted,
    amounts,
    devices,
    lacking,
    lacking_for_engine,
    share_of_memory,
)

REACH_S = 5.0
"""How long the head of a cluster may take to accept a connection."""
NODE_ID = "ray.io/node-id"
"""A label that Ray gives every node."""
PLACED_S = 5.0
"""How long Ray may take to start a process on a machine that has room."""
ANSWER_S = 0.05
"""How long an actor that lives may take to answer: one whose machine is gone never does."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ANSI = re.compile(r"\x1b\[\d*m")
RAISED = re.compile(r"^\w+Error: .+", re.MULTILINE)


@dataclass(slots=True)
class RayWorker:
    """See :class:`engine.contracts.parallelism.StartedWorker`, and ``StartedEngine``."""

    rank: int
    connection: socket.socket
    place: str
    actor: Actor
    memory_bytes: int | None = None

    def ended(self) -> str | None:
        return self.actor.ended()

    def abort(self) -> None:
        self.actor.handle.abort.remote()

    def kill(self) -> None:
        self.actor.handle.kill.remote()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # it ends with its connection, too


class Actor:
    """A handle on a :class:`RankActor`, which may be gone."""

    def __init__(self, ray: Any, handle: Any, node: Node) -> None:
        self.handle = handle
        self.node = node
        self.pid = 0
        """Of what it started."""
        self._ray = ray
        self._asked: Any = None
        self._asking = threading.Lock()

    def ended(self) -> str | None:
        """How its process ended; ``None`` also while the actor does not answer."""
        with self._asking:
            if self._asked is None:
                self._asked = self.handle.ended.remote()
            answered, _ = self._ray.wait([self._asked], timeout=ANSWER_S)
            if not answered:
                return None
            asked, self._asked = self._asked, None
        try:
            how: str | None = self._ray.get(asked)
        except self._ray.exceptions.RayError:
            return f"its Ray actor on {self.node.address}"
        return how


class RayLauncher:
    """See :class:`engine.contracts.parallelism.Launcher` and ``EngineLauncher``."""

    def __init__(self, config: RayConfig, context: BuildContext) -> None:
        self._config = config
        self._on_gpus = context.device.kind == "cuda"
        self._gpus_here = context.device.count
        self._ray: Any = None
        self._connected = False
        """By this launcher."""
        self._group: Any = None
        self._handles: list[Any] = []
        self._listener: Listener | None = None

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        with self._started():
            return self._launch(jobs, start, timeout_s)

    def launch_engine(self, job: EngineJob, start: WorkerStart, timeout_s: float) -> StartedEngine:
        with self._started():
            return self._launch_engine(job, start, timeout_s)

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        """Connected to Ray; all is given back where something fails."""
        try:
            self._connect()
            yield
        except BaseException as error:
            failed = self._ray is not None and isinstance(error, self._ray.exceptions.RayError)
            self.close()
            if failed:
                raise LauncherError(f"Ray could not start workers: {_first_line(error)}") from error
            raise

    def close(self) -> None:
        """Actors are killed, and their workers with them."""
        if self._listener is not None:
            self._listener.close()
        ray, handles, group = self._ray, self._handles, self._group
        self._handles, self._group, self._listener = [], None, None
        if ray is None or not ray.is_initialized():
            return
        for handle in handles:
            ray.kill(handle)
        if group is not None:
            ray.util.remove_placement_group(group)
        if self._connected:
            self._connected = False
            ray.shutdown()

    def _connect(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ImportError as error:
            raise LauncherError(f"parallelism=ray: {INSTALL} ({error})") from error
        self._ray = ray
        # Ray's processes look for modules in this process's current folder first: nothing of ours is looked for there.
        ray.cloudpickle.register_pickle_by_value(in_ray)
        if ray.is_initialized():
            return
        address = self._config.address
        if address != "auto":
            _check_reachable(address)
        with _own_handlers():
            try:
                ray.init(address=address, namespace="engine", logging_level="WARNING")
            except Exception as error:
                raise LauncherError(_why_not_connected(address, error)) from error
        self._connected = True

    def _launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        ray = self._ray
        wanted = self._wanted(jobs)
        nodes = self._reserve(wanted, ray.get_runtime_context().get_node_id())
        actors = self._actors(jobs, wanted, nodes)
        visible = self._visible(actors, wanted, timeout_s)
        seeing = [WorkerJob(job.rank, {**job.environment, **visible.get(job.rank, {})}) for job in jobs]
        token = secrets.token_urlsafe(16)
        self._listener = Listener(nodes[0].address, self._config.port, token)
        return self._joined(seeing, actors, start, self._listener, token, timeout_s)

    def _joined(
        self,
        jobs: Sequence[WorkerJob],
        actors: Mapping[int, Actor],
        start: WorkerStart,
        listener: Listener,
        token: str,
        timeout_s: float,
    ) -> list[RayWorker]:
        """Have actors start their processes, which connect."""
        arguments = [*start.command[1:], "--join", f"{listener.host}:{listener.port}", "--rank"]
        started = [
            actors[job.rank].handle.start.remote([*arguments, str(job.rank)], {**job.environment, TOKEN: token})
            for job in jobs
        ]
        for job, pid in zip(jobs, self._answers(started, timeout_s), strict=True):
            actors[job.rank].pid = pid

        def waits(missing: Sequence[int]) -> None:
            for rank in missing:
                how = actors[rank].ended()
                if how is not None:
                    raise LauncherError(f"{_place(actors[rank], rank)} ended with {how} before it connected: its words "
                                        "are above, or in Ray's log of that machine")  # fmt: skip

        addresses = ", ".join(sorted({actors[job.rank].node.address for job in jobs}))
        joined = listener.wait(
            jobs, timeout_s, waits,
            f"does {addresses} reach that address? Open the port in the firewall (parallelism.port=N chooses one)",
        )  # fmt: skip
        return [
            RayWorker(one.rank, one.connection, _where(actors[one.rank]), actors[one.rank]) for one in joined
        ]  # fmt: skip

    def _listening(self, host: str, token: str, timeout_s: float) -> Listener:
        """Engines of one server that have one port wait for it in turn."""
        ends = time.monotonic() + timeout_s
        while True:
            try:
                return Listener(host, self._config.port, token)
            except LauncherError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)

    def _launch_engine(self, job: EngineJob, start: WorkerStart, timeout_s: float) -> RayWorker:
        from ray.util import get_node_ip_address

        ray = self._ray
        cpus = job.ranks * (self._config.cpus or (1 if job.gpus else job.threads))
        needed: dict[str, float] = {CPU: cpus, **({GPU: job.gpus} if job.gpus else {})}
        handle = ray.remote(in_ray.RankActor).options(
            num_cpus=cpus, num_gpus=job.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote()  # fmt: skip
        self._handles.append(handle)
        node, visible = self._placed(handle, needed), {}
        if job.gpus:
            visible[VISIBLE] = ",".join(self._answers([handle.gpus.remote()], timeout_s)[0])
        own = WorkerJob(0, {**job.environment, **visible})
        actors, token = {0: Actor(ray, handle, node)}, secrets.token_urlsafe(16)
        self._listener = listener = self._listening(get_node_ip_address(), token, timeout_s)
        (engine,) = self._joined([own], actors, start, listener, token, timeout_s)
        listener.close()
        engine.memory_bytes = None if job.gpus else share_of_memory(node, needed)
        return engine

    def _placed(self, handle: Any, needed: Mapping[str, float]) -> Node:
        """Where Ray has room for an engine, once it has."""
        ends, told = time.monotonic() + self._config.wait_s, _Once()
        asked = handle.node.remote()
        while not self._ray.wait([asked], timeout=PLACED_S)[0]:
            lacks, busy = lacking_for_engine(self._nodes(), needed), f"a machine with {amounts(needed)} free"
            if lacks and all(node.alive for node in self._nodes()):
                raise LauncherError(lacks)
            if time.monotonic() > ends:
                raise LauncherError(
                    lacks
                    or f"Ray did not have {busy}, within parallelism.wait_s={self._config.wait_s:g}: see `ray "
                    "status` for who uses them; threads=N or parallelism.cpus=N says how many CPUs an engine takes"
                )
            told(lacks or f"waiting for Ray to have {busy}")
        (found,) = self._answers([asked], 1.0)
        return next(node for node in self._nodes() if node.id == found)

    def _wanted(self, jobs: Sequence[WorkerJob]) -> Wanted:
        ranks, config = len(jobs) + 1, self._config
        if not self._on_gpus:
            threads = jobs[0].environment.get("OMP_NUM_THREADS", "1")
            return Wanted(ranks, config.nodes, {CPU: config.cpus or int(threads)})
        share = min(1.0, config.nodes * self._gpus_here / ranks) if config.share_devices else 1.0
        return Wanted(ranks, config.nodes, {CPU: config.cpus or 1, GPU: int(share * 1e4) / 1e4})

    def _reserve(self, wanted: Wanted, here: str) -> list[Node]:
        """A bundle on each of the machines, whose first is this one. Raises :class:`LauncherError` at once for what the
        cluster does not have, unless a machine of it has died, which may be replaced."""
        ray, ends = self._ray, time.monotonic() + self._config.wait_s
        told = _Once()
        while lacks := lacking(nodes := self._nodes(), here, wanted):
            if all(node.alive for node in nodes) or time.monotonic() > ends:
                raise LauncherError(lacks)
            told(f"waiting for another machine: {lacks}")
            time.sleep(1.0)
        selectors = [{NODE_ID: here}, *({} for _ in range(wanted.nodes - 1))]
        self._group = group = ray.util.placement_group(
            [wanted.bundle] * wanted.nodes, strategy="STRICT_SPREAD", bundle_label_selector=selectors
        )
        while not group.wait(1):
            busy = f"{wanted.nodes} machines with {amounts(wanted.bundle)} free each, this one among them"
            if time.monotonic() > ends:
                raise LauncherError(
                    f"Ray did not have {busy}, within parallelism.wait_s={self._config.wait_s:g}: see `ray status` for "
                    "who uses them; parallelism.cpus=N says how many CPUs a rank takes"
                )
            told(f"waiting for Ray to have {busy}")
        known = {node.id: node for node in self._nodes()}
        chosen = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [known[chosen[index]] for index in range(wanted.nodes)]

    def _nodes(self) -> list[Node]:
        return [
            Node(found["NodeID"], found["NodeManagerAddress"], found["Alive"], found["Resources"])
            for found in self._ray.nodes()
        ]

    def _actors(self, jobs: Sequence[WorkerJob], wanted: Wanted, nodes: Sequence[Node]) -> dict[int, Actor]:
        """By rank. Rank 0, which is this process, has one where it takes a GPU: that tells which one."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, actors = self._ray, {}
        for rank in (*([0] if self._on_gpus else []), *(job.rank for job in jobs)):
            index = rank // wanted.ranks_per_node
            handle = ray.remote(in_ray.RankActor).options(
                num_cpus=wanted.each[CPU],
                num_gpus=wanted.each.get(GPU, 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            ).remote()  # fmt: skip
            self._handles.append(handle)
            actors[rank] = Actor(ray, handle, nodes[index])
        return actors

    def _visible(self, actors: Mapping[int, Actor], wanted: Wanted, timeout_s: float) -> dict[int, dict[str, str]]:
        """On GPUs, the one that each rank sees: first they are asked for, then workers are started with them."""
        if not self._on_gpus:
            return {}
        given = self._answers([actor.handle.gpus.remote() for actor in actors.values()], timeout_s)
        by_rank = {rank: gpus[0] for rank, gpus in zip(actors, given, strict=True)}
        own = os.environ.get(VISIBLE, "").split(",")[0].strip() or "0"
        try:
            here = devices(own, [by_rank[rank] for rank in range(wanted.ranks_per_node)])
        except ValueError as error:
            raise LauncherError(str(error)) from error
        return {rank: {VISIBLE: gpu} for rank, gpu in {**by_rank, **dict(enumerate(here))}.items()}

    def _answers(self, asked: Sequence[Any], timeout_s: float) -> list[Any]:
        try:
            return list(self._ray.get(list(asked), timeout=timeout_s))
        except self._ray.exceptions.GetTimeoutError as error:
            raise LauncherError(
                f"Ray's processes on the machines did not start within {timeout_s:.0f} s: see `ray status`"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise LauncherError(
                f"Ray could not start a worker: {_first_line(error)}; the same engine and plugins must be installed "
                "in the Python that runs Ray on every machine"
            ) from error


class _Once:
    """Says something on stderr, the same thing once."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, text: str) -> None:
        if text != self._said:
            self._said = text
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Ray ends a process at SIGTERM; this one has handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise LauncherError(
            f"parallelism.address={address}: nothing answers there ({error}); `ray start --head` prints the address"
        ) from error


def _why_not_connected(address: str, error: Exception) -> str:
    said = str(error)
    if "ersion mismatch" in said:
        return f"parallelism=ray: {' '.join(said.split())} Install the same Ray and Python on all machines"
    if address == "auto" and isinstance(error, ConnectionError):
        return (
            "parallelism.address=auto: this machine is part of no Ray cluster; run `ray start --head` here, or `ray "
            "start --address=HOST:PORT` for a cluster that is there, or use parallelism=local"
        )
    return (
        f"parallelism.address={address}: Ray does not let this process in: {_first_line(error)}; this machine must be "
        f"part of the cluster: run `ray start --address={address}` here"
    )


def _where(actor: Actor) -> str:
    return f"pid {actor.pid} on {actor.node.address}"


def _place(actor: Actor, rank: int) -> str:
    return f"rank {rank} ({_where(actor)})"


def _first_line(error: BaseException) -> str:
    """Of what Ray says; of an error that was raised elsewhere, which it wraps in a traceback, that error."""
    said = ANSI.sub("", str(error)).strip()
    raised = RAISED.findall(said)
    return str(raised[-1]) if raised else said.partition("\n")[0] or type(error).__name__
