"""`onequeue cache ls|clear`: the keys and values of KV_CACHE_DIR. Servers may run meanwhile: what
they have in memory stays."""

import argparse
import time
from collections.abc import Sequence

from server.core.settings import SettingsError, load_settings
from server.preflight import exit_with_error, open_stored_prefixes


def cache_command(program: str, argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(program, description=__doc__)
    parser.add_argument("action", choices=("ls", "clear"))
    action = parser.parse_args(argv).action
    try:
        settings = load_settings()
        if (store := open_stored_prefixes(settings)) is None:
            raise SettingsError("KV_CACHE_DIR is not set")
    except SettingsError as error:
        exit_with_error(error)
    if action == "clear":
        store.clear()
    usage, limit = store.usage, settings.kv_cache_dir_gb
    oldest_s = max(0.0, time.time() - usage.oldest_at)
    print(f"files={usage.files} gb={usage.bytes / 1e9:.3f} of={limit:g} oldest_s={oldest_s:.0f}")
