"""What the README states from the code is what the code says; its Python runs."""

from __future__ import annotations

import inspect
import re

import pytest
import tables
from transformers import GenerationConfig, GenerationMixin

from hf_cb.hf.calls import option_table

README = tables.README.read_text()


def test_option_table() -> None:
    assert tables.between_marks(README, "options") == option_table.markdown(), "run: python tests/tables.py"


def test_model_table() -> None:
    assert tables.between_marks(README, "models") == tables.model_table(), "run: python tests/tables.py"


def test_command_table() -> None:
    assert tables.between_marks(README, "commands") == tables.command_table(), "run: python tests/tables.py"


def test_every_option_of_this_transformers_has_a_fate() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    assert fields | parameters <= option_table.FATES.keys()


@pytest.mark.timeout(300)  # a cold cache prepares the model first
@pytest.mark.parametrize("beginning", ["from concurrent", "from transformers import pipeline"])
def test_the_examples_run(beginning: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(rf"```python\n({beginning}[^`]*)```", README)
    exec(compile(example, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
