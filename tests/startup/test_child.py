"""The engine process at the end of its connection."""

import queue
import socket

import msgspec

from engine.loop.messages import Ping
from engine.startup.child import Beats, Connection, _listen
from engine.startup.process import HEADER


def test_a_heartbeat_that_nobody_takes_any_more_is_no_fault(capsys):
    ours, theirs = socket.socketpair()
    body = msgspec.msgpack.encode(Ping())
    ours.sendall(HEADER.pack(len(body)) + body)
    ours.close()
    inbox = queue.SimpleQueue()
    _listen(Connection(theirs.detach()), inbox, Beats())
    assert inbox.get_nowait() is None
    assert capsys.readouterr().err == ""
