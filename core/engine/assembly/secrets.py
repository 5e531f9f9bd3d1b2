"""A configuration as it may be shown."""

from __future__ import annotations

from typing import Any

SECRET = "***"
"""In place of a value that is set."""
_WORDS = ("api_key", "password", "secret", "credential", "access_token", "auth_token")


def redacted(value: Any) -> Any:
    """A copy without values whose key says that they are secret."""
    if isinstance(value, dict):
        return {key: SECRET if item and _is_secret(str(key)) else redacted(item) for key, item in value.items()}
    return [redacted(item) for item in value] if isinstance(value, list | tuple) else value


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _WORDS)
