"""The tests of this folder need torchvision; tests/process/test_packages.py runs them with it."""

import importlib.util

if importlib.util.find_spec("torchvision") is None:
    collect_ignore_glob = ["test_*"]
