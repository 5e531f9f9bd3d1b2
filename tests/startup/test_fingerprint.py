"""Two machines compute the same if what they run is the same: by content, wherever it lies."""

import sys
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.startup.fingerprint import code_digests, other_source, plugin_digests, versions


@pytest.fixture(autouse=True)
def looked_at_anew():
    code_digests.cache_clear()
    yield
    code_digests.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package ``mine``, installed in a folder of this name."""

    def install(name: str, **changed: str) -> None:
        for known in [known for known in sys.path if known.startswith(str(tmp_path))]:
            sys.path.remove(known)
        package = tmp_path / name / "mine"
        files = {"__init__": "", "ops/add": "x + y", "native/add": "x + y;"} | changed
        for path, text in files.items():
            file = package / f"{path}{'.cpp' if 'native' in path else '.py'}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / name))
        code_digests.cache_clear()

    return install


def test_the_same_source_in_another_place_is_the_same(installed, tmp_path):
    installed("here")
    first = code_digests("mine")
    assert list(first) == ["mine", "mine.native", "mine.ops"]
    installed("there")
    for stray in ("notes.txt", "__pycache__/add.cpython-311.pyc", "ops/.add.py.swp"):
        (tmp_path / "there" / "mine" / stray).parent.mkdir(exist_ok=True)
        (tmp_path / "there" / "mine" / stray).write_text("of one machine")
    assert code_digests("mine") == first


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"ops/add": "x - y"}, "mine.ops"),
        ({"native/add": "x - y;"}, "mine.native"),
        ({"ops/deeper/less": ""}, "mine.ops"),
        ({"more": ""}, "mine"),
    ],
)
def test_a_part_with_other_source_is_named_with_both_digests(changed, part, installed):
    installed("here")
    ours = code_digests("mine")
    installed("there", **changed)
    theirs = code_digests("mine")
    assert other_source(ours, ours) == ""
    assert other_source(ours, theirs) == f"{part} ({theirs[part]}, rank 0: {ours[part]})"


def test_parts_that_one_side_lacks_are_named_and_no_more_than_a_few():
    assert other_source({"a": "1"}, {}) == "a (none, rank 0: 1)"
    assert other_source({}, {"a": "1", "b": "2"}) == "a (1, rank 0: none) and b (2, rank 0: none)"
    assert other_source({}, dict.fromkeys("abcdefg", "1")).endswith("d (1, rank 0: none) and 3 other parts")


def test_all_that_computes_is_looked_at():
    source = versions().source
    kernels = Path(sys.modules["engine"].__file__).parent / "kernels"
    assert {"engine", "engine.kernels", "engine.models", "engine.native", "engine.step"} <= source.keys()
    assert any(kernels.rglob("*.cpp"))
    plan = assemble(["device=cpu"])
    assert {"engine_plugins.architecture", "engine_plugins.attention_kernel"} <= plugin_digests(plan).keys()


def test_a_single_file_is_a_package_of_one_part_and_what_is_not_there_has_none(tmp_path, monkeypatch):
    (tmp_path / "alone.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(code_digests("alone")) == ["alone"]
    assert code_digests("not_installed") == {}
