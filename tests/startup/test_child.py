"""The engine process at its connection: the end of it, and what makes no sense."""

import queue
import socket

import msgspec
import pytest

from engine.loop.messages import Ping
from engine.startup.child import Beats, Connection, _listen
from engine.startup.engine_process import HEADER


def test_a_heartbeat_that_nobody_takes_any_more_is_no_fault(capsys):
    ours, theirs = socket.socketpair()
    body = msgspec.msgpack.encode(Ping())
    ours.sendall(HEADER.pack(len(body)) + body)
    ours.close()
    inbox = queue.SimpleQueue()
    _listen(Connection(theirs), inbox, Beats())
    assert inbox.get_nowait() is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00",
        HEADER.pack(0),
        HEADER.pack(2**32 - 1) + b"x",
        HEADER.pack(10) + b"short",
        HEADER.pack(3) + b"\xc1\xc1\xc1",
        HEADER.pack(4) + b"\x80\x04K\x01",  # a pickle
        HEADER.pack(11) + b"\x81\xa4type\xa4exec",
        HEADER.pack(5) + b"\xdd\xff\xff\xff\xff",  # an array that claims four billion entries
    ],
)
def test_what_makes_no_sense_ends_the_connection_and_reaches_nobody(sent):
    ours, theirs = socket.socketpair()
    ours.sendall(sent)
    ours.shutdown(socket.SHUT_WR)
    inbox = queue.SimpleQueue()
    _listen(Connection(theirs), inbox, Beats())
    assert inbox.get_nowait() is None and inbox.empty()
    ours.close()
