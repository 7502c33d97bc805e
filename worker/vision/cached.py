"""The model runner for what is not paged, with pictures: a prompt that has some runs by itself,
with the model's own forward and its cache.

Whether what it keeps between steps is right is asked of the model at load, as for text; without
that, such a prompt is run anew, pictures and all, for each token.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from batching.sequence import Chunk, Sequence
from worker.model.cached_runner import (
    CACHED,
    RECURRENT,
    STEPS,
    CachedRunner,
    Group,
    Past,
    Place,
    log_refusal,
    kept,
    place_of,
)
from worker.model.entrance import Entrance
from worker.model.language_model import LanguageModel
from worker.model.self_check import CannotRun, compare
from worker.vision.check import sample
from worker.vision.processor import Processor
from worker.vision.prompt import PicturePrompt
