"""The masks of a step equal llguidance's own, computed one row and one draft at a time."""

import threading

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests import tiny_chat
from tests.generating import when_ready
from worker.grammar.bitmask import BitmaskComputer, PendingMask
from worker.grammar.compiler import GrammarCompiler
from worker.messages.generation import Constraint
from worker.model.sampler import TokenMask

TOKENIZER = tiny_chat.tokenizer()
WIDTH = len(TOKENIZER) + 5  # a model may have more logits than the tokenizer has tokens
END = TOKENIZER.eos_token_id
GRAMMARS = GrammarCompiler(TOKENIZER, WIDTH, [END])
MASKS = BitmaskComputer(WIDTH, [END])


def matcher(regex: str) -> LLMatcher:
    grammar = when_ready(lambda: GRAMMARS.compile_constraint(Constraint("regex", regex, "r")))
    return grammar.matcher.deep_copy()


def computed(wanted: list[tuple[int, PendingMask]], computer: BitmaskComputer = MASKS) -> TokenMask:
    """The masks of outputs, each with its first row."""
    masks = [mask for _, mask in wanted]
    computer.start(masks)
    for mask in masks:
        mask.outcome.result(60)
    counts = [1 + len(mask.drafts) for mask in masks]
    return computer.token_mask(list(zip([row for row, _ in wanted], counts, masks, strict=True)))


def alone(of: LLMatcher) -> torch.Tensor:
    bits = np.frombuffer(of.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=WIDTH, bitorder="little")).bool()


def test_each_row_and_draft_has_its_mask() -> None:
    drafts = tuple(TOKENIZER.encode("Paris", add_special_tokens=False))
    first, second = matcher("(Paris|Pa)[0-9]"), matcher("[a-c]+")
    wanted = [(1, PendingMask(first, drafts)), (9, PendingMask(second))]
    allowed = computed(wanted)
    assert list(allowed.rows) == [*range(1, 2 + len(drafts)), 9]
    expected = [alone(first)]
    for draft in drafts:
        assert expected[-1][draft]
        assert first.consume_token(draft)
        expected.append(alone(first))
    expected.append(alone(second))
    assert torch.equal(allowed.tokens, torch.stack(expected))
    assert not allowed.tokens[:, len(TOKENIZER) :].any()


def test_masks_of_single_and_additional_tokens() -> None:
    held = matcher("[a-c]+")
    wanted = [
        (0, PendingMask(held, extra_token=4)),
        (1, PendingMask(forced_token=40)),
        (2, PendingMask(drafts=(8, 9), forbids_stop=True)),
    ]
    allowed = computed(wanted).tokens
    also = alone(held)
    also[4] = True
    assert torch.equal(allowed[0], also)
    assert allowed[1].nonzero()[:, 0].tolist() == [40]
    for row in allowed[2:]:
        assert (~row).nonzero()[:, 0].tolist() == [END]


def test_failed_thread_start_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    computer = BitmaskComputer(WIDTH, [END])
    wanted = [(0, PendingMask(matcher("[a-c]+")))]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", out_of_threads)
        with pytest.raises(RuntimeError):
            computed(wanted, computer)
    assert torch.equal(computed(wanted, computer).tokens[0], alone(matcher("[a-c]+")))


def out_of_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
