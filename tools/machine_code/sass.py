"""Machine code of NVIDIA GPUs (SASS), as ``nvdisasm`` prints it, and what can be counted in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+):")
WAIT = "ACQBULK"
"""Waits for the kernel before this one (``griddepcontrol.wait``)."""
LOADS = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP")
STORES = ("STG", "RED", "ATOM", "ATOMG", "UTMASTG")
TENSOR_CORES = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
"""Bytes that a load fetches for each thread, by a part of its name; 4 without any."""


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    """With what modifies it: ``LDG.E.EF.128``."""
    operands: str

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes for each thread, of a load or store."""
        return next((WIDTHS[part] for part in self.opcode.split(".") if part in WIDTHS), 4)


def disassembled(cubin: bytes) -> str:
    """SASS by ``nvdisasm``, which comes with Triton; raises ``FileNotFoundError`` where there is none."""
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    tool = str(bundled) if bundled.exists() else shutil.which("nvdisasm")
    if tool is None:
        raise FileNotFoundError("nvdisasm: neither in triton's folder nor on the PATH (it is part of CUDA)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


class MachineCode:
    """The instructions of a kernel, in the order of their addresses."""

    def __init__(self, sass: str) -> None:
        self.instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in sass.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(self.instructions)
            elif found := INSTRUCTION.search(line):
                self.instructions.append(Instruction(found[2], found[3]))
        assert self.instructions, "no instructions in the disassembly"
        self._labels = labels

    @property
    def before_wait(self) -> Sequence[Instruction] | None:
        """What stands above the first wait; ``None``: it never waits."""
        for at, instruction in enumerate(self.instructions):
            if instruction.kind == WAIT:
                return self.instructions[:at]
        return None

    @property
    def loops(self) -> list[Sequence[Instruction]]:
        """Bodies of loops that have no other inside, in the order of their ends. A jump to itself ends a kernel and
        is none."""
        bounds = []
        for at, instruction in enumerate(self.instructions):
            target = re.search(r"`\((\.L_x_\d+)\)", instruction.operands) if instruction.kind == "BRA" else None
            begin = self._labels.get(target[1], at) if target else at
            if begin < at:
                bounds.append((begin, at + 1))
        inner = [
            one for one in bounds if not any(one != two and one[0] <= two[0] and two[1] <= one[1] for two in bounds)
        ]
        return [self.instructions[begin:end] for begin, end in inner]

    @property
    def main_loop(self) -> Sequence[Instruction]:
        """The inner loop that has tensor-core instructions, or else the one that loads most bytes; everything, where
        no loop loads any."""

        def worth(loop: Sequence[Instruction]) -> tuple[bool, int]:
            return counted(loop, TENSOR_CORES) > 0, loaded_bytes(loop)

        return max((loop for loop in self.loops if any(worth(loop))), key=worth, default=self.instructions)


def counted(instructions: Sequence[Instruction], kinds: Sequence[str]) -> int:
    return sum(instruction.kind in kinds for instruction in instructions)


def loaded_bytes(instructions: Sequence[Instruction]) -> int:
    """From global memory, by one thread."""
    return sum(instruction.width for instruction in instructions if instruction.kind in LOADS)


def buffers_in_flight(instructions: Sequence[Instruction]) -> int | None:
    """Groups of asynchronous copies that may still be under way when a loop waits for one; ``None``: it copies none."""
    waits = [one.operands for one in instructions if one.kind == "DEPBAR"]
    numbers = [int(found[1], 16) for text in waits if (found := re.search(r"SB0, (0x[0-9a-f]+)", text))]
    return max(numbers, default=None)
