"""The types of JSON that a tool's parameters may have, as their schemas say.

What a model writes does not always tell a text from a number; then these do (arguments.py). They
are found with the request, in a pool thread, since schemas come from strangers.
"""

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

DEEPEST = 100
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
NAMES |= {type(None): "null", dict: "object"}
JSON = frozenset(NAMES.values())

Types = Mapping[str, Collection[str]]  # of parameters; none where a schema does not say
Tools = Mapping[str, Types]  # by their names


def types_of_parameters(tool: Mapping[str, Any]) -> Types:
    parameters = tool["function"].get("parameters")
    declared = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(declared, dict):
        return {}
    known: dict[int, set[str]] = {}
    return {key: types_of(schema, parameters, known) for key, schema in declared.items()}


def types_of(schema: Any, root: Any, known: dict[int, set[str]], depth: int = 0) -> set[str]:
    """The types that a schema within `root` allows. `known`: of what is referred to, by its id."""
    if not isinstance(schema, dict) or depth > DEEPEST:
        return set()
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    # a type that JSON has not is written as a text
    types = {each if each in JSON else "string" for each in listed if isinstance(each, str)}
    options = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if not types and isinstance(options, list):
        types = {type_of(option) for option in options}
    for several in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(several)
        for each in branches if isinstance(branches, list) else ():
            types |= types_of(each, root, known, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        found = referred(root, reference)
        if id(found) not in known:
            known[id(found)] = set()  # it may refer to itself
            known[id(found)] = types_of(found, root, known, depth + 1)
        types |= known[id(found)]
    if schema.get("nullable"):
        types.add("null")
    return types


def referred(root: Any, reference: str) -> Any:
    """What a `$ref` within a document means; True, which takes anything, where it is none."""
    if not f"{reference}/".startswith("#/"):
        return True
    for key in unquote(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and int(key[:9]) < len(root):
            root = root[int(key[:9])]
        elif isinstance(root, dict) and key in root:
            root = root[key]
        else:
            return True
    return root


def type_of(made: Any) -> str:
    return NAMES[type(made)]
