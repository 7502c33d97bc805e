"""Run a script with the packages of .venv. Scripts import this module before installed packages.

A script that was started with a Python without these packages starts again with .venv/bin/python.
The checkout precedes an installed copy of its packages on sys.path.
"""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"

if not importlib.util.find_spec("transformers"):
    if Path(sys.executable) == PYTHON or not PYTHON.exists():
        raise SystemExit(f"{sys.argv[0]} needs the packages in .venv: run scripts/install first")
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
