"""Bundles for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import bundle_fixtures as fixtures
import pytest


@pytest.fixture(scope="session")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An accepted bundle of the smoke tier. Tests must not change it."""
    return fixtures.make_bundle(tmp_path_factory.mktemp("accepted"))


@pytest.fixture(scope="session")
def accepted_pr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An accepted bundle of the pr tier: 14 cells, two stages. Tests must not change it."""
    return fixtures.make_bundle(tmp_path_factory.mktemp("accepted_pr"), tier="pr")
