"""Bundles for the tests of this folder, decided by stand-ins for the gates' decision functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bundle_fixtures as fixtures
import pytest

from reports import protocols


@pytest.fixture(autouse=True, scope="module")
def stand_ins() -> Iterator[None]:
    """Decide by the stand-ins: these tests are about bundles, not about what a gate's numbers mean."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocols, "implementation", fixtures.implementation)
        yield


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An accepted bundle. Tests must not change it."""
    return fixtures.make_bundle(tmp_path_factory.mktemp("accepted"))
