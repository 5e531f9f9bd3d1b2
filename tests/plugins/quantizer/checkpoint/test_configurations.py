"""Whatever a configuration says, it is understood or refused in words."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.quantizer.checkpoint.writers import CASES

from engine.contracts.ops import LinearPart, LinearSpec
from engine_plugins.quantizer.checkpoint.layouts import LAYOUTS
from engine_plugins.quantizer.checkpoint.methods import recipe_of

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=True) | st.text(max_size=8)
    | st.sampled_from(["re:(", "re:.*", "Linear", "group", "gptq", "fp8", "int", "float", "128x128"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SPEC = LinearSpec((LinearPart("model.layers.0.mlp.down_proj", 64),), 96, shard="in")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of a configuration, as a path."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in keys for found in ((*path, key), *places(inner, (*path, key)))]


@settings(max_examples=160)
@given(st.data())
def test_a_damaged_configuration_is_read_or_refused(data: st.DataObject) -> None:
    config: Any = copy.deepcopy(data.draw(st.sampled_from([CASES[name].quantization for name in sorted(CASES)])))
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from(places(config)))
        inside = config
        for key in above:
            inside = inside[key]
        inside[last] = data.draw(JUNK)
    recipe = recipe_of(config)
    assert all(isinstance(problem, str) and problem for problem in recipe.problems)
    if not recipe.problems:
        scheme = recipe.scheme_of(SPEC.parts[0].name, False)
        assert scheme is None or LAYOUTS[scheme.layout].rules(scheme, SPEC.parts[0], SPEC)
