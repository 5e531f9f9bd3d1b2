"""``engine plan``: what fits where, how fast, and what to change; the sizing examples that guides give, checked."""

import asyncio
import json
from dataclasses import replace
from functools import cache

import msgspec
import pytest

from engine.cli.main import main
from engine.contracts.model import DeviceFacts
from engine.contracts.step_cost import StepWork
from engine_lab.plan import planning
from engine_lab.plan.candidates import CANDIDATES, LAYOUTS, Candidate, combined
from engine_lab.plan.cost import estimate_of, estimated
from engine_lab.plan.device import GPU, facts_of, listed
from engine_lab.plan.live import Observed, Scored, alarms, baseline_file, observed, read_baseline, scores
from engine_lab.plan.main import live_question, question_of
from engine_lab.plan.planning import Planner
from engine_lab.plan.report import show
from engine_lab.plan.served import otherwise, requests_of
from engine_lab.plan.workload import parse_workload
from engine_lab.shared.estimates.devices import SHEETS, device, sheet
from engine_lab.shared.estimates.errors import EstimateError
from engine_lab.shared.live import LiveEngine, LiveError
from engine_lab.shared.sizing import size_plan

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Writes a ``config.json`` of these sizes and returns its folder; there are no weights."""

    def write(layers, hidden, heads, kv_heads, inner, vocabulary, **more):
        folder = tmp_path_factory.mktemp("model")
        config = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "intermediate_size": inner,
            "vocab_size": vocabulary,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **more,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@pytest.fixture(scope="module")
def llama_8b(model):
    return model(32, 4096, 32, 8, 14336, 128256)


@pytest.fixture(scope="module")
def llama_70b(model):
    return model(80, 8192, 64, 8, 28672, 128256)


@pytest.fixture(scope="module")
def qwen_32b(model):
    return model(64, 5120, 64, 8, 25600, 151936, architectures=["Qwen3ForCausalLM"], max_position_embeddings=40960)


@cache
def sized(folder, name, *overrides):
    return size_plan([f"model.path={folder}", *overrides], (), facts_of(sheet(name)))


# Devices -------------------------------------------------------------------------------------------------------------

GPUS = [each for each in SHEETS.values() if each.kind != "cpu"]


@pytest.mark.parametrize("card", GPUS, ids=lambda card: card.name)
def test_rates_of_a_card_fit_each_other(card):
    known = card.figures
    narrow = [known[name] for name in ("fp8_tflops", "int8_tflops") if name in known]
    assert narrow and max(narrow) >= 2 * known["bf16_tflops"] * 0.998  # data sheets round
    assert 100 <= known["bf16_tflops"] * 1e3 / known["bandwidth_gb_s"] <= 450
    assert 0.9e9 * known["memory_gb"] <= card.memory <= GIB * known["memory_gb"]


def test_every_figure_has_a_source_and_the_table_a_date():
    for card in SHEETS.values():
        assert card.as_of == "2026-11-22"
        assert set(card.sources) == set(card.figures) and set(card.sources.values()) <= set(card.texts)
    assert set(sheet("A10G").recalled) == {"bf16_tflops", "int8_tflops", "link_gb_s", "watts", "usd_per_hour"}


def test_a_card_has_the_memory_its_driver_reports():
    assert device("H100").memory == int(79.19 * GIB) < 80 * GIB
    assert device("h100-sxm") == device("H100")
    assert device("L4").memory == 24 * 10**9  # not known in GiB: the smaller reading of "24 GB"


def test_what_is_not_known_is_no_number():
    with pytest.raises(EstimateError, match="A100-80GB: fp8_tflops is unknown"):
        sheet("A100").device("fp8_tflops")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H10", r"device 'H10' is unknown \(did you mean .*H100.*\): expected one of L4"),
        ("EPYC-9654", "a CPU is probed, not looked up .*461 GB/s.*plan --device here"),
        ("MI300X", "no kernels for it"),
    ],
)
def test_devices_that_cannot_be_planned_for(name, message):
    with pytest.raises(EstimateError, match=message):
        listed(name)


# What guides say, checked -------------------------------------------------------------------------------------------


def test_kv_cache_of_an_8b_model_is_131_kb_a_token(llama_8b):
    found = sized(llama_8b, "H100")
    assert found.kv_per_token == 131_072
    assert found.kv_per_token * 4096 == 512 * 2**20
    assert found.kv_per_token * 131_072 == 16 * GIB


def test_kv_cache_of_4096_tokens_of_a_70b_model_is_1_3_gb(llama_70b):
    assert sized(llama_70b, "H200", "model.max_len=8192").kv_per_token * 4096 == pytest.approx(1.3e9, rel=0.04)


def test_70b_takes_two_cards_in_bf16_and_one_in_fp8(llama_70b):
    one = sized(llama_70b, "H100", "model.max_len=8192")
    two = sized(llama_70b, "H100", "model.max_len=8192", "parallelism.tp=2")
    narrow = sized(llama_70b, "H100", "model.max_len=8192", "quantizer=fp8")
    assert (one.blocks, two.blocks > 0, narrow.blocks > 0) == (0, True, True)
    assert one.weights == pytest.approx(141e9, rel=0.01) and "quantizer=int4" in one.refusal


def test_47_users_are_not_those_of_70b_fp8_on_one_h100(llama_70b):
    """A guide ends its example with 47 users there. What is left holds 12k tokens: 2 requests of 4.3k, and not half of
    the 47 even if all share a prefix of 4,000 tokens."""
    found = sized(llama_70b, "H100", "model.max_len=8192", "quantizer=fp8")
    assert 3.5 * GIB < found.ledger["KV pool"] < 4.5 * GIB and 11_000 < found.kv_tokens < 13_000
    assert found.by_memory(4300) == 2
    assert 20 <= found.by_memory(4350, 4000) < 47 / 2 + 1
    assert (
        47 < sized(llama_70b, "H100", "model.max_len=8192", "quantizer=fp8", "kv_format=fp8").by_memory(4350, 4000) < 60
    )


def test_47_users_are_those_of_a_32b_model_in_int4(qwen_32b):
    """4 users in bfloat16 and 47 in 4 bits imply 65 to 66 GiB for weights and caches, and 1 GiB a user. Here
    memory.fraction says how much that is, and 8 bits of a head that was said to have 4 take a little."""
    limits = ("model.max_len=4096", "memory.fraction=0.85")
    wide, narrow = (sized(qwen_32b, "H100", *limits, f"quantizer={name}") for name in ("none", "int4"))
    assert wide.kv_per_token * 4096 == GIB
    assert wide.weights == pytest.approx(61 * GIB, rel=0.02)
    assert wide.by_memory(4096) == pytest.approx(4, abs=2) and narrow.by_memory(4096) == pytest.approx(47, abs=3)


def test_a_decode_step_takes_at_least_the_weights_over_the_bandwidth(llama_8b):
    found = sized(llama_8b, "H100")
    step = estimated(found, device("H100"), GPU).step
    floor_ms = found.weights / 3.35e12 * 1e3
    assert floor_ms < step.base_ms < 2 * floor_ms
    assert step.per_decode_context_ms == pytest.approx(131_072 / (GPU.bandwidth * 3.35e12) * 1e3, rel=0.01)


@pytest.mark.parametrize(
    ("card", "layers", "hidden", "heads", "ffn", "step_ms", "prompt", "prompt_ms"),
    [("H200", 32, 4096, 32, 14336, 4.49, 8192, 235.0), ("H200", 16, 2048, 32, 8192, 0.86, 8192, 47.2),
     ("H100", 16, 2048, 32, 8192, 1.05, None, None)],
)  # fmt: skip
def test_estimates_of_a_gpu_are_near_what_was_measured_on_it(
    model, card, layers, hidden, heads, ffn, step_ms, prompt, prompt_ms
):
    """Bfloat16, batch 1 after 1,024 tokens. One H100 was not fitted to; prompts of small models take longer than
    estimated."""
    tied = {"tie_word_embeddings": True, "head_dim": hidden // heads} if hidden == 2048 else {}
    found = sized(model(layers, hidden, heads, 8, ffn, 128256, **tied), card, "model.max_len=16384")
    estimate = estimate_of(found, device(card), GPU)
    assert estimate.decode(1, 1024).ms == pytest.approx(step_ms, rel=0.12)
    if prompt is not None:
        assert estimate.prefill(prompt).ms == pytest.approx(prompt_ms, rel=0.25)


def test_a_long_prompt_reads_all_experts_and_one_token_few(model):
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2}
    folder = model(4, 1024, 8, 8, 4096, 1024, architectures=["MixtralForCausalLM"], **sizes)
    found = sized(folder, "H100", "model.max_len=8192")
    step = estimated(found, device("H100"), GPU).step
    assert step.weights(1) == 1.0 and 2.5 < step.weights(2048) < 4.0
    whole = estimate_of(found, device("H100"), GPU).prefill(2048).ms
    assert step.ms(StepWork.chunk(2048)) >= whole * 0.999


def test_weights_of_half_the_bytes_make_decode_faster_and_prompts_not(llama_8b):
    wide, narrow = (
        estimated(sized(llama_8b, "H100", f"quantizer={name}"), device("H100"), GPU).step for name in ("none", "fp8")
    )
    assert narrow.base_ms < 0.7 * wide.base_ms
    whole = [step.base_ms + 2048 * step.per_token_ms for step in (wide, narrow)]
    assert whole[1] == pytest.approx(whole[0], rel=0.02)


# Loads ---------------------------------------------------------------------------------------------------------------


def test_a_load_is_read_with_distributions_and_written_as_it_was():
    text = "in=lognormal:512,0.6,out=uniform:10,20,rate=2.5,shared_prefix=0.5"
    assert str(parse_workload(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("in=5,out=6", "rate is missing"),
        ("in=5,out=6,rate=fast", "rate=fast: expected a number"),
        ("in=5,out=6,rate=0", "rate=0: expected requests per second"),
        ("in=5,out=6,rate=1,shared_prefix=2", "shared_prefix=2: expected a share"),
        ("in=0,out=6,rate=1", "expected a whole number of at least 1"),
        ("in=5,in=6", "'in=6': expected in, out, rate, shared_prefix, each once"),
    ],
)
def test_odd_loads_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_workload(text)


def test_requests_share_whole_blocks_of_their_prefix_and_nothing_else():
    first, second = parse_workload("in=160,out=4,rate=1,shared_prefix=0.5").requests(2)
    assert set(first.block_hashes) & set(second.block_hashes) == set(range(5))
    assert len(first.block_hashes) == 10 and first.arrival_s < second.arrival_s


# The page ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    file = tmp_path_factory.mktemp("measured") / "calibration.json"
    cost = {"base_ms": 2.0, "per_token_ms": 0.01, "num_samples": 100}
    file.write_text(json.dumps({"schema": "engine-simulation/1", "step_cost": cost, "measured_on": "a test"}))
    return str(file)


@pytest.fixture
def few_options(monkeypatch):
    """The whole list takes a second for each."""
    monkeypatch.setattr(planning, "CANDIDATES", (Candidate(("quantizer=int4",), "less exact"),))
    monkeypatch.setattr(planning, "LAYOUTS", planning.LAYOUTS[:1])


def shown(capsys, *words):
    code = main(["plan", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_plan_says_where_each_figure_is_from(llama_8b, few_options, capsys):
    code, out, _ = shown(
        capsys, "--device", "H100", "--model", llama_8b, "--json", "--requests", "60", "--thorough",
        "--workload", "in=256,out=16,rate=2,shared_prefix=0.5", "--slo", "ttft=1s,itl=50ms",
    )  # fmt: skip
    page = json.loads(out)
    assert code == 0 and page["fits"] and page["steps"]["origin"] == "estimated"
    assert page["requests_at_once"] == {"value": 32, "origin": "estimated"}
    assert page["usd_per_hour"] == {"value": 2.69, "origin": "stated"}
    assert page["prediction"]["good_share"] == 1.0 and page["prediction"]["origin"] == "simulated"
    assert page["prediction"]["ttft_ms"]["p99"] is None, "60 requests say nothing of it"
    output_per_hour = page["prediction"]["output_tokens_per_s"] * 3600
    assert page["usd_per_million"]["value"] == pytest.approx(2.69 / output_per_hour * 1e6)
    assert page["replicas"] == {"value": 1, "origin": "simulated"} and page["most_rate"]["value"] > 2
    best = page["options"][0]
    assert best["overrides"] == ["quantizer=int4"] and best["gain"]["value"] > 1.5
    two = page["layouts"][0]
    assert two["devices"] == 2 and two["usd_per_million"]["value"] > page["usd_per_million"]["value"]


def test_no_figure_of_a_plan_is_cut_at_80_columns(llama_8b, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    long = Candidate(("quantizer=int4", "scheduler.max_requests=128", "kv_format=fp8"), "less exact")
    monkeypatch.setattr(planning, "CANDIDATES", (long,))
    monkeypatch.setattr(planning, "LAYOUTS", ())
    answers, answer = [], Planner.answer

    def answered_once(planner):
        answers[:] = answers or [answer(planner)]
        return answers[0]

    monkeypatch.setattr(Planner, "answer", answered_once)
    words = ("--device", "H100", "--model", llama_8b, "--requests", "19", "--workload", "in=2560,out=160,rate=2")
    words += ("--thorough",)
    code, out, _ = shown(capsys, *words, "--slo", "ttft=1s,itl=50ms")
    _, told, _ = shown(capsys, *words, "--slo", "ttft=1s,itl=50ms", "--json")
    assert code == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80
    option = json.loads(told)["options"][0]
    row = next(line for line in out.splitlines() if line.strip().startswith("quantizer=int4"))
    figures = (option["prediction"]["itl_ms"]["p50"], option["concurrency"], option["usd_per_million"]["value"])
    assert all(show(figure) in row.split() for figure in figures) and "100%" in row
    assert out.count("P95 needs 20") == 1, "19 requests have none"


def test_what_does_not_fit_says_what_would_and_what_computes_the_same_first(llama_70b, capsys):
    load = ("--requests", "8", "--workload", "in=256,out=8,rate=1")
    code, out, err = shown(capsys, "--device", "H100", "--model", llama_70b, "parallelism.tp=2", "--json", *load)
    page = json.loads(out)
    assert code == 1 and "GiB are missing" in page["why_not"] and "1 of " in err
    fixes = {tuple(each["overrides"]): each for each in page["fixes"]}
    ((first, *further), *_) = fixes
    assert first.startswith("model.max_len=") and not further
    assert all(each["fits"] and each["prediction"]["origin"] == "simulated" for each in fixes.values())
    assert {("quantizer=fp8",), ("quantizer=int8",), ("quantizer=int4",), ("parallelism.tp=4",)} <= fixes.keys()
    # A rank's part of the weights, not all of them.
    narrow = sized(llama_70b, "H100", "parallelism.tp=2", "quantizer=int4").ledger["weights"]
    told = next(line for line in page["why_not"].splitlines() if "quantizer=int4" in line)
    assert float(told.split("about ")[1].split()[0]) * GIB == pytest.approx(narrow, rel=0.1)


def test_a_format_that_fits_with_shorter_requests_alone_is_named_with_them(llama_70b, capsys):
    load = ("--requests", "8", "--workload", "in=256,out=8,rate=1")
    _, out, _ = shown(capsys, "--device", "H100", "--model", llama_70b, *load)
    table = out.partition("what makes it fit")[2]
    assert all(f"quantizer={name}" in table for name in ("fp8", "int8", "int4")) and "model.max_len=" in table
    assert table.index("parallelism.tp=4") < table.index("quantizer=fp8")


def test_a_measured_plan_is_answered_where_nothing_can_be_estimated(few_options, monkeypatch, calibration, capsys):
    def unknown(facts, dtype):
        raise EstimateError("--device here: this GPU is not probed")

    monkeypatch.setattr(planning, "probed", unknown)
    words = ("--calibration", calibration, "--requests", "10", "--workload", "in=32,out=8,rate=5")
    code, out, _ = shown(capsys, *words)
    said = " ".join(out.split())
    assert code == 0 and "--thorough compares overrides" in said
    assert "USD per hour of a device - none" in said, "no price was given: it is not unknown"
    code, out, _ = shown(capsys, *words, "--thorough")
    assert code == 0 and "no overrides are compared" in " ".join(out.split()) and "TTFT" in out


def test_a_load_that_no_request_of_fits_is_wrong_usage(calibration, capsys):
    words = ("--requests", "5", "--workload", "in=100000,out=8,rate=5")
    code, _, err = shown(capsys, "--calibration", calibration, *words)
    assert code == 2 and "the shortest has 100008 tokens" in err and "model.max_len" in err


@pytest.mark.slow
def test_the_drafts_that_are_left_out_are_named(calibration, few_options, monkeypatch, capsys):
    words = ("drafter=ngram", "--calibration", calibration, "--requests", "5", "--workload", "in=32,out=8,rate=5")
    assert "drafter=ngram: its drafts are left out" in " ".join(shown(capsys, *words)[1].split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "H10"], "did you mean"),
        (["--device", "H100", "quantizer=fp9"], "fp9"),
        (["--device", "H100", "parallelism.pp=2"], "parallelism.pp=2: pipelines are not simulated"),
        (["--workload", "rate=1"], "in is missing"),
        (["--trace", "/nowhere"], "/nowhere"),
        (["--calibration", "/nowhere"], "/nowhere"),
        (["--device", "H100", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_usage_ends_in_a_message(capsys, words, message):
    code, _, err = shown(capsys, *words)
    assert code == 2 and message in err and "Traceback" not in err


def test_every_override_that_is_proposed_can_be_set(model):
    for each in (*CANDIDATES, *LAYOUTS):
        assert sized(model(2, 1024, 8, 8, 1024, 1024), "H100", *each.overrides).blocks


def test_an_override_takes_the_place_of_one_that_sets_the_same():
    assert combined(["quantizer=none", "seed=1"], ["quantizer=int8"]) == ("seed=1", "quantizer=int8")


# Against a running server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def brief(calibration):
    """A plan of the bundled model whose steps were measured."""
    from engine.cli.command import parser_of
    from engine_lab.plan.command import COMMAND

    words = ["--calibration", calibration, "--requests", "60", "--workload", "in=32,out=8,rate=5"]
    return Planner(question_of(parser_of("plan", COMMAND).parse_args(words), [])).brief()


def server(answer, itl_ms):
    """What a server with that plan answers."""
    slots = msgspec.to_builtins(answer.sizing.plan.slots)
    engine = {"kv_tokens": answer.sizing.kv_tokens, "weights_bytes": answer.sizing.weights}
    times = {name: {"count": 0} | dict.fromkeys(("p50", "p95", "p99")) for name in ("ttft_ms", "e2e_ms")}
    itl = {"count": 480, "p50": itl_ms, "p95": itl_ms, "p99": itl_ms}
    settings = {"fleet": {"replicas": answer.sizing.plan.settings.fleet.replicas}}
    plan = {"model": {"name": answer.sizing.plan.model.name}, "slots": slots, "settings": settings}
    return {"id": "default", "plan": plan, "engine": engine}, {**times, "itl_ms": itl}


def test_a_prediction_is_scored_by_what_the_server_measured(brief):
    predicted = brief.prediction.itl_ms["p50"]
    found = {each.name: each for each in scores(brief, *server(brief, predicted / 1.1))}
    assert found["KV tokens"].error == 0.0 and found["itl_ms p50"].error == pytest.approx(10.0)
    assert not any(name.startswith("ttft") for name in found), "nothing was measured"


def test_another_plan_than_the_servers_is_not_scored(brief):
    plan, latency = server(brief, 2.0)
    plan["plan"]["slots"]["quantizer"] = [{"name": "int4"}]
    with pytest.raises(ValueError, match="quantizer=int4, planned is checkpoint"):
        scores(brief, plan, latency)
    plan, latency = server(brief, 2.0)
    plan["plan"]["slots"]["scheduler"][0]["config"]["max_requests"] = 2
    with pytest.raises(ValueError, match=r"scheduler\.max_requests=2, planned is 32"):
        scores(brief, plan, latency)
    plan, latency = server(brief, 2.0)
    plan["plan"]["settings"]["fleet"]["replicas"] = 2
    with pytest.raises(ValueError, match=r"fleet\.replicas=2, planned is 1"):
        scores(brief, plan, latency)


def answered(ago_s, prompt=200, output=30):
    """A request, as /engine/requests lists it."""
    spans = {"receive": 0.5, "tokenize": 2.0, "route": 0.5, "dispatch": 0.2, "queue": 3.0, "prefill": 20.0}
    return {
        "prompt_tokens": prompt, "cached_tokens": 33, "output_tokens": output, "finish_reason": "stop",
        "total_ms": 100.0, "ttft_ms": 28.0, "spans": spans, "ended_s_ago": ago_s,
    }  # fmt: skip


def test_the_plan_and_the_load_are_the_servers_unless_they_are_given(brief, calibration):
    from engine.cli.command import parser_of
    from engine_lab.plan.command import COMMAND

    requests = requests_of([answered(1.0), answered(3.0, prompt=100), answered(2.0, output=0)])
    assert [(r.arrival_s, r.prompt_tokens) for r in requests] == [(0.0, 100), (pytest.approx(2.0), 200)]
    assert requests[0].measured.deliver_ms == pytest.approx(1.8) and requests[0].block_hashes[:2] == (0, 1)
    served = msgspec.json.decode(replace(brief.sizing.plan, max_len=512).to_json())
    seen = Observed({"id": "default", "plan": served, "engine": {}}, {}, requests)
    for words, is_served in (([], True), (["--workload", "in=32,out=8,rate=5"], False)):
        flags = parser_of("plan", COMMAND).parse_args(["--calibration", calibration, "--live", "http://x", *words])
        question = live_question(question_of(flags, []), flags, seen)
        assert (question.trace == tuple(requests)) is question.load_is_served is is_served
        assert Planner(question).brief().sizing.plan.max_len == 512
        assert live_question(question_of(flags, ["seed=1"]), flags, seen).served is None


def test_another_load_than_the_one_assumed_is_named():
    assumed = parse_workload("in=200,out=30,rate=2").requests(50)
    served = requests_of([answered(50 - i / 2) for i in range(50)])
    assert otherwise(assumed, served) == "" == otherwise(assumed, served[:1])
    told = otherwise(assumed, requests_of([answered(50 - i / 8, prompt=900) for i in range(50)]))
    assert "8.0 requests/s instead of" in told and "900.0 prompt tokens instead of 200.0" in told


def test_a_baseline_is_of_a_running_server(capsys):
    assert main(["plan", "--baseline", "FILE"]) == 2
    assert "--baseline FILE: it is for --live URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now", "is_alarm"), [(5.0, 6.9, False), (5.0, 7.1, True), (50.0, 54.0, False), (50.0, 56.0, True)]
)
def test_an_error_that_rises_by_two_points_and_a_tenth_is_an_alarm(before, now, is_alarm):
    found = alarms([Scored("itl_ms p50", 100.0 + now, 100.0, 99)], {"itl_ms p50": before})
    assert found == ["itl_ms p50"] * is_alarm


def test_a_file_that_is_no_baseline_is_refused(brief, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = baseline_file(brief, "http://127.0.0.1:1")
    assert read_baseline(file) == {}
    file.write_text("[]")
    with pytest.raises(ValueError, match="no baseline of engine plan"):
        read_baseline(file)


def test_baselines_are_those_of_one_load(brief, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fewer = replace(brief, question=replace(brief.question, load=None, trace=brief.question.trace[:5]))
    files = [baseline_file(each, "http://127.0.0.1:1") for each in (brief, fewer, brief)]
    assert files[0] == files[2] != files[1]
    assert (
        len({baseline_file(brief, "http://127.0.0.1:1", engine) for engine in ("default", "a", "b")} - {files[0]}) == 2
    )


def test_a_server_that_is_not_ready_is_named(brief, monkeypatch):
    async def json_of(self, path):
        return {"engines": [{"id": "default"}]} if path == "/engine/fleet" else {"plan": {}, "engine": None}

    monkeypatch.setattr(LiveEngine, "json", json_of)
    with pytest.raises(LiveError, match="is not ready yet"):
        asyncio.run(observed("http://127.0.0.1:1", None))


def test_one_engine_of_several_is_observed_and_the_others_are_named(served_by_two, capsys):
    seen = asyncio.run(observed(served_by_two.url, None, "b"))
    assert (seen.plan["id"], seen.latency["engine"]) == ("b", "b")
    assert "b is one of 2 engines; --engine chooses another: a" in capsys.readouterr().err
    assert asyncio.run(observed(served_by_two.url, None)).plan["id"] == "a"


def test_an_engine_is_chosen_of_a_running_server(capsys):
    assert main(["plan", "--engine", "b"]) == 2
    assert "--engine b: it is for --live URL" in capsys.readouterr().err


def test_a_described_card_is_what_the_engine_would_see():
    facts = facts_of(sheet("L40S"))
    assert facts == DeviceFacts("cuda", "L40S", (8, 9), int(44.99 * GIB), count=8)
