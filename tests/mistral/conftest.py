"""The tests here need mistral-common; tests/process/test_packages.py runs them with it."""

import importlib.util

if importlib.util.find_spec("mistral_common") is None:
    collect_ignore_glob = ["test_*"]
