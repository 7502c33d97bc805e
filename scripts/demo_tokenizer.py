"""The chat demo model's tokenizer: Qwen2's pre-tokenizer, ChatML turns and Qwen's tool calls.

CHAT_TEMPLATE renders a conversation, RESPONSE_TEMPLATE describes how to parse the output. Every
byte is a token, so that any text in NFC is decoded exactly.
"""

import json
from collections.abc import Iterable
from typing import Any

from demo_corpus import FOLDER
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

VOCABULARY = 1536
MAX_LENGTH = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not special, so that decoding without special tokens keeps them for the response template.
TAGS = ["<tool_call>", "<tool_response>", "<think>"]
TAGS += [tag.replace("<", "</") for tag in TAGS]

CHAT_TEMPLATE = (FOLDER / "chat_template.jinja").read_text().strip()

RESPONSE_TEMPLATE = {
    "version": 1,
    "start_anchor": f"{START}assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            # White space before a call is not content: it would replace the text before it.
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {
            "close_pattern": r"\s*<\|(?:im_end|endoftext)\|>\s*",
            "content": "text",
        },
    },
}


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train byte pair encoding on the texts and add the tags."""
    learner = Tokenizer(models.BPE())
    reference: Any = (
        Qwen2Tokenizer().backend_tokenizer
    )  # the pre-tokenizer that Qwen2 models load with
    learner.normalizer, learner.pre_tokenizer = reference.normalizer, reference.pre_tokenizer
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    make: Any = Qwen2Tokenizer
    tokenizer: PreTrainedTokenizerFast = make(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=None,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer
