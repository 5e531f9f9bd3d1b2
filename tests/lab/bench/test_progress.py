from __future__ import annotations

from engine_lab.bench import progress as module
from engine_lab.bench.progress import requests_done
from engine_lab.bench.record import RequestRecord


def test_a_pipe_gets_a_line_every_few_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with requests_done("closed loop, 1 at once", 30) as told:
        for index in range(25):
            now[0] = float(index)
            told(RequestRecord(index, 0.0, 0.0, 0.0, error="timeout" if index == 3 else ""))
    assert capsys.readouterr().err.splitlines() == [
        "closed loop, 1 at once: 11 of 30 done, 1 failed, 10 s",
        "closed loop, 1 at once: 21 of 30 done, 1 failed, 20 s",
    ]
