"""From overrides to the parts of a gateway: a router and exporters, without a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.assembly.assemble import configure
from engine.assembly.bind import build_choices
from engine.assembly.choosing import Chosen, choose_without_model
from engine.assembly.compose import quoted
from engine.assembly.errors import AssemblyError, nearest
from engine.assembly.negotiation import slot_choice
from engine.assembly.plan import SlotChoice
from engine.contracts.config import GatewaySettings, Settings
from engine.contracts.exporter import Exporter
from engine.contracts.provider import BuildContext
from engine.contracts.router import ANSWERS, BLOCK_UNITS, Router

PARTS = ("gateway", "server", "router", "exporter", "plugins", "preset")
"""Keys of the configuration that a gateway has."""
_HOST = re.compile(r"[A-Za-z0-9.\-]+:[0-9]+(?:/.*)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHORT = "targets"
"""Short for ``gateway.targets``."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    settings: Settings
    make_router: Callable[[], Router]
    exporters: tuple[Exporter, ...]
    router: SlotChoice
    failures: tuple[object, ...]
    """Plugins that are installed but broken."""


def gateway_parts(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> GatewayParts:
    """Raises :class:`AssemblyError` with every problem. ``words``: overrides, and URLs of targets."""
    overrides = _overrides(words)
    problems = [
        f"{text}: a gateway has {', '.join(PARTS)} alone{nearest(_group(text), [SHORT]) or '; leave it out'}"
        for text in overrides
        if _is_else(text)
    ]
    problems += [f"{text}: a target is a URL; write http://{text}" for text in overrides if _HOST.fullmatch(text)]
    if problems:
        raise AssemblyError(problems)
    configured = configure(overrides, config_dirs)
    settings = configured.composed.settings
    problems += _setting_problems(settings.gateway)
    chosen = choose_without_model(configured.composed, configured.discovered, ("router", "exporter"), problems)
    problems += _router_problems(chosen)
    if problems:
        raise AssemblyError(problems)
    choices = [slot_choice(one) for one in chosen]
    context = _context(settings)
    (router,) = [choice for choice in choices if choice.slot == "router"]

    def make_router() -> Router:
        return cast(Router, build_choices([router], context)[0])

    make_router()  # one that cannot be built is told now
    exporters = build_choices([choice for choice in choices if choice.slot == "exporter"], context)
    return GatewayParts(settings, make_router, exporters, router, tuple(configured.discovered.failures))


def _setting_problems(gateway: GatewaySettings) -> Iterator[str]:
    if not gateway.targets and not gateway.providers:
        yield "gateway.targets is empty; name the servers: engine gateway http://HOST:PORT http://HOST:PORT"
    keys = {"gateway": gateway.key_env, **{f"gateway.providers.{k}": v.key_env for k, v in gateway.providers.items()}}
    for key, name in keys.items():
        if name is None:
            continue
        if not _VARIABLE.fullmatch(name):  # which may be the key itself
            yield f"{key}.key_env: expected the name of an environment variable, of letters, digits and underscores"
        elif not (value := os.environ.get(name)):
            yield f"{key}.key_env={name}: the environment has no such variable, or it is empty"
        elif not value.isprintable() or value != value.strip():
            yield f"{key}.key_env={name}: the variable has a line break, a space at an end or a control character"


def _router_problems(chosen: Sequence[Chosen]) -> Iterator[str]:
    for one in chosen:
        if one.slot == "router" and ANSWERS in one.offer.provider.provides:
            yield (
                f"{one.label}: it answers from stored tokens, and a gateway has no tokens; use it at the servers, and "
                "another router here"
            )


def _overrides(words: Sequence[str]) -> list[str]:
    """The words, URLs and the short key as the key of the configuration."""
    urls = [word for word in words if word.startswith(("http://", "https://"))]
    given = [f"gateway.{word}" if word.startswith(f"{SHORT}=") else word for word in words if word not in urls]
    return [*given, f"gateway.targets=[{','.join(map(quoted, urls))}]"] if urls else given


def _is_else(override: str) -> bool:
    return "=" in override and _group(override) not in PARTS


def _group(override: str) -> str:
    """The first part of its key."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


class _NoModel:
    """Stands for what a gateway knows nothing of. Plugins that ask it cannot be built for one, and say so."""

    name = "gateway"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a gateway has no model and no device: {name} is not known")


def _context(settings: Settings) -> BuildContext:
    nothing: Any = _NoModel()
    return BuildContext(
        model=nothing,
        device=nothing,
        dtype="",
        execution="",
        max_len=0,
        max_requests=0,
        block_size=BLOCK_UNITS,
        max_draft_tokens=0,
        settings=settings,
    )
