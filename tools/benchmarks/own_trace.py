"""Does ``engine simulate`` say of a trace that was just recorded what its requests saw, with drafts too?

    python -m tools.benchmarks.own_trace [--out DIR] [--repeats 3] [--requests 300] [--load 0.6] [overrides]

Serves the plugin set (``+preset=latency`` unless given) with exporter ``trace``: first a closed loop, for the rate that
it serves at most, then ``--load`` of that rate, whose part of the trace is simulated with what the engine has kept of
its steps. Each repeat starts anew. A line has both P50s, measured and simulated, their error, and whether the client
kept up. Run it on a machine that nothing else uses: a simulated one does not change while it serves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPTS = ("--text", str(ROOT / "docs" / "serving.md"), "--temperature", "0")
LENGTHS = ("--prompt-tokens", "lognormal:200,0.6", "--output-tokens", "lognormal:80,0.5")


def engine(*words: str) -> list[str]:
    return [sys.executable, "-m", "engine.cli.main", *words]


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}: see serve.log")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server is not ready after two minutes")


def bench(url: str, out: Path, *words: str) -> dict[str, Any]:
    """Its result; what it prints is left out. A client that lagged is said by the result."""
    flags = ("--url", url, *PROMPTS, *LENGTHS, *words, "--json", str(out))
    subprocess.run(engine("bench", *flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return dict(json.loads(out.read_text()))


def recorded(out: Path, overrides: Sequence[str], flags: argparse.Namespace, seed: int) -> tuple[Path, dict[str, Any]]:
    """The trace of the open loop, and the result of its client."""
    trace, url = out / "trace.jsonl", f"http://127.0.0.1:{flags.port}"
    words = (f"server.port={flags.port}", "exporter=[prometheus,trace]", f"exporter.trace.path={trace}")
    with (out / "serve.log").open("ab") as log:
        process = subprocess.Popen(engine("serve", *overrides, *words), stdout=log, stderr=log)
    try:
        wait_until_ready(url, process)
        most = bench(url, out / "closed.json", "--concurrency", "16", "--requests", "100", "--seed", str(seed))
        rate = flags.load * most["requests"]["ok"] / most["duration_s"]
        time.sleep(1.0)
        before = trace.read_text().splitlines()
        load = ("--rate", f"{rate:.3f}", "--requests", str(flags.requests), "--seed", str(seed + 100))
        result = bench(url, out / "open.json", *load)
        time.sleep(1.0)
        after = trace.read_text().splitlines()
    finally:
        process.terminate()
        process.wait(60)
    part = out / "part.jsonl"
    part.write_text("\n".join((after[0], *after[len(before) :])))
    return part, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--port", type=int, default=18_471)
    flags, overrides = parser.parse_known_args()
    print("| requests/s | TTFT P50, measured, simulated | error | E2E P50, measured, simulated | error | client |")
    print("|---|---|---|---|---|---|", flush=True)
    for number in range(flags.repeats):
        out = (flags.out or Path(tempfile.mkdtemp(prefix="own-trace-"))) / str(number)
        out.mkdir(parents=True)
        words = [*(overrides or ["+preset=latency"]), f"calibration={out}"]
        part, result = recorded(out, words, flags, number)
        told = subprocess.run(engine("simulate", str(part), *words, "--json", "-"), stdout=subprocess.PIPE, check=True)
        found = json.loads(told.stdout)
        (out / "simulated.json").write_bytes(told.stdout)
        cells = [f"{found['measured']['requests'] / result['duration_s']:.1f}"]
        for name in ("ttft_ms", "e2e_ms"):
            real, said = found["measured"][name]["p50"], found["sets"][0][name]["p50"]
            cells += [f"{real:.1f}, {said:.1f} ms", f"{said / real - 1:+.0%}"]
        cells.append("valid" if result["valid"] else "lagged")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
