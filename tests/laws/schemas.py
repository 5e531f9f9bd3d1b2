"""JSON schemas drawn at random, of the keywords that constraints follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
PATTERNS = (
    "^[a-z]{2,5}$",
    "^(yes|no)$",
    "^[A-Z][a-z]*[0-9]{1,3}$",
    "^#[0-9a-f]{6}$",
    "^a?b+c{2,3}$",
    "^\\d{2}-\\d{2}$",
)
NAMES = ("id", "name", "tags", "size", "é", "with space", 'quo"te', "nested", "a.b", "列", "0", "$x")
MOST_DEPTH = 3


class Draw:
    """Schemas by number: one number, one schema."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._has_node = False

    def schema(self) -> dict[str, Any]:
        """An object, whose values are anything."""
        found = self._object(1)
        if self._has_node:
            found["$defs"] = {"node": self._node()}
        return found

    def _any(self, depth: int) -> dict[str, Any]:
        flat: list[Callable[[], dict[str, Any]]] = [
            self._string, self._integer, self._number, self._enum, self._const,
            lambda: {"type": "boolean"}, lambda: {"type": "null"}, self._nullable,
        ]  # fmt: skip
        deep: list[Callable[[int], dict[str, Any]]] = [self._object, self._array, self._either, self._all, self._ref]
        if depth >= MOST_DEPTH or self._random.random() < 0.5:
            return self._random.choice(flat)()
        return self._random.choice(deep)(depth + 1)

    def _string(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        match self._random.randrange(4):
            case 0:
                found["pattern"] = self._random.choice(PATTERNS)
            case 1:
                found["format"] = self._random.choice(FORMATS)
            case _:
                found["maxLength"] = self._random.randint(0, 12)
                found["minLength"] = self._random.randint(0, found["maxLength"])
        return found

    def _integer(self) -> dict[str, Any]:
        low = self._random.choice((-1000, -7, 0, 1, 99))
        found: dict[str, Any] = {"type": "integer", self._random.choice(("minimum", "exclusiveMinimum")): low}
        found[self._random.choice(("maximum", "exclusiveMaximum"))] = low + self._random.choice((2, 30, 12345))
        if self._random.random() < 0.2:
            found = {"type": "integer", "multipleOf": self._random.choice((2, 5, 7)), "minimum": 0, "maximum": 500}
        return found

    def _number(self) -> dict[str, Any]:
        low = self._random.choice((-2.5, 0, 0.125))
        return {"type": "number", "minimum": low, "maximum": low + self._random.choice((1, 10.75, 1000))}

    def _enum(self) -> dict[str, Any]:
        values = ["a", "bb", 'c"c', "ü\n", 1, 2.5, True, None, [1, "x"], {"k": []}]
        return {"enum": self._random.sample(values, self._random.randint(1, 6))}

    def _const(self) -> dict[str, Any]:
        return {"const": self._random.choice(["fixed", 7, False, None, ["a", 1], {"a": {"b": 1}}])}

    def _nullable(self) -> dict[str, Any]:
        kinds: tuple[tuple[str, dict[str, Any]], ...] = (
            ("string", {"maxLength": 6}), ("integer", {"minimum": -9, "maximum": 9}), ("boolean", {}),
        )  # fmt: skip
        name, limits = self._random.choice(kinds)
        return {"type": [name, "null"], **limits}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        properties = {name: self._any(depth) for name in names}
        required = [name for name in names if self._random.random() < 0.6]
        found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        match self._random.randrange(6):
            case 0:
                found["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
            case 1:
                found["patternProperties"] = {"^x_[a-z]{1,3}$": {"type": "boolean"}}
                found["additionalProperties"] = False
            case _:
                found["additionalProperties"] = False
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        found: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + self._random.randint(0, 2)}
        if self._random.random() < 0.3:
            first = [self._any(depth) for _ in range(self._random.randint(1, 2))]
            rest: Any = self._random.choice((False, {"type": "boolean"}))
            return {"type": "array", "prefixItems": first, "items": rest, "minItems": len(first), "maxItems": 4}
        return {**found, "items": self._any(depth)}

    def _either(self, depth: int) -> dict[str, Any]:
        """Of ``oneOf``, values that cannot be of two."""
        if self._random.random() < 0.5:
            return {"anyOf": [self._any(depth) for _ in range(2)]}
        return {"oneOf": [self._string(), self._integer(), {"type": "null"}]}

    def _all(self, depth: int) -> dict[str, Any]:
        del depth
        low, high = self._random.randint(0, 9), self._random.randint(10, 99)
        return {"allOf": [{"type": "integer", "minimum": low}, {"type": "integer", "maximum": high}]}

    def _ref(self, depth: int) -> dict[str, Any]:
        del depth
        self._has_node = True
        return {"$ref": "#/$defs/node"}

    def _node(self) -> dict[str, Any]:
        """A list of a type that names itself, which may end anywhere."""
        value = self._string()
        inner = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
        return {
            "type": "object",
            "properties": {"value": value, "children": inner},
            "required": ["value"],
            "additionalProperties": False,
        }
