"""The rules, a file for each branch of the decision tree."""

from __future__ import annotations

from engine_lab.doctor.rules import decoding, delivery, machine, memory, prompts, queueing

RULES = (*machine.RULES, *prompts.RULES, *queueing.RULES, *memory.RULES, *decoding.RULES, *delivery.RULES)
