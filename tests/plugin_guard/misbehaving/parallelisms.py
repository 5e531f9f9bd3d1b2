"""Launchers. For one rank none is called: it finds what they lack."""

from __future__ import annotations

from typing import Any

from engine_plugins.parallelism.local import LocalLauncher


class NoLaunch(LocalLauncher):
    """Lacks a call."""

    says = r"built a NoLaunch, which is not a Launcher: it lacks part of the protocol"
    launch: Any = None


class LaunchCoroutine(LocalLauncher):
    """Would have to be awaited."""

    says = r"cannot be used: TypeError: launch\(\) is a coroutine, expected a plain method"

    async def launch(self, *args: Any) -> Any:  # type: ignore[override]
        return ()
