"""Dynamo counts recompilations by code, and the code of a test is that of all its cases: each begins anew."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
