"""How far is the memory ledger from the real peak of an engine on this CPU?

    python tools/benchmarks/memory_peak.py [MODEL] [--batch 16] [--set "scheduler.token_budget=1024 ..."]

Starts an engine in a process of its own, runs one prompt of a whole token budget and then a batch that samples with
every filter, and compares two numbers: the ledger's estimate, made before a weight was read, and the peak of the
process's resident memory above what it was just before loading (VmHWM, reset there).

The KV pool is zero pages until somebody writes to them, so of the pool only what was written counts: blocks are told
apart by the pages of the pool that are resident. The bytes of shared libraries that were first touched during the run
are counted apart (RssFile): they are no part of the ledger, and the kernel may drop them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

KIB = 1024


def status(name: str) -> int:
    """A field of ``/proc/self/status`` in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise SystemExit(f"/proc/self/status has no {name}")


def measure(model: str, batch: int, overrides: list[str]) -> dict[str, float]:
    """In this process: bytes by name."""
    from engine.assembly.assemble import assemble
    from engine.assembly.bind import bind
    from engine.loop.environment import with_defaults

    plan = assemble([f"model.path={model}", "device=cpu", *overrides])
    os.environ.update(with_defaults(os.environ, "cpu"))
    from engine.contracts.request import EngineRequest, SamplingParams
    from engine.startup.build import build_engine

    bind(plan)  # imports and kernels are not what the ledger is about
    before, libraries = status("VmRSS"), status("RssFile")
    Path("/proc/self/clear_refs").write_text("5")
    engine = build_engine(plan)
    core, ledger = engine.core, engine.info.ledger
    assert ledger is not None
    started = ledger.peak_so_far_bytes
    budget = plan.scheduler.token_budget
    length = min(budget, engine.info.max_len - 8)
    filtered = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, top_k=50, seed=1, ignore_eos=True)

    def run(prompts: list[tuple[int, ...]], sampling: SamplingParams) -> None:
        for i, prompt in enumerate(prompts):
            core.submit(EngineRequest(f"peak-{len(prompts)}-{i}", prompt, sampling, cache_salt=f"{len(prompts)}-{i}"))
        while core.has_work:
            for output in core.step().outputs:
                assert not output.error, output.error

    def prompt(seed: int, tokens: int) -> tuple[int, ...]:
        return tuple((seed * 31 + i * 7) % (engine.info.vocab_size - 1) for i in range(tokens))

    peaks = [ledger.peak_so_far_bytes]
    stages = [
        ("prefill", [prompt(1, length)], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)),
        ("prompt logprobs", [prompt(2, length)], SamplingParams(max_tokens=1, prompt_logprobs=5, logprobs=5)),
        ("batch", [prompt(i, max(1, length // batch)) for i in range(batch)], filtered),
    ]
    for name, prompts, sampling in stages:
        run(prompts, sampling)
        peaks.append(status("VmHWM") - before)
        print(f"{name}: peak {peaks[-1] / 2**20:.1f} MiB, KV written {written_bytes(engine.info.kv_bytes) / 2**20:.1f}")
    lines = {line.name: line.planned_bytes for line in ledger.lines}
    written = written_bytes(engine.info.kv_bytes)
    core.close()
    return {
        "peak": max(peaks),
        "start": started,
        "libraries": status("RssFile") - libraries,
        "weights": lines["weights"],
        "loading": lines["loading peak"],
        "workspace": lines["workspace"],
        "tables": lines["tables"],
        "programs": lines["programs"],
        "overhead": lines["process overhead"],
        "written": written,
    }


def written_bytes(pool_bytes: int) -> int:
    """Resident bytes of the KV pool's mappings: shared anonymous memory, of which an engine has no other."""
    resident, shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            shared = line.endswith("/dev/zero (deleted)")
        elif shared and line.startswith("Rss:"):
            resident += int(line.split()[1]) * KIB
    assert resident <= pool_bytes * 1.01 + 2**20, "more shared memory than the pool has"
    return resident


def report(name: str, found: dict[str, float]) -> None:
    mib = {key: value / 2**20 for key, value in found.items()}
    ledger = mib["weights"] + max(mib["loading"], mib["workspace"]) + mib["tables"]
    ledger += mib["programs"] + mib["overhead"] + mib["written"]
    peak = mib["peak"] - mib["libraries"]
    print(
        f"{name}: ledger {ledger:.1f} MiB (weights {mib['weights']:.1f}, largest of loading {mib['loading']:.1f} and "
        f"workspace {mib['workspace']:.1f}, tables {mib['tables']:.1f}, "
        f"programs {mib['programs']:.1f}, process overhead {mib['overhead']:.1f}, "
        f"KV written {mib['written']:.1f}); "
        f"peak {mib['peak']:.1f} MiB above the start, {mib['libraries']:.1f} of them libraries, at start-up "
        f"{mib['start']:.1f}; ledger / (peak - libraries) = {ledger / peak:.3f}, / peak = {ledger / mib['peak']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--set", default="", metavar="'KEY=VALUE ...'", help="overrides")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    overrides = options.set.split()
    if options.child:
        print(json.dumps(measure(options.model, options.batch, overrides)))
        return
    words = [sys.executable, __file__, options.model, "--batch", str(options.batch), "--set", options.set, "--child"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    print("\n".join(done.stdout.splitlines()[:-1]))
    report(f"{options.model} {options.set}".strip(), json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
