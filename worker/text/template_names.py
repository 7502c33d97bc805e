"""Which names of a chat template are not a request's to set: `chat_template_kwargs` sets others.

Derived from what renders here: arguments on the way to the template, which would be given twice
or would do something else, special tokens, and the functions that a template finds. What a
template does with its own variables is its affair.
"""

import inspect
from collections.abc import Iterable
from typing import Any

from jinja2 import Template
from jinja2.filters import FILTERS
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import chat_template_utils

from batching.errors import InvalidInput


def own_names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    utils: Any = chat_template_utils
    environment = utils._compile_jinja_template("").environment
    way = (
        type(tokenizer).apply_chat_template,
        ProcessorMixin.apply_chat_template,
        utils.render_jinja_template,
        Template.render,
    )
    return frozenset(
        {
            "messages",  # what the renderer calls a conversation
            *(name for function in way for name in inspect.signature(function).parameters),
            *tokenizer.SPECIAL_TOKENS_ATTRIBUTES,
            *tokenizer.special_tokens_map,
            *environment.globals,
            *(name for name, _ in environment.filters.items() - FILTERS.items()),
        }
    )


def check_names(given: Iterable[str], own: frozenset[str]) -> None:
    for name in given:
        if name in own:
            param = f"chat_template_kwargs.{name}"
            raise InvalidInput(f"{param}: is not a variable of the template", param)
