"""The child that runs a model's chat template: ``python -m engine.service.template_child``.

A template may loop for ever or build a string of gigabytes in one call of C code, also while it is compiled.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import msgspec

from engine.service.chat_template import ChatTemplate, TemplateFailed, TemplateRefused, TemplateSource
from engine.service.sandbox import child
from engine.service.turns import PlainConversation

REHEARSAL = (
    r"{{ '\u00e9\N{BULLET}' | striptags | pprint }}{{ lipsum(1) }}{{ strftime_now('%c') }}{{ raise_exception('') }}"
)


class Prompt(msgspec.Struct, frozen=True, tag=True):
    """The rendered conversation; empty for the first frame."""

    text: str


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why there is no prompt. ``refused``: the template did not take this conversation; it may take others."""

    words: str
    refused: bool


class Renderer:
    """Compiles the template of the first frame, a :class:`TemplateSource`; renders the conversations of the others."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None
        self._decode = msgspec.msgpack.Decoder(PlainConversation).decode

    def __call__(self, frame: bytes) -> bytes:
        reply: Prompt | Failure
        try:
            reply = Prompt(self._text(frame))
            return msgspec.msgpack.encode(reply)
        except TemplateFailed as error:
            # A template may word its errors in characters that cannot be sent.
            words = str(error).encode(errors="replace").decode()
            reply = Failure(words, isinstance(error, TemplateRefused))
        except UnicodeEncodeError:
            reply = Failure("the chat template made text that is no Unicode", refused=True)
        return msgspec.msgpack.encode(reply)

    def _text(self, frame: bytes) -> str:
        if self._template is None:
            self._template = ChatTemplate(msgspec.msgpack.decode(frame, type=TemplateSource))
            return ""
        return self._template.render(self._decode(frame))


def rehearse() -> None:
    """Render once before the limits hold, error paths included: what libraries load on first use is there then."""
    with suppress(TemplateFailed):
        ChatTemplate(TemplateSource(REHEARSAL, {})).render(PlainConversation([], False))


if __name__ == "__main__":
    sys.exit(child.main(Renderer(), rehearse))
