"""What ``auto`` chooses from, in which order, and what it says about those it did not choose."""

from dataclasses import dataclass, field

import pytest

from engine.assembly.compose import compose, options, usable
from engine.assembly.describe import notes
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.contracts.config import DrafterConfig
from engine.contracts.provider import Provider

MAMBA = {"architectures": ["MambaForCausalLM"]}
LLAMA_CANNOT = "llama: it computes "


def only(architecture):
    """An ``unsupported`` of a plugin for one model family."""

    def unsupported(model, device):
        return () if model.architecture == architecture else (f"it computes {architecture}",)

    return unsupported


only_mamba = only("MambaForCausalLM")


def never_asked(model, device):
    raise AssertionError("was asked")


def family(name, unsupported=only_mamba):
    return Provider(name, "tests.families:AnyFamily", unsupported=unsupported)


@pytest.fixture
def plan(with_builtins, checkpoint, cpu):
    """``plan(*overrides)`` against the tiny checkpoint; ``model`` changes its ``config.json``."""

    def make(*overrides, entries=(), model=None):
        path = checkpoint(**(model or {}))
        found = usable(with_builtins(*entries))
        return resolve(compose([f"model.path={path}", *overrides], found), found, model_config(path), cpu)

    return make


def refused(make, *overrides, **kwargs):
    with pytest.raises(AssemblyError) as raised:
        make(*overrides, **kwargs)
    (problem,) = raised.value.problems
    return problem


def test_a_third_party_is_found_where_the_built_in_plugin_has_reasons_against(plan, entry):
    made = plan(entries=[entry("engine-mamba", engine_architecture=[family("mamba")])], model=MAMBA)
    choice = made.choice("architecture")
    assert (choice.name, choice.origin, choice.requested) == ("mamba", "engine-mamba 0.3.0", "auto")
    assert choice.passed_over[0].startswith(LLAMA_CANNOT)
    assert not any("would fit" in note for note in made.notes)


def test_a_third_party_is_not_asked_where_a_built_in_plugin_fits(plan, entry):
    made = plan(entries=[entry("engine-mamba", engine_architecture=[family("mamba", never_asked)])])
    assert (made.choice("architecture").name, made.choice("architecture").passed_over) == ("llama", ())


def test_a_third_party_that_does_not_say_what_it_supports_is_never_taken(plan, entry):
    silent = entry("engine-any", engine_architecture=[Provider("any", "tests.families:AnyFamily")])
    problem = refused(plan, entries=[silent], model=MAMBA)
    assert "engine-any:any: it does not say what it supports (no unsupported()); architecture=any selects" in problem
    assert plan("architecture=any", entries=[silent], model=MAMBA).choice("architecture").name == "any"


def test_of_two_that_fit_the_first_by_distribution_is_taken_and_the_other_is_noted(plan, entry):
    entries = [
        entry("engine-zoo", engine_architecture=[family("zoo")]),
        entry("Engine-ark", engine_architecture=[family("noah", only("Ark")), family("ark")]),
    ]
    made = plan(entries=entries, model=MAMBA)
    choice = made.choice("architecture")
    assert (choice.name, choice.origin) == ("ark", "Engine-ark 0.3.0")
    assert choice.passed_over[-1] == "Engine-ark:noah: it computes Ark"
    assert "architecture=auto chose Engine-ark:ark; architecture=zoo would fit, too" in notes(made)


def test_where_nothing_fits_every_third_party_is_listed_with_its_reasons(plan, entry, broken_entry):
    def boom(model, device):
        raise SystemExit(3)

    entries = [
        entry("engine-b", engine_architecture=[family("b", only("Bee"))]),
        entry("engine-a", engine_architecture=[family("a", boom)]),
        broken_entry("engine-broken", ImportError("no such thing")),
    ]
    problem = refused(plan, entries=entries, model=MAMBA)
    said = [
        LLAMA_CANNOT,
        "engine-a:a: unsupported() of architecture=a (engine-a 0.3.0) raised SystemExit: 3",
        "engine-b:b: it computes Bee",
        "note: plugin 'main' of engine-broken 0.3.0 failed (import)",
    ]
    assert sorted(said, key=problem.index) == said


def test_a_third_party_with_a_built_in_plugins_name_changes_no_default(plan, entry):
    same = entry("engine-llama", engine_architecture=[family("llama", only("LlamaForCausalLM"))])
    assert plan(entries=[same]).choice("architecture").origin.startswith("engine ")
    mamba = entry("engine-llama", engine_architecture=[family("llama")])
    choice = plan(entries=[mamba], model=MAMBA).choice("architecture")
    assert choice.origin == "engine-llama 0.3.0" and choice.passed_over[0].startswith(LLAMA_CANNOT)


@dataclass(frozen=True)
class MandatoryConfig(DrafterConfig):
    k: int = field(kw_only=True)


@dataclass(frozen=True)
class GreedyConfig(DrafterConfig):
    def __post_init__(self):
        if self.max_width < 9:
            raise ValueError(f"drafter.max_width={self.max_width}: expected at least 9")


@dataclass(frozen=True)
class RaisingConfig(DrafterConfig):
    def __post_init__(self):
        raise KeyError("x")


@dataclass(frozen=True)
class NeedyConfig(DrafterConfig):
    def unsupported(self, model, device):
        return (f"drafter.max_width={self.max_width} needs a GPU",)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MandatoryConfig, "missing required field `k`"),
        (GreedyConfig, "drafter.max_width=2: expected at least 9"),
        (RaisingConfig, "its config raised KeyError: 'x'"),
        (NeedyConfig, "drafter.max_width=2 needs a GPU"),
    ],
)
def test_auto_passes_over_a_plugin_whose_settings_do_not_fit(config, why, plan, entry):
    offered = [Provider("odd", "x:Y", config=config, unsupported=lambda model, device: ())]
    chosen = ["drafter=auto", "drafter.candidates=[third_party,ngram]", "drafter.max_width=2"]
    choice = plan(*chosen, entries=[entry("engine-odd", engine_drafter=offered)]).choice("drafter")
    assert choice.name == "ngram" and choice.config["max_width"] == 2
    assert len(choice.passed_over) == 1 and why in choice.passed_over[0]


def test_candidates_set_on_the_command_line_replace_the_whole_order(plan, entry):
    mine = entry("engine-mine", engine_attention_kernel=[Provider("mine", "x:Y")])
    choice = plan("attention_kernel.candidates=[mine,cpu]", entries=[mine]).choice("attention_kernel")
    assert (choice.name, choice.origin, choice.passed_over) == ("mine", "engine-mine 0.3.0", ())
    other = entry("engine-mamba", engine_architecture=[family("mamba", never_asked)])
    problem = refused(plan, "architecture.candidates=[llama]", entries=[other], model=MAMBA)
    assert "engine-mamba" not in problem


def test_third_parties_may_stand_anywhere_in_the_order(plan, entry):
    mine = entry("engine-mine", engine_architecture=[family("mine", only("LlamaForCausalLM"))])
    assert plan("architecture.candidates=[third_party,llama]", entries=[mine]).choice("architecture").name == "mine"


def test_a_candidate_is_asked_once(plan, entry):
    asked = []

    def unsupported(model, device):
        asked.append(model.name)
        return ("not now",)

    mine = entry("engine-mine", engine_architecture=[family("mine", unsupported)])
    problem = refused(plan, "architecture.candidates=[mine,third_party,mine]", entries=[mine])
    assert len(asked) == 1 and problem.count("not now") == 1


def test_a_candidate_of_two_distributions_must_be_qualified(plan, entry):
    two = [entry(dist, engine_architecture=[family("mine")]) for dist in ("engine-a", "engine-b")]
    problem = refused(plan, "architecture.candidates=[mine,third_party]", entries=two, model=MAMBA)
    assert "mine: offered by engine-a:mine, engine-b:mine; name one of these" in problem
    made = plan("architecture.candidates=['engine-b:mine']", entries=two, model=MAMBA)
    assert made.choice("architecture").origin == "engine-b 0.3.0"
    by_itself = plan(entries=two, model=MAMBA)
    assert by_itself.choice("architecture").origin == "engine-a 0.3.0"
    assert any("architecture.plugin=engine-b:mine would fit, too" in note for note in by_itself.notes)


def test_a_candidate_that_nobody_offers_gets_near_matches_or_the_failure(plan, entry):
    choice = plan("drafter=auto", "drafter.candidates=[ngrm,ngram]").choice("drafter")
    assert choice.passed_over == ("ngrm: not installed; did you mean 'ngram'?",)
    problem = refused(plan, "drafter=auto", "drafter.candidates=[third_parties]")
    assert "third_parties: not installed; did you mean 'third_party'?" in problem
    broken = entry("engine-odd", engine_drafter=[Provider("odd", "x:Y", doc=None)])
    problem = refused(plan, "drafter=auto", "drafter.candidates=[odd]", entries=[broken])
    assert "odd: plugin 'main' of engine-odd 0.3.0 drafter=odd failed (provider): doc None" in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["drafter.candidates=[ngram]"], "drafter=none names a plugin, and only auto has candidates; use drafter=auto"),
        (["scheduler.candidates=[static]"], "scheduler=chunked_prefill names a plugin, and only auto has candidates"),
        (["attention_kernel.candidates=cpu"], "expected a list of plugin names, like [cpu,torch]"),
        (["attention_kernel.candidates=[1]"], "expected a list of plugin names"),
        (["attention_kernel.candidates=['']"], "expected a list of plugin names"),
        (["attention_kernel.candidates=null"], "expected a list of plugin names"),
        (["attention_kernel.candidates=[]"], "attention_kernel=auto: nothing fits checkpoint on cpu: it has no candid"),
    ],
)
def test_candidates_that_cannot_be_are_refused(overrides, words, plan):
    assert words in refused(plan, *overrides)


@pytest.fixture
def preset(tmp_path, entry):
    """``preset(text)``: a third party's preset of that name."""

    def make(text):
        (tmp_path / "preset").mkdir()
        (tmp_path / "preset" / "mine.yaml").write_text("# @package _global_\n" + text)
        return entry("engine-mine", engine_config_searchpath=[f"file://{tmp_path}"])

    return make


def test_a_preset_sets_candidates_and_the_command_line_wins_over_it(plan, preset):
    mine = preset("defaults: [override /drafter: auto]\ndrafter: {candidates: [suffix, ngram]}\n")
    assert plan("+preset=mine", entries=[mine]).choice("drafter").name == "suffix"
    chosen = plan("+preset=mine", "drafter.candidates=[ngram]", entries=[mine]).choice("drafter")
    assert chosen.name == "ngram"


def test_a_presets_candidates_for_a_plugin_that_is_named_are_an_error_that_says_so(plan, preset):
    mine = preset("attention_kernel: {candidates: [torch]}\n")
    problem = refused(plan, "+preset=mine", "attention_kernel=torch", entries=[mine])
    assert problem.startswith("attention_kernel.candidates=['torch'] (set by YAML): attention_kernel=torch names")


def test_every_shipped_auto_asks_third_parties_last(with_builtins):
    found = with_builtins()
    autos = [slot for slot, names in options(found).items() if "auto" in names]
    assert autos == ["architecture", "communicator", "attention_kernel", "drafter"]
    for slot in autos:
        (pick,) = compose([f"{slot}=auto"], found).selections[slot]
        assert pick.candidates[-1] == "third_party" and len(pick.candidates) > 1
