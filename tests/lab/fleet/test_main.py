"""``engine fleet`` (:mod:`engine_lab.fleet.command`) against a server with two engines."""

import asyncio
import io
import json
import threading
from contextlib import contextmanager

from msgspec import structs
from rich.console import Console
from structlog.testing import capture_logs
from tests.http.fakes import chat
from tests.http.routes.test_fleet import CHAT, two

from engine.cli.main import main
from engine.service.sending import OTHER_IDENTITY
from engine_lab.fleet.main import table


@contextmanager
def served(**settings):
    """The server, its engines, and what waits for work in its loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    context = two(**settings)
    try:
        with capture_logs():
            yield *do(context.__aenter__()), do
            do(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_engines_are_a_table_with_their_pids_that_fits_a_terminal(capsys):
    with served() as (server, _, _):
        assert main(["fleet", server.url]) == 0
    shown = capsys.readouterr().out
    assert rows(shown)[2:] == [[name, "ready", "yes", "1", "1", "0", "0", "0"] for name in "ab"]
    assert max(map(len, shown.splitlines())) <= 80


def test_targets_of_a_gateway_keep_their_ids_whole_and_say_their_models():
    load = {"sequences": 12, "queued_tokens": 123456, "running_tokens": 123456}
    targets = (("10.0.0.12:8000", "large", "cannot be reached"), ("vendor", "large, small", "ready"))
    engines = [
        {"id": name, "model": models, "state": state, "ready": state == "ready", "starts": 1, "load": load}
        for name, models, state in targets
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(table({"engines": engines}))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80 and shown.count("123456") == 4
    assert "pid" not in shown, "what runs elsewhere has none here"
    assert all(word in shown for word in ("10.0.0.12:8000 ", "models", "small", "reached"))


def test_engines_of_two_roles_have_them_in_the_table():
    load = {"sequences": 1, "queued_tokens": 2, "running_tokens": 3}
    common = {"model": "m", "state": "ready", "ready": True, "pid": 4711, "starts": 1, "load": load}
    roles = ("decode", "prefill")
    console = Console(file=io.StringIO(), width=80)
    console.print(table({"engines": [{"id": role[0], "role": role, **common} for role in roles]}))
    assert [row[:3] for row in rows(console.file.getvalue())[2:]] == [[role[0], role, "ready"] for role in roles]


def test_engines_on_other_machines_are_a_table_with_these():
    load = {"sequences": 1, "queued_tokens": 2, "running_tokens": 3}
    common = {"model": "m", "state": "serving", "ready": True, "starts": 1, "load": load}
    console = Console(file=io.StringIO(), width=80)
    console.print(table({"engines": [{"id": "replica-0", "pid": 4711, "host": "10.0.0.2", **common}]}))
    assert rows(console.file.getvalue())[-1][:5] == ["replica-0", "serving", "yes", "10.0.0.2", "4711"]


def test_a_restart_says_each_step_and_waits_for_the_last(capsys):
    with served() as (server, _, _):
        assert main(["fleet", "restart", server.url]) == 0
        shown = capsys.readouterr().out
        steps = [line.split()[2:4] for line in shown.splitlines()[:6]]
        names = ("draining,", "restarting", "ready")
        assert steps == [[name, step] for name in "ab" for step in names]
        assert rows(shown)[-2:] == [[name, "ready", "yes", "1", "2", "0", "0", "0"] for name in "ab"]
        assert main(["fleet", "restart", server.url, "b", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["starts"] for each in found["engines"]] == [2, 3] and found["change"]["number"] == 2


def test_a_restart_that_fails_says_why(capsys):
    with served() as (server, clients, _):
        clients["a"].fail_starts = 9
        assert main(["fleet", "restart", server.url]) == 1
        shown = capsys.readouterr()
        assert shown.err == "engine fleet: a did not start: no memory left\n"
        assert rows(shown.out)[-1] == ["b", "ready", "yes", "1", "1", "0", "0", "0"]


def test_a_drain_waits_until_nothing_is_left(capsys):
    with served() as (server, clients, do):
        a, b = clients["a"], clients["b"]
        a.hold_before = 1
        b.info = structs.replace(b.info, identity="another")
        running = threading.Thread(target=lambda: do(server.post(CHAT, chat(n=2))))
        running.start()
        do(a.holding.wait())

        async def proceed():
            asyncio.get_running_loop().call_later(0.4, a.proceeding.set)

        do(proceed())
        assert main(["fleet", "drain", server.url, "a"]) == 0
        running.join()
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == f"a  2 sequences left (2 stay: {OTHER_IDENTITY})"
        assert "a  0 sequences left" in shown
        assert shown[-2].split()[:3] == ["a", "draining", "no"]
        assert main(["fleet", "drain", server.url, "b"]) == 1
        assert "b is the only engine that takes requests" in capsys.readouterr().err
        assert main(["fleet", "undrain", server.url, "a"]) == 0
        assert rows(capsys.readouterr().out)[2][:3] == ["a", "ready", "yes"]


def test_fewer_engines_and_more(capsys):
    with served() as (server, _, _):
        assert main(["fleet", "resize", server.url, "1"]) == 0
        assert rows(capsys.readouterr().out)[-1][:3] == ["b", "stopped", "no"]
        assert main(["fleet", "resize", server.url, "3"]) == 1
        assert "start it with fleet.replicas=3" in capsys.readouterr().err
        assert main(["fleet", "resize", server.url, "2"]) == 0
        assert rows(capsys.readouterr().out)[-1][:3] == ["b", "ready", "yes"]


def test_what_is_wrong_is_said_in_a_line(capsys):
    with served(api_key="sesame") as (server, _, _):
        assert main(["fleet", server.url]) == 1
        assert "wants a key: give --api-key" in capsys.readouterr().err
        assert main(["fleet", "restart", server.url, "c", "--api-key", "sesame"]) == 1
        assert "There is no engine 'c'; there are: a, b." in capsys.readouterr().err
        assert main(["fleet", "restart", server.url, "--api-key", "sesame"]) == 0
    capsys.readouterr()
    assert main(["fleet", server.url]) == 1
    assert "is the server running?" in capsys.readouterr().err
