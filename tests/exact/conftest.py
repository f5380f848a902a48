"""Fixtures of these tests."""

import pytest
from exact_support import Recovered

from retrograde._engine import call as calls


@pytest.fixture
def recovered(monkeypatch):
    log = Recovered()
    monkeypatch.setattr(calls, "observer", log)
    return log
