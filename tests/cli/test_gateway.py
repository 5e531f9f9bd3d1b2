"""``engine gateway``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.cli.main import main
from engine.contracts.config import Settings
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router

A = "http://127.0.0.1:9001"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of each gateway that would have been served."""
    found: list[Settings] = []

    def serve(settings: Settings, make_router: Callable[[], Router], exporters: Sequence[Exporter]) -> int:
        found.append(settings)
        return 7

    monkeypatch.setattr("engine.http.gateway.server.serve_gateway", serve)
    return found


def test_urls_and_short_flags_become_settings(served: list[Settings]) -> None:
    assert main(["gateway", A, "--port", "9100", "--host", "::1"]) == 7
    (settings,) = served
    assert settings.gateway.targets == [A]
    assert (settings.server.host, settings.server.port) == ("::1", 9100)


def test_a_key_that_is_not_in_the_environment_is_named(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert main(["gateway", A, "gateway.key_env=NO_SUCH_KEY"]) == 2
    assert "gateway.key_env=NO_SUCH_KEY: the environment has no such variable" in capsys.readouterr().err
    monkeypatch.setenv("NO_SUCH_KEY", "sesame")
    assert main(["gateway", A, "gateway.key_env=NO_SUCH_KEY"]) == 7 and len(served) == 1


def test_a_model_is_refused(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", A, "model.path=x"]) == 2
    assert "model.path=x" in capsys.readouterr().err and not served
