from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from tests.lab.bench.test_main import FakeServer, measure
from tests.lab.bench.test_workload import BASE

from engine_lab.bench.mixture import mixed, read_mixture

FILE = """
[chat]
share = 3
prompt_tokens = 20
output_tokens = "uniform:2,4"
turns = 3
slo = "ttft=60s"

[batch]
prompt_tokens = "50"
leave = "1@30"
slo = "ttft=1ms,e2e=1ms"
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "workload.toml").write_text(FILE)
    return str(tmp_path / "workload.toml")


def test_requests_come_of_each_class_by_its_share_with_what_the_class_says(path):
    found = list(islice(mixed(read_mixture(path), BASE, "measured"), 400))
    counts = Counter(request.service_class for request in found)
    assert counts["chat"] == pytest.approx(300, abs=30) and set(counts) == {"chat", "batch"}
    assert [request.index for request in found] == list(range(400))
    for request in found:
        is_chat = request.service_class == "chat"
        assert len(request.prompt) == (80 if is_chat else 200)
        assert len(request.turns) == (2 if is_chat else 0)
        assert request.leave_after_s == (None if is_chat else 30)


def test_a_session_sends_each_turn_with_all_that_was_said_before_it_and_classes_are_judged_by_their_own_limits(path):
    fake = FakeServer()
    result = measure(fake, "--workload", path, "--requests", "40", "--concurrency", "4", "--warmup", "0")
    by_length = {}
    for body in fake.bodies:
        if body["stream"]:
            by_length.setdefault(len(body["messages"]), []).append(body["messages"])
    assert set(by_length) == {1, 3, 5}
    for messages in by_length[5]:
        assert [each["role"] for each in messages] == ["user", "assistant", "user", "assistant", "user"]
        assert set(messages[1]["content"]) == {"x"}, "the server's own answer"
        assert messages[:3] in by_length[3]
    turns = {(record["service_class"], record["turn"]) for record in result["records"]}
    assert turns == {("chat", 0), ("chat", 1), ("chat", 2), ("batch", 0)}
    classes = result["classes"]
    assert (classes["chat"]["goodput"]["share"], classes["batch"]["goodput"]["share"]) == (1.0, 0.0)
    assert result["goodput"]["share"] == pytest.approx(classes["chat"]["requests"] / 40)


def test_a_class_with_a_load_of_its_own_runs_beside_the_load_of_the_flags(tmp_path):
    path = tmp_path / "beside.toml"
    path.write_text("[chat]\nprompt_tokens = 9\n[batch]\nconcurrency = 2\n[poll]\nrate = 50\n")
    argv = ["--workload", str(path), "--concurrency", "3", "--duration", "0.2", "--output-tokens", "1"]
    classes = measure(FakeServer(), *argv, "--prompt-ids", "--warmup", "0")["classes"]
    assert set(classes) == {"batch", "chat", "poll"} and min(each["ok"] for each in classes.values()) >= 2
    with pytest.raises(ValueError, match="expected --duration S"):
        measure(FakeServer(), "--workload", str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a table for each class"),
        ("rate = 3", "expected a table for each class"),
        ("[chat]\nprompt_token = 3", r"\[chat\]: no key prompt_token; did you mean prompt_tokens"),
        ("[chat]\nshare = -1", "share: -1: expected a number from"),
        ("[chat]\nturns = 'some'", "turns: 'some': expected a whole number"),
        ("[chat]\nrate = 1\nconcurrency = 2", "exclude each other"),
        ("[chat]\nrate = 1\nshare = 2", "a class with a load of its own has no share"),
        ("[chat", "expected TOML"),
    ],
)
def test_what_a_workload_file_has_wrong_is_named(tmp_path, text, words):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_mixture(str(tmp_path / "x.toml"))
