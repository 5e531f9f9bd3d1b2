"""What begins with a slash."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine_lab.chat.conversation import Conversation

HELP = '''\
/reset            forget what was said
/system [TEXT]    the system prompt: show it, or set it (- takes it away)
/params [N=V ..]  fields of each request, such as temperature=0.7 max_tokens=200; N= takes one away
/why              where the time of the last answer went
/exit             leave; Ctrl-D does, too
"""               begins and ends a message of several lines
A line that begins with a blank is a message, whatever follows.'''


def obey(line: str, conversation: Conversation, why: Callable[[], None], say: Callable[[str], None]) -> bool:
    """Does what a line says; whether to stay. Raises ``ValueError`` for what makes no sense."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/exit" | "/quit":
            return False
        case "/help":
            say(HELP)
        case "/reset":
            conversation.turns.clear()
            say("forgotten")
        case "/system":
            if rest:
                conversation.system = "" if rest == "-" else rest
            say(conversation.system or "no system prompt")
        case "/params":
            conversation.set_params(rest)
            shown = (f"{key}={msgspec.json.encode(value).decode()}" for key, value in conversation.params.items())
            say(" ".join(shown) or "the server's defaults")
        case "/why":
            why()
        case _:
            raise ValueError(f"no command {name!r}; expected /reset, /system, /params, /why, /help or /exit")
    return True
