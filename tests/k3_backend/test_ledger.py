"""The ledger: counts say what ran, by site, path and reason."""

from __future__ import annotations

import json

from spy_kernels import PICO

from k3_backend.model.program import decode_program
from k3_backend.step.ledger import Ledger


def test_counts_by_site_path_and_reason() -> None:
    """A site, a path or a reason is missing from the evidence of which code ran."""
    program = decode_program(PICO)
    ledger = Ledger(program)
    for site in program:
        ledger.counter(site)[0] += 2
    ledger.counter(program[3])[0] += 1
    ledger.count_specialized_step()
    ledger.count_standard_step(("batch.not_decode", "batch.ragged", "batch.not_decode"))
    ledger.count_standard_step(("batch.not_decode",))
    snapshot = ledger.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert [(row["layer"], row["op"], row["site"]) for row in snapshot["sites"]] == [
        (site.layer, site.op, site.name) for site in program
    ]
    assert [row["specialized"] for row in snapshot["sites"]] == [3 if i == 3 else 2 for i in range(len(program))]
    assert {row["standard"] for row in snapshot["sites"]} == {2}
    assert snapshot["steps"] == {"specialized": 1, "standard": 2}
    assert snapshot["fallbacks"] == {"batch.not_decode": 2, "batch.ragged": 1}


def test_reset_keeps_counter_addresses() -> None:
    """Captured steps count into freed or forgotten memory after a reset."""
    program = decode_program(PICO)
    ledger = Ledger(program)
    counter = ledger.counter(program[0])
    counter[0] = 5
    ledger.count_standard_step(("mode.off",))
    ledger.reset()
    empty = ledger.snapshot()
    assert all(row["specialized"] == row["standard"] == 0 for row in empty["sites"])
    assert empty["fallbacks"] == {}
    assert set(empty["steps"].values()) == {0}
    counter[0] += 1
    assert ledger.snapshot()["sites"][0]["specialized"] == 1
