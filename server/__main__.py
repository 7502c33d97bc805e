"""`python -m server [MODEL]` serves; `python -m server calibrate` measures batch settings.

The commands are server/commands/serve.py and server/commands/calibrate/.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import sys
from collections.abc import Sequence

from server.commands.serve import PROGRAM, run_command, serve_command


def main(args: Sequence[str]) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if args[:1] != ["calibrate"]:
        run_command(PROGRAM, serve_command, args)
        return
    from server.commands.calibrate.command import calibrate_command

    run_command(f"{PROGRAM} calibrate", calibrate_command, args[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
