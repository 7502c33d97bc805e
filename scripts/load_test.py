#!/usr/bin/env python3
"""Load-test an HTTP inference server by URL; --help lists the options.

The command is server/commands/load_test/. It needs no installed packages.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server.commands.load_test.command import load_command

if __name__ == "__main__":
    load_command("load_test.py", sys.argv[1:])
