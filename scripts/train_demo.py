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
from demo_chat import chat
from demo_embedding import embedding
from demo_fill_mask import fill_mask
from demo_speech import speech


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model that onequeue contains.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = environment.ROOT / "worker" / "demo"
    for name, train_model, about, minutes in (
        ("fill-mask", fill_mask, "plain facts with one word hidden", 6.0),
        ("chat", chat, "the same facts as dialogues, and a weather tool", 28.0),
        ("speech", speech, "ten digits as tones, in two voices", 5.0),
        ("embedding", embedding, "the same facts; phrasings of one fact are similar", 2.0),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("--out", type=Path, default=demo / name)
        command.add_argument("--minutes", type=float, default=minutes, help="about, on two cores")
        command.set_defaults(train=train_model)
    args = parser.parse_args()
    torch.set_num_threads(2)
    args.train(args.out, args.minutes)
    for path in args.out.iterdir():
        # Checkpoints are saved with mode 600, which a container image would keep.
        path.chmod(0o644)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
