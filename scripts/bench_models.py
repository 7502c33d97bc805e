#!/usr/bin/env python3
"""Chat models of random weights in bfloat16, for `bench.py generation`, each made in a process.

Each token of the vocabulary has a text, so that the first token of a response is seen. Those that
the demo's tokenizer lacks never occur in prompts.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import environment

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 4096,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
TOKENIZER = environment.ROOT / "worker" / "demo" / "chat"


def make_model(shape: str) -> str:
    """Return the folder of the model, which is made if it is not there."""
    folder = Path(tempfile.gettempdir()) / f"onequeue-bench-{shape}"
    if not (folder / "tokenizer.json").exists():
        subprocess.run([sys.executable, __file__, shape, str(folder)], check=True)
    return str(folder)


def save(shape: str, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=40960, dtype="bfloat16", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    untyped: Any = Qwen3ForCausalLM  # not annotated
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = untyped._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    # added tokens keep their ids if the vocabulary has them too
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary |= {f"Ġ{number}": number for number in range(len(tokenizer), config.vocab_size)}
    file.write_text(json.dumps(content))


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
