#!/usr/bin/env python3
"""Train the tiny models that onequeue contains, so that it runs without a download.

    scripts/train_demo.py {fill-mask,chat,embedding,speech} [--out DIR] [--minutes M]

All training data is generated from the short lists in demo/. A model memorizes those facts in many
phrasings and knows nothing else; it says nothing about real checkpoints. The same seed and minutes
give the same steps, whatever the speed of the machine.
"""

import argparse
from pathlib import Path

import environment  # noqa: F401  # first: may start the script again with .venv
import torch
from demo_bert import embedding, fill_mask
from demo_chat import chat
from demo_speech import speech
from demo_training import DEMO, train

# Minutes by default, about, on two cores; and steps per minute.
MODELS = {
    "fill-mask": (fill_mask, 6.0, 500),  # plain facts with one word hidden
    "chat": (chat, 28.0, 250),  # the same facts as dialogues, and a weather tool
    "speech": (speech, 5.0, 450),  # ten digits as tones, in two voices
    "embedding": (embedding, 2.0, 1500),  # the same facts; phrasings of one fact are similar
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model that onequeue contains.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, metavar="DIR", help="worker/demo/MODEL by default")
    parser.add_argument("--minutes", type=float, metavar="M", help="about, on two cores")
    args = parser.parse_args()
    torch.set_num_threads(2)
    make, minutes, steps_per_minute = MODELS[args.model]
    steps = round((args.minutes or minutes) * steps_per_minute)
    out = args.out or DEMO / args.model
    train(make(out, steps), steps, out)
    for path in out.iterdir():
        # Checkpoints are saved with mode 600, which a container image would keep.
        path.chmod(0o644)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
