import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import yaml

from engine.assembly.compose import AUTO, compose, conf_dir, plugin_settings, usable
from engine.assembly.errors import AssemblyError
from engine.contracts.config import DrafterConfig, PluginSettings, Settings
from engine.contracts.provider import Provider
from engine.contracts.slots import SLOTS

PRESETS = ("balanced", "baseline", "latency", "throughput")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class MineConfig(DrafterConfig):
    k: int = 3
    colour: Colour = Colour.RED
    inner: Inner = field(default_factory=Inner)
    table: dict[str, int] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > 9:
            raise ValueError(f"drafter.k={self.k}: expected at most 9")


@dataclass(frozen=True)
class MandatoryConfig(DrafterConfig):
    k: int = field(kw_only=True)


@dataclass(frozen=True)
class RefusingConfig(DrafterConfig):
    def __post_init__(self) -> None:
        raise ValueError("never")


@dataclass(frozen=True)
class RaisingConfig(DrafterConfig):
    def __post_init__(self) -> None:
        raise KeyError("x")


@dataclass(frozen=True)
class ObjectConfig(DrafterConfig):
    k: Any = field(default_factory=object)


@dataclass(frozen=True)
class MistypedConfig(DrafterConfig):
    k: int = "three"


@pytest.fixture
def builtins(with_builtins):
    return with_builtins()


def problems(overrides, discovered, **kwargs):
    with pytest.raises(AssemblyError) as raised:
        compose(overrides, discovered, **kwargs)
    return raised.value.problems


def picked(composed, slot):
    (pick,) = composed.selections[slot]
    return pick


def test_without_overrides_every_slot_is_filled_and_settings_are_the_defaults(builtins):
    composed = compose([], builtins)
    assert composed.settings == Settings()
    assert tuple(composed.selections) == tuple(SLOTS)
    assert all(len(composed.selections[slot]) == (slot != "kv_store") for slot in SLOTS)


@pytest.mark.parametrize("form", ["+preset=latency", "preset=latency", "++preset=latency", "+preset=[latency]"])
def test_every_way_to_write_a_preset_means_the_same(form, builtins):
    composed = compose([form], builtins)
    assert composed.presets == ("latency",)
    assert picked(composed, "scheduler").requested == "chunked_prefill_latency"
    assert picked(composed, "drafter").plugin == "auto"


@pytest.mark.parametrize(
    "forms", [["+preset=[latency,baseline]"], ["preset=[latency,baseline]"], ["+preset=latency", "preset=baseline"]]
)
def test_presets_stack_and_the_last_one_wins(forms, builtins):
    composed = compose(forms, builtins)
    assert composed.presets == ("latency", "baseline")
    assert picked(composed, "scheduler").plugin == "static"
    assert composed.settings.overlap is False


def test_an_explicit_choice_beats_the_preset_wherever_it_stands(builtins):
    for overrides in (["drafter=none", "+preset=latency"], ["+preset=latency", "drafter=none"]):
        assert picked(compose(overrides, builtins), "drafter").plugin == "none"


def test_a_variant_takes_its_plugins_types_and_its_own_values(builtins):
    pick = picked(compose(["scheduler=chunked_prefill_latency", "scheduler.max_requests=7"], builtins), "scheduler")
    assert (pick.requested, pick.plugin) == ("chunked_prefill_latency", "chunked_prefill")
    assert pick.config["max_requests"] == 7
    assert pick.config["itl_target_ms"] == 50.0 and isinstance(pick.config["itl_target_ms"], float)


def test_exporters_are_any_number_each_with_its_own_keys(builtins):
    composed = compose(["exporter=[jsonl,console]", "exporter.jsonl.path=a.jsonl"], builtins)
    assert [(pick.plugin, dict(pick.config)) for pick in composed.selections["exporter"]] == [
        ("jsonl", {"path": "a.jsonl"}),
        ("console", {"every_s": 10.0}),
    ]
    assert compose(["exporter=[]"], builtins).selections["exporter"] == ()
    assert [pick.plugin for pick in compose(["exporter=console"], builtins).selections["exporter"]] == ["console"]


def test_auto_brings_its_candidates_and_only_the_values_that_were_set(builtins, with_builtins):
    pick = picked(compose(["attention_kernel=auto"], builtins), "attention_kernel")
    assert pick.plugin == AUTO and pick.candidates == ("triton", "cpu", "torch", "third_party")
    assert dict(pick.config) == {}


@pytest.mark.parametrize("override", ["model.path=x", "+model.path=x", "++model.path=x"])
def test_plus_signs_on_known_keys_are_harmless(override, builtins):
    assert compose([override], builtins).settings.model.path == "x"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+prest=latency", ["prest", "did you mean 'preset'"]),
        ("schedulr=static", ["schedulr", "did you mean 'scheduler'"]),
        ("scheduler=statik", ["did you mean 'static'", "options: "]),
        ("+preset=latncy", ["no such preset", "did you mean 'latency'"]),
        ("drafter.max_widht=3", ["no such key 'max_widht' in 'drafter'", "did you mean 'max_width'"]),
        ("model.pth=x", ["no such key 'pth' in 'model'", "did you mean 'path'"]),
        ("scheduler.max_requests=abc", ["scheduler.max_requests=abc", "expected int"]),
        ("overlap=perhaps", ["overlap=perhaps", "expected bool"]),
        ("seed=null", ["seed=null"]),
        ("drafter=null", ["drafter=null", "options: "]),
        ("drafter=", ["options: "]),
        ("drafter=[none,ngram]", ["exactly one"]),
        ("drafter=none,ngram", ["a sweep"]),
        ("~drafter", ["nothing can be deleted"]),
        ("~exporter", ["exporter=[]"]),
        ("model=3", ["group of keys"]),
        ("latency", ["key=value"]),
        ("latency=1", ["'latency'", "keys: "]),
        ("server.port=99999", ["server.port=99999: expected 0 to 65535"]),
        ("server.max_body_bytes=0", ["server.max_body_bytes=0: expected at least 1"]),
        ("server.keepalive_s=-1", ["server.keepalive_s=-1.0: expected at least 0"]),
        ("server.drain_s=inf", ["server.drain_s=inf: expected a finite number"]),
        ("server.stall_s=nan", ["server.stall_s=nan: expected at least 5"]),
        ("server.host=", ["server.host is empty"]),
        ("server.api_key=", ["server.api_key is empty"]),
        ("drafter.max_width=99", ["drafter.max_width=99: expected 0 to 32"]),
        ("exporter.jsonl.path=x", ["'jsonl' is not selected", "exporter=[prometheus,jsonl]"]),
        ("hydra.run.dir=x", ["no such key 'hydra'"]),
        ("drafter@x=none", ["drafter=<option>"]),
        ("preset.x=1", ["+preset=<name>"]),
        ("plugins.alow=[x]", ["did you mean 'allow'"]),
    ],
)
def test_a_mistake_gets_one_clear_line_with_what_was_meant(override, words, builtins):
    (problem,) = problems([override], builtins)
    for word in words:
        assert word in problem
    assert "Traceback" not in problem and "full_key" not in problem


def test_all_mistakes_are_told_at_once(builtins):
    assert len(problems(["+prest=a", "drafter=ngrm", "scheduler=statik", "~router"], builtins)) == 4
    assert len(problems(["model.pth=x", "overlap=maybe", "server.port=-1", "drafter.kk=1"], builtins)) == 4


def test_a_plugins_dataclass_is_its_schema_without_any_yaml(entry, with_builtins):
    mine = entry("engine-mine", engine_drafter=[Provider("mine", "mine:Mine", config=MineConfig)])
    overrides = ["drafter=mine", "drafter.k=5", "drafter.colour=BLUE", "drafter.inner.depth=4", "+drafter.table.a=1"]
    pick = picked(compose(overrides, with_builtins(mine)), "drafter")
    assert pick.config == {
        "path": "auto",
        "max_width": 4,
        "adaptive": True,
        "k": 5,
        "colour": "blue",
        "inner": {"depth": 4},
        "table": {"a": 1},
        "limit": None,
    }
    assert problems(["drafter=mine", "drafter.k=10"], with_builtins(mine)) == ("drafter.k=10: expected at most 9",)
    assert (
        "no such key 'dpth' in 'drafter.inner'"
        in problems(["drafter=mine", "drafter.inner.dpth=1"], with_builtins(mine))[0]
    )


def offers(config):
    return [Provider("mine", "mine:Mine", config=config)]


def test_a_field_without_a_default_must_be_set_and_the_message_names_the_plugin(entry, with_builtins):
    found = with_builtins(entry("engine-mine", engine_drafter=offers(MandatoryConfig)))
    assert problems(["drafter=mine"], found) == (
        "drafter.k: drafter=mine of engine-mine 0.3.0 has no default for it; set drafter.k=<value>",
    )
    assert picked(compose(["drafter=mine", "drafter.k=2"], found), "drafter").config["k"] == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RefusingConfig, "drafter: drafter=mine of engine-mine 0.3.0 refuses its configuration: never"),
        (RaisingConfig, "drafter: the config of drafter=mine of engine-mine 0.3.0 raised KeyError: 'x'"),
    ],
)
def test_a_config_that_cannot_be_built_is_named_when_it_is_selected(config, words, entry, with_builtins):
    found = with_builtins(entry("engine-mine", engine_drafter=offers(config)))
    assert compose([], found).settings == Settings()
    assert problems(["drafter=mine"], found) == (words,)


@pytest.mark.parametrize("config", [ObjectConfig, MistypedConfig])
def test_a_config_that_cannot_be_a_schema_stops_only_those_who_select_it(config, entry, with_builtins):
    found = usable(with_builtins(entry("engine-mine", engine_drafter=offers(config))))
    (failure,) = found.failures
    assert f"config {config.__name__} cannot be a schema: Value " in str(failure)
    assert compose([], found).settings == Settings()
    (problem,) = problems(["drafter=mine"], found)
    assert str(failure) in problem


def test_naming_a_plugin_selects_its_schema_too(builtins):
    pick = picked(compose(["drafter.plugin=ngram", "drafter.max_match=3"], builtins), "drafter")
    assert pick.plugin == "ngram" and pick.config["max_match"] == 3


def test_of_two_offers_the_qualified_one_decides_the_schema(entry, with_builtins):
    found = with_builtins(
        entry("engine-a", engine_drafter=[Provider("mine", "a:A")]),
        entry("engine-b", engine_drafter=[Provider("mine", "b:B", config=MineConfig)]),
    )
    pick = picked(compose(["drafter=mine", "drafter.plugin='engine-b:mine'", "drafter.k=5"], found), "drafter")
    assert pick.plugin == "engine-b:mine" and pick.config["k"] == 5


def test_a_third_partys_yaml_adds_options_and_presets(tmp_path, entry, with_builtins):
    (tmp_path / "preset").mkdir()
    (tmp_path / "drafter").mkdir()
    (tmp_path / "preset" / "fast.yaml").write_text("# @package _global_\ndefaults: [override /drafter: mine_wide]\n")
    (tmp_path / "drafter" / "mine_wide.yaml").write_text("plugin: mine\nk: 8\n")
    found = with_builtins(
        entry(
            "engine-mine",
            engine_drafter=[Provider("mine", "mine:Mine", config=MineConfig)],
            engine_config_searchpath=[f"file://{tmp_path}"],
        )
    )
    pick = picked(compose(["+preset=fast"], found), "drafter")
    assert (pick.requested, pick.plugin, pick.config["k"]) == ("mine_wide", "mine", 8)


def test_a_users_folder_adds_options(tmp_path, builtins):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "tiny.yaml").write_text("plugin: static\nmax_requests: 2\n")
    pick = picked(compose(["scheduler=tiny"], builtins, [tmp_path]), "scheduler")
    assert (pick.plugin, pick.config["max_requests"]) == ("static", 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "does not compose"),
        ("plugin: static\nmax_rows: 2\n", "max_rows"),
        ("plugin: static\nmax_requests: x\n", "max_requests"),
    ],
)
def test_faulty_yaml_is_a_message_not_a_traceback(tmp_path, text, words, builtins):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "bad.yaml").write_text(text)
    assert words in " ".join(problems(["scheduler=bad"], builtins, config_dirs=[tmp_path]))


def test_what_changed_in_a_folder_is_composed_anew(tmp_path, builtins):
    file = tmp_path / "scheduler" / "tiny.yaml"
    file.parent.mkdir()
    for requests in (2, 31, 2):
        file.write_text(f"plugin: static\nmax_requests: {requests}\n")
        assert picked(compose(["scheduler=tiny"], builtins, [tmp_path]), "scheduler").config["max_requests"] == requests
    file.unlink()
    assert "tiny" in problems(["scheduler=tiny"], builtins, config_dirs=[tmp_path])[0]


def test_yaml_cannot_add_a_top_level_key(tmp_path, builtins):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "odd.yaml").write_text("# @package _global_\noverlapp: true\n")
    assert "overlapp" in problems(["+preset=odd"], builtins, config_dirs=[tmp_path])[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# @package _global_\nrouter: direct\n", ["router=direct", "- override /router: direct"]),
        ("overlap: true\n", ["preset: no such key", "'# @package _global_'"]),
    ],
)
def test_a_preset_that_is_written_otherwise_is_told_how(text, words, tmp_path, builtins):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "odd.yaml").write_text(text)
    (problem,) = problems(["+preset=odd"], builtins, config_dirs=[tmp_path])
    assert all(word in problem for word in words)


def test_missing_folders_are_not_ignored(tmp_path, entry, with_builtins):
    assert "no such directory" in problems([], with_builtins(), config_dirs=[tmp_path / "nope"])[0]
    lost = entry("engine-lost", engine_config_searchpath=["pkg://engine_lost_nowhere.conf"])
    assert "engine-lost 0.3.0" in problems([], with_builtins(lost))[0]


def test_a_failed_plugin_is_named_where_its_option_is_missed(broken_entry, with_builtins):
    found = with_builtins(broken_entry("engine-bad", ImportError("no triton")))
    (problem,) = problems(["drafter=bad"], found)
    assert "engine-bad 0.3.0" in problem and "no triton" in problem


def test_plugin_switches_are_read_before_anything_is_composed():
    assert plugin_settings(["drafter=none", "plugins.allow=[a,b]", "+plugins.third_party=false"]) == PluginSettings(
        third_party=False, allow=["a", "b"]
    )


def test_plugin_switches_in_yaml_are_refused(tmp_path, builtins):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "off.yaml").write_text("# @package _global_\nplugins: {third_party: false}\n")
    assert "only be given as overrides" in problems(["+preset=off"], builtins, config_dirs=[tmp_path])[0]


def test_what_comes_out_is_plain_json(builtins):
    tree = compose(["+preset=latency", "exporter=[jsonl]"], builtins).tree()
    assert json.loads(json.dumps(tree)) == tree
    assert set(tree) == {
        *SLOTS,
        "model",
        "device",
        "calibration",
        "gateway",
        "batches",
        "slo",
        "execution",
        "overlap",
        "seed",
        "threads",
        "memory",
        "server",
        "fleet",
        "plugins",
    }


def test_hydras_globals_are_left_as_they_were(builtins):
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    store = ConfigStore.instance()
    store.store(group="scheduler", name="of_the_host_program", node={"x": 1})
    before = {key: list(value) if isinstance(value, dict) else value for key, value in store.repo.items()}
    options = problems(["scheduler=nope"], builtins)[0]
    after = {key: list(value) if isinstance(value, dict) else value for key, value in store.repo.items()}
    store.repo.pop("scheduler")
    assert "of_the_host_program" not in options
    assert after == before and not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_only_select_options_and_set_the_engines_own_switches(preset, builtins):
    text = (conf_dir() / "preset" / f"{preset}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    body = yaml.safe_load(text)
    for choice in body.pop("defaults"):
        ((key, option),) = choice.items()
        assert key.startswith("override /") and key.removeprefix("override /") in SLOTS
        assert isinstance(option, str | list)
    assert set(body) <= {"overlap", "execution"}
    assert compose([f"+preset={preset}"], builtins).presets == (preset,)


def test_the_shipped_presets_are_these():
    assert tuple(sorted(path.stem for path in (conf_dir() / "preset").glob("*.yaml"))) == PRESETS


def test_the_baseline_has_everything_off(builtins):
    composed = compose(["+preset=baseline"], builtins)
    chosen = {slot: picks[0].plugin for slot, picks in composed.selections.items() if picks}
    assert (
        chosen["scheduler"] == "static"
        and "kv_store" not in chosen
        and chosen["kv_allocator"] == "contiguous"
        and chosen["drafter"] == "none"
    )
    assert composed.settings.overlap is False
