"""The decision configuration of a checkpoint (`decision.json`), or of DECISION_CONFIG.

Read as by transformers' `decision` pipeline; settings that this version does not know are ignored.
No torch: the server reads the file before it loads a model.
"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from jinja2.meta import find_undeclared_variables
from msgspec import Meta, Struct

from batching.errors import OnequeueError
from worker.messages.decisions import NOUL_OPTIONS
from worker.task_detection import download, is_path, split_file
from worker.template_file import UnusableTemplate, parse_template, read_template


class UnusableDecisionConfig(OnequeueError):
    """A language model cannot follow the configuration."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"decision configuration (DECISION_CONFIG=none ignores it): {reason}")


class DecisionConfig(Struct, frozen=True):
    """`labels` and `temperature` are by the kind of a question: noul, choice, score. A noul has a
    label for each of `noul_options`. `chat_template` renders `state` and `question`; None: a
    message of the user does."""

    labels: dict[str, Annotated[list[str], Meta(min_length=1)]] = {}
    temperature: dict[str, Annotated[float, Meta(gt=0)]] = {}
    noul_options: tuple[str, str] = NOUL_OPTIONS
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    adapter: str | None = None


def load_decision_config(setting: str, model: str) -> DecisionConfig:
    """Return the configuration that DECISION_CONFIG names for a checkpoint, by default its own.
    Raises UnusableDecisionConfig."""
    config, variables = DecisionConfig(), set[str]()
    if setting == "none":
        return config
    files = find_files(split_file(model)[0]) if setting == "auto" else [Path(setting), None]
    file, template = files
    try:
        if file is not None:
            config = msgspec.json.decode(file.expanduser().read_bytes(), type=DecisionConfig)
        if template is not None:
            config = msgspec.structs.replace(config, chat_template=read_template(str(template)))
        if config.chat_template is not None:
            variables = find_undeclared_variables(parse_template(config.chat_template))
    except (OSError, ValueError, UnusableTemplate) as error:
        raise UnusableDecisionConfig(str(error)) from None
    if sorted(config.noul_options) != sorted(NOUL_OPTIONS):
        raise UnusableDecisionConfig("noul_options must be true and false, in any order")
    if "questions" in variables:
        raise UnusableDecisionConfig("its template reads `questions`, all in one prompt")
    if config.adapter:
        raise UnusableDecisionConfig("it names a LoRA adapter")
    return config


def find_files(model: str) -> list[Path | None]:
    """Return the paths of a checkpoint's decision.json and template; None for one that it lacks, or
    that cannot be looked up on the hub."""
    paths: list[Path | None] = [None, None]
    for n, name in enumerate(("decision.json", "decision_template.jinja")):
        with suppress(Exception):
            path = Path(model).expanduser() / name if is_path(model) else download(model, name)
            paths[n] = path if path.is_file() else None
    return paths
