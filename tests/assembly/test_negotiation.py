from dataclasses import dataclass, replace

import pytest

from engine.assembly.choosing import plugin_problems
from engine.assembly.compose import compose
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.assembly.plan import EnginePlan
from engine.assembly.records import reasons_of
from engine.contracts.config import DrafterConfig
from engine.contracts.model import DeviceFacts
from engine.contracts.provider import Provider


@pytest.fixture
def plan(with_builtins, checkpoint, cpu):
    """``plan(*overrides)`` against the tiny checkpoint."""

    def make(*overrides, entries=(), device=cpu, model=None, **changes):
        path = checkpoint(**changes)
        found = with_builtins(*entries)
        facts = model or model_config(path)
        return resolve(compose([f"model.path={path}", *overrides], found), found, facts, device)

    return make


HOPPER = DeviceFacts("cuda", "test", (9, 0))
COMPILING_CPU = DeviceFacts("cpu", features=frozenset({"cxx"}))
NO_COMPILER = DeviceFacts("cpu", no_cxx="none found")


def refused(make, *overrides, **kwargs):
    with pytest.raises(AssemblyError) as raised:
        make(*overrides, **kwargs)
    return raised.value.problems


def no_gpu(model, device):
    return () if device.kind == "cuda" else ("needs a GPU",)


def test_a_plan_is_json_and_comes_back_equal(plan):
    made = plan("+preset=latency", "exporter=[prometheus,jsonl]", "server.api_key=secret")
    assert EnginePlan.from_json(made.to_json()) == made


def test_auto_takes_the_first_that_fits_and_says_what_it_passed_over(plan, gpu):
    choice = plan(device=COMPILING_CPU).choice("attention_kernel")
    assert (choice.name, choice.requested) == ("cpu", "auto")
    assert choice.passed_over == ("triton: needs a CUDA device",)
    plain = plan(device=DeviceFacts("cpu")).choice("attention_kernel")
    assert plain.name == "torch" and "C++ compiler" in plain.passed_over[1]
    on_gpu = plan(device=gpu).choice("attention_kernel")
    assert (on_gpu.name, on_gpu.passed_over) == ("triton", ())


@pytest.mark.parametrize(
    ("device", "head_dim", "why"),
    [
        (DeviceFacts("cuda", "an older GPU", (7, 5)), 16, "needs compute capability 8.0, this device has 7.5"),
        (DeviceFacts("cuda", "test", (9, 0)), 36, "head_dim=36 is not a multiple of 8 up to 256"),
    ],
)
def test_auto_passes_over_a_kernel_that_this_gpu_or_model_cannot_use(plan, device, head_dim, why):
    choice = plan(device=device, head_dim=head_dim).choice("attention_kernel")
    assert choice.name == "torch" and choice.passed_over[0] == f"triton: {why}"


@pytest.mark.parametrize(
    ("device", "dtype", "execution"),
    [
        (COMPILING_CPU, "bfloat16", "compile"),
        (COMPILING_CPU, "float16", "eager"),
        (DeviceFacts("cpu"), "bfloat16", "eager"),
        (HOPPER, "bfloat16", "graphs"),
        (HOPPER, "float16", "graphs"),
        (DeviceFacts("cuda", "an older GPU", (7, 5)), "float16", "eager"),
    ],
)
def test_execution_is_the_fastest_way_there_is(plan, device, dtype, execution):
    assert plan(f"model.dtype={dtype}", device=device).execution == execution


def test_a_kernel_that_cannot_be_captured_leaves_a_gpu_without_graphs_and_the_plan_says_so(plan):
    made = plan("attention_kernel=torch", device=HOPPER)
    assert made.execution == "compile"
    (note,) = made.notes
    assert "auto chose compile: graphs unavailable (attention_kernel=torch cannot be captured" in note
    (problem,) = refused(plan, "attention_kernel=torch", "execution=graphs", device=HOPPER)
    assert "execution=graphs" in problem and "cannot be captured" in problem


def test_a_plan_says_why_it_is_not_compiled(plan):
    (note,) = plan(device=NO_COMPILER).notes
    assert note.startswith("execution=auto chose eager: compile unavailable (") and "C++ compiler: none found" in note
    assert plan(device=COMPILING_CPU).notes == ()


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        (NO_COMPILER, "bfloat16", "C++ compiler: none found"),
        (COMPILING_CPU, "float16", "not in float16"),
        (DeviceFacts("cuda", "an older GPU", (7, 5)), "bfloat16", "compute capability 8.0, an older GPU has 7.5"),
    ],
)
def test_compiling_where_it_cannot_be_done_is_refused(plan, device, dtype, why):
    (problem,) = refused(plan, "execution=compile", f"model.dtype={dtype}", device=device)
    assert "execution=compile" in problem and why in problem and "execution=auto" in problem


def test_an_activation_nobody_computes_is_refused_before_anything_is_loaded(plan):
    (problem,) = refused(plan, hidden_act="quick_gelu")
    assert problem.startswith("architecture=llama cannot compute model.path=")
    assert "hidden_act 'quick_gelu' of the checkpoint: expected one of silu, " in problem


@pytest.mark.parametrize("quantizer", ["checkpoint", "none", "int8"])
def test_activations_a_quantizer_lacks_are_refused_by_the_plan_not_at_start_up(plan, quantizer):
    (problem,) = refused(plan, f"quantizer={quantizer}", "quantizer.activations=fp8")
    assert "quantizer.activations=fp8: expected one of bf16" in problem


def test_nothing_degrades_silently_when_a_plugin_is_named(plan):
    (problem,) = refused(plan, "attention_kernel=triton")
    assert "attention_kernel=triton cannot serve checkpoint on cpu: needs a CUDA device" in problem
    assert "plugins that can: torch" in problem


def test_auto_without_a_fitting_candidate_lists_what_was_tried(plan):
    (problem,) = refused(plan, architectures=["MambaForCausalLM"])
    assert "architecture=auto" in problem and "llama: " in problem and "MambaForCausalLM" in problem


def test_all_problems_are_told_at_once(plan):
    told = refused(
        plan,
        "attention_kernel=triton",
        "execution=graphs",
        "model.max_len=100000",
        "drafter.plugin=nope",
        quantization_config={"quant_method": "awq", "version": "gemv"},
    )
    assert len(told) == 5
    text = "\n".join(told)
    for words in (
        "needs a CUDA device",
        "execution=graphs",
        "512 positions",
        "drafter=nope",
        "awq",
    ):
        assert words in text


@pytest.mark.parametrize("quantizer", ["none", "int8"])
def test_an_already_quantized_checkpoint_is_refused(quantizer, plan):
    (problem,) = refused(plan, f"quantizer={quantizer}", quantization_config={"quant_method": "gptq"})
    assert f"quantizer={quantizer}" in problem and "gptq" in problem


def test_a_missing_capability_names_who_has_it(plan, entry):
    needy = entry(
        "engine-needy",
        engine_router=[Provider("needy", "x:Y", requires={"kv_allocator": ("prefix_cache",), "drafter": ("magic",)})],
    )
    told = refused(plan, "router=needy", "kv_allocator=paged", entries=[needy])
    assert told == (
        "router=needy needs kv_allocator with prefix_cache, but kv_allocator=paged lacks that; "
        "kv_allocator plugins that have it: prefix_cache",
        "router=needy needs drafter with magic, but drafter=none lacks that; drafter plugins that have it: (none)",
    )


def test_auto_passes_over_what_lacks_a_capability_that_settings_of_another_slot_need(plan):
    nodes = ("parallelism=join", "parallelism.tp=2", "parallelism.nodes=2")
    assert plan("parallelism=join", "parallelism.tp=2", device=COMPILING_CPU).choice("communicator").name == "shm"
    choice = plan(*nodes, device=COMPILING_CPU).choice("communicator")
    assert choice.name == "gloo"
    assert "shm: lacks several_machines, which parallelism=join needs" in choice.passed_over
    (problem,) = refused(plan, *nodes, "communicator=shm", device=COMPILING_CPU)
    assert problem == (
        "parallelism=join needs communicator with several_machines, but communicator=shm lacks that; "
        "communicator plugins that have it: nccl, gloo"
    )


def test_symmetric_memory_is_for_gpus_of_one_machine(plan):
    chosen = ("parallelism.tp=2", "communicator=symmetric")
    assert plan(*chosen, device=replace(HOPPER, count=2)).choice("communicator").name == "symmetric"
    (problem,) = refused(plan, *chosen, "parallelism=join", "parallelism.nodes=2", device=HOPPER)
    assert problem == (
        "parallelism=join needs communicator with several_machines, but communicator=symmetric lacks that; "
        "communicator plugins that have it: nccl, gloo"
    )
    (problem,) = refused(plan, *chosen)
    assert "communicator=symmetric" in problem and "it moves tensors of GPUs, not cpu" in problem


def test_an_ambiguous_name_is_an_error_only_when_selected(plan, entry):
    two = [entry(dist, engine_drafter=[Provider("mine", f"{dist[-1]}:D")]) for dist in ("engine-a", "engine-b")]
    assert plan(entries=two).choice("drafter").name == "none"
    (problem,) = refused(plan, "drafter=mine", entries=two)
    assert "offered by 2 distributions: engine-a:mine, engine-b:mine" in problem
    assert "drafter.plugin=engine-a:mine" in problem
    assert plan("drafter=mine", "drafter.plugin='engine-b:mine'", entries=two).choice("drafter").factory == "b:D"


class Odd(BaseException):
    """Neither ``Exception`` nor ``SystemExit``."""


def raising(error):
    def unsupported(model, device):
        raise error

    return unsupported


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), Odd("x")])
def test_a_raising_unsupported_is_a_reason_that_names_its_plugin(error, plan, entry):
    odd = entry("engine-odd", engine_drafter=[Provider("odd", "x:Y", unsupported=raising(error))])
    (problem,) = refused(plan, "drafter=odd", entries=[odd])
    assert f"unsupported() of drafter=odd (engine-odd 0.3.0) raised {type(error).__name__}" in problem


def test_the_users_own_interrupt_is_no_reason(plan, entry):
    odd = entry("engine-odd", engine_drafter=[Provider("odd", "x:Y", unsupported=raising(KeyboardInterrupt()))])
    with pytest.raises(KeyboardInterrupt):
        plan("drafter=odd", entries=[odd])


NO_REASONS = [
    ("needs a GPU", "returned 'needs a GPU'; expected a tuple of reasons, ('needs a GPU',)"),
    ("", "returned ''; expected a tuple of reasons, ('',)"),
    (None, "returned None; expected a tuple of reasons, empty when there are none"),
    (True, "returned True; expected"),
    ([1], "returned [1]; expected"),
    (("",), "returned ('',); expected"),
]


@pytest.mark.parametrize(("returned", "words"), NO_REASONS)
def test_what_are_no_reasons_is_one_line_that_says_so(returned, words):
    (line,) = reasons_of(returned, "unsupported() of mine")
    assert line.startswith(f"unsupported() of mine {words}")


def test_an_unsupported_that_returns_no_reasons_is_one_problem_that_names_it(plan, entry):
    @dataclass(frozen=True)
    class OddConfig(DrafterConfig):
        def unsupported(self, model, device):
            return "needs a GPU"

    offered = [
        Provider("odd", "x:Y", unsupported=lambda model, device: "needs a GPU"),
        Provider("odd_config", "x:Y", config=OddConfig),
    ]
    odd = entry("engine-odd", engine_drafter=offered)
    (problem,) = refused(plan, "drafter=odd", entries=[odd])
    assert "unsupported() of drafter=odd (engine-odd 0.3.0) returned 'needs a GPU'" in problem
    (problem,) = refused(plan, "drafter=odd_config", entries=[odd])
    assert "unsupported() of the config of drafter=odd_config (engine-odd 0.3.0) returned 'needs a GPU'" in problem


def test_reasons_may_be_a_list_and_are_told_on_one_line_each(plan, entry):
    odd = entry("engine-odd", engine_drafter=[Provider("odd", "x:Y", unsupported=lambda m, d: ["too\nold", "slow"])])
    told = refused(plan, "drafter=odd", entries=[odd])
    assert ["on cpu: too old (" in told[0], "on cpu: slow (" in told[1]] == [True, True]


def test_auto_keeps_what_was_set_on_top_of_the_chosen_plugins_defaults(plan, entry, tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "fitting.yaml").write_text("plugin: auto\ncandidates: [gpu_only, absent, ngram]\n")
    maker = entry(
        "engine-auto",
        engine_drafter=[Provider("gpu_only", "x:Y", unsupported=no_gpu)],
        engine_config_searchpath=[f"file://{tmp_path}"],
    )
    choice = plan("drafter=fitting", "drafter.max_width=2", entries=[maker]).choice("drafter")
    assert choice.name == "ngram" and choice.config["max_width"] == 2 and choice.config["max_match"] == 4
    assert choice.passed_over == ("gpu_only: needs a GPU", "absent: not installed")


@pytest.mark.parametrize(
    ("path", "kind", "setting", "expected"),
    [
        ("local", "cpu", "auto", "bfloat16"),
        ("local", "cpu", "float32", "float32"),
        ("bundled", "cpu", "auto", "float32"),
        ("bundled", "cuda", "auto", "bfloat16"),
        ("bundled", "cpu", "bfloat16", "bfloat16"),
    ],
)
def test_dtype_auto_is_the_checkpoints_except_for_the_bundled_model_on_a_cpu(
    path, kind, setting, expected, plan, checkpoint, cpu, gpu
):
    overrides = [f"model.dtype={setting}", *(["model.path=bundled"] if path == "bundled" else [])]
    made = plan(*overrides, device=cpu if kind == "cpu" else gpu, model=model_config(checkpoint()))
    assert made.dtype == expected


def test_max_len_is_the_models_unless_a_smaller_one_is_asked_for(plan):
    assert plan().max_len == 512
    assert plan("model.max_len=100").max_len == 100
    assert "model.max_len=512 or less" in refused(plan, "model.max_len=513")[0]


@pytest.mark.parametrize(("wanted", "block_size", "fewest"), [(16, 16, 32), (64, 64, 128), (40, 64, 128)])
def test_a_pool_of_one_block_is_refused_naming_one_that_is_large_enough(plan, wanted, block_size, fewest):
    sizes = (f"memory.kv_tokens={wanted}", f"kv_allocator.block_size={block_size}")
    assert refused(plan, *sizes)[0].endswith(f"use memory.kv_tokens={fewest}")
    plan(f"memory.kv_tokens={fewest}", sizes[1])


def test_a_host_drafters_cost_is_noted_by_capability_not_by_name(plan, entry):
    mine = entry("engine-m", engine_drafter=[Provider("mine", "x:Y", provides=("host_drafter",))])
    assert any("drafter=mine runs on the host" in note for note in plan("drafter=mine", entries=[mine]).notes)
    assert plan("drafter=mine", "overlap=false", entries=[mine], device=COMPILING_CPU).notes == ()


def test_an_open_door_is_noted(plan):
    assert any("server.host=0.0.0.0" in note for note in plan("server.host=0.0.0.0").notes)
    assert plan("server.host=0.0.0.0", "server.api_key=x", device=COMPILING_CPU).notes == ()


def test_every_rank_has_a_gpu_of_its_own(plan):
    two = replace(HOPPER, count=2)
    assert plan("parallelism.tp=2", device=two).layout.size == 2
    (problem,) = refused(plan, "parallelism.tp=4", device=two)
    assert "4 ranks on this machine need 4 GPUs, and 2 can be seen" in problem
    assert "parallelism.tp=1, parallelism.tp=2" in problem
    assert plan("parallelism.tp=4", "parallelism=join", "parallelism.nodes=2", device=two)
    assert plan("parallelism.tp=4", "parallelism.share_devices=true", device=two)
    assert plan("parallelism.tp=4", "parallelism.pp=2").layout.size == 8, "a CPU has as many as are wanted"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("parallelism.pcp=2 parallelism.ep=3", "does not divide parallelism.tp=1 and is not parallelism.tp x pcp=2"),
        ("parallelism.tp=2 parallelism.dcp=2 parallelism.pcp=2", "parallelism.pcp=2 parallelism.dcp=2: ranks"),
        ("parallelism.pp=2 parallelism.stage_layers=[3]", "expected 2 numbers from 1 on, one for each stage of"),
        ("parallelism.dcp=2", "parallelism.dcp=2: does not divide parallelism.tp=1"),
        ("parallelism.ep=2", "parallelism.ep=2: does not divide parallelism.tp=1"),
        ("parallelism.nodes=2", "parallelism.nodes=2: does not divide the 1 rank of"),
        ("parallelism.timeout_s=0.5", "parallelism.timeout_s=0.5: expected at least 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(plan, override, says):
    (problem,) = refused(plan, *override.split())
    assert says in problem


def test_a_plan_says_that_no_step_is_large_enough_to_be_shared_out(plan):
    small = plan("parallelism.pcp=2", "scheduler.token_budget=64")
    assert any("shares out no step: scheduler.token_budget=64" in note for note in small.notes)
    assert not any("shares out" in note for note in plan("parallelism.pcp=2").notes)


def test_simulated_ranks_are_in_one_process(plan):
    (problem,) = refused(plan, "parallelism.tp=2", "parallelism=local", "communicator=simulated")
    assert "one_process" in problem and "threads" in problem
    assert plan("parallelism.tp=2", "parallelism=threads", "communicator=simulated")


def test_ranks_that_share_out_tokens_need_a_kernel_that_says_the_log_sum_exp(plan, entry):
    wanted = ("parallelism.tp=4", "parallelism.dcp=2")
    assert plan(*wanted, "kv_allocator.block_size=32").block_size == 64
    on_gpu = ("attention_kernel=triton", "parallelism.share_devices=true", "kv_allocator.block_size=32")
    assert plan(*wanted, *on_gpu, device=HOPPER).block_size == 64
    mine = entry("engine-m", engine_attention_kernel=[Provider("mine", "x:Y")])
    (problem,) = refused(plan, *wanted, "attention_kernel=mine", entries=[mine])
    assert problem.startswith(
        "parallelism.dcp=2 needs attention_kernel with log_sum_exp, but attention_kernel=mine lacks that; "
        "attention_kernel plugins that have it: torch, cpu"
    )


def test_a_block_of_all_ranks_is_no_larger_than_one_may_be(plan):
    (problem,) = refused(plan, "parallelism.tp=4", "parallelism.dcp=4", "kv_allocator.block_size=128")
    assert "blocks of 512 tokens, 128 on each rank" in problem and "kv_allocator.block_size=8, 16, 32, 64" in problem
    (problem,) = refused(plan, "parallelism.tp=3", "parallelism.dcp=3")
    assert "expected a power of two up to 256: use a power of two as parallelism.dcp" in problem


def test_names_nobody_offers_show_without_a_model(with_builtins):
    found = with_builtins()
    (problem,) = plugin_problems(compose(["drafter.plugin=ngrm"], found), found)
    assert "did you mean 'ngram'" in problem
