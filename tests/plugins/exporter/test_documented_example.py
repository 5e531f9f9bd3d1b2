"""The example in the plugin guide is a plugin: it is taken from the page and put through the suite of its slot."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance, request_event

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    module = ModuleType("engine_slow_log")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(code, str(PAGE), "exec"), module.__dict__)  # noqa: S102 - the page is ours
    return module


class TestDocumentedExample(ExporterConformance):
    @pytest.fixture(autouse=True)
    def _load(self, example: ModuleType) -> None:
        self.module = example

    def make(self):
        return self.module.SlowLog(self.module.SlowLogConfig(), build_context())


def test_its_hook_offers_the_plugin_it_defines(example):
    (provider,) = example.engine_exporter()
    assert provider.factory == f"{example.__name__}:{example.SlowLog.__name__}"
    assert provider.config is example.SlowLogConfig


def test_it_reports_what_it_says(example, capsys):
    log = example.SlowLog(example.SlowLogConfig(over_ms=15.0), build_context())
    log.export([request_event(ttft_ms=20.0), request_event(ttft_ms=10.0)])
    assert capsys.readouterr().err == "r1: 20 ms, queued 4 ms\n"
