"""Texts or lists of token ids, one or several: what completions and embeddings are asked about."""

from typing import Any

from batching.errors import InvalidInput

Input = str | list[int]


def read_inputs(given: Any, param: str) -> dict[str, Input]:
    """Each input by what errors call it: `param` for a single one. A list of ids is one."""
    if not given:
        raise InvalidInput.at(param, "must not be empty")
    kind = str if isinstance(given, str) else type(given[0])
    for n, each in enumerate(given if isinstance(given, list) else ()):
        if type(each) is not kind:
            raise InvalidInput.at(f"{param}[{n}]", "a list is of one kind: texts or token ids")
        if isinstance(each, (str, list)) and not each:
            raise InvalidInput.at(f"{param}[{n}]", "must not be empty")
    if isinstance(given, str) or kind is int:
        return {param: given}
    return {f"{param}[{n}]": each for n, each in enumerate(given)}
