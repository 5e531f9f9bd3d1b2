"""The rules, a file for what is slow.

* ``prompts``, ``queueing``: TTFT. ``decoding``: ITL, the host's gaps between steps and drafts included.
* ``memory``: preemptions and prefix hits. ``delivery``: the API process and clients. ``machine``: neighbours on it.
"""

from __future__ import annotations

from engine_lab.doctor.rules import decoding, delivery, machine, memory, prompts, queueing

RULES = (*machine.RULES, *prompts.RULES, *queueing.RULES, *memory.RULES, *decoding.RULES, *delivery.RULES)
