"""``engine eval --drafter`` from its command line to its exit code."""

import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tests.selection import few

from engine.assembly.discovery import Discovered, Offer, Origin
from engine.cli.main import main
from engine.contracts.config import DrafterConfig
from engine.contracts.provider import Provider
from engine_lab.eval.baseline import undrafted_override
from engine_lab.eval.drafting import turns
from engine_lab.eval.drafting.turns import groups_of
from engine_lab.eval.drafting.worker import DUMP_SIGNAL
from engine_lab.shared.errors import EvalError

QUESTIONS = ("What does json.dumps do?", "What does math.gcd do?", "What does json.dumps do?")
NGRAM = ("--drafter", "drafter=ngram drafter.adaptive=false drafter.max_width=3")


@dataclass(frozen=True)
class Silent(DrafterConfig):
    max_width: int = 0


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join((*QUESTIONS, "")))
    return str(file)


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_engines_answer_alike_and_the_counts_add_up(tmp_path, prompts, capsys):
    file = tmp_path / "result.json"
    words = ["--prompts", prompts, "--batch", "1,2", "--pairs", "2", "--answer-tokens", "12", "--json", str(file)]
    early = ["--drafter", "drafter=early_exit drafter.layers=4 drafter.adaptive=false drafter.max_width=2"]
    assert main(["eval", "device=cpu", "model.max_len=256", *NGRAM, *early, *words]) == 0
    result = json.loads(file.read_text())
    assert result["asked"] == {"1": 3, "2": 2} and result["wrong"] == [] and result["differences"] == []
    assert result["compared"] == 2 * 2 * (3 + 2)
    labels = [(row["batch"], row["label"].split()[0]) for row in result["rows"]]
    assert labels == [(b, f"drafter={name}") for b in (1, 2) for name in ("none", "ngram", "early_exit")]
    for row in result["rows"]:
        figures = row["figures"]
        whole = figures["draft_ms"] + figures["verify_ms"] + figures["rest_ms"]
        assert whole > 0 and figures["tokens_per_step"] >= 1
        if row["label"] == "drafter=none":
            assert figures["tokens_per_step"] == 1 and figures["drafted"] == figures["draft_ms"] == 0
            continue
        assert figures["drafted"] >= figures["accepted"] and figures["chains"] <= figures["decode_steps"]
        assert figures["draft_ms"] > 0 and figures["slowdown_bound"] >= figures["slowdown"] > 0
        tau = figures["tokens_per_step"]
        assert figures["ideal"] == pytest.approx(tau / (figures["drafting_cost"] + figures["verify_cost"]))
        # What drafts bring is in the tokens, but for those after the end of an answer.
        assert 1 <= tau <= 1 + figures["accepted"] / figures["decode_steps"] + 1e-9
    assert any(row["figures"]["accepted"] for row in result["rows"])
    assert "all 20 answers equal those without drafts, token for token" in " ".join(capsys.readouterr().out.split())


def test_left_over_prompts_fill_no_batch():
    assert [list(group) for group in groups_of(list("abcde"), 2)] == [["a", "b"], ["c", "d"]]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_engine_that_does_not_fit_is_named(prompts, capsys):
    words = ["--prompts", prompts, "model.max_len=256", "memory.fraction=1e-6"]
    assert main(["eval", "device=cpu", *NGRAM, *words]) == 2
    shown = capsys.readouterr().err
    assert "drafter=none: " in shown and "memory.fraction" in shown and "Traceback" not in shown


@few(10)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompts", "FILE"], "--prompts: these compare drafters; name one"),
        (["--batch", "4", "--pairs", "2"], "--batch, --pairs: these compare drafters"),
        ([*NGRAM], "--drafter needs --prompts FILE"),
        ([*NGRAM, "--prompts", ""], "--prompts is empty"),
        ([*NGRAM, "--prompts", "/nowhere"], "--prompts /nowhere: expected a file of UTF-8 text"),
        ([*NGRAM, "--prompts", "FILE", "--text", "a"], "--text: not with --drafter"),
        ([*NGRAM, "--prompts", "FILE", "--compare", "quantizer=int8"], "--compare: not with --drafter"),
        ([*NGRAM, "--prompts", "FILE", "--max-kl", "0"], "--max-kl: not with --drafter"),
        ([*NGRAM, "--prompts", "FILE", "--batch", "1,0"], "'1,0': expected numbers of at least 1, such as 1,4,16"),
        ([*NGRAM, "--prompts", "FILE", "--batch", "2,2"], "expected each of them once"),
        ([*NGRAM, "--prompts", "FILE", "--batch", "4"], "3 prompts do not fill a batch of 4"),
        ([*NGRAM, "--prompts", "FILE", "--batch", "64"], "scheduler.max_requests=32 of drafter=none holds no more"),
        ([*NGRAM, "--prompts", "FILE", "--max-slowdown", "0"], "'0': expected a number above 0"),
        ([*NGRAM, "--prompts", "FILE", "--timeout", "inf"], "'inf': expected a number above 0"),
        (["--timeout", "5"], "--timeout: these compare drafters"),
        ([*NGRAM, "--prompts", "FILE", "--max-slowdown", "1.1", "--pairs", "1"], "a bound needs at least 2 pairs"),
        ([*NGRAM, "--prompts", "FILE", "--json", "FILE"], "that is read, too"),
        (["--drafter", "drafter=ngramm", "--prompts", "FILE"], "ngramm"),
        (["--drafter", "drafter=none", "--prompts", "FILE"], "--drafter 'drafter=none': drafts nothing"),
        (["--drafter", "drafter=ngram drafter.max_width=0", "--prompts", "FILE"], "max_width"),
        (["--drafter", "drafter=ngram quantizer=int8", "--prompts", "FILE"], "drafter=NAME and drafter.KEY=VALUE al"),
        (["--drafter", "", "--prompts", "FILE"], "drafter=NAME and drafter.KEY=VALUE alone"),
        (["--drafter", "drafter='x", "--prompts", "FILE"], "No closing quotation"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(words, says, prompts, capsys):
    assert main(["eval", "device=cpu", *(prompts if word == "FILE" else word for word in words)]) == 2
    assert says in capsys.readouterr().err


@few(3)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a", "question": "b"}', "line 1: expected one of question, messages, prompt, found question and"),
        ('{"text": "a"}', "line 1: expected one of question, messages, prompt, found none of them"),
        ('{"question": "a"}\n{"prompt": 5}', "line 2: expected prompt to be a text"),
        ('{"messages": []}', "line 1: expected messages to be a list of objects"),
        ('{"messages": [{"role": "alien", "content": "hi"}]}', "line 1: the chat template of bundled refuses it"),
        ('{"prompt": "' + "word " * 300 + '"}', "line 1: 600 tokens, and bundled serves model.max_len=256"),
        ("What?", "line 1: not JSON"),
        ("", "expected some text"),
    ],
)
def test_lines_that_are_no_prompts_are_named(tmp_path, capsys, text, says):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    assert main(["eval", "device=cpu", "model.max_len=256", *NGRAM, "--prompts", str(file)]) == 2
    shown = capsys.readouterr().err
    assert f"--prompts {file}" in shown and says in shown


def engine_is(program, monkeypatch):
    """Run this program in place of Python, for engines alone: chat templates are rendered by Python, too."""
    monkeypatch.setattr("engine_lab.eval.drafting.turns.sys", SimpleNamespace(executable=program))


def test_an_engine_that_dies_in_the_middle_of_an_answer_is_named_with_its_signal(
    prompts, tmp_path, monkeypatch, capsys
):
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nprintf '{\"run\"'\nkill -9 $$\n")
    dying.chmod(0o755)
    engine_is(str(dying), monkeypatch)
    assert main(["eval", "device=cpu", *NGRAM, "--prompts", prompts]) == 1
    assert "engine eval: drafter=none: the engine ended by signal 9. It said nothing" in capsys.readouterr().err


def test_an_engine_that_dies_is_named_and_is_exit_code_1(prompts, monkeypatch, capsys):
    engine_is("/bin/false", monkeypatch)
    assert main(["eval", "device=cpu", *NGRAM, "--prompts", prompts]) == 1
    assert "engine eval: drafter=none: the engine ended with status 1. It said nothing" in capsys.readouterr().err


HANGS = """#!/bin/sh
read setup
STARTED
echo "where it hangs" >&2
exec sleep 1000
"""


@few(1)
@pytest.mark.parametrize(
    ("started", "says"), [(":", "did not start"), ("echo '{}'; read group", "did not answer")], ids=["start", "answer"]
)
def test_an_engine_that_hangs_is_ended_and_what_it_said_is_shown(started, says, prompts, tmp_path, monkeypatch, capsys):
    hanging = tmp_path / "hanging"
    hanging.write_text(HANGS.replace("STARTED", started))
    hanging.chmod(0o755)
    engine_is(str(hanging), monkeypatch)
    monkeypatch.setattr(turns, "PATIENCE_S", 0.1)  # the other engine, which hangs too, is closed
    assert main(["eval", "device=cpu", *NGRAM, "--prompts", prompts, "--timeout", "2"]) == 1
    shown = capsys.readouterr().err
    assert f"engine eval: drafter=none: the engine {says} within 2 s and was ended; --timeout SECONDS allows" in shown
    assert "more. where it hangs" in shown and "Traceback" not in shown


@pytest.mark.slow
def test_an_engine_that_ignores_every_signal_but_one_is_ended(prompts, tmp_path, monkeypatch, capsys):
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' USR1 TERM INT\nexec sleep 1000\n")
    stubborn.chmod(0o755)
    engine_is(str(stubborn), monkeypatch)
    assert main(["eval", "device=cpu", *NGRAM, "--prompts", prompts, "--timeout", "1"]) == 1
    assert "the engine did not start within 1 s and was ended" in capsys.readouterr().err


def test_an_engine_says_where_it_hangs():
    code = """
import sys, time
from engine_lab.eval.drafting import worker

def serve(lines, out):
    out.write(b"hanging\\n")
    out.flush()
    time.sleep(1000)

worker.serve = serve
worker.main()
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout.readline() == b"hanging\n"
        process.send_signal(DUMP_SIGNAL)
        said = [process.stderr.readline().decode() for _ in range(2)]
    finally:
        process.kill()
        process.communicate()
    assert said[0].startswith(("Current thread", "Thread", "Stack")) and "in serve" in said[1]


def test_the_engine_without_drafts_is_one_that_does_not_claim_to_draft():
    def offer(name, dist, config, *provides):
        provider = Provider(name, f"{name}:Drafter", config=config, provides=provides)
        return Offer("drafter", provider, Origin(dist, "1", ""))

    forgetful = offer("forgetful", "engine", DrafterConfig)
    quiet = offer("quiet", "theirs", Silent)
    assert undrafted_override(Discovered((offer("a", "engine", DrafterConfig, "drafts"), forgetful, quiet))) == (
        "drafter=quiet"
    )
    own = offer("silent", "engine", Silent)
    assert undrafted_override(Discovered((quiet, own))) == "drafter=silent"
    with pytest.raises(EvalError, match="no drafter with max_width 0 that does not provide 'drafts' is installed"):
        undrafted_override(Discovered((forgetful, offer("b", "engine", Silent, "drafts"))))
