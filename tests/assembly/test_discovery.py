from dataclasses import dataclass

import pytest

from engine.assembly.discovery import Origin, PluginEntry, discover
from engine.contracts.command import CommandProvider
from engine.contracts.config import DrafterConfig, PluginSettings, SchedulerConfig
from engine.contracts.provider import Provider
from engine.contracts.slots import SLOTS
from engine.hookspecs import ENTRY_POINT_GROUP


@dataclass(frozen=True)
class NotASlotConfig:
    width: int = 1


@dataclass(frozen=True)
class MineConfig(DrafterConfig):
    k: int = 3


class UndecoratedConfig(DrafterConfig):
    k: int = 3


@dataclass(frozen=True)
class ReservedConfig(DrafterConfig):
    candidates: str = ""


class Loads:
    def __init__(self, load):
        self.load = load


class Odd(BaseException):
    """Neither ``Exception`` nor ``SystemExit``."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unreadable(dict):
    def __iter__(self):
        raise ValueError("no keys")


def test_the_builtin_plugins_fill_every_slot_without_a_failure():
    found = discover(PluginSettings(third_party=False))
    assert found.failures == ()
    assert {offer.slot for offer in found.offers} == set(SLOTS)
    assert {offer.origin.dist for offer in found.offers} == {"engine"}


@pytest.mark.parametrize(
    "error", [ImportError("no such\nthing"), SystemExit(3), ZeroDivisionError("oops"), Odd("x"), Unprintable()]
)
def test_a_plugin_that_cannot_be_imported_is_recorded_and_the_others_go_on(error, broken_entry, entry, provider):
    found = discover(entries=[broken_entry("engine-bad", error), entry("engine-good", engine_drafter=[provider()])])
    (failure,) = found.failures
    assert (str(failure.origin), failure.stage) == ("engine-bad 0.3.0", "import")
    assert type(error).__name__ in failure.error and "\n" not in failure.error
    assert found.names("drafter") == ("mine",)


def test_the_users_own_interrupt_is_no_failure_of_a_plugin(broken_entry):
    with pytest.raises(KeyboardInterrupt):
        discover(entries=[broken_entry("engine-slow", KeyboardInterrupt())])


@pytest.mark.parametrize("module", [None, 3])
def test_an_entry_point_that_leads_to_no_module_is_recorded(module, entry, provider):
    odd = PluginEntry(Origin("engine-odd", "0.3.0", "main"), ENTRY_POINT_GROUP, Loads(lambda: module))
    found = discover(entries=[odd, entry("engine-good", engine_drafter=[provider()])])
    (failure,) = found.failures
    assert failure.stage == "hooks" and "hookimpl" in failure.error
    assert found.names("drafter") == ("mine",)


def test_a_mistyped_hook_is_an_error_of_that_plugin(entry, provider):
    found = discover(entries=[entry("engine-typo", engine_draftr=[provider()], engine_drafter=[provider()])])
    assert found.offers == ()
    assert "engine_draftr" in found.failures[0].error and "engine_drafter" in found.failures[0].error


def test_a_module_without_hooks_is_an_error(entry):
    (failure,) = discover(entries=[entry("engine-empty")]).failures
    assert "hookimpl" in failure.error


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, Odd])
def test_a_raising_hook_loses_neither_the_plugins_other_hooks_nor_other_plugins(error, entry, provider):
    def boom():
        raise error("boom")

    found = discover(
        entries=[
            entry("engine-a", engine_drafter=boom, engine_router=[provider("r")]),
            entry("engine-b", engine_drafter=[provider()]),
        ]
    )
    assert found.names("router") == ("r",) and found.names("drafter") == ("mine",)
    assert f"engine_drafter() raised {error.__name__}: boom" in found.failures[0].error


@pytest.mark.parametrize("answer", [None, Provider("x", "a:b"), "text"])
def test_a_hook_that_returns_no_list_is_recorded(answer, entry):
    (failure,) = discover(entries=[entry("engine-odd", engine_drafter=lambda: answer)]).failures
    assert "expected a list" in failure.error


def test_another_major_version_is_reported_without_being_imported(broken_entry):
    never = broken_entry("engine-old", AssertionError("was imported"), group="engine.plugins.v0")
    (failure,) = discover(entries=[never]).failures
    assert failure.stage == "version"
    assert "plugin API 0" in failure.error and "speaks 1" in failure.error


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"api": (1, 9)}, "needs plugin API 1.9"),
        ({"api": (2, 0)}, "needs plugin API 2.0"),
        ({"api": "1.0"}, "api '1.0': expected two numbers"),
        ({"config": NotASlotConfig}, "DrafterConfig"),
        ({"config": SchedulerConfig}, "DrafterConfig"),
        ({"requires": {"memory": ("x",)}}, "memory"),
        ({"requires": {"kv_allocator": "paged"}}, "requires['kv_allocator'] 'paged': expected a tuple of capabilities"),
        ({"requires": {"kv_allocator": "paged"}}, "('paged',)"),
        ({"requires": {"kv_allocator": None}}, "requires['kv_allocator'] None: expected"),
        ({"requires": {"kv_allocator": (1,)}}, "requires['kv_allocator'] (1,): expected"),
        ({"requires": {3: ("paged",)}}, "requires names no slot: 3"),
        ({"requires": ["kv_allocator"]}, "expected capabilities by slot, like {'kv_allocator': ('paged',)}"),
        ({"requires": None}, "requires None: expected capabilities by slot"),
        ({"requires": Unreadable(x=())}, "its record cannot be read: ValueError: no keys"),
        ({"provides": "paged"}, "provides 'paged': expected a tuple of capabilities, ('paged',)"),
        ({"provides": None}, "provides None: expected a tuple"),
        ({"provides": (1, "paged")}, "provides (1, 'paged'): expected a tuple"),
        ({"provides": ("",)}, "provides ('',): expected a tuple"),
        ({"unsupported": ("needs a GPU",)}, "unsupported ('needs a GPU',): expected a function of (model, device)"),
        ({"unsupported": None}, "unsupported None: expected a function"),
        ({"doc": None}, "doc None: expected one line"),
        ({"doc": "two\nlines"}, "doc 'two\\nlines': expected one line"),
        ({"config": MineConfig()}, "expected a frozen dataclass derived from"),
        ({"config": UndecoratedConfig}, "UndecoratedConfig: its fields k are not read without @dataclass(frozen=True)"),
        ({"config": ReservedConfig}, "ReservedConfig: every drafter has the key 'candidates' already"),
    ],
)
def test_a_provider_that_does_not_fit_is_refused_with_the_reason(fields, words, entry, provider):
    found = discover(entries=[entry("engine-odd", engine_drafter=[provider(**fields), provider("good")])])
    assert found.names("drafter") == ("good",)
    (failure,) = found.failures
    assert words in failure.error and (failure.slot, failure.name) == ("drafter", "mine")
    assert "\n" not in str(failure)


def test_capabilities_may_be_any_collection_of_words(entry, provider):
    offered = [provider("a", provides=["paged"]), provider("b", provides={"paged"}, requires={"router": ["x"]})]
    assert discover(entries=[entry("engine-mine", engine_drafter=offered)]).names("drafter") == ("a", "b")


def test_a_name_offered_twice_by_one_distribution_is_refused_the_second_time(entry, provider):
    found = discover(entries=[entry("engine-odd", engine_drafter=[provider(), provider()])])
    assert found.names("drafter") == ("mine",)
    assert "offers drafter=mine twice" in found.failures[0].error


@pytest.mark.parametrize("name", ["auto", "third_party", 3, "Mine", "my-one", "", "a:b"])
def test_names_that_could_not_be_selected_are_refused(name, entry, provider):
    assert discover(entries=[entry("engine-odd", engine_drafter=[provider(name)])]).offers == ()


def test_something_that_is_no_provider_is_refused(entry):
    (failure,) = discover(entries=[entry("engine-odd", engine_drafter=[{"name": "x"}])]).failures
    assert "expected a Provider" in failure.error


@pytest.mark.parametrize(
    "settings",
    [
        PluginSettings(third_party=False),
        PluginSettings(disable=["Engine_Mine"]),
        PluginSettings(allow=["engine-other"]),
    ],
)
def test_switched_off_distributions_are_not_imported_but_named(settings, broken_entry):
    found = discover(settings, [broken_entry("engine-mine", AssertionError("was imported"))])
    assert found.failures == ()
    assert [str(origin) for origin in found.switched_off] == ["engine-mine 0.3.0"]


def test_an_allowed_distribution_is_loaded(entry, provider):
    found = discover(PluginSettings(allow=["engine_mine"]), [entry("engine-mine", engine_drafter=[provider()])])
    assert found.names("drafter") == ("mine",)


def test_two_offers_of_a_name_are_kept_apart_by_distribution(entry, provider):
    found = discover(
        entries=[entry("engine-a", engine_drafter=[provider()]), entry("engine-b", engine_drafter=[provider()])]
    )
    assert len(found.named("drafter", "mine")) == 2
    assert [str(offer.origin) for offer in found.named("drafter", "engine-b:mine")] == ["engine-b 0.3.0"]


def test_search_paths_come_with_their_origin_and_odd_ones_are_refused(entry):
    found = discover(entries=[entry("engine-yaml", engine_config_searchpath=["pkg://engine_yaml.conf", "/tmp/x"])])
    assert [(path.path, str(path.origin)) for path in found.searchpaths] == [
        ("pkg://engine_yaml.conf", "engine-yaml 0.3.0")
    ]
    assert "/tmp/x" in found.failures[0].error


COMMAND = CommandProvider("replay", "engine_mine:REPLAY", "replay recorded requests")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([COMMAND, "bench"], "engine_command gave a str, expected a CommandProvider"),
        ([COMMAND, CommandProvider("Bad name", "a:b", "")], "name 'Bad name': expected lower-case"),
        ([COMMAND, CommandProvider("odd", "nowhere", "")], "factory 'nowhere': expected 'package.module:attribute'"),
        ([COMMAND, CommandProvider("new", "a:b", "", api=(1, 9))], "command 'new': needs plugin API 1.9"),
        ([COMMAND, CommandProvider("new", "a:b", "", api="1.0")], "api '1.0': expected two numbers"),
        ([COMMAND, CommandProvider(3, "a:b", "")], "name 3: expected lower-case"),
        ([COMMAND, CommandProvider("new", "a:b", "two\nlines")], "expected one line"),
        ([COMMAND, COMMAND], "offers the command 'replay' twice"),
    ],
)
def test_a_record_of_a_command_that_cannot_be_used_is_a_failure_and_the_others_stay(answer, expected, entry):
    found = discover(entries=[entry("engine-mine", engine_command=answer)])
    assert [offered.provider for offered in found.commands] == [COMMAND]
    assert expected in found.failures[0].error
