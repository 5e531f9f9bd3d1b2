"""Conformance suites: what the core relies on, as tests a plugin author runs against their own plugin.

Derive a test class from your slot's suite in your own test file, say how your plugin is made, and run
pytest; every inherited test is one promise of the slot's contract. There are suites for: ``architecture``,
``attention_kernel``, ``communicator``, ``drafter``, ``exporter``, ``kv_allocator``, ``kv_format``, ``quantizer``,
``router`` and ``scheduler``. For an attention kernel, for example:

.. code-block:: python

    from engine.testing.attention_kernel import AttentionKernelConformance
    from engine_mine import MineConfig, MyAttention


    class TestMyAttention(AttentionKernelConformance):
        device = "cuda"
        capabilities = MyAttention.capabilities

        def make(self, context):
            return MyAttention(MineConfig(), context)

``engine.testing.context.build_context()`` is the context a factory is handed, for plugins whose suite does not bring
one. Where a promise depends on what a plugin claims (its capabilities, ``lossless``, tolerances), the suite reads the
claim, has a class attribute for it, or there is one suite more to inherit: what a plugin does not claim gives no cases,
and nothing is skipped. Suites need the ``test`` extra (``pip install engine[test]``); nothing is imported until you
import a suite.

``engine.testing.aot`` compiles Triton kernels for GPUs that are not there and reports registers, shared memory and
spills; ``engine.testing.attention_cases`` runs attention cases without pytest, for scripts.
"""
