"""The command `onequeue`, also `python -m server`: serve, calibrate, load, template, cache and
build.

Each subcommand is a module of server/commands/ and is imported when it runs: the load test needs
neither torch nor a web server.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import logging
import sys
from collections.abc import Sequence

from server import __version__

HELP = """\
usage: onequeue COMMAND …

  serve [MODEL]       serve models over HTTP; without MODEL, the demo models
  calibrate [MODEL]   measure the request rate that this machine sustains, and the settings for it
  load URL …          load-test an HTTP inference server
  template MODEL      print the formats of tool calls and reasoning inferred from a chat template
  cache ls|clear      show or remove the keys and values in KV_CACHE_DIR
  build               build the native operations for this CPU, which the first start would build

onequeue COMMAND --help lists the options of a command; onequeue --version prints the version."""
MISUSE = 2  # exit status, as argparse's


def main(argv: Sequence[str] | None = None) -> None:
    name, *args = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "serve":
        from server.commands.serve import run_command, serve_command

        restore_interrupt()
        run_command("onequeue serve", serve_command, args)
    elif name == "calibrate":
        from server.commands.calibrate import calibrate_command
        from server.commands.serve import run_command

        restore_interrupt()
        run_command("onequeue calibrate", calibrate_command, args)
    elif name == "load":
        from server.commands.load_test.command import load_command

        restore_interrupt()
        load_command("onequeue load", args)
    elif name == "template":
        from server.commands.template import template_command

        logging.disable(logging.WARNING)  # the report has them
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` is no error
        template_command("onequeue template", args)
    elif name == "cache":
        from server.commands.cache import cache_command

        cache_command("onequeue cache", args)
    elif name == "build":
        from worker.backends.native_attention import build_command

        build_command("onequeue build", args)
    elif name in ("-h", "--help"):
        print(HELP)
    elif name == "--version":
        print(f"onequeue {__version__}")
    else:
        print(
            f"onequeue: unknown command {name!r}: serve, calibrate, load, template, cache, build",
            file=sys.stderr,
        )
        raise SystemExit(MISUSE)


def restore_interrupt() -> None:
    """Raise KeyboardInterrupt again on Ctrl-C, after the imports."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
