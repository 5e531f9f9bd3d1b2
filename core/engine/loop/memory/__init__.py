"""What an engine takes of its device's memory: estimated before loading, refused early, accounted for afterwards.

``needs`` estimates from headers and plan, ``room`` measures what is free and used, ``fit`` refuses and sizes the KV
pool, ``remedies`` finds the overrides that would make a model fit, ``ledger`` compares estimate and measurement, and
``report`` (free of torch) prints both.
"""
