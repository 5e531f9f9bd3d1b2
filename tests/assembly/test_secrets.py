"""What of a configuration is shown."""

from __future__ import annotations

import pytest

from engine.assembly.secrets import redacted
from engine.cli.main import main


def test_secrets_are_hidden_at_any_depth_and_what_is_not_set_is_seen() -> None:
    given = {
        "server": {"api_key": "sesame", "port": 1},
        "list": [{"auth_token": "x"}],
        "password": None,
        "key_env": "K",
    }
    shown = {"server": {"api_key": "***", "port": 1}, "list": [{"auth_token": "***"}], "password": None, "key_env": "K"}
    assert redacted(given) == shown


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_engine_config_shows_that_a_key_is_set_and_not_which(
    flag: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "server.api_key=sesame", *flag]) == 0
    shown = capsys.readouterr().out
    assert "sesame" not in shown and "***" in shown
    assert main(["config", *flag]) == 0 and "***" not in capsys.readouterr().out
