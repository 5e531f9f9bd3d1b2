"""From installed plugins and a few overrides to an :class:`~engine.assembly.plan.EnginePlan`, and from a plan to
built plugins. Discovery -> composition -> negotiation -> plan -> bind; hydra and pluggy are gone after assembly.
"""
