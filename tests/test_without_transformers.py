"""Where transformers is not installed, only what needs it is refused."""

import sys

import pytest
from torch import nn

from funcspec.errors import ModelError
from funcspec.models import huggingface
from funcspec.models.huggingface import load


def test_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: huggingface(nn.Linear(2, 2)), lambda: load("somewhere")):
        with pytest.raises(ModelError, match=r"^transformers: expected .* got none\. Fix: pip install 'funcspec\[huggingface\]'\.$"):
            call()
