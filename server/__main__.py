"""`python -m server [MODEL]`, which `scripts/serve` is: uvicorn's command, with a model and the
settings as flags; `python -m server calibrate` measures which of them to choose.

A flag becomes the environment's, over what was there; then it is `uvicorn server.app:app`. What
makes no sense is said in one line, status 2, before torch is imported.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of what is being imported

import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, get_args

import click
from dotenv import load_dotenv
from uvicorn.main import main as uvicorn_command

from server import __version__
from server.core.log import uvicorn_config
from server.core.settings import Settings, SettingsError, load_settings, put_flags
from server.preflight import MISUSE, check_address, check_socket, check_workers, place, refuse

PROGRAM = "python -m server"
APP = {"app": "server.app:app", "app_dir": "", "factory": False}
# a client that neither reads nor leaves must not keep a stopped server alive
DEFAULTS = {"timeout_graceful_shutdown": 5}
METAVARS = {str: "NAME", int: "N", float: "N", bool: "on|off"}
SERVED = ["pipeline", "chat", "embedding", "rerank", "speech"]
MODEL = click.Argument(["model"], required=False)


class Command(click.Command):
    """Whose help has the settings apart from other flags."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = {spec.name for spec in fields(Settings)}
        formatter.width = min(100, shutil.get_terminal_size().columns)
        options = [each for each in self.params if isinstance(each, click.Option)]
        for ours, group in groupby(options, lambda each: each.name in names):
            with formatter.section("Settings" if ours else "Flags"):
                formatter.write_dl([row for each in group if (row := each.get_help_record(ctx))])


def command() -> click.Command:
    theirs = [each for each in uvicorn_command.params if each.name not in (*APP, "version")]
    made = Command(
        "server",
        context_settings={**uvicorn_command.context_settings, "default_map": DEFAULTS},
        params=[MODEL, *map(option, fields(Settings)), *theirs],
        callback=start,
        help="Serve transformers models over HTTP. MODEL is a hub id or a local path; what it is "
        "for is read off its files. Settings are environment variables too "
        "(PIPELINE_MODEL=…), read from .env as well; a flag wins. With a MODEL, nothing else is "
        "served but what another flag names. The flags at the end are uvicorn's. Which numbers to "
        f"choose is measured: {PROGRAM} calibrate --help.",
    )
    return click.version_option(__version__, message="onequeue %(version)s")(made)


def option(spec: Any) -> click.Option:
    default = "auto" if spec.default is None else spec.default
    choices = spec.metadata["choices"]
    text = spec.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
    return click.Option(
        ["--" + spec.name.replace("_", "-")],
        metavar=METAVARS[get_args(spec.type)[0] if get_args(spec.type) else spec.type],
        help=f"{text} ({'off' if default is False else default or 'empty'})",
        allow_from_autoenv=False,
    )


def put_settings(model: str | None, given: dict[str, Any]) -> None:
    """Take the settings out of what was given, and put them into the environment, over what was
    there, over files; of these uvicorn would read its own when there is an app already."""
    for file in (given.get("env_file"), ".env"):
        if file:
            load_dotenv(file)
    flags = {spec.name: given.pop(spec.name) for spec in fields(Settings)}
    put_flags(place(model, flags) if model else flags)


def start(model: str | None, **given: Any) -> None:
    put_settings(model, given)
    check_workers(given["workers"] and str(given["workers"]))
    if given["uds"]:
        check_socket(given["uds"])
    elif given["fd"] is None:
        check_address(given["host"], given["port"])
    if given["log_config"] is None:
        given |= {"log_config": uvicorn_config(), "use_colors": None}
    from server.app import create_app, make_app

    if given["reload"]:  # the processes that serve make theirs, with this environment
        create_app(load_settings())
    else:
        make_app()
    assert uvicorn_command.callback
    uvicorn_command.callback(**APP, **given)


def calibration() -> click.Command:
    def add(name: str, kind: Any, text: str, **more: Any) -> click.Option:
        return click.Option(name.split(), type=kind, help=text, show_default=True, **more)

    above_0, served = click.FloatRange(0, min_open=True), click.Choice(SERVED)
    file = "what to post to /, or to transcribe, in place of something made up"
    words = "of a text, at least and at most"
    within = "95 % of the answers are to come within so many milliseconds"
    own = [
        add("--p95-ms", above_0, within, required=True, metavar="N"),
        add("--serves", served, "which of the models is measured (the first that is served)"),
        add("--words", (int, int), words, default=(4, 20), metavar="LOW HIGH"),
        add("--tokens", click.IntRange(1), "of a chat's answer", default=32, metavar="N"),
        add("--input file", click.File("rb"), file, metavar="FILE"),
    ]
    return Command(
        "calibrate",
        params=[MODEL, *own, *map(option, fields(Settings))],
        callback=start_calibration,
        help="Find the rate of requests that keeps a percentile on this machine, and the settings "
        "for it. It takes a minute or two; let nothing else run.",
    )


def start_calibration(model: str | None, **given: Any) -> None:
    put_settings(model, given)
    from server.app import make_app
    from server.commands.calibrate.command import Options, calibrate

    file = given.pop("file")
    options = Options(**given, file=file.read() if file else None)
    if calibrate(make_app(), options, click.echo) is None:
        raise SystemExit(1)


def main(words: Sequence[str]) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    name, make = PROGRAM, command
    if words[:1] == ["calibrate"]:
        name, make, words = f"{PROGRAM} calibrate", calibration, words[1:]
    try:
        make().main(list(words), prog_name=name, standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):  # Ctrl-C
        raise SystemExit(130) from None
    except click.ClickException as error:
        refuse(f"{error.format_message()} ({name} --help lists them)", MISUSE)
    except SettingsError as error:
        refuse(error, MISUSE)


if __name__ == "__main__":
    main(sys.argv[1:])
