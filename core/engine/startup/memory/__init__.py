"""What an engine takes of its device's memory: estimated before loading, refused early, accounted for afterwards.

``estimate`` and ``weights`` compute bytes from the plan and the checkpoint's headers, ``budget`` measures what is free
and used, ``fit`` checks the one against the other and sizes the KV pool, ``refusal`` says what is missing and what to
set, ``profile_run`` measures the largest step on a GPU, ``ledger`` compares estimate and measurement, and ``report``
(free of torch) prints them.
"""
