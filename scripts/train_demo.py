#!/usr/bin/env python3
"""Train the tiny models that onequeue contains, so that it runs without a download.

    scripts/train_demo.py {fill-mask,chat,embedding,speech} [--out DIR] [--minutes M]

All training data is generated from the short lists in demo/. A model memorizes those facts in many
phrasings and knows nothing else; it says nothing about real checkpoints. The same seed and minutes
give the same steps, whatever the speed of the machine.
"""

import argparse
from pathlib import Path

import environment  # first: may start the script again with .venv
import torch
from demo_bert import embedding, fill_mask
from demo_chat import chat
from demo_speech import speech
from demo_training import train

# Minutes by default, about, on two cores; and steps per minute.
MODELS = {
    "fill-mask": (fill_mask, "plain facts with one word hidden", 6.0, 500),
    "chat": (chat, "the same facts as dialogues, and a weather tool", 28.0, 250),
    "speech": (speech, "ten digits as tones, in two voices", 5.0, 450),
    "embedding": (embedding, "the same facts; phrasings of one fact are similar", 2.0, 1500),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model that onequeue contains.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, about, minutes, _) in MODELS.items():
        command = commands.add_parser(name, help=about)
        out = environment.ROOT / "worker" / "demo" / name
        command.add_argument("--out", type=Path, default=out)
        command.add_argument("--minutes", type=float, default=minutes, help="about, on two cores")
    args = parser.parse_args()
    torch.set_num_threads(2)
    make, _, _, steps_per_minute = MODELS[args.command]
    steps = round(args.minutes * steps_per_minute)
    train(make(args.out, steps), steps, args.out)
    for path in args.out.iterdir():
        # Checkpoints are saved with mode 600, which a container image would keep.
        path.chmod(0o644)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
