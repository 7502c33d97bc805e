"""The masks of a step equal llguidance's own, computed one row and one draft at a time."""

import threading

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests import tiny_chat
from tests.generating import when_ready
from worker.grammar.bitmask import BitmaskComputer, MaskRequest
from worker.grammar.compiler import GrammarCompiler
from worker.messages.generation import Constraint

TOKENIZER = tiny_chat.tokenizer()
WIDTH = len(TOKENIZER) + 5  # a model may have more logits than the tokenizer has tokens
END = TOKENIZER.eos_token_id
GRAMMARS = GrammarCompiler(TOKENIZER, WIDTH, [END])
MASKS = BitmaskComputer(WIDTH, [END])


def matcher(regex: str) -> LLMatcher:
    grammar = when_ready(lambda: GRAMMARS.compile_constraint(Constraint("regex", regex, "r")))
    return grammar.matcher.deep_copy()


def alone(of: LLMatcher) -> torch.Tensor:
    bits = np.frombuffer(of.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=WIDTH, bitorder="little")).bool()


def test_each_row_and_draft_has_its_mask() -> None:
    drafts = tuple(TOKENIZER.encode("Paris", add_special_tokens=False))
    first, second = matcher("(Paris|Pa)[0-9]"), matcher("[a-c]+")
    wanted = [(1, MaskRequest(first, drafts)), (9, MaskRequest(second))]
    pending = MASKS.start(wanted)
    assert pending is not None
    allowed = pending.result()
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
        (0, MaskRequest(held, extra_token=4)),
        (1, MaskRequest(forced_token=40)),
        (2, MaskRequest(drafts=(8, 9), forbids_stop=True)),
    ]
    pending = MASKS.start(wanted)
    assert pending is not None
    allowed = pending.result().tokens
    also = alone(held)
    also[4] = True
    assert torch.equal(allowed[0], also)
    assert allowed[1].nonzero()[:, 0].tolist() == [40]
    for row in allowed[2:]:
        assert (~row).nonzero()[:, 0].tolist() == [END]
    assert MASKS.start([]) is None


def test_failed_thread_start_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = BitmaskComputer(64, [])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", out_of_threads)
        with pytest.raises(RuntimeError):
            masks.start([(0, MaskRequest(forced_token=3))])
    pending = masks.start([(0, MaskRequest(forced_token=3))])
    assert pending is not None
    assert pending.result().tokens.nonzero().tolist() == [[0, 3]]


def out_of_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
