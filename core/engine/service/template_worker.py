"""Chat templates are rendered in a sandbox (:mod:`engine.service.template_child`). A server's has two children, so that
nobody waits for a conversation over which the template breaks a limit."""

from __future__ import annotations

import re

import msgspec

from engine.service.chat_template import TemplateFailed, TemplateRefused, TemplateSource, max_chars
from engine.service.quoting import Rendered, quoted
from engine.service.sandbox.frames import MAX_FRAME
from engine.service.sandbox.process import LimitBroken, Sandbox, SandboxEnded
from engine.service.template_child import Failure, Prompt
from engine.service.turns import Conversation, Turn

CPU_S = 1.0
"""What compiling the template, or rendering one conversation, may take."""
MEMORY_MB = 512
NUM_CHILDREN = 2
MAX_WORDS = 300
GREETING = Conversation((Turn("user", "warm"),))


class TemplateWorker:
    """A model's chat template, ready to render. Use from any thread; :meth:`close` ends its processes."""

    def __init__(self, source: TemplateSource, num_children: int = NUM_CHILDREN) -> None:
        """Returns before the template is compiled; :meth:`check` waits for it. ``num_children``: conversations that
        are rendered at once. Raises :class:`TemplateFailed` for a template that cannot even be sent."""
        try:
            setup = msgspec.msgpack.encode(source)
        except UnicodeEncodeError:
            raise TemplateFailed("the model's chat template has characters that are no Unicode") from None
        if len(setup) > MAX_FRAME:
            raise TemplateFailed(f"the model's chat template has more than {MAX_FRAME >> 20} MB")
        self.source = source
        self._decode = msgspec.msgpack.Decoder(Prompt | Failure).decode
        self._sandbox = Sandbox(
            "engine.service.template_child", MEMORY_MB, num_children=num_children, setup=setup, check=self._text
        )
        self._starts = self._sandbox.start(CPU_S)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children there are now."""
        return self._sandbox.pids

    def check(self) -> None:
        """Raises :class:`TemplateFailed` for a template that does not compile, or breaks a limit over a greeting."""
        try:
            for start in self._starts:
                start.result()
        except SandboxEnded as error:
            raise TemplateFailed(f"the model's chat template cannot be used: it {error}") from None
        try:
            self.render_now(GREETING)
        except TemplateRefused:
            pass  # it may take other conversations

    async def render(self, conversation: Conversation, specials: re.Pattern[str] | None = None) -> Rendered:
        """The prompt of a conversation. ``specials`` matches special tokens. Raises :class:`TemplateFailed`, and
        :class:`SandboxEnded` for what neither template nor conversation is to blame for."""
        frame, max_reply, names = _question(conversation, specials)
        try:
            return Rendered(self._text(await self._sandbox.ask(frame, CPU_S, max_reply)), names)
        except LimitBroken as error:
            raise TemplateFailed(f"the chat template {error}") from None

    def render_now(self, conversation: Conversation, specials: re.Pattern[str] | None = None) -> Rendered:
        """:meth:`render`, blocking the calling thread."""
        frame, max_reply, names = _question(conversation, specials)
        try:
            return Rendered(self._text(self._sandbox.ask_now(frame, CPU_S, max_reply)), names)
        except SandboxEnded as error:
            raise TemplateFailed(f"the chat template {error}") from None

    def close(self) -> None:
        self._sandbox.close()

    def _text(self, reply: bytes) -> str:
        """The prompt. Raises :class:`TemplateFailed`. Nothing is believed of a reply but its type."""
        try:
            match self._decode(reply):
                case Prompt(text):
                    return text
                case Failure(words, refused):
                    raise (TemplateRefused if refused else TemplateFailed)(_one_line(words))
        except (UnicodeDecodeError, msgspec.DecodeError):
            pass
        raise TemplateFailed("the chat template's process answered what it should not")


def _question(conversation: Conversation, specials: re.Pattern[str] | None) -> tuple[bytes, int, dict[str, str]]:
    """What to ask, how large the answer may be, and the special tokens that placeholders in it stand for."""
    try:
        asked, names = quoted(conversation.plain(), specials)
        frame, size = msgspec.msgpack.encode(asked), max_chars(asked)
    except RecursionError:
        raise TemplateRefused("the conversation is nested too deeply") from None
    except OverflowError:
        raise TemplateRefused("the conversation has an integer beyond 64 bits") from None
    if len(frame) > MAX_FRAME:
        raise TemplateRefused(f"the conversation has more than {MAX_FRAME >> 20} MB")
    return frame, 4096 + 4 * size, names


def _one_line(words: str) -> str:
    return "".join(c if c.isprintable() else " " for c in words[:MAX_WORDS])
