"""The functions for int8 in the plugin guide are those of a format: they are taken from the page and put through the
suite of the slot."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.testing.context import build_context
from engine.testing.kv_format import KVTileConformance
from engine_plugins.kv_format.int8 import Int8Format

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"
IMPORTS = "import triton\nimport triton.language as tl\n\n\n"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    (code,) = re.findall(r"```python\n((?:(?!```).)*?def store_int8.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("documented") / "documented_int8.py"  # Triton reads the source of what it compiles
    file.write_text(IMPORTS + code)
    spec = spec_from_file_location("documented_int8", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TestDocumentedInt8(KVTileConformance):
    error = 0.5 / 127 + 2.0**-8

    @pytest.fixture(autouse=True)
    def _load(self, example: ModuleType) -> None:
        self.module = example

    def make(self) -> KVFormat:
        module = self.module

        class Documented(Int8Format):
            def load_tile(self) -> Any:
                return module.load_int8

            def store_tile(self) -> Any:
                return module.store_int8

        return Documented(SlotConfig(), build_context())
