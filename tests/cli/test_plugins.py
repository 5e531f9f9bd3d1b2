"""``engine plugins`` with a plugin's name: ``check``, ``show``, ``new``, and the words that are none of these."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
from tests.cli.installed import put_on_path, take_off_path

from engine.assembly.discovery import Discovered, Offer, Origin, discover
from engine.assembly.errors import AssemblyError
from engine.cli.complete import candidates
from engine.cli.main import main
from engine.cli.plugins import check
from engine.cli.plugins.docstrings import as_markdown, where_is
from engine.cli.plugins.named import find_offer, selecting
from engine.cli.plugins.show import keys
from engine.contracts.config import PluginSettings
from engine.contracts.provider import Provider
from engine.contracts.slots import SLOTS


@pytest.fixture
def package(tmp_path: Path):
    """``package(slot, name, old, new)``: a new package on the path, its module changed as by an editor."""
    folders: list[Path] = []

    def make(slot: str, name: str, *changes: tuple[str, str]) -> Path:
        assert main(["plugins", "new", slot, name, "--dir", str(tmp_path)]) == 0
        folder = tmp_path / f"engine-{name.replace('_', '-')}"
        module = folder / f"engine_{name}.py"
        for old, new in changes:
            text = module.read_text()
            assert old in text
            module.write_text(text.replace(old, new))
        put_on_path(folder)
        folders.append(folder)
        return folder

    yield make
    take_off_path(*folders)


# check -----------------------------------------------------------------------------------------------------------


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the tests by name, of ``engine plugins check WORDS --json``."""
    capsys.readouterr()
    code = main(["plugins", "check", *words, "--json"])
    return code, {one["test"]: one for one in json.loads(capsys.readouterr().out)["tests"]}


def test_check_finds_a_planted_bug_and_says_which_promise_is_broken(package, capsys) -> None:
    package("router", "hard_of_hearing", ("            if engine.alive:", "            if engine.engine_id:"))
    code, tests = checked(capsys, "hard_of_hearing")
    failed = {name for name, one in tests.items() if one["outcome"] == "failed"}
    assert code == 1 and failed == {
        "test_a_new_request_goes_to_an_engine_that_is_alive_or_to_a_url",
        "test_a_request_nobody_can_take_is_refused_as_unavailable",
        "test_fleets_of_any_size_and_load_are_served",
        "test_what_has_begun_may_be_told_of_any_engine_at_any_time",
    }
    assert "'dead'" in tests["test_a_new_request_goes_to_an_engine_that_is_alive_or_to_a_url"]["why"]
    assert len(tests) > len(failed)
    assert main(["plugins", "check", "hard_of_hearing", "--details"]) == 1
    shown = capsys.readouterr().out
    counts = f"{len(tests) - len(failed)} passed, {len(failed)} failed"
    assert f"router=hard_of_hearing of engine-hard-of-hearing 0.1.0: {counts}" in shown and "assert" in shown


def test_check_survives_a_plugin_that_kills_its_process_and_names_the_line(package, capsys) -> None:
    crash = (
        "        for event in events:",
        "        import os; os.kill(os.getpid(), 11)\n        for event in events:",
    )
    package("exporter", "deadly", crash)
    code, tests = checked(capsys, "exporter=deadly")
    (failed,) = (one for one in tests.values() if one["outcome"] == "failed")
    assert code == 1 and failed["test"] == "test_it_takes_every_kind_of_event"
    assert failed["why"].startswith("the process died of SIGSEGV (engine_deadly.py:") and "Fatal" in failed["details"]


def test_an_error_of_the_plugin_is_told_with_its_type_and_place(package, capsys) -> None:
    package(
        "exporter",
        "furious",
        ("        self._over_ms = ", "        raise RuntimeError('not today\\nnor ever')\n        self._over_ms = "),
    )
    code, tests = checked(capsys, "furious")
    assert code == 1 and {one["outcome"] for one in tests.values()} == {"failed"}
    whys = {one["why"] for one in tests.values()}
    assert len(whys) == 1 and whys.pop().startswith("RuntimeError: not today (engine_furious.py:")


def test_check_builds_the_plugin_with_the_configuration_that_overrides_make(package, capsys) -> None:
    package(
        "exporter",
        "picky",
        ("        self._over_ms = ", "        assert config.over_ms == 7, config\n        self._over_ms = "),
    )
    assert checked(capsys, "picky", "exporter.picky.over_ms=7")[0] == 0
    assert main(["plugins", "check", "picky", "exporter.picky.ovr_ms=7"]) == 2
    assert "did you mean 'over_ms'" in capsys.readouterr().err


def test_a_provider_may_bring_its_own_suite(package, capsys) -> None:
    own = "\n\nclass OwnSuite:\n    size = 3\n\n    def test_it_is_asked(self):\n        assert self.size == 3\n"
    suite = ('            doc="Prints', '            suite="engine_own:OwnSuite",\n            doc="Prints')
    folder = package("exporter", "own", suite)
    (folder / "engine_own.py").write_text((folder / "engine_own.py").read_text() + own)
    code, tests = checked(capsys, "own", "--set", "size=4")
    assert code == 1 and set(tests) == {"test_it_is_asked"}
    assert tests["test_it_is_asked"]["why"].startswith("assert 4 == 3")
    assert main(["plugins", "check", "own", "--set", "sise=4"]) == 2
    assert "did you mean 'size'" in capsys.readouterr().err
    assert main(["plugins", "check", "own", "--set", "size=x"]) == 2
    assert "--set size=x: expected `int`, got `str` (it is 3)" in capsys.readouterr().err


def test_a_suite_without_tests_is_no_suite_that_passes(package, capsys) -> None:
    package(
        "exporter",
        "empty",
        ('            doc="Prints', '            suite="engine_empty:EmptyExporter",\n            doc="Prints'),
    )
    code, tests = checked(capsys, "empty")
    assert code == 1 and tests["pytest"]["why"] == "pytest ended with NO_TESTS_COLLECTED"


def test_a_check_leaves_no_files_after(package, capsys, tmp_path, monkeypatch) -> None:
    folder, here, temporary = package("exporter", "writer"), tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def files() -> list[Path]:
        return sorted(file for file in folder.rglob("*") if "__pycache__" not in file.parts)

    before = files()
    assert checked(capsys, "exporter=jsonl")[0] == 0  # opens engine-events.jsonl in the current folder
    assert [*here.iterdir(), *temporary.iterdir()] == [] and files() == before


def test_without_the_test_extra_check_says_in_one_line_how_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert main(["plugins", "check", "direct"]) == 2
    assert capsys.readouterr().err == (
        "engine: plugins check needs pytest and hypothesis; install with: pip install 'engine[test]'\n"
    )


# show ------------------------------------------------------------------------------------------------------------


def test_show_tells_all_of_a_built_in_plugin(capsys) -> None:
    assert main(["plugins", "show", "ngram"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # whatever the width
    for part in (
        "drafter=ngram: Prompt lookup", "engine_plugins/drafter/ngram.py", "drafts, host_drafter", "drafter.max_match",
        "Longest suffix, in tokens, that is looked up.", "engine serve drafter=ngram", "engine.contracts.drafter",
        "serves bundled on cpu", "Most draft tokens per request and step",
    ):  # fmt: skip
        assert part in shown, part


def test_show_gives_the_reasons_against_a_model_or_a_device(tmp_path, capsys) -> None:
    assert main(["plugins", "show", "triton", "device=cpu", "--json"]) == 0
    (reason,) = json.loads(capsys.readouterr().out)["reasons_against"]
    assert "needs a CUDA device" in reason
    assert main(["plugins", "show", "llama", "--model", str(tmp_path), "device=cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "has no config.json" in shown["reasons_against"][0] and str(tmp_path) in shown["asked_for"]


@pytest.mark.parametrize("slot", SLOTS)
def test_what_is_shown_of_a_plugin_is_in_its_provider_and_its_source(slot) -> None:
    for one in discover(PluginSettings(third_party=False)).of_slot(slot):
        file, about = where_is(one.provider.factory)
        assert Path(file).is_file() and about
        described = list(keys(one))
        assert [key.key.rpartition(".")[2] for key in described] == [f.name for f in fields(one.config_class)]
        assert not any(key.required for key in described)


def test_docstrings_are_shown_without_their_roles() -> None:
    text = "See :class:`~engine.x.Thing`, :meth:`go` and :attr:`that <a.b>`: ``x`` is\n``y``."
    assert as_markdown(text) == "See `Thing`, `go` and `that`: `x` is\n`y`."
    block = "Do:\n\n.. code-block:: python\n\n    x = 1\n\n    y = 2\n\nThen ``z``."
    assert as_markdown(block) == "Do:\n\n```python\nx = 1\n\ny = 2\n```\n\nThen `z`."


# names -----------------------------------------------------------------------------------------------------------


def offer(slot: str, name: str, dist: str = "engine-a") -> Offer:
    return Offer(slot, Provider(name, "m:C"), Origin(dist, "0.1.0", "main"))


def test_a_name_is_found_alone_with_its_slot_and_with_its_distribution() -> None:
    one, two, three = offer("drafter", "x"), offer("scheduler", "y"), offer("scheduler", "y", "engine-b")
    found = Discovered((one, two, three))
    assert find_offer("x", found) is find_offer("drafter=x", found) is find_offer("engine-a:x", found) is one
    assert find_offer("engine-b:y", found) is find_offer("scheduler=engine-b:y", found) is three
    with pytest.raises(AssemblyError, match=r"say which of scheduler=engine-a:y, scheduler=engine-b:y"):
        find_offer("y", found)
    assert selecting(one, found) == ["drafter=x"] and selecting(three, found) == ["scheduler.plugin=engine-b:y"]


def test_an_exporter_of_two_packages_is_selected_by_its_distribution() -> None:
    found = Discovered((offer("exporter", "x"), offer("exporter", "x", "engine-b")))
    assert selecting(found.offers[1], found) == ["exporter=[x]", "exporter.x.plugin=engine-b:x"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shw"], "did you mean 'show'"),
        (["--json", "show"], "it comes right after 'engine plugins'"),
        (["check", "none"], "say which of quantizer=none, drafter=none"),
        (["check", "quantizer=int9"], "did you mean 'int8'"),
        (["show", "ngrm"], "did you mean 'ngram'"),
        (["show", "draftr=ngram"], "no such slot 'draftr'; did you mean 'drafter'"),
        (["show", "router"], "router is a slot; its plugins are router=direct, router=round_robin, router=least_load"),
        (["show"], "required: PLUGIN"),
        (["check", "direct", "--set", "x"], "--set x: expected an attribute of the suite and its value"),
        (["new", "schedulr", "x"], "did you mean 'scheduler'"),
        (["new", "x", "scheduler"], "the slot comes first: engine plugins new scheduler x"),
        (["new", "scheduler", "X-1"], "expected lower-case letters"),
        (["new", "scheduler", "auto"], "and not auto or third_party"),
        (["new", "scheduler", "static"], "'static' is taken by a plugin of engine"),
        (["new", "scheduler", "chunked_prefill_latency"], "is taken by a variant in YAML"),
        (["new", "scheduler", "plugins"], "is taken by the module engine_plugins"),
        (["new", "scheduler", "x", "--dir", "/nowhere"], "/nowhere/engine-x cannot be written"),
        (["new", "scheduler", "x", "drafter=none"], "unexpected 'drafter=none'"),
    ],
)
def test_wrong_words_get_one_line_and_exit_code_2(words, expected, capsys) -> None:
    assert main(["plugins", *words]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and len(shown.splitlines()) == 1


def test_a_folder_that_is_there_is_never_written_to(tmp_path, capsys) -> None:
    (tmp_path / "engine-untouched").mkdir()
    assert main(["plugins", "new", "scheduler", "untouched", "--dir", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err and not list((tmp_path / "engine-untouched").iterdir())


def test_new_says_what_to_do_next(tmp_path, capsys) -> None:
    assert main(["plugins", "new", "exporter", "two_words", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split("next:\n")[1].splitlines() == [
        "pip install -e engine-two-words",
        "python -m pytest engine-two-words",
        "engine plugins check exporter=two_words",
        "engine serve 'exporter=[prometheus,two_words]'",
    ]


def test_the_help_of_plugins_lists_its_commands(capsys) -> None:
    assert main(["plugins", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"engine plugins {name} " in shown for name in ("new", "check", "show"))
    assert main(["plugins", "check", "--help"]) == 0
    assert "usage: engine plugins check PLUGIN [--flags] [overrides]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine plugins n", ["new"]),
        ("engine plugins new", ["new"]),
        ("engine plugins new sch", ["scheduler"]),
        ("engine plugins new scheduler ", []),
        ("engine plugins show ngr", ["ngram", "ngrams"]),
        ("engine plugins check quantizer=", ["quantizer=none", "quantizer=int8", "quantizer=fp8"]),
        ("engine plugins check ngram drafter.max_w", ["drafter.max_width="]),
        ("engine plugins check --de", ["--details"]),
        ("engine plugins drafter=ng", ["drafter=ngram"]),
        ("engine completion b", ["bash"]),
    ],
)
def test_completion_knows_the_commands_and_what_they_are_about(line, expected) -> None:
    assert candidates(line) == expected
