"""``engine eval --drafter``: what drafters bring on prompts of the user's own, beside the same plan without one.

Every setting is an engine in a process of its own; they take turns, group by group of prompts, in another order each
time, so that what slows the machine down slows all of them. ``options`` reads the command line, ``plans`` assembles
what is compared, ``prompts`` reads the file, ``worker`` is the process, ``turns`` calls the processes in turn,
``figures`` sums up, ``report`` judges and prints.
"""
