"""Damages the caches of compiled kernels and of rounded weights in every way we know, and loads from them.

    python tools/attack/native_cache.py [--only truncated fifo]

Each try has caches of its own in a temporary folder, filled by an honest start. What loads is a child process: if it
crashes, that is a result. Prints a table; exit code 1 if a bar is missed. Tries with files of another user need root.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})
KERNELS, WEIGHTS = "kernels", "weights"
LIMIT_S = 60
"""A start that takes longer hangs."""
OTHER_USER = 65534
PAGE = 4096

SOURCE = """
extern "C" const char filler[1 << 16] = {1};  // so that there are pages to lose
static int (*volatile pointer)();
static int forty_two() { return 42; }
extern "C" int answer() { pointer = forty_two; return pointer(); }
"""
EVIL = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void run() { if (const char* name = getenv("CANARY")) fclose(fopen(name, "w")); }
extern "C" int answer() { return 666; }
"""
PAUSE = """
import os, time
if "PAUSE" in os.environ:
    os.replace = lambda *_, **__: (open(os.environ["PAUSE"], "w").close(), time.sleep(60))
"""
KERNELS_CHILD = """
import sys
from pathlib import Path
from engine.native import compiler, shared_library
shared_library.find_compiler = lambda: compiler.Compiler((sys.argv[2],), "any version")  # asking takes half a second
loaded = shared_library.open_library(compiler.Source(Path(sys.argv[1]) / "kernel.cpp"))
print("loaded", flush=True)
sys.stdin.readline()
print("answer", loaded.answer())
"""
WEIGHTS_CHILD = """
import os, sys
from pathlib import Path
import torch
from engine.native.folder import user_folder
from engine.kernels.disk_cache import DiskCache, Kept
cache = DiskCache(user_folder("weights"), "model-" + "0" * 16, 1 << 30)
kept = cache.read("layer", "key")
if kept is None:
    kept = Kept({"weight": torch.full((PAGE,), int(sys.argv[2]))}, {"bits": 8})
    cache.write("layer", "key", kept)
print("loaded", flush=True)
sys.stdin.readline()
print("answer", int(kept.tensors["weight"][0]))
""".replace("PAGE", str(PAGE))


class MissedError(Exception):
    """A bar was missed; the message says how."""


@dataclass(frozen=True)
class Start:
    """What a start printed, and how it ended."""

    code: int
    answer: str
    stderr: str

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if "Warning: " in line]


class Case:
    """One try: a cache of ``kind`` in ``folder``, filled; and ``evil``, what an attacker would have in it."""

    def __init__(self, kind: str, folder: Path, honest: Path) -> None:
        self.kind, self.folder = kind, folder
        shutil.copytree(honest, folder)
        self.cache, self.temp, self.canary = folder / "cache", folder / "tmp", folder / "canary"
        self.place = self.cache / "engine" / ("native" if kind == KERNELS else "weights/model-" + "0" * 16)
        (self.file,) = (path for path in self.place.iterdir() if path.is_file())
        self.evil = (folder / "evil").read_bytes()

    def popen(self, compiler: str = "c++", umask: int = -1, pause: str = "") -> subprocess.Popen[str]:
        """A start, which waits for a line before it answers; and before it keeps something, after it made the file
        ``pause``."""
        environment = {"PAUSE": str(self.folder / pause)} if pause else {}
        return start(self.kind, self.folder, compiler if self.kind == KERNELS else "42", umask, environment)

    def load(self, **options: str | int) -> Start:
        return ended(self.popen(**options))

    def forged(self) -> bytes:
        """``evil`` as the engine itself would have kept it, if an attacker knows how."""
        if self.kind == WEIGHTS:
            return self.evil
        return self.evil + hashlib.sha256(f"{self.file.name}\0".encode() + self.evil).digest()

    def script(self, text: str) -> str:
        """A compiler that does more than compile. The file to write is its last argument."""
        path = self.folder / "cxx"
        path.write_text(f'#!/bin/sh\ncd "{self.folder}"\nfor out; do :; done\n{text}\n')
        path.chmod(0o755)
        return str(path)


def start(
    kind: str, folder: Path, argument: str, umask: int = -1, environment: Mapping[str, str] = NOTHING
) -> subprocess.Popen[str]:
    environment = {
        **os.environ, **environment,
        "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), "CANARY": str(folder / "canary"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "default",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    code = PAUSE + KERNELS_CHILD if kind == KERNELS else PAUSE + WEIGHTS_CHILD
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment, umask=umask, start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> Start:
    try:
        out, err = process.communicate("\n", timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        kill(process)
        raise MissedError(f"hangs for {LIMIT_S} s") from None
    return Start(process.returncode, out.rpartition("answer ")[2].strip(), err)


def kill(process: subprocess.Popen[str]) -> None:
    """With the compiler it started: they are a session of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise MissedError(f"{path.name} did not appear in {LIMIT_S} s")
        time.sleep(0.01)


def fill(folder: Path, kind: str) -> Path:
    """An honest cache, and what the attacker has made beside it."""
    honest = folder / kind
    for name in ("cache", "tmp"):
        (honest / name).mkdir(parents=True)
    (honest / "kernel.cpp").write_text(SOURCE)
    made = ended(start(kind, honest, "c++" if kind == KERNELS else "42"))
    if made.answer != "42":
        raise SystemExit(f"an honest start fails: {made.stderr}")
    if kind == KERNELS:
        build = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(honest / "evil")]
        subprocess.run(build, input=EVIL, text=True, check=True)
    else:
        other = folder / "other"
        (other / "tmp").mkdir(parents=True)
        ended(start(kind, other, "666"))
        (file,) = (path for path in other.rglob("*.safetensors"))
        shutil.copy(file, honest / "evil")
    return honest


# How a start must end.


def right(case: Case, begun: Start) -> None:
    """With the right answer, and without foreign code."""
    if case.canary.exists():
        raise MissedError("foreign code ran")
    if begun.code < 0:
        raise MissedError(f"killed by {signal.Signals(-begun.code).name}")
    if begun.code > 0:
        raise MissedError(f"exit code {begun.code}: {begun.stderr.strip().splitlines()[-1]}")
    if begun.answer != "42":
        raise MissedError(f"answers {begun.answer}")


def used(case: Case, _: Path) -> None:
    begun = case.load()
    right(case, begun)
    if begun.warnings:
        raise MissedError(f"warns: {begun.warnings[0]}")


def warned(case: Case, culprit: Path) -> None:
    begun = case.load()
    right(case, begun)
    if not any(str(culprit) in line for line in begun.warnings):
        raise MissedError("no warning names it")


def made_again(case: Case, culprit: Path) -> None:
    begun = case.load()
    right(case, begun)
    if len(begun.warnings) != 1 or str(culprit) not in begun.warnings[0]:
        raise MissedError(f"{len(begun.warnings)} warnings, expected one that names the file")
    used(case, culprit)


BARS: dict[Callable[[Case, Path], None], str] = {
    used: "used, no warning",
    warned: "not used, a warning names it",
    made_again: "made again, one warning names the file; the next start uses it",
}

# What is done to the cache; each returns what a warning must name.

Damage = Callable[[Case], Path]


def truncated(share: float) -> Damage:
    def damage(case: Case) -> Path:
        size = int(case.file.stat().st_size * share) // PAGE * PAGE
        os.truncate(case.file, size)
        return case.file

    return damage


def shorter(case: Case) -> Path:
    os.truncate(case.file, case.file.stat().st_size - 1)
    return case.file


def zeroed(first: float, last: float) -> Damage:
    def damage(case: Case) -> Path:
        size = case.file.stat().st_size
        with case.file.open("r+b") as file:
            file.seek(int(size * first))
            file.write(bytes(int(size * last) - int(size * first)))
        return case.file

    return damage


def flipped(share: float) -> Damage:
    def damage(case: Case) -> Path:
        data = bytearray(case.file.read_bytes())
        data[int((len(data) - 1) * share)] ^= 0x10
        case.file.write_bytes(data)
        return case.file

    return damage


def huge(case: Case) -> Path:
    os.truncate(case.file, 1 << 40)
    return case.file


def foreign(case: Case) -> Path:
    case.file.write_bytes(case.evil)
    return case.file


def of_another_kernel(case: Case) -> Path:
    case.file.write_bytes(case.evil + hashlib.sha256(b"other-0.so\0" + case.evil).digest())
    return case.file


def link(to: str) -> Damage:
    def damage(case: Case) -> Path:
        (case.folder / "forged").write_bytes(case.forged())
        case.file.unlink()
        case.file.symlink_to(case.folder / to)
        return case.file

    return damage


def pipe(case: Case) -> Path:
    case.file.unlink()
    os.mkfifo(case.file)
    return case.file


def socket_file(case: Case) -> Path:
    case.file.unlink()
    folder = os.open(case.place, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{case.file.name}")  # the whole path would be too long
    os.close(folder)
    return case.file


def directory(*names: str) -> Damage:
    def damage(case: Case) -> Path:
        case.file.unlink()
        case.file.mkdir()
        for name in names:
            (case.file / name).touch()
        return case.file

    return damage


def mode(bits: int) -> Damage:
    def damage(case: Case) -> Path:
        case.file.write_bytes(case.forged())
        case.file.chmod(bits)
        return case.file

    return damage


def of_another_user(case: Case) -> Path:
    case.file.write_bytes(case.forged())
    os.chown(case.file, OTHER_USER, OTHER_USER)
    return case.file


def folder_mode(where: str, bits: int) -> Damage:
    """Where others can write, they put a folder of their choice in the place of ours."""

    def damage(case: Case) -> Path:
        case.file.write_bytes(case.forged())
        folder = case.place / where
        folder.resolve().chmod(bits)
        return folder.resolve()

    return damage


def folder_of_another_user(where: str) -> Damage:
    def damage(case: Case) -> Path:
        case.file.write_bytes(case.forged())
        folder = (case.place / where).resolve()
        os.chown(folder, OTHER_USER, OTHER_USER)
        return folder

    return damage


def linked_through_a_folder_of_all(case: Case) -> Path:
    case.file.write_bytes(case.forged())
    of_all = case.folder / "of_all"
    of_all.mkdir()
    of_all.chmod(0o777)
    (case.cache / "engine").rename(case.folder / "engine")
    (of_all / "engine").symlink_to(case.folder / "engine")
    (case.cache / "engine").symlink_to(of_all / "engine")
    return of_all


def link_of_another_user(case: Case) -> Path:
    case.file.write_bytes(case.forged())
    case.cache.rename(case.folder / "elsewhere")
    case.cache.symlink_to("elsewhere")
    os.lchown(case.cache, OTHER_USER, OTHER_USER)
    return case.cache


def sticky_parent(case: Case) -> Path:
    case.cache.chmod(0o1777)
    return case.cache


def linked(case: Case) -> Path:
    case.cache.rename(case.folder / "elsewhere")
    case.cache.symlink_to("elsewhere")
    return case.cache


# Attacks that are more than damage before a start.


def while_loaded(case: Case) -> None:
    for change in (lambda: os.truncate(case.file, 0), lambda: case.file.write_bytes(bytes(1 << 18))):
        process = case.popen()
        assert process.stdout is not None
        if process.stdout.readline() != "loaded\n":
            raise MissedError("does not load")
        change()
        right(case, ended(process))


def exchanged_all_the_time(case: Case) -> None:
    good, is_over = case.file.read_bytes(), threading.Event()

    def exchange() -> None:
        other = case.place / "other"
        while not is_over.is_set():
            for content in (case.evil, good):
                other.write_bytes(content)
                other.chmod(0o600)
                other.rename(case.file)

    attacker = threading.Thread(target=exchange)
    attacker.start()
    try:
        for _ in range(8):
            right(case, case.load())
    finally:
        is_over.set()
        attacker.join()


def exchanged_build_folder(case: Case) -> None:
    """Where others can write to the temporary folder, they exchange the one a library is built in."""
    case.place.chmod(0o777)
    case.temp.chmod(0o777)
    exchange = 'dir=$(realpath "$(dirname "$out")"); mv "$dir" "$dir.old"; mkdir "$dir"; cp evil "$dir/${out##*/}"'
    right(case, case.load(compiler=case.script(f'c++ "$@"; {exchange}')))


def any_umask(case: Case) -> None:
    for umask in (0, 0o077):
        shutil.rmtree(case.cache / "engine")
        look = 'c++ "$@"; code=$?; stat -Lc "%a" "$out" "$(dirname "$out")" > modes; exit $code'
        right(case, case.load(compiler=case.script(look), umask=umask))
        paths = (case.cache / "engine", case.place, next(case.place.iterdir()))
        found = [f"{path.stat().st_mode & 0o777:o}" for path in paths]
        unfinished = (case.folder / "modes").read_text().split()
        if found != ["700", "700", "600"] or any(each[1:] != "00" for each in unfinished):
            raise MissedError(f"umask {umask:o}: folders and file {found}, while it is built {unfinished}")


def killed_build(case: Case) -> None:
    case.file.unlink()
    process = case.popen(compiler=case.script('touch "$out" "$(dirname "$out")/cc.s" started; exec sleep 60'))
    wait_for(case.folder / "started")
    kill(process)
    nothing_left(case)


def killed_write(case: Case) -> None:
    case.file.unlink()
    process = case.popen(pause="started")
    wait_for(case.folder / "started")
    kill(process)
    nothing_left(case)


def nothing_left(case: Case) -> None:
    right(case, case.load())
    left = [*case.temp.iterdir(), *(path for path in case.place.iterdir() if path != case.file)]
    if left:
        raise MissedError(f"left behind: {left[0].name}")


def swept_while_building(case: Case) -> None:
    case.file.unlink()
    build = 'touch started; while [ ! -e go ]; do sleep 0.02; done; exec c++ "$@"'
    process = case.popen(compiler=case.script(build))
    wait_for(case.folder / "started")
    right(case, case.load())
    (case.folder / "go").touch()
    right(case, ended(process))


def sweeping_what_is_not_its_own(case: Case) -> None:
    precious = case.folder / "precious"
    ours, link, no_lock, other = (case.temp / f"engine-scratch-{letter * 8}" for letter in "abcd")
    for folder in (precious, ours, no_lock, other):
        folder.mkdir()
        (folder / "data").touch()
        (folder / "lock").touch()
    (no_lock / "lock").unlink()
    (ours / "link").symlink_to(precious)
    link.symlink_to(precious)
    if os.geteuid() == 0:
        os.chown(other, OTHER_USER, OTHER_USER)
    right(case, case.load())
    kept = [precious, link, no_lock] + [other] * (os.geteuid() == 0)
    if not all((folder / "data").exists() for folder in kept):
        raise MissedError("removed what is not its own")
    if ours.exists():
        raise MissedError("did not remove its own")


# The table.


@dataclass(frozen=True)
class Attack:
    """``tries`` of one kind; either damage, after which a start ``must`` end in some way, or the whole of it."""

    name: str
    tries: tuple[Damage, ...] | Callable[[Case], None]
    must: Callable[[Case, Path], None] = made_again
    bar: str = ""
    kinds: tuple[str, ...] = (KERNELS, WEIGHTS)
    needs_root: bool = False


RIGHT, ONLY = "the right answer", (KERNELS,)
ATTACKS = (
    Attack("truncated", (truncated(0.5), truncated(0.9), truncated(0.0), shorter)),
    Attack("zeroed", (zeroed(0, 1), zeroed(0.5, 1), zeroed(0.1, 0.9))),
    Attack("one bit flipped", tuple(flipped(share) for share in (0.0, 0.3, 0.7, 1.0))),
    Attack("a terabyte of zeros after it", (huge,)),
    Attack("foreign library", (foreign,), kinds=ONLY),
    Attack("library of another kernel", (of_another_kernel,), kinds=ONLY),
    Attack("link in place of the file", (link("forged"), link("nothing"))),
    Attack("FIFO in place of the file", (pipe,)),
    Attack("socket in place of the file", (socket_file,)),
    Attack("directory in place of the file", (directory(), directory("a", "b")), warned),
    Attack("forged file that others can write to", (mode(0o620), mode(0o602))),
    Attack("forged file of another user", (of_another_user,), needs_root=True),
    Attack("folder that others can write to", (folder_mode(".", 0o777), folder_mode(".", 0o770)), warned),
    Attack("folder of another user", (folder_of_another_user("."),), warned, needs_root=True),
    Attack("parent that others can write to", (folder_mode("..", 0o777), folder_mode("../..", 0o757)), warned),
    Attack("parent of another user", (folder_of_another_user("../.."),), warned, needs_root=True),
    Attack("link through a folder that others can write to", (linked_through_a_folder_of_all,), warned),
    Attack("link of another user on the way", (link_of_another_user,), warned, needs_root=True),
    Attack("no attack: parent with the sticky bit, or a link", (sticky_parent, linked), used),
    Attack("changed in place while it is loaded", while_loaded, bar=RIGHT),
    Attack("exchanged all the time", exchanged_all_the_time, bar=RIGHT, kinds=ONLY),
    Attack("build folder exchanged", exchanged_build_folder, bar=RIGHT, kinds=ONLY),
    Attack("umask 000 and 077", any_umask, bar="700, 600, also while it is built", kinds=ONLY),
    Attack("build killed", killed_build, bar="the next start leaves nothing", kinds=ONLY),
    Attack("killed before the file is in its place", killed_write, bar="the next start leaves nothing"),
    Attack("another start while building", swept_while_building, bar="both give the right answer", kinds=ONLY),
    Attack("links and others' folders where it sweeps", sweeping_what_is_not_its_own, bar="untouched", kinds=ONLY),
)


def carry_out(attack: Attack, kind: str, honest: Path, scratch: Path, is_short: bool = False) -> tuple[int, list[str]]:
    """Number of tries, and how they missed the bar. ``scratch`` is made."""
    runs: list[Callable[[Case], None]]
    if callable(attack.tries):
        runs = [attack.tries]
    else:
        runs = [lambda case, damage=damage: attack.must(case, damage(case)) for damage in attack.tries]
    runs, missed = runs[:1] if is_short else runs, []
    for number, run in enumerate(runs):
        try:
            run(Case(kind, scratch / str(number), honest))
        except MissedError as error:
            missed.append(str(error))
    return len(runs), missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="attacks with one of these in the name")
    chosen = parser.parse_args().only
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as name:
        folder = Path(name).resolve()
        honest = {kind: fill(folder / "honest", kind) for kind in (KERNELS, WEIGHTS)}
        print(f"{'attack':58} | tried | {'result':30} | bar")
        for attack, kind in ((each, kind) for each in ATTACKS for kind in each.kinds):
            name = f"{attack.name}: {kind}"
            if not any(word.lower() in name.lower() for word in chosen):
                continue
            tried, missed = 0, ["not tried: needs root"]
            if not attack.needs_root or os.geteuid() == 0:
                tried, missed = carry_out(attack, kind, honest[kind], folder / name)
                num_missed += len(missed)
            result = f"{len(missed)} missed: {missed[0]}" if tried and missed else "".join(missed) or "met"
            print(f"{name:58} | {tried:5} | {result:30} | {attack.bar or BARS[attack.must]}", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
