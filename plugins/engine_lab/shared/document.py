"""A report as one HTML page that needs neither network nor scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine_lab.shared.markup import Markup, joined, tag

CSS = Path(__file__).with_name("page.css")


def document(title: str, sections: Sequence[Markup], data: Any) -> str:
    """The whole page. ``data`` is in it as JSON."""
    css = CSS.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    # "<" would end the element, wherever it stands in a string.
    shown = Markup(msgspec.json.encode(data).decode().replace("<", "\\u003c"))
    head = joined(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("title", title),
        tag("style", Markup(css)),
    )
    body = tag("main", *sections, tag("script", shown, type="application/json", id="data"))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
