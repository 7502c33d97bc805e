"""`python -m server`, which `scripts/serve` is: uvicorn's command with the settings as flags.

A flag becomes the environment's, over what was there; then it is `uvicorn server.app:app`. What
uvicorn would find out only while a model loads is looked at before.
"""

from dataclasses import fields
from typing import Any

import click
from uvicorn.main import main as uvicorn_command

from server.preflight import check_address, check_workers, refuse
from server.settings import Settings, SettingsError, put_flags

APP = {"app": "server.app:app", "app_dir": "", "factory": False}
# a client that neither reads nor leaves must not keep a stopped server alive
DEFAULTS = {"timeout_graceful_shutdown": 5}


def command() -> click.Command:
    return click.Command(
        "server",
        context_settings={**uvicorn_command.context_settings, "default_map": DEFAULTS},
        params=[
            *(option(spec) for spec in fields(Settings)),
            *(theirs for theirs in uvicorn_command.params if theirs.name not in APP),
        ],
        callback=start,
        help="Serve a transformers model over HTTP. The settings come first; they are also "
        "environment variables (PIPELINE_MODEL=…), read from .env too, and a flag wins. The other "
        "flags are uvicorn's.",
    )


def option(spec: Any) -> click.Option:
    default = ",".join(spec.default) if isinstance(spec.default, tuple) else spec.default
    default = "auto" if default is None else default
    choices = spec.metadata["choices"]
    text = spec.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
    return click.Option(
        ["--" + spec.name.replace("_", "-")],
        metavar=spec.name.upper(),
        help=f"{text} ({default or ('empty' if default == '' else 'off')})",
        allow_from_autoenv=False,
    )


def start(**given: Any) -> None:
    try:
        put_flags({spec.name: given.pop(spec.name) for spec in fields(Settings)})
        check_workers(given["workers"] and str(given["workers"]))
        if given["uds"] is None and given["fd"] is None:
            check_address(given["host"], given["port"])
    except SettingsError as error:
        refuse(error)
    assert uvicorn_command.callback
    uvicorn_command.callback(**APP, **given)


if __name__ == "__main__":
    command().main(prog_name="python -m server")
