"""The command line: which sections, where to, and how it ended."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check import registry, report, resume
from gpu_check.conductor import Outcome, conduct, end_with_parent
from gpu_check.floors import DATA_SHEETS
from gpu_check.section import CARD, Context
from gpu_check.standalone import REPOSITORY, is_there, missing_packages, source_paths
from gpu_check.wheels import gather

PASSED, FAILED, CANNOT_RUN = 0, 1, 2
REPORTS = REPOSITORY / "tools" / "benchmarks"
SCRATCH = "gpu_check-"
"""How scratch folders begin; the process that made one follows."""
ROOM = 24 << 30
"""Bytes the scratch folder must have for the weights of both models and a head; less is looked for elsewhere."""


def main(doc: str, arguments: list[str] | None = None) -> int:
    options = parser(doc).parse_args(arguments)
    if options.gather:
        return gathered(options.gather, options.python)
    if options.child:
        return run_child(options.child, options.scratch, options.dry_run)
    if missing := missing_packages():
        print(f"gpu_check: these packages are missing: {' '.join(missing)}; --help says how to carry them here",
              file=sys.stderr)  # fmt: skip
        return CANNOT_RUN
    if not options.dry_run and not has_cuda():
        return CANNOT_RUN
    parent = scratch_parent(options.dry_run)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", dir=parent) as folder:
        return check(options, Path(folder))


def parser(doc: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="gpu_check", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(registry.BY_NAME)
    result.add_argument(
        "--only", nargs="+", choices=names, metavar="SECTION", help=f"and what they need; of {', '.join(names)}"
    )
    result.add_argument(
        "--output", type=Path, help="folder of the JSON report (tools/benchmarks; of a dry run: temporary files)"
    )
    result.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU: does the tool itself work?")
    result.add_argument(
        "--total", type=float, default=registry.TOTAL_S, metavar="S", help="seconds for all sections (%(default)g)"
    )
    result.add_argument(
        "--resume", type=Path, nargs="?", const=Path(), metavar="JSON",
        help="go on with the run of this report, or of the newest in the --output folder: rows in it are not measured "
             "again, and the new ones are merged with them",
    )  # fmt: skip
    result.add_argument("--logs", type=Path, help="keep the sections' logs in this folder")
    result.add_argument("--gather", type=Path, metavar="FOLDER", help="fetch the wheels to carry there, and stop")
    result.add_argument("--python", default="3.12", help="of the machine they are for (%(default)s)")
    result.add_argument("--child", choices=sorted(registry.BY_NAME), help=argparse.SUPPRESS)
    result.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return result


def gathered(folder: Path, python: str) -> int:
    """Wheels for a machine without a network."""
    try:
        wheels = gather(folder, python)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return FAILED
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB, in {folder}: {' '.join(wheel.name for wheel in wheels)}")
    return PASSED


def check(options: argparse.Namespace, scratch: Path) -> int:
    """Run the sections, write the report, print the table."""
    sys.path[:0] = source_paths(scratch)
    from rich.console import Console

    from engine_lab.shared.output import check_folder

    folder = options.output or (Path(tempfile.gettempdir()) if options.dry_run else REPORTS)
    try:
        for flag, wanted in (("--output", folder), ("--logs", options.logs)):
            if wanted is not None:
                check_folder(wanted, flag)
                wanted.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return FAILED
    console = Console(width=None if sys.stdout.isatty() else 180)
    device = device_facts(options.dry_run)
    (scratch / CARD).write_text(DATA_SHEETS.get(device["name"], ""))
    try:
        found = earlier_report(options.resume, folder, device["name"])
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return FAILED
    earlier = resume.outcomes_of(found) if found else []
    began = [found["when"], *found.get("resumed", ())] if found else []
    when = [*began, datetime.datetime.now().isoformat(timespec="seconds")]
    asked, left_out = registry.chosen(options.only, options.dry_run)
    sections = resume.still_to_run(asked, earlier, scratch)

    def save(outcomes: Sequence[Outcome]) -> Path:
        whole = resume.merged(earlier, outcomes)
        return report.write(report.as_json(device, when, whole, left_out), folder)

    later = conduct(
        sections, scratch, dry_run=options.dry_run, total_s=options.total, say=lambda line: print(line, flush=True),
        save=save,
    )  # fmt: skip
    path, outcomes = save(later), resume.merged(earlier, later)
    if options.logs:
        for log in (*scratch.glob("*.log"), *scratch.glob("*.txt")):
            shutil.copy(log, options.logs)
    console.print(report.table(outcomes, left_out))
    print(*report.legend(outcomes), sep="\n")
    is_failed = report.failed(outcomes)
    print(f"{'FAILED' if is_failed else 'passed'}; report: {path}")
    return FAILED if is_failed else PASSED


def earlier_report(asked: Path | None, folder: Path, device: str) -> dict[str, Any] | None:
    """The report to go on with. ``asked``: nothing, its path, or the empty path for the newest in ``folder``, if there
    is one. Raises ``ValueError`` for one that cannot be gone on with."""
    if asked is None:
        return None
    path = report.newest(device, folder) if asked == Path() else asked
    return None if path is None else resume.load(path, device)


def run_child(name: str, scratch: Path, dry_run: bool) -> int:
    """One section, in this process."""
    end_with_parent()
    section = registry.BY_NAME[name]
    module = importlib.import_module(f"gpu_check.{section.module}")
    module.run(Context(section, scratch, dry_run))
    return 0


def has_cuda() -> bool:
    import torch

    if not torch.cuda.is_available():
        print(
            f"gpu_check: torch {torch.__version__} finds no CUDA device; there is nothing to check "
            "(--dry-run runs the tool with tiny shapes on the CPU)",
            file=sys.stderr,
        )
        return False
    return True


def scratch_parent(dry_run: bool) -> str | None:
    """Memory if there is room for the weights in it, else wherever temporary files go."""
    shared = "/dev/shm"
    remove_left_behind(Path(shared))
    if dry_run or not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < ROOM:
        return None
    return shared


def remove_left_behind(parent: Path) -> None:
    """Scratch folders of runs that were killed: in memory, their weights would take it from this one."""
    for folder in parent.glob(f"{SCRATCH}[0-9]*-*"):
        if not Path("/proc", folder.name.removeprefix(SCRATCH).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def device_facts(dry_run: bool) -> dict[str, Any]:
    """The device and the software, for the report. Asks the driver, not torch: that would take memory on the card."""
    from engine.assembly.device_facts import cuda_facts

    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers") if is_there(name)
    }
    common: dict[str, Any] = {**versions, "python": platform.python_version(), "host_cores": os.cpu_count()}
    if dry_run:
        return {"name": "dry run on a CPU", **common}
    facts, reason = cuda_facts()
    if facts is None:
        return {"name": f"unknown: {reason}", **common}
    capability = ".".join(map(str, facts.capability or ()))
    return {"name": facts.name, "capability": capability, "memory_gb": round(facts.memory_bytes / 1e9, 1), **common}
