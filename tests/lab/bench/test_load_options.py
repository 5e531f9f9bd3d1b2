"""The flags of what is sent, of all commands that send requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from engine_lab.bench import options as bench
from engine_lab.bench.load_options import add_prompt_flags, endpoint_of
from engine_lab.ladder import options as ladder
from engine_lab.sweep import options as sweep
from engine_lab.tune import options as tune

AddFlags = Callable[[argparse.ArgumentParser], None]


@pytest.mark.parametrize("add_flags", [bench.add_flags, ladder.add_flags, sweep.add_flags, tune.add_flags])
def test_every_command_that_sends_requests_has_the_same_flags_for_prompts(add_flags: AddFlags) -> None:
    common, parser = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_prompt_flags(common.add_argument_group())
    add_flags(parser)
    words = ["--prompt-tokens", "7", "--output-tokens", "uniform:1,9", "--shared-prefix", "0.5", "--prompt-ids"]
    expected, found = vars(common.parse_args(words)), vars(parser.parse_args(words))
    assert {name: found[name] for name in expected} == expected
    assert endpoint_of(parser.parse_args(words)) == "completions"
