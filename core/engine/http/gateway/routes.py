"""What a gateway says of itself and its targets."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.gateway.state import GatewayState, gateway_of
from engine.http.gateway.tiers import TIERS
from engine.http.routes.fleet import changeable, flag
from engine.service.engines import not_ready
from engine.service.errors import ApiError, bad_request
from engine.service.promises import DEFAULT_CLASS
from engine.service.scaling import ClassFigures
from engine.service.targets import Target


async def models(http: web.Request) -> web.StreamResponse:
    """``GET /v1/models``: those of all targets, each once."""
    return json_response({"object": "list", "data": list(gateway_of(http).targets.models.values())})


async def health(http: web.Request) -> web.StreamResponse:
    """``GET /health``: 200 while the process answers; targets do not get better by restarting it."""
    return json_response({"status": "ok", "targets": sum(t.takes_requests for t in gateway_of(http).targets.values())})


async def ready(http: web.Request) -> web.StreamResponse:
    """``GET /ready``: 200 while every name can answer: see :meth:`GatewayState.not_ready`."""
    state = gateway_of(http)
    if (reason := state.not_ready()) is not None:
        raise not_ready(reason)
    return json_response({"status": "ready"})


async def fleet(http: web.Request) -> web.StreamResponse:
    """``GET /engine/fleet``: each target, as a server's page says it of engines."""
    return json_response(_state(gateway_of(http)))


async def scale(http: web.Request) -> web.StreamResponse:
    """``GET /engine/scale``: as a server's page, of the own targets, as far as a gateway knows: what it has sent them,
    and when it expects the first byte of what it sends now. Tokens are estimated from bytes."""
    state = gateway_of(http)
    shed = await state.read_exporters(lambda: state.targets.shed)
    targets = [target for target in state.targets.values() if target.provider is None]
    wanted = [target for target in targets if not target.draining]
    ready = [target for target in wanted if target.takes_requests]
    backlogs_ms = [ms for target in ready if (ms := target.expected_ms(0)) is not None]
    places = state.settings.max_queue * len(ready)
    leaving = sorted(wanted, key=lambda target: (target.takes_requests, target.load.sequences))
    return json_response(
        {
            "desired": len(wanted),
            "ready": len(ready),
            "reason": "gateway.targets, but those that were drained",
            "backlog_s": sum(backlogs_ms) / len(backlogs_ms) / 1e3 if backlogs_ms else None,
            "saturation": min(1.0, state.admission.in_flight / places) if places else 1.0,
            "tokens_in_flight": {
                "queued": sum(target.load.queued_tokens for target in targets),
                "running": sum(target.load.running_tokens for target in targets),
            },
            "classes": {DEFAULT_CLASS: asdict(ClassFigures(None, None, shed))},
            "may_go": [target.id for target in leaving[: max(0, len(wanted) - 1)]],
            "engines": [_target(target) for target in targets],
        }
    )


async def names(http: web.Request) -> web.StreamResponse:
    """``GET /engine/names``: of each name that stands for several models, which these are, and what is known of the
    smaller ones."""
    state, tiers = gateway_of(http), http.app[TIERS]
    counted = await state.read_exporters(state.targets.names_counted)
    found: dict[str, dict[str, Any]] = {name: {"models": models} for name, models in state.gateway.models.items()}
    for name, cascade in tiers.cascades.items():
        facts = {"model": cascade.table.model, "threshold": cascade.threshold}
        found[name]["cascade"] = facts | counted[name]["look"].get(cascade.table.model, {})
    for name in tiers.shadows:
        found[name]["shadow"] = counted[name]["shadow"]
    return json_response({"names": found})


async def drain(http: web.Request) -> web.StreamResponse:
    """``?engine=ID``: it gets no more requests. ``force=1``: though a model has no other target."""
    state = gateway_of(http)
    await changeable(http, state)
    target = _named(http, state)
    lost = [name for name in target.models if not _others(state, target, name)]
    if lost and not flag(http, "force"):
        message = f"No other target takes requests for {', '.join(lost)}; --force (force=1) drains it all the same."
        raise ApiError("conflict", message, code="last_engine")
    target.drain()
    return json_response(_state(state))


async def undrain(http: web.Request) -> web.StreamResponse:
    """``?engine=ID``: it gets requests again."""
    state = gateway_of(http)
    await changeable(http, state)
    _named(http, state).draining = False
    return json_response(_state(state))


async def no_engine(http: web.Request) -> web.StreamResponse:
    """Every other route below ``/engine``, which commands ask that watch or change engines."""
    urls = ", ".join(target.url for target in gateway_of(http).targets.values() if target.provider is None)
    message = f"A gateway has no engines to watch or change; ask its targets: {urls or 'it has providers alone'}."
    raise ApiError("not_found", message)


def _others(state: GatewayState, target: Target, model: str) -> bool:
    return any(other.takes_requests for other in state.targets.having(model) if other is not target)


def _named(http: web.Request, state: GatewayState) -> Target:
    known = ", ".join(state.targets)
    if (name := http.query.get("engine")) is None:
        raise bad_request(f"Which target? Send ?engine=ID; there are: {known}.", "engine")
    if name not in state.targets:
        raise ApiError("not_found", f"There is no target {name[:64]!r}; there are: {known}.", param="engine")
    return state.targets[name]


def _state(state: GatewayState) -> dict[str, Any]:
    return {"engines": [_target(target) for target in state.targets.values()], "change": None}


def _target(target: Target) -> dict[str, Any]:
    return {
        "id": target.id,
        "model": ", ".join(target.models),
        "state": target.why_not or target.state,
        "ready": target.takes_requests,
        "why_not": target.why_not,
        "refusal": target.refusal,
        "starts": target.starts,
        "load": asdict(target.load),
    }
