"""Has a real Prometheus scrape a running engine, and asks it what every panel of every dashboard shows and whether it
can evaluate every rule.

    engine serve drafter=ngram &
    engine bench --concurrency 4 --duration 60 &
    python tools/check_dashboards.py --prometheus /usr/bin/prometheus

Exit status 1 when a panel is empty, or shows no number, or a rule is not healthy. Debian's package ``prometheus`` has
the program.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine_lab.alerts.rules import RuleOptions, rules
from engine_lab.alerts.rules_file import rules_file
from engine_lab.dashboards.boards import DASHBOARDS
from engine_lab.dashboards.model import Dashboard

SCRAPE_S = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running engine, under load (%(default)s)")
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program (on PATH)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to scrape (%(default)g)")
    flags = parser.parse_args(arguments)
    if flags.prometheus is None:
        parser.error("there is no prometheus on PATH; give --prometheus")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        configure(Path(folder), urlsplit(flags.url).netloc)
        with subprocess.Popen(command(flags.prometheus, folder, port), stderr=subprocess.DEVNULL) as prometheus:
            try:
                time.sleep(flags.seconds)
                api = f"http://127.0.0.1:{port}/api/v1"
                empty = sum(check(board, api) for board in DASHBOARDS)
                return 1 if empty + check_rules(api) else 0
            finally:
                prometheus.terminate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def configure(folder: Path, target: str) -> None:
    (folder / "rules.yml").write_text(rules_file(rules(RuleOptions(rag=True))))
    scrape = {"job_name": "engine", "static_configs": [{"targets": [target]}]}
    every = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(json.dumps(config))


def command(program: str, folder: str, port: int) -> list[str]:
    return [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]


def check(board: Dashboard, api: str) -> int:
    """How many queries of it have no number for an answer."""
    wrong = 0
    for panel in board.panels():
        for query in panel.queries:
            values = [float(found["value"][1]) for found in ask(api, filled(query.promql, board))]
            numbers = [value for value in values if not math.isnan(value)]
            wrong += not numbers
            shown = f"{numbers[0]:.4g}" if numbers else "EMPTY"
            print(f"{board.uid:20} {panel.title:48} {query.legend:24} {len(values):3} series {shown}")
    return wrong


def filled(promql: str, board: Dashboard) -> str:
    """As Grafana fills in its variables."""
    chosen = dict.fromkeys(("$job", "$model", "$instance", "$engine"), ".*")
    values = {"$__rate_interval": f"{4 * SCRAPE_S + 6}s", **chosen}
    for name, value in (values | {f"${name}": choices[0] for name, choices in board.choices.items()}).items():
        promql = promql.replace(name, value)
    return promql


def ask(api: str, promql: str) -> Iterator[dict[str, Any]]:
    try:
        yield from get(f"{api}/query?" + urllib.parse.urlencode({"query": promql}))["result"]
    except urllib.error.HTTPError as error:
        print(f"{promql}: {error.read().decode()}", file=sys.stderr)


def check_rules(api: str) -> int:
    """How many are not healthy."""
    found = [rule for group in get(f"{api}/rules")["groups"] for rule in group["rules"]]
    unhealthy = [rule for rule in found if rule["health"] != "ok"]
    firing = [rule["name"] for rule in found if rule["state"] != "inactive"]
    print(f"{len(found)} rules, {len(unhealthy)} not healthy, these fire: {', '.join(firing) or 'none'}")
    return len(unhealthy) + (not found)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


if __name__ == "__main__":
    sys.exit(main())
