"""`onequeue serve [MODEL]`: uvicorn's command, with a model and the settings as flags.

    flags → environment → checks → uvicorn server.app:app

A flag becomes an environment variable and overrides one that is set. Invalid flags end the process
with one line and status 2, before torch is imported. `SettingsCommand`, `setting_option` and
`export_settings` serve `calibrate` as well.
"""

import shutil
import ssl
from collections.abc import Callable, Sequence
from dataclasses import Field
from itertools import groupby
from typing import Any, get_args

import click
from uvicorn.main import main as uvicorn_command

from server import __version__
from server.core.log import uvicorn_config
from server.core.settings import (
    SPECS,
    SettingsError,
    export_flags,
    load_env_file,
    load_settings,
    refusing,
)
from server.preflight import (
    MISUSE,
    assign_model,
    check_address,
    check_certificate,
    check_hub,
    check_socket,
    check_workers,
    exit_with_error,
)

# app_dir: None keeps the working directory, which may have a server.py, out of sys.path
APP = {"app": "server.app:app", "app_dir": None, "factory": False}
# bounds the stop where a client neither reads its response nor disconnects
DEFAULTS = {"timeout_graceful_shutdown": 5}
METAVARS = {str: "NAME", int: "N", float: "N", bool: "on|off"}
MODEL = click.Argument(["model"], required=False)


def serve_command() -> click.Command:
    uvicorn_params = [p for p in uvicorn_command.params if p.name not in (*APP, "version")]
    for param in uvicorn_params:
        name = (param.name or "").upper()
        if isinstance(param, click.Option) and name in ("HOST", "PORT"):  # platforms set them
            param.envvar, param.show_envvar = [f"UVICORN_{name}", name], True
    command = SettingsCommand(
        "server",
        context_settings={**uvicorn_command.context_settings, "default_map": DEFAULTS},
        params=[MODEL, *map(setting_option, SPECS.values()), *uvicorn_params],
        callback=serve,
        help="Serve transformers models over HTTP. MODEL is a hub id or a local path; its task is "
        "inferred from the checkpoint. Settings are environment variables too "
        "(PIPELINE_MODEL=…), also read from .env; a flag overrides them. With a MODEL, only it "
        "and models named by other flags are served. The flags at the end are uvicorn's. "
        "To measure which batch settings fit this machine: onequeue calibrate --help.",
    )
    return click.version_option(__version__, message="onequeue %(version)s")(command)


def serve(model: str | None, **flags: Any) -> None:
    """The command's callback: check the flags, then run uvicorn."""
    export_settings(model, flags)
    check_workers(flags["workers"] and str(flags["workers"]))
    if flags["uds"]:
        check_socket(flags["uds"])
    elif flags["fd"] is None:
        check_address(flags["host"], flags["port"])
    certfile, keyfile = flags["ssl_certfile"], flags["ssl_keyfile"]
    if certfile or keyfile:
        check_certificate(certfile, keyfile)
    settings = load_settings()
    check_hub(settings)  # before the imports
    if flags["log_config"] is None:
        flags |= {"log_config": uvicorn_config(settings.log_format), "use_colors": None}
    from server.app import create_app, make_app

    if flags["reload"]:  # the child processes make the app, from this environment
        create_app(settings)
    else:
        make_app()
    assert uvicorn_command.callback
    with refusing(f"--ssl-certfile {certfile} --ssl-keyfile {keyfile or certfile}", ssl.SSLError):
        uvicorn_command.callback(**APP, **flags)


def export_settings(model: str | None, flags: dict[str, Any]) -> None:
    """Remove the settings from `flags` and put them into the environment.

    Precedence: flags, environment, the file of `--env-file`, `.env`. The files are loaded here
    since uvicorn loads its own after the app is made."""
    for file in (flags.get("env_file"), ".env"):
        if file:
            load_env_file(file)
    settings = {name: flags.pop(name) for name in SPECS}
    export_flags(assign_model(model, settings) if model else settings)


class SettingsCommand(click.Command):
    """A command whose help lists the settings apart from other flags."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.width = min(100, shutil.get_terminal_size().columns)
        options = [param for param in self.params if isinstance(param, click.Option)]
        for are_settings, group in groupby(options, lambda option: option.name in SPECS):
            with formatter.section("Settings" if are_settings else "Flags"):
                rows = [option.get_help_record(ctx) for option in group]
                formatter.write_dl([row for row in rows if row])


def default_text(default: Any) -> str:
    """Return the default as a user writes it in the environment."""
    if default is None:
        return "auto"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or "empty"
    return f"{default:g}" if isinstance(default, float) else str(default)


def setting_option(spec: Field[Any]) -> click.Option:
    choices = spec.metadata["choices"]
    text = spec.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
    value_type: Any = get_args(spec.type)[0] if get_args(spec.type) else spec.type
    return click.Option(
        ["--" + spec.name.replace("_", "-")],
        metavar=METAVARS[value_type],
        help=f"{text} ({default_text(spec.default)})",
        allow_from_autoenv=False,
    )


def run_command(name: str, make: Callable[[], click.Command], args: Sequence[str]) -> None:
    """Run a command; print an error as one line and exit with status 2."""
    try:
        make().main(list(args), prog_name=name, standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):  # Ctrl-C
        raise SystemExit(130) from None
    except click.ClickException as error:
        exit_with_error(f"{error.format_message()} (see {name} --help)", MISUSE)
    except SettingsError as error:
        exit_with_error(error, MISUSE)
