"""Fixtures of several test modules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.verify.perf_records import FakeSampler, make_plan, record, speeds


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A complete performance record of a candidate that is 10 % faster everywhere. Tests must not change it."""
    return record(tmp_path_factory.mktemp("accepted"), make_plan(), FakeSampler(speeds(0.1)))
