"""Client libraries against the server: each is asked for what it offers, and what the server lacks must be refused in
words that the library understands.

Give the interpreters of virtual environments that have some of the libraries (``cases.CASES``), and folders in which
``npm install openai`` or ``npm install ai @ai-sdk/openai-compatible`` was run (``litellm`` needs ``mcp`` for tools and
responses):

    python -m tools.clients --python /tmp/openai2/bin/python --python /tmp/litellm/bin/python --node /tmp/node6

Programs (``programs.PROGRAMS``) are given with their executables (``lm_eval[api]`` needs ``transformers``, ``litellm``
its extra ``proxy``; ``open-webui`` does with the packages of ``requirements-slim.txt``, which is in its wheel):

    python -m tools.clients --program litellm=/tmp/litellm/bin/litellm --program aider=/tmp/aider/bin/aider
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.attack.harness import Row, arguments, run, serve, target_of
from tools.clients.cases import ANSWER, ASK, BESIDE, CASES, COMPLETE, HISTORY, PLAIN, SCHEMA, TOOL, outcome
from tools.clients.programs import AGENTS, PROGRAMS, Place

HERE = Path(__file__).parent
NODE = {
    "openai": "openai.mjs",
    "@ai-sdk/openai-compatible": "vercel.mjs",
    "@ai-sdk/openai": "ai_openai.mjs",
    "@anthropic-ai/sdk": "anthropic.mjs",
}
"""Scripts by package."""
LIMIT_S = 600


def inside(url: str) -> None:
    """Runs in an environment of its own: prints each library that it has, and what came of each case."""
    found = []
    for library, cases in CASES.items():
        if version := _version(library):
            tried = {name: outcome(call, refused) for name, call, refused in cases(url)}
            found.append({"library": f"{library} {version}", "cases": tried})
    print("\n" + json.dumps(found))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


async def attack(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        url = f"http://{target.host}:{target.port}/v1"
        rows = []
        for python in options.python:
            rows += await _rows([python, "-m", "tools.clients", "--inside", url], None, {})
        for folder in options.node:
            for package, script in NODE.items():
                if (Path(folder) / "node_modules" / package).exists():
                    # Not as a file: it is to find the packages of the folder.
                    source = (HERE / script).read_text()
                    told = {"CASES": json.dumps(_node_cases(url)), "RUN": (HERE / "run.mjs").as_uri()}
                    rows += await _rows(["node", "--input-type=module", "-e", source], folder, told)
        programs = [given.partition("=")[::2] for given in options.program]
        rows += [await _program(name, path, url) for name, path in programs if name not in AGENTS]
    agents = [(name, path) for name, path in programs if name in AGENTS]
    if not agents:
        return rows
    from tools.clients.long_model import write_long_model  # what runs inside of other environments has no tokenizers

    with tempfile.TemporaryDirectory(prefix="engine-model-") as folder:
        write_long_model(Path(folder) / "bundled")
        # Without line ends in what a grammar writes: they would end it.
        async with serve(*options.overrides, f"model.path={folder}/bundled", "constraint.max_whitespace=0") as target:
            url = f"http://{target.host}:{target.port}/v1"
            return rows + [await _program(name, path, url) for name, path in agents]


async def _program(name: str, path: str, url: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="engine-client-") as folder:
        at, version, wrong = Place(os.path.abspath(path), url, Path(folder)), "", ""
        try:
            version = await at.version()
            await PROGRAMS[name](at)
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:400]}"
        tried = " ".join((PROGRAMS[name].__doc__ or "").split())
        return Row(f"clients: {name} {version}".rstrip(), tried, wrong or "all as they should be", "all", not wrong)


def _node_cases(url: str) -> dict[str, Any]:
    names = {"ask": ASK, "complete": COMPLETE, "tool": TOOL, "schema": SCHEMA, "answer": ANSWER}
    return {"url": url, "plain": PLAIN, "beside": BESIDE, "history": HISTORY} | names


async def _rows(command: list[str], folder: str | None, more: dict[str, str]) -> list[Row]:
    # Nothing of this environment: the library is to be the other one's.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment | more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
        found = json.loads(out.splitlines()[-1])
    except (TimeoutError, ValueError, IndexError):
        if process.returncode is None:
            process.kill()
            await process.wait()
            return [Row(f"clients: {command[0]}", "everything", f"not done in {LIMIT_S} s", "all", False)]
        said = [line for line in err.decode(errors="replace").splitlines() if "Error" in line]
        return [Row(f"clients: {command[0]}", "everything", f"did not run: {' '.join(said)[:200]}", "all", False)]
    rows = []
    for library in found:
        wrong = {name: why for name, why in library["cases"].items() if why}
        shown = "; ".join(f"{name}: {why}" for name, why in wrong.items()) or "all as they should be"
        rows.append(Row(f"clients: {library['library']}", ", ".join(library["cases"]), shown, "all", not wrong))
    return rows


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--python", action="append", default=[], help="an interpreter; may be repeated")
    parser.add_argument("--node", action="append", default=[], help="a folder with node_modules; may be repeated")
    parser.add_argument(
        "--program", action="append", default=[], metavar="NAME=PATH", help=f"{', '.join(PROGRAMS)}; may be repeated"
    )
    parser.add_argument("--inside", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return 0
    if not options.python and not options.node and not options.program:
        parser.error("nothing to try: give --python, --node or --program")
    for given in options.program:
        if given.partition("=")[0] not in PROGRAMS:
            parser.error(f"no such program: {given}")
    return run(options, attack)


if __name__ == "__main__":
    sys.exit(main())
