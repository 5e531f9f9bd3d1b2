"""The architecture comes first: it says what the model is, and every way in which it cannot is one line that helps."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
from tests.families import AnyFamily, NestedFamily
from tests.selection import few

from engine.assembly.bind import build_context, build_slots
from engine.assembly.compose import compose
from engine.assembly.describe import notes
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelConfig, ModelFacts
from engine.contracts.ops import Attention
from engine.contracts.provider import Provider

MINE = {"architectures": ["MineForCausalLM"]}
MODULE = "engine_mine_architectures"


@dataclass(frozen=True)
class MineConfig(SlotConfig):
    positions: int = 64


class Configured(AnyFamily):
    def describe(self, model, b):
        super().describe(model, b)
        b.positions(self.config.positions)


class Seen(AnyFamily):
    """It computes a model whose positions are what it was shown of ``config.json``."""

    def describe(self, model, b):
        super().describe(model, b)
        b.positions(model.raw["my_positions"])


class NestedSeen(Seen):
    def text_config(self, config):
        return config["text_config"]


class NoLayers(AnyFamily):
    def describe(self, model, b):
        b.positions(64)
        b.lm_head(b.embed("embed", 16, 8), "head", 16)


class Odd(AnyFamily):
    """Heads that are none: the builder refuses them."""

    def describe(self, model, b):
        b.rms_norm(b.embed("embed", 16, 8), "norm", 1e-5, size=3)


class Refusing(AnyFamily):
    def describe(self, model, b):
        raise ValueError("my_positions=7:\n expected 8")


class Failing(AnyFamily):
    def describe(self, model, b):
        return model.raw["absent"]


class Ending(AnyFamily):
    def describe(self, model, b):
        sys.exit(3)


class Wanting(AnyFamily):
    """Made as plugins of other slots are."""

    def __init__(self, config, context):
        raise AssertionError("not reached")


class Lacking:
    def __init__(self, config):
        pass


CLASSES = (AnyFamily, NestedFamily, Configured, Seen, NestedSeen, NoLayers, Odd, Refusing, Failing, Ending, Wanting,
           Lacking)  # fmt: skip


def only_mine(model, device):
    assert type(model) is ModelConfig, "there are no facts yet"
    return () if model.architecture == "MineForCausalLM" else ("it computes MineForCausalLM",)


@pytest.fixture
def plan(with_builtins, checkpoint, cpu, entry, monkeypatch):
    """``plan(Class, *overrides)``: against a checkpoint of a third party's family, described by this class."""
    module = ModuleType(MODULE)
    for kind in CLASSES:
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, MODULE, module)

    def make(kind, *overrides, others=(), **changes):
        path = checkpoint(**(MINE | changes))
        mine = Provider("mine", f"{MODULE}:{kind}", config=MineConfig, unsupported=only_mine)
        found = with_builtins(entry("engine-mine", engine_architecture=[mine]), *others)
        return resolve(compose([f"model.path={path}", *overrides], found), found, model_config(path), cpu)

    return make


def refused(make, *args, **kwargs):
    with pytest.raises(AssemblyError) as raised:
        make(*args, **kwargs)
    (problem,) = raised.value.problems
    assert problem.isprintable()
    return problem


def test_what_the_engine_knows_of_a_model_follows_from_its_description(plan):
    made = plan("AnyFamily", hidden_size=None, num_hidden_layers=None, vocab_size=None)
    facts = made.model
    assert type(facts) is ModelFacts and facts.architecture == "MineForCausalLM"
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size, facts.max_position) == (8, 1, 16, 64)
    assert facts.attentions == (Attention(2, 1, 4, scale=0.5),) and not facts.tie_embeddings
    assert made.max_len == 64 and made.dtype == "bfloat16"


def test_it_is_made_of_its_own_settings_alone_wherever_it_is_asked(plan):
    made = plan("Configured", "architecture=mine", "architecture.positions=32")
    assert made.model.max_position == made.max_len == 32
    ((built,),) = build_slots(made, ("architecture",), build_context(made)).values()
    assert built.config == MineConfig(positions=32)
    assert "model.max_len=32 or less" in refused(plan, "Configured", "architecture=mine", "architecture.positions=32",
                                                 "model.max_len=33")  # fmt: skip


def test_an_architecture_of_nested_checkpoints_is_shown_the_part_for_text(plan):
    part = {"my_positions": 48, "torch_dtype": "float16", "eos_token_id": 5}
    made = plan("NestedSeen", text_config=part, my_positions=16)
    assert (made.model.max_position, made.model.raw) == (48, part)
    assert (made.dtype, made.model.eos_token_ids) == ("float16", (5, 2))
    assert plan("Seen", text_config=part, my_positions=16).model.max_position == 16


def test_other_plugins_are_asked_with_what_the_architecture_says(plan, entry):
    asked = []

    def unsupported(model, device):
        asked.append(model)
        return ()

    scheduler = entry("engine-odd", engine_scheduler=[Provider("odd", "x:Y", unsupported=unsupported)])
    made = plan("AnyFamily", "scheduler=odd", others=[scheduler])
    assert asked and all(model == made.model for model in asked)


def test_architectures_of_other_families_are_no_news(plan):
    made = plan("AnyFamily")
    assert made.choice("architecture").passed_over and not any("architecture" in note for note in notes(made))


def test_a_model_that_nobody_computes_is_named_with_near_names_and_what_everybody_does(plan):
    problem = refused(plan, "AnyFamily", architectures=["Qwen4ForCausalLM"], vision_config={"depth": 2})
    assert problem.startswith(
        "architecture=auto: no plugin computes Qwen4ForCausalLM, the architecture of checkpoint; near names: "
        "Qwen3ForCausalLM (llama), Qwen2ForCausalLM (llama), "
    )
    assert (
        "; set model.path to a model that is computed, or install an architecture plugin for this one. Asked were "
        "llama: it computes Llama"
    ) in problem
    assert problem.endswith("engine-mine:mine: it computes MineForCausalLM")
    mine = refused(plan, "AnyFamily", architectures=["MinesForCausalLM"])
    assert "; near names: MineForCausalLM (engine-mine:mine), " in mine
    named = refused(plan, "AnyFamily", "architecture=llama", architectures=["LlavaForConditionalGeneration"])
    assert "Qwen3ForCausalLM; set model.path to a model that is computed, or install" in named


def test_an_architecture_that_is_named_says_what_it_computes_and_which_others_can(plan):
    problem = refused(plan, "AnyFamily", "architecture=llama")
    assert problem.startswith("architecture=llama cannot serve checkpoint (MineForCausalLM) on cpu: it computes Llama")
    assert problem.endswith("(architecture plugins that can: mine)")


def test_a_long_name_of_a_model_is_not_repeated_by_every_plugin(plan):
    problem = refused(plan, "AnyFamily", architectures=["x" * 1000])
    assert problem.count("xxx...") == 1 and problem.count("x") < 250


def test_a_checkpoint_of_experts_is_not_taken_for_a_dense_one(plan):
    problem = refused(plan, "AnyFamily", architectures=["MistralForCausalLM"], num_local_experts=8)
    assert "llama: it computes no experts, and config.json says num_local_experts=8" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' of the checkpoint: expected one of silu, "),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"rope_scaling": {"rope_type": "odd"}}, "rope type 'odd': expected one of default, "),
        ({"head_dim": 2}, "2 dimensions of each head are rotated: expected an even number, at least 4"),
    ],
)
def test_what_a_config_says_wrong_is_refused_before_anything_is_loaded(changes, words, plan, tmp_path):
    problem = refused(plan, "AnyFamily", architectures=["LlamaForCausalLM"], **changes)
    assert problem.startswith(f"architecture=llama cannot compute model.path={tmp_path}/checkpoint: {words}")


def test_what_one_architecture_cannot_describe_another_may(plan, entry):
    offered = [Provider("other", f"{MODULE}:AnyFamily", unsupported=lambda model, device: ())]
    other = entry("engine-other", engine_architecture=offered)
    changes = {"architectures": ["LlamaForCausalLM"], "hidden_act": "quick_gelu"}
    problem = refused(plan, "AnyFamily", others=[other], **changes)
    assert problem.endswith(" (architecture plugins that can: other)")
    assert plan("AnyFamily", "architecture=other", others=[other], **changes).model.hidden_size == 8


MINE_SAYS = "architecture=mine (from engine-mine 0.3.0)"


@few(4)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Refusing", "architecture=mine cannot compute model.path={path}: my_positions=7: expected 8"),
        ("Odd", "architecture=mine cannot compute model.path={path}: norm norm: 8 features are not heads of 3"),
        ("NoLayers", "model.path={path}: " + MINE_SAYS + ": describe() recorded a graph that is no whole model: it "),
        ("Failing", "model.path={path}: " + MINE_SAYS + ": describe() raised KeyError: 'absent' (test_archite"),
        ("Ending", "model.path={path}: " + MINE_SAYS + ": describe() raised SystemExit: 3"),
        ("NestedFamily", "model.path={path}: " + MINE_SAYS + ": text_config() raised KeyError: 'text_config'"),
        ("Lacking", MINE_SAYS + " built a Lacking, which is not a Architecture: it lacks describe"),
        ("Wanting", MINE_SAYS + " failed to build: TypeError: "),
        ("Absent", MINE_SAYS + f" cannot be imported from {MODULE}:Absent"),
    ],
)
def test_an_architecture_that_fails_is_one_line_with_its_name(kind, words, plan, tmp_path):
    assert refused(plan, kind).startswith(words.format(path=f"{tmp_path}/checkpoint"))


@pytest.mark.parametrize("part", [None, [1], "x"])
def test_a_part_for_text_that_is_none_is_the_plugins_mistake(part, plan):
    problem = refused(plan, "NestedFamily", text_config=part)
    assert f"{MINE_SAYS}: text_config() returned {part!r}, expected the part for text of config.json" in problem


def test_mistakes_of_other_names_are_told_beside_an_architectures(plan):
    with pytest.raises(AssemblyError) as raised:
        plan("Refusing", "drafter.plugin=ngrm", "scheduler.plugin=nope")
    assert [problem.split("=")[0] for problem in raised.value.problems] == ["architecture", "drafter", "scheduler"]
