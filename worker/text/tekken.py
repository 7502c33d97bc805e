"""Tokenizers of checkpoints with a tekken.json, Mistral's: mistral-common renders their chats.

The library makes a fast tokenizer with the same ids of the file, and a chat template of the
package's rules, so that it serves like any other.
"""

from pathlib import Path
from typing import Any

from transformers.utils.import_utils import is_mistral_common_available

TEKKEN = "tekken.json"
INSTALL = "pip install mistral-common, which reads its tekken.json"


def fast_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of a tekken.json as a fast one with a chat template, any other, and all
    without mistral-common, unchanged."""
    file = _file(tokenizer)
    if file.name != TEKKEN or not is_mistral_common_available():
        return tokenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    fast: Any = convert_tekken_tokenizer(str(file))
    fast.add_bos_token = True
    # it names recordings as OpenAI's API does, a chat's parts are named as the library does
    names = "['input_audio', "
    fast.chat_template = (fast.chat_template or "").replace(names, f"['audio', {names[1:]}")
    return fast


def lacks_mistral_common(tokenizer: Any) -> bool:
    """Return whether a tekken.json was read without the package."""
    return _file(tokenizer).name == TEKKEN and not is_mistral_common_available()


def _file(tokenizer: Any) -> Path:
    if getattr(tokenizer, "backend", None) == "mistral_common":
        return Path(tokenizer.tokenizer.instruct_tokenizer.tokenizer.file_path)
    return Path(str(getattr(tokenizer, "vocab_file", None)))
