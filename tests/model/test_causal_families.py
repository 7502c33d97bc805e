"""Every causal language model of transformers that can be made tiny generates as `generate` does,
however it runs; docs/architectures.md has the same result."""

from pathlib import Path

import pytest

from tests.causal_families import families
from tests.causal_parity import check_family

ROOT = Path(__file__).parents[2]
RUNS = {"paged": "paged", "transformers' cache": "own cache", "refused": "refused"}


def documented() -> dict[str, str]:
    """Return the mode of each model type in the table."""
    modes: dict[str, str] = {}
    for line in (ROOT / "docs" / "architectures.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] in RUNS:
            modes |= {kind.strip("` "): RUNS[cells[0]] for kind in cells[2].split(",")}
    return modes


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(documented()))
def test_outputs_equal_those_of_generate(kind: str, tmp_path: Path) -> None:
    assert check_family(kind, tmp_path / kind).mode == documented()[kind]


def test_the_table_has_the_models_of_transformers() -> None:
    kinds = families()
    assert len(documented()) > 150
    assert documented().keys() <= kinds.keys()
    assert documented()["llama"] == documented()["qwen3_5_text"] == "paged"
