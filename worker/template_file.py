"""A chat template in a file of its own, for a checkpoint without one (`CHAT_TEMPLATE`).

No torch: the server reads the file before it loads a model.
"""

from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Template
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batching.errors import OnequeueError

MAX_BYTES = 1_000_000


class UnusableTemplate(OnequeueError):
    """The file cannot be read, or its template does not compile."""


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text in templates for transformers."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(file: str) -> str:
    """Return the template in a file. Raises UnusableTemplate."""
    path = Path(file).expanduser()
    try:
        if not path.is_file():
            raise UnusableTemplate("is a folder" if path.is_dir() else "there is no such file")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        source = content.decode()
    except OSError as error:
        raise UnusableTemplate(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UnusableTemplate("is not UTF-8 text") from None
    if len(content) > MAX_BYTES:
        raise UnusableTemplate(f"is larger than {MAX_BYTES} bytes")
    if not source.strip():
        raise UnusableTemplate("is empty")
    parse_template(source)
    return source


def parse_template(source: str) -> Template:
    """Return the nodes of a template. Raises UnusableTemplate if it does not compile."""
    environment = ImmutableSandboxedEnvironment(extensions=[GenerationTag, loopcontrols])
    try:
        environment.from_string(source)
        return environment.parse(source)
    except (TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise UnusableTemplate(f"does not compile{where}: {error}") from None
