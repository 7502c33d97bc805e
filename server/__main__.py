"""`python -m server`: uvicorn with the settings as flags, over the environment's."""

import argparse
import sys
from dataclasses import fields

import uvicorn

from server.app import STARTUP_FAILURE, create_app
from server.settings import Settings, SettingsError, load_settings


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m server",
        description="Serve a transformers model over HTTP. Each flag is also an environment "
        "variable in capitals (PIPELINE_MODEL=…), read from .env too; a flag wins.",
    )
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    made.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    for spec in fields(Settings):
        default = ",".join(spec.default) if isinstance(spec.default, tuple) else spec.default
        default = "auto" if default is None else default
        choices = spec.metadata["choices"]
        text = spec.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
        made.add_argument(
            "--" + spec.name.replace("_", "-"),
            metavar=spec.name.upper(),
            help=f"{text} ({default if default not in ('', False) else 'off'})",
        )
    return made


def main() -> None:
    arguments = vars(parser().parse_args())
    host, port = arguments.pop("host"), arguments.pop("port")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        app = create_app(load_settings(overrides=given))
    except SettingsError as error:
        print(f"onequeue: {error}", file=sys.stderr)
        raise SystemExit(STARTUP_FAILURE) from None
    # a client that neither reads nor leaves must not keep a stopped server alive
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
