"""Routers."""

from __future__ import annotations

import time
from typing import Any

from engine.contracts.router import Answer, Reject, ToEngine, ToUrl
from engine_plugins.router.direct import DirectRouter


class Text(DirectRouter):
    """Returns the engine's name."""

    says = r"place\(\) returned what is no route: a route is 'default', expected Attempts or ToEngine or ToUrl or"

    def place(self, request: Any, fleet: Any) -> Any:
        return "default"


class Elsewhere(DirectRouter):
    """Chooses an engine that there is not."""

    says = r"place\(\) returned ToEngine\(engine_id='other'\), expected an engine of the fleet: 'default'"

    def place(self, request: Any, fleet: Any) -> Any:
        return ToEngine("other")


class NoUrl(DirectRouter):
    """Passes requests on to nowhere."""

    says = r"place\(\) returned what is no route: a route\.base_url is None, expected str"

    def place(self, request: Any, fleet: Any) -> Any:
        return ToUrl(None)  # type: ignore[arg-type]


class HalfUrl(DirectRouter):
    """Passes requests on to something that is no URL."""

    says = r"place\(\) returned ToUrl\(base_url='localhost:1'\), expected an http or https URL"

    def place(self, request: Any, fleet: Any) -> Any:
        return ToUrl("localhost:1")


class AsksBack(DirectRouter):
    """Tells clients to come back before they came."""

    says = r"place\(\) returned Reject\(.*expected retry_after_s from 0 to 86400"

    def place(self, request: Any, fleet: Any) -> Any:
        return Reject(429, "later", retry_after_s=-5)


class RejectsWell(DirectRouter):
    """Refuses with a status of success."""

    says = r"place\(\) returned Reject\(status=200.*expected a status from 400 to 599"

    def place(self, request: Any, fleet: Any) -> Any:
        return Reject(200, "fine")


class NoChoices(DirectRouter):
    """Answers without a choice."""

    says = r"place\(\) returned an answer of 0 choices, expected 1"

    def place(self, request: Any, fleet: Any) -> Any:
        return Answer(())


class NoTokens(DirectRouter):
    """Answers with a text where tokens belong."""

    says = r"place\(\) returned an answer whose tokens are a str, expected a tuple of token ids"

    def place(self, request: Any, fleet: Any) -> Any:
        return Answer(({"tokens": "hello", "finish_reason": "stop"},))


class Raises(DirectRouter):
    """Raises at every call."""

    says = r"place\(\) raised ZeroDivisionError: .* by zero \(routers\.py:\d+\)"

    def place(self, request: Any, fleet: Any) -> Any:
        return 1 // 0


class Exits(DirectRouter):
    """Ends the process."""

    says = r"place\(\) raised SystemExit: 4"

    def place(self, request: Any, fleet: Any) -> Any:
        raise SystemExit(4)


class FinishedRaises(DirectRouter):
    """Cannot take notes."""

    says = r"finished\(\) raised OSError: disk full \(routers\.py:\d+\)"
    serves = True

    def finished(self, request: Any, answer: Any) -> None:
        raise OSError("disk full")


class Blocks(DirectRouter):
    """Takes 60 ms over a decision."""

    says = r"router blocked the server"
    serves = True

    def place(self, request: Any, fleet: Any) -> Any:
        time.sleep(0.06)
        return super().place(request, fleet)
