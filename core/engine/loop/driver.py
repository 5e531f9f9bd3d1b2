"""The engine's main loop: messages in, steps, messages out. The same in a process of its own and in a thread."""

from __future__ import annotations

import contextlib
import queue
import traceback
from collections.abc import Callable, Mapping

from engine.loop.core import EngineBroken, EngineCore
from engine.loop.inbox import Inbox
from engine.loop.messages import (
    Abort,
    CauseOfDeath,
    DeviceFailed,
    ExpertLoad,
    Failed,
    FromEngine,
    ReadExpertLoad,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    Submit,
    Wake,
)
from engine.plugin_guard.calls import by_plugin, describe_error

Counts = Callable[[], Mapping[int, tuple[int, ...]]]
"""As :attr:`engine.loop.messages.ExpertLoad.layers`."""


def drive(core: EngineCore, inbox: Inbox, send: Callable[[FromEngine], None], expert_load: Counts = dict) -> bool:
    """Run until asked to stop (True) or until the engine broke (False; the reason was sent as ``Failed``)."""

    def send_expert_load() -> None:
        send(ExpertLoad(dict(expert_load())))

    core.count_as_waiting(inbox.unread)
    core.wake = inbox.wake
    send(StepOutputs((), (), core.stats()))  # the pool's size is known before the first step
    try:
        while _receive(core, inbox, send_expert_load):
            outputs = core.step() if core.has_work else StepOutputs((), (), core.stats())
            with contextlib.suppress(BrokenPipeError):  # whoever closed its end is seen in the inbox next
                send(outputs)
    except Exception as error:
        cause = _cause(error)
        if cause != "rank_failed":  # that rank has logged it
            traceback.print_exc()
        send(Failed(str(error) if isinstance(error, EngineBroken) else describe_error(error), "running", cause=cause))
        _close(core)
        return False
    _close(core)
    return True


def _close(core: EngineCore) -> None:
    """What fails now is logged: the engine has ended, and why, was said."""
    try:
        core.close()
    except Exception:
        traceback.print_exc()


def _cause(error: Exception) -> CauseOfDeath:
    if isinstance(error, EngineBroken):
        return error.cause
    return "plugin_failed" if by_plugin(error) else "engine_dead"


def _receive(core: EngineCore, inbox: Inbox, send_expert_load: Callable[[], None]) -> bool:
    """Take in all messages, waiting for one if there is nothing to do. False: stop."""
    wait = not core.has_work
    rest_s = 0.0 if wait else core.rest_s()
    while True:
        try:
            message = inbox.get(wait or rest_s > 0.0, rest_s or None)
        except queue.Empty:
            return True
        wait, rest_s = False, 0.0
        match message:
            case Submit(request, arrived_s):
                core.submit(request, arrived_s)
            case Abort(request_ids, reason):
                core.abort(request_ids, reason)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case ReadExpertLoad():
                send_expert_load()
            case Wake():
                core.take_stored()
            case DeviceFailed(error):
                raise EngineBroken(error, "rank_failed")
            case Shutdown() | None:
                return False
