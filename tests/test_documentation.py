"""What the documentation says is there is there: files, classes, plugins, and examples that run."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from engine import testing
from engine.assembly.discovery import discover
from engine.cli.commands import commands
from engine.contracts.config import PluginSettings, SchedulerConfig
from engine.contracts.slots import SLOTS
from engine.testing.context import build_context
from engine.testing.scheduler import BLOCK, SchedulerConformance

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "contrib" / "README.md", ROOT / "tools" / "README.md")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "plugins.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
SERVING = (ROOT / "docs" / "serving.md").read_text()
TOOLS = (ROOT / "tools" / "README.md").read_text()

FOLDERS = ("core", "plugins", "conf", "tests", "tools", "docs", "contrib")
FILE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?")


def rows(table_after: str, page: str) -> list[list[str]]:
    """Cells of the first table after a heading line of that table."""
    lines = page[page.index(table_after) :].splitlines()[2:]
    body = [line for line in lines[: lines.index("")] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_a_page_names_exists(page):
    text = page.read_text()
    linked = [page.parent / target for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)]
    missing = [str(path) for path in (*linked, *(ROOT / name for name in FILE.findall(text))) if not path.exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """What a link may point to: headings in lower case, spaces as hyphens; a repeated one is numbered."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(name for n in count() if (name := f"{slug}-{n}" if n else slug) not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_heading_a_page_links_to_exists(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    assert [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


def test_the_readme_fits_on_two_screens_and_links_to_every_page():
    prose = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
    assert len(README.splitlines()) <= 104 and max(map(len, prose.splitlines())) <= 120
    assert all(f"](docs/{page.name})" in README for page in ROOT.glob("docs/*.md"))


def test_the_serving_page_lists_every_command():
    known = commands(discover(PluginSettings(third_party=False)))
    assert {row[0].strip("`") for row in rows("| command |", SERVING)} == {f"engine {name}" for name in known}


def test_the_tools_page_lists_every_script():
    tools = ROOT / "tools"
    scripts = {
        file.relative_to(tools).as_posix() for where in ("*.py", "benchmarks/*.py") for file in tools.glob(where)
    }
    programs = {f"{file.parent.name}/" for file in tools.glob("*/__main__.py")}
    assert {row[0].strip("`") for row in rows("| tool |", TOOLS)} == scripts | programs | {"attack/"}


def test_the_page_on_reliability_names_every_attack():
    page = (ROOT / "docs" / "reliability.md").read_text()
    started_by_others = {"holder", "probe"}
    attacks = {file.stem for file in (ROOT / "tools" / "attack").glob("*.py") if "__main__" in file.read_text()}
    assert {name for name in attacks - started_by_others if f"tools.attack.{name}" not in page} == set()


def test_the_page_on_known_attacks_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "known_attacks.md").read_text())
    assert len(named) > 100
    assert [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()] == []


def test_the_architecture_page_names_many_files_and_only_classes_that_exist():
    assert len(set(FILE.findall(ARCHITECTURE))) > 40
    source = "\n".join(file.read_text() for file in (ROOT / "core").rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w+)`", ARCHITECTURE)) | set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", ARCHITECTURE))
    assert {"EnginePlan", "Sequence", "StepPlan"} <= named
    assert {name for name in named if f"class {name}" not in source} == set()
    methods = re.findall(r"\b[A-Z]\w+\.(\w+)\b", ARCHITECTURE)
    assert "plan" in methods and {name for name in methods if f"def {name}(" not in source} == set()


def test_the_architecture_page_stays_short():
    assert len(ARCHITECTURE.splitlines()) <= 120


def test_the_readme_lists_the_built_in_plugins_and_their_defaults():
    found = discover(PluginSettings(third_party=False))
    defaults = {}
    for entry in yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["defaults"]:
        defaults |= entry if isinstance(entry, dict) else {}
    table = {slot.strip("`"): plugins for slot, _, plugins in rows("| slot | its question", README)}
    assert set(table) == set(SLOTS)
    for slot, cell in table.items():
        named = set(found.names(slot)) if slot != "architecture" else set()  # docs/models.md has those
        assert set(re.findall(r"`(\w+)`", cell)) - {"auto"} == named, slot
        default = defaults[slot]
        assert re.findall(r"`(\w+)`\*", cell) == (default if isinstance(default, list) else [default]), slot


def test_the_models_page_lists_every_architecture_and_what_was_measured_of_it():
    found = discover(PluginSettings(third_party=False)).of_slot("architecture")
    assert {plugin.strip("`") for plugin, *_ in rows("| plugin | models", MODELS)} == {offer.name for offer in found}
    files = {offer.provider.factory.partition(":")[0].rpartition(".")[2] for offer in found}
    assert {row[-1].partition(".py")[0] for row in rows("| architecture | logits", MODELS)} == files


def test_the_guide_lists_every_slot_with_its_contract_and_every_suite():
    table = {row[0].strip("`"): row for row in rows("| slot | question |", GUIDE)}
    assert set(table) == set(SLOTS)
    assert all(find_spec(row[2].strip("`")) for row in table.values())
    suites = {file.stem for file in Path(testing.__file__).parent.glob("*.py")} & set(SLOTS)
    assert {slot for slot, row in table.items() if row[3]} == suites
    assert {row[3] for row in table.values() if row[3]} == {f"`engine.testing.{slot}`" for slot in suites}


def test_the_guide_lists_the_capabilities_in_use():
    found = discover(PluginSettings(third_party=False))
    provided = {(offer.slot, capability) for offer in found.offers for capability in offer.provider.provides}
    assert all(f"| `{slot}` | `{capability}` |" in GUIDE for slot, capability in provided)


class TestTheReadmesPlugin(SchedulerConformance):
    """The whole plugin on the first page, put through the suite of its slot."""

    @pytest.fixture(autouse=True)
    def _load(self, monkeypatch):
        module = ModuleType("engine_mine")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        code = README.split("# engine_mine.py\n")[1].split("```")[0]
        exec(compile(code, "README.md", "exec"), module.__dict__)  # noqa: S102 - the page is ours
        self.module = module

    def make(self):
        return self.module.OneAtATime(SchedulerConfig(), build_context(BLOCK))

    def test_its_hook_offers_the_class_it_defines(self):
        (provider,) = self.module.engine_scheduler()
        assert provider.factory == f"engine_mine:{self.module.OneAtATime.__name__}"
