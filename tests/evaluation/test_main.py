"""``engine eval`` from its command line to its exit code."""

import json

import pytest

from engine.cli.main import main
from engine.evaluation.options import num_bytes
from tests.execution import tiny

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


def test_fewer_bits_lose_more_and_outside_the_tolerance_is_exit_code_1(tmp_path, text, capsys):
    plans = ["--compare", "quantizer=int8", "--compare", "quantizer=int4 kv_format=int8"]
    code, result = evaluated(tmp_path, "--text", text, *plans, "--max-kl", "0.001")
    _, int8, int4 = result["rows"]
    assert int8["kl"] < 0.001 < int4["kl"] and int4["agreement"] < 1
    assert int4["weights_bytes"] < int8["weights_bytes"] and int4["kv_bytes_per_token"] < int8["kv_bytes_per_token"]
    assert code == 1 and len(result["outside"]) == 1 and "KL" in result["outside"][0]
    assert "OUTSIDE" in capsys.readouterr().out


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
        (["--capacity-only", "--requests-of", "5000"], "4096 positions"),
        (["--compare", "quantizer=int5"], "int5"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(words, says, capsys):
    assert main(["eval", "device=cpu", *words]) == 2
    assert says in capsys.readouterr().err


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
