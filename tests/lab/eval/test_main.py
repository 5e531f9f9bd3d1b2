"""``engine eval`` from its command line to its exit code."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.kernels import tiny
from tests.selection import few

from engine.assembly.model_config import bundled_dir
from engine.cli.main import main
from engine_lab.shared.flags import num_bytes

TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 3
QUESTIONS = (
    {"question": "What does json.dumps do?", "answer": "Serialize ``obj`` to a JSON formatted ``str``."},
    {"question": "What does json.dumps do?", "answer": "Nothing."},
)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def evaluated(tmp_path, *words):
    """Exit code and the rows of the JSON."""
    file = tmp_path / "result.json"
    code = main(["eval", "device=cpu", *words, "--json", str(file)])
    return code, json.loads(file.read_text())


def test_the_reference_against_itself_is_no_loss(tmp_path, text):
    code, result = evaluated(tmp_path, "--text", text, "quantizer=none", "--max-kl", "0", "--min-agreement", "1")
    reference, plan = result["rows"]
    assert code == 0 and result["outside"] == []
    assert plan["kl"] == 0.0 and plan["agreement"] == 1.0 and plan["perplexity"] == reference["perplexity"] > 1
    assert reference["is_reference"] and reference["kl"] is None


@pytest.mark.slow
def test_fewer_bits_lose_more_and_outside_the_tolerance_is_exit_code_1(tmp_path, text, capsys):
    plans = ["--compare", "quantizer=int8", "--compare", "quantizer=int4 kv_format=int8"]
    code, result = evaluated(tmp_path, "--text", text, *plans, "--max-kl", "0.001")
    _, int8, int4 = result["rows"]
    assert int8["kl"] < 0.001 < int4["kl"] and int4["agreement"] < 1
    assert int4["weights_bytes"] < int8["weights_bytes"] and int4["kv_bytes_per_token"] < int8["kv_bytes_per_token"]
    assert code == 1 and len(result["outside"]) == 1 and "KL" in result["outside"][0]
    assert "OUTSIDE" in capsys.readouterr().out


@pytest.mark.slow
def test_settings_of_the_quantizer_do_not_reach_the_reference(tmp_path, text):
    _, result = evaluated(tmp_path, "--text", text, "quantizer=int4", "quantizer.group_size=64", "--tokens", "20")
    reference, plan = result["rows"]
    assert (reference["slots"]["quantizer"], plan["slots"]["quantizer"]) == ("none", "int4")
    assert plan["tokens"] == 20


def test_questions_are_asked_greedily_and_matched(tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    words = ["--questions", str(file), "--match", "begins", "model.max_len=512", "--min-exact", "0.6"]
    code, result = evaluated(tmp_path, *words)
    assert [row["exact"] for row in result["rows"]] == [0.5, 0.5]
    assert code == 1 and result["rows"][1]["perplexity"] is None


def test_capacity_alone_loads_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | {"torch_dtype": "bfloat16"}))
    words = ["--capacity-only", "--as-cuda", "9.0", "--memory", "4GiB", "--requests-of", "100"]
    code, result = evaluated(tmp_path, "--model", str(tmp_path), *words)
    assert code == 0 and result["rows"][0]["requests"] > 0


@few(10)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--text", "a", "--jsonl", "b"], "exclude each other"),
        (["--context", "10", "--stride", "20"], "larger than --context"),
        (["--as-cuda", "9.0"], "needs --capacity-only"),
        (["--context", "5000"], "more than model.max_len=4096"),
        (["--text", "/nowhere"], "/nowhere"),
        (["--max-kl", "-1"], "number from 0"),
        (["--capacity-only", "--min-exact", "0.9"], "--capacity-only measures no quality"),
        (["--text", "a", "--min-exact", "0.9"], "--min-exact: nothing here measures that; give --questions"),
        (["--questions", "a", "--max-kl", "0.1", "--min-agreement", "1"], "--max-kl, --min-agreement: nothing here"),
        (["--memory", "much"], "80GiB"),
        (["--memory", "0"], "at least one byte"),
        (["--memory", "9" * 400], "at least one byte"),
        (["--min-agreement", "99"], "'99': expected a share from 0 to 1"),
        (["--min-exact", "1.5"], "expected a share from 0 to 1"),
        (["--max-kl", "nan"], "number from 0"),
        (["--compare", "quantizer='int8"], "No closing quotation"),
        (["--compare", "quantizer=int8 --json x"], "--json is a flag, expected overrides alone"),
        (["--text", ""], "--text is empty"),
        (["--json", ""], "--json is empty"),
        (["--capacity-only", "--text", "/nowhere"], "--text: --capacity-only reads no text"),
        (["--capacity-only", "--reference", "/nowhere"], "--reference: --capacity-only reads no text and"),
        (["--reference", "/nowhere"], "engine: --reference /nowhere: no such directory"),
        (["model.max_len=512", "--compare", "quantizer=int8", "--compare", "model.max_len=64"], "model.max_len=64 of"),
        (["--capacity-only", "--requests-of", "5000"], "4096 positions"),
        (["--compare", "quantizer=int5"], "int5"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(words, says, capsys):
    assert main(["eval", "device=cpu", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def untouched(monkeypatch):
    """No plan may be loaded."""

    def loaded(*arguments):
        raise AssertionError("a plan was loaded")

    monkeypatch.setattr("engine_lab.eval.forward.LoadedPlan", loaded)
    monkeypatch.setattr("engine_lab.eval.questions.LLM", loaded)


def copy_of_bundled(folder, **config):
    shutil.copytree(bundled_dir(), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_result_that_cannot_be_written_is_told_before_the_work(tmp_path, text, untouched, capsys):
    (tmp_path / "folder").mkdir()
    for target, says in (
        (tmp_path / "no" / "result.json", "No such file or directory"),
        (tmp_path / "folder", "it is a directory"),
        (text, "is read, too"),
        ("/proc/result.json", "No such file or directory"),
    ):
        assert main(["eval", "device=cpu", "--text", text, "--json", str(target)]) == 2
        shown = capsys.readouterr().err
        assert f"--json {target}: " in shown and says in shown
    assert Path(text).read_text() == TEXT


def test_a_disk_that_is_full_is_one_line_and_the_table_is_shown_all_the_same(capsys):
    words = ["--capacity-only", "--memory", "4GiB", "--json", "/dev/full"]
    assert main(["eval", "device=cpu", *words]) == 1
    shown = capsys.readouterr()
    assert shown.err == "engine eval: --json /dev/full: No space left on device\n" and "requests" in shown.out


@pytest.mark.parametrize(
    ("line", "words", "says"),
    [
        ({"messages": [{"role": "alien", "content": "hi"}], "answer": "x"}, [], "refuses question 1"),
        ({"question": "hi " * 600, "answer": "x"}, ["model.max_len=512"], "question 1 has 60"),
    ],
)
def test_a_question_that_cannot_be_asked_is_told_before_the_work(tmp_path, text, untouched, capsys, line, words, says):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(line))
    assert main(["eval", "device=cpu", "--text", text, "--context", "64", "--questions", str(file), *words]) == 2
    assert f"--questions: {'the chat template of bundled ' if not words else ''}{says}" in capsys.readouterr().err


def test_a_model_that_cannot_be_asked_is_told_before_the_work(tmp_path, untouched, capsys):
    folder, file = copy_of_bundled(tmp_path / "silent"), tmp_path / "questions.jsonl"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    file.write_text(json.dumps({"question": "hi?", "answer": "x"}))
    assert main(["eval", "device=cpu", "--model", str(folder), "--questions", str(file)]) == 2
    assert "silent has no chat template to ask with; give --text or --jsonl" in capsys.readouterr().err


def test_every_plan_is_held_against_the_window_not_the_first_alone(tmp_path, text, untouched, capsys):
    folder = copy_of_bundled(tmp_path / "short", max_position_embeddings=32)
    words = ["--context", "64", "--compare", "quantizer=int8", "--compare", f"model.path={folder}"]
    assert main(["eval", "device=cpu", "--text", text, *words]) == 2
    assert "--context 64: more than model.max_len=32 of short" in capsys.readouterr().err


def test_every_plan_must_cut_the_text_as_the_reference_does(tmp_path, text, untouched, capsys):
    folder = copy_of_bundled(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = ["--compare", "quantizer=int8", "--compare", f"model.path={folder}"]
    assert main(["eval", "device=cpu", "--text", text, *words]) == 2
    assert "different tokens: expected the same model" in capsys.readouterr().err


def test_tokens_that_the_model_does_not_have_are_named(tmp_path, text, untouched, capsys):
    folder = copy_of_bundled(tmp_path / "small", vocab_size=300)
    assert main(["eval", "device=cpu", "--text", text, "--model", str(folder)]) == 2
    assert "config.json says vocab_size=300" in capsys.readouterr().err


def broken_bundled(folder, factor):
    copy_of_bundled(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * factor
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def test_a_plan_whose_logits_are_not_numbers_is_named(tmp_path, text, capsys):
    folder = broken_bundled(tmp_path / "nan", math.nan)
    assert main(["eval", "device=cpu", "--text", text, "--model", folder, "--reference", "bundled"]) == 1
    assert "engine eval: quantizer=checkpoint kv_format=native computed logits that are not" in capsys.readouterr().err


@pytest.mark.slow
def test_a_perplexity_beyond_all_numbers_is_infinite_and_outside_every_tolerance(tmp_path, text, capsys):
    folder = broken_bundled(tmp_path / "huge", 1e4)
    words = ["--reference", "bundled", "--tokens", "20", "--max-perplexity-increase", "1000"]
    code, result = evaluated(tmp_path, "--text", text, "--model", folder, *words)
    plan = result["rows"][1]
    assert code == 1 and (plan["perplexity"], plan["perplexity_increase"]) == ("inf", "inf") and plan["kl"] > 1
    assert main(["eval", "device=cpu", "--text", text, "--model", folder, "--tokens", "20"]) == 1
    assert "the reference" in (shown := capsys.readouterr().err) and "perplexity is infinite" in shown


def test_a_damaged_checkpoint_is_wrong_usage_in_one_line(tmp_path, text, capsys):
    folder = copy_of_bundled(tmp_path / "cut")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    assert main(["eval", "device=cpu", "--text", text, "--model", str(folder)]) == 2
    assert "model.safetensors: tensors end at byte" in capsys.readouterr().err


@few(1)
@pytest.mark.parametrize("fault", [ValueError, RuntimeError])
def test_a_fault_in_the_code_keeps_its_traceback(text, monkeypatch, capsys, fault):
    def broken(*arguments):
        raise fault("a fault")

    monkeypatch.setattr("engine_lab.eval.scoring._score", broken)
    assert main(["eval", "device=cpu", "--text", text]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and f"{fault.__name__}: a fault" in said


def test_ctrl_c_ends_it_without_a_traceback_and_leaves_no_result(tmp_path, text, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine_lab.eval.scoring._score", interrupted)
    folder = tmp_path / "results"
    folder.mkdir()
    assert main(["eval", "device=cpu", "--text", text, "--json", str(folder / "result.json")]) == 130
    assert "Traceback" not in capsys.readouterr().err and not list(folder.iterdir())


@pytest.mark.slow
def test_a_preset_with_values_of_a_quantizer_belongs_into_compare(tmp_path, text, capsys):
    (tmp_path / "preset").mkdir()
    lines = ["# @package _global_", "defaults:", "  - override /quantizer: int4", "quantizer:", "  group_size: 64"]
    (tmp_path / "preset" / "mine.yaml").write_text("\n".join(lines))
    words = ["--text", text, "--tokens", "20", "--config-dir", str(tmp_path)]
    assert main(["eval", "device=cpu", *words, "+preset=mine"]) == 2
    shown = capsys.readouterr().err
    assert "no such key 'group_size'" in shown and "in the reference" in shown and "goes into --compare" in shown
    code, result = evaluated(tmp_path, *words, "--compare", "+preset=mine")
    assert code == 0 and [row["slots"]["quantizer"] for row in result["rows"]] == ["none", "int4"]


def test_a_model_without_a_suite_needs_text(tmp_path, capsys):
    assert main(["eval", "device=cpu", "--model", str(tiny.write(tmp_path)), "--context", "64"]) == 2
    assert "--text, --jsonl or --questions" in capsys.readouterr().err


def test_a_reference_with_other_tokens_is_refused(tmp_path, text, capsys):
    folder = tmp_path / "other"
    folder.mkdir()
    assert main(["eval", "device=cpu", "--text", text, "--reference", str(tiny.write(folder))]) == 2
    assert "expected the same model" in capsys.readouterr().err


def test_a_quantized_checkpoint_needs_its_original(tmp_path, text, capsys):
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    tiny.write(tmp_path, quantization_config=section)
    words = ["--text", text, "--model", str(tmp_path), "--compare", "model.path=bundled"]
    assert main(["eval", "device=cpu", *words]) == 2
    assert "--reference DIR" in capsys.readouterr().err


def test_sizes_are_binary_or_decimal():
    assert (num_bytes("80GiB"), num_bytes("80GB"), num_bytes("1.5 kb")) == (80 << 30, 80 * 10**9, 1500)
