"""The plugin: hands calls to ``shm.cpp``.

The memory is a file without a name, which rank 0 makes and the others open by way of its process: it takes no part of
``/dev/shm``, and is gone with the processes, however they end.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import native
from engine.contracts.communicator import CommunicatorError, World
from engine.contracts.config import CommunicatorConfig
from engine.contracts.provider import BuildContext
from engine.native import INT64, POINTER, Function, NativeCall
from engine_plugins.communicator.calls import (
    check_counts,
    check_parts,
    check_peer,
    check_source,
    check_sum,
    ranks_of,
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``Dtype`` of ``shm.cpp``."""
MOST_RANKS, MOST_GROUPS = 64, 16
"""As in ``segment.h``."""
TOKEN_BYTES, WHY_BYTES = 16, 1024
NAME = "engine-ranks"
INVITATION = re.compile(r"(/proc/\d+/fd/\d+) ([0-9a-f]+)")
INSTEAD = (
    "communicator=shm needs all ranks on one machine, in one container and of one user; communicator=gloo does not"
)


@cache
def kernels() -> Any:
    """The functions of ``shm.cpp``. Raises :class:`engine.native.NativeError`."""
    functions: dict[str, tuple[Any, ...]] = {
        "shm_create": (INT64, INT64, POINTER),
        "shm_add_group": (POINTER, ctypes.c_uint64, ctypes.c_char_p, POINTER, INT64),
        "shm_format": (INT64, INT64, ctypes.c_char_p, POINTER),
        "shm_start": (POINTER, INT64, INT64, ctypes.c_char_p),
        "shm_all_reduce": (POINTER, INT64, POINTER, INT64, INT64),
        "shm_reduce_scatter": (POINTER, INT64, POINTER, POINTER, INT64, POINTER),
        "shm_all_gather": (POINTER, INT64, POINTER, POINTER, POINTER),
        "shm_all_to_all": (POINTER, INT64, POINTER, POINTER, POINTER, POINTER),
        "shm_broadcast": (POINTER, INT64, POINTER, INT64, INT64),
        "shm_send": (POINTER, POINTER, INT64, INT64),
        "shm_recv": (POINTER, POINTER, INT64, INT64),
        "shm_abort": (POINTER, ctypes.c_char_p),
        "shm_begun": (POINTER, POINTER),
        "shm_failure": (POINTER, POINTER, INT64, POINTER),
        "shm_close": (POINTER,),
    }
    return native.load(Path(__file__).with_name("shm.cpp"), functions)


class SharedMemoryCommunicator:
    """See :class:`engine.contracts.communicator.Communicator` and
    :class:`~engine.contracts.communicator.NativeCommunicator`."""

    capturable = False
    same_bits = True

    def __init__(self, config: CommunicatorConfig, context: BuildContext) -> None:
        self._world: World | None = None
        self._native = ctypes.c_void_p()
        """``Communicator`` of ``waiting.h``. Never freed: programs point at it."""
        self._has_failed = ctypes.c_int32()
        self._groups: dict[str, int] = {}
        self._invitation, self._file = "", -1
        self._stopped = ""
        self._lock = threading.Lock()
        """Of ``abort`` and ``close``."""

    @property
    def begun(self) -> int:
        begun = ctypes.c_int64()
        with self._lock:
            if self._native:
                kernels().shm_begun(self._native, ctypes.byref(begun))
        return begun.value

    def invite(self, world: World) -> str:
        self._check_world(world)
        token, error = secrets.token_bytes(TOKEN_BYTES), ctypes.c_int64()
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        kernels().shm_format(self._file, world.size, token, ctypes.byref(error))
        if error.value:
            raise CommunicatorError(f"no memory for {world.size} ranks: {os.strerror(error.value)}")
        # A file that gets shorter while it is mapped would end its processes.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._invitation = f"/proc/{os.getpid()}/fd/{self._file} {token.hex()}"
        return self._invitation

    def start(self, world: World, invitation: str) -> None:
        self._check_world(world)
        if self._stopped:
            raise CommunicatorError(self._stopped)
        path, token = self._read(invitation)
        file = self._file if invitation == self._invitation else self._open(path)
        try:
            self._world = world
            made = ctypes.c_void_p()
            kernels().shm_create(world.rank, int(world.timeout_s * 1e9), ctypes.byref(made))
            assert made.value is not None
            self._has_failed = ctypes.c_int32.from_address(made.value)
            self._native = made
            for index, (name, ranks) in enumerate(sorted(world.groups.items())):
                self._groups[name] = index
                members = (ctypes.c_int32 * len(ranks))(*ranks)
                kernels().shm_add_group(made, _key(name, ranks), name.encode(), members, len(ranks))
            self._call(kernels().shm_start, file, world.size, token)
        finally:
            os.close(file)
            self._file = -1

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        self._call(kernels().shm_all_reduce, *self._sum_arguments(x, group))
        return x

    def all_reduce_call(self, x: Tensor, group: str) -> NativeCall:
        function: Function = kernels().shm_all_reduce
        return function.at(self._handle.value, *self._sum_arguments(x, group))

    def check(self) -> None:
        if self._has_failed.value:
            raise self._failure()

    def all_gather(self, x: Tensor, group: str, parts: Sequence[Tensor]) -> None:
        ranks = self._ranks(group)
        check_parts(parts, ranks, "all_gather")
        own = parts[ranks.index(self._here.rank)]
        if own.nbytes != x.nbytes:
            raise ValueError(f"all_gather of {x.nbytes} bytes to {own.nbytes} bytes")
        _check_contiguous(x, *parts)
        self._call(kernels().shm_all_gather, self._groups[group], x.data_ptr(), _addresses(parts), _sizes(parts))

    def reduce_scatter(self, x: Tensor, group: str, counts: Sequence[int]) -> Tensor:
        ranks = self._ranks(group)
        check_sum(x)
        check_counts(x, counts, ranks)
        _check_contiguous(x)
        out = x.new_empty(counts[ranks.index(self._here.rank)], *x.shape[1:])
        row = x[0].numel() if x.shape[0] else 0
        lengths = (ctypes.c_int64 * len(counts))(*(count * row for count in counts))
        arguments = x.data_ptr(), lengths, DTYPES[x.dtype], out.data_ptr()
        self._call(kernels().shm_reduce_scatter, self._groups[group], *arguments)
        return out

    def all_to_all(self, parts: Sequence[Tensor], group: str, received: Sequence[Tensor]) -> None:
        ranks = self._ranks(group)
        check_parts(parts, ranks, "all_to_all")
        check_parts(received, ranks, "all_to_all")
        _check_contiguous(*parts, *received)
        sent, got = (_addresses(parts), _sizes(parts)), (_addresses(received), _sizes(received))
        self._call(kernels().shm_all_to_all, self._groups[group], *sent, *got)

    def broadcast(self, x: Tensor, group: str, source: int) -> Tensor:
        ranks = self._ranks(group)
        check_source(source, ranks, group)
        _check_contiguous(x)
        self._call(kernels().shm_broadcast, self._groups[group], x.data_ptr(), x.nbytes, ranks.index(source))
        return x

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self._here, to, "send to")
        _check_contiguous(x)
        self._call(kernels().shm_send, x.data_ptr(), x.nbytes, to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        check_peer(self._here, source, "recv from")
        _check_contiguous(x)
        self._call(kernels().shm_recv, x.data_ptr(), x.nbytes, source)
        return x

    def abort(self, why: str) -> None:
        with self._lock:
            self._stopped = self._stopped or f"stopped: {why}"
            if self._native:
                kernels().shm_abort(self._native, why.encode())

    def close(self) -> None:
        with self._lock:
            if self._native:
                kernels().shm_close(self._native)
            if self._file >= 0:
                os.close(self._file)
            self._native, self._has_failed, self._file = ctypes.c_void_p(), ctypes.c_int32(), -1
            self._world = None

    @property
    def _here(self) -> World:
        if self._world is None:
            raise CommunicatorError("this communicator was not started, or is closed")
        return self._world

    @property
    def _handle(self) -> ctypes.c_void_p:
        assert self._here
        return self._native

    def _ranks(self, group: str) -> tuple[int, ...]:
        return ranks_of(self._here, group)

    def _sum_arguments(self, x: Tensor, group: str) -> tuple[int, int, int, int]:
        self._ranks(group)
        check_sum(x)
        _check_contiguous(x)
        return self._groups[group], x.data_ptr(), x.numel(), DTYPES[x.dtype]

    def _call(self, function: Function, *arguments: Any) -> None:
        function(self._handle, *arguments)
        if self._has_failed.value:
            raise self._failure()

    def _failure(self) -> CommunicatorError:
        text, missing = ctypes.create_string_buffer(WHY_BYTES), ctypes.c_uint64()
        kernels().shm_failure(self._native, text, WHY_BYTES, ctypes.byref(missing))
        ranks = [rank for rank in range(MOST_RANKS) if missing.value >> rank & 1]
        return CommunicatorError(text.value.decode(errors="replace"), ranks)

    @staticmethod
    def _check_world(world: World) -> None:
        if not world.device.startswith("cpu"):
            raise ValueError(f"communicator=shm moves tensors of CPUs, this rank's device is {world.device}")
        if world.size > MOST_RANKS or len(world.groups) > MOST_GROUPS:
            raise ValueError(
                f"communicator=shm: {world.size} ranks in {len(world.groups)} groups; "
                f"at most {MOST_RANKS} ranks, and {MOST_GROUPS} groups of each"
            )

    @staticmethod
    def _read(invitation: str) -> tuple[str, bytes]:
        found = INVITATION.fullmatch(invitation)
        if found is None:
            raise CommunicatorError(f"{invitation!r} is no invitation of communicator=shm")
        return found[1], bytes.fromhex(found[2])

    @staticmethod
    def _open(path: str) -> int:
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):
                raise CommunicatorError(f"{path} is not the memory of rank 0: {INSTEAD}")
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CommunicatorError(f"no memory of rank 0 at {path}, {error.strerror}: {INSTEAD}", [0]) from error


def _key(name: str, ranks: Sequence[int]) -> int:
    text = f"{name}:{','.join(map(str, ranks))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _sizes(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_int64 * len(tensors))(*(tensor.nbytes for tensor in tensors))


def _check_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())}: expected a contiguous one"
            )
