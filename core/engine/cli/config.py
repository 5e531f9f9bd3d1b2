"""``engine config``: every key and its value, as composed; of secrets only whether they are set."""

from __future__ import annotations

import argparse
import json

from engine.cli.serve import overrides_of, shorthands
from engine.contracts.command import OK, Command


def _flags(parser: argparse.ArgumentParser) -> None:
    shorthands(parser)
    parser.add_argument("--json", action="store_true", help="JSON instead of YAML")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.assembly.assemble import configure
    from engine.assembly.secrets import redacted

    tree = redacted(configure(overrides_of(flags, overrides), flags.config_dir).composed.tree())
    if flags.json:
        print(json.dumps(tree, indent=2))
    else:
        import yaml

        print(yaml.safe_dump(tree, sort_keys=False), end="")
    return OK


COMMAND = Command("Print the composed configuration; nothing is resolved or started.", _run, _flags)
