"""The parts of a linear layer as the loader hands them to a quantizer: tensors that are read when they are asked for.

A quantizer that has what it makes of them already, from an earlier start, asks for none; it can tell by their origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from engine.checkpoint.tensors import TensorEntry


@dataclass(frozen=True, slots=True)
class Origin:
    """Where tensors come from. Equal origins: equal tensors."""

    place: str
    """Files, names of tensors, and what is cut out of them."""
    state: str
    """Of the files at this moment: size and times of the last change; and where in them the tensors lie."""


class StoredPart(Mapping[str, "Tensor"]):
    """Tensors of one part by suffix. Each is read once, when it is first asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]], origin: Origin) -> None:
        self._readers = readers
        self._read: dict[str, Tensor] = {}
        self.origin = origin

    def __getitem__(self, suffix: str) -> Tensor:
        if suffix not in self._read:
            self._read[suffix] = self._readers[suffix]()
        return self._read[suffix]

    def __contains__(self, suffix: object) -> bool:
        return suffix in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def origin_of_tensor(name: str, entry: TensorEntry, cut: str = "") -> Origin:
    """``cut``: what of the tensor is taken, or how it is converted. Raises ``OSError`` for a file that is gone."""
    file = entry.file.resolve()
    status = file.stat()
    # st_mtime is what an archive or a copy sets, perhaps to the same for two models; nobody sets st_ctime.
    state = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return Origin(f"{file} {name} {cut}", f"{state} {entry.offset} {entry.dtype} {list(entry.shape)}")


def joined_origins(origins: Sequence[Origin]) -> Origin:
    """Of several tensors, in this order."""
    return Origin("\n".join(origin.place for origin in origins), "\n".join(origin.state for origin in origins))


def origin_of(parts: Sequence[Mapping[str, Tensor]]) -> Origin | None:
    """Of what a quantizer is handed; ``None`` for tensors that come from no file."""
    stored = [part.origin for part in parts if isinstance(part, StoredPart)]
    return joined_origins(stored) if len(stored) == len(parts) else None
