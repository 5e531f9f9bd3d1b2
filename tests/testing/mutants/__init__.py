"""Planted bugs, with which the suites of ``engine.testing`` are tested.

A mutant is a plugin with one bug; its docstring says which. It derives from a correct plugin, built-in or written here,
and names the tests of its slot's suite that catch it: :func:`tests.testing.mutants.mutant.mutant`. A test catches it by
a failed assertion, or by an error that the mutant declares. There is one file
for each slot. A mutant that no test catches says why (``missed``).

``tests/testing/test_mutants.py`` runs each mutant through the tests it names. The whole suites on all mutants, which
takes some minutes, are run by a script; it prints the table of ``README.md`` and what the table has wrong::

    python -m tests.testing.mutants            # all slots
    python -m tests.testing.mutants scheduler  # some
    python -m tests.testing.mutants --table    # the table alone, run nothing
"""
