"""The findings of the performance gate by code; docs/reasons.md shows this table."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CODES"]

CODES: Mapping[str, str] = {
    "perf.cell_slower": "a cell is slower than its claim allows, by its upper bound, or clearly in both first blocks",
    "perf.cell_not_faster": "a cell that must gain is shown to have the same speed",
    "perf.cell_undecided": "a cell's interval is too wide for its claim",
    "perf.no_gain": "no cell is faster than the current best, and none can be by more than the band",
    "perf.look": "one block was measured: it shows a size, no bound, and can accept nothing",
    "perf.gain_undecided": "no cell is shown faster than the current best, but some may be",
    "perf.identical": "the candidate's artifacts and schedules are those of the current best",
    "perf.output_mismatch": "outputs or states of timed calls are wrong or were not compared",
    "perf.fallback": "timed calls took the standard path",
    "perf.below_floor": "a timed call is faster than this machine can move and compute what it must",
    "perf.crash": "the candidate's process ended",
    "perf.timeout": "the candidate's process did not answer in time",
    "perf.protocol": "the candidate's process sent what trusted code never sends",
    "perf.error": "a call of the candidate raised or was refused",
    "perf.futile": "stopped after two blocks: the cells that must gain lost on average in both",
    "perf.control": "the current best does not read 1.00 against itself",
    "perf.clock_disagrees": "the evaluator's and the worker's clock differ in too many slices",
    "perf.clock_forged": "a worker reports more time than passed on the evaluator's clock",
    "perf.floor_missing": "the record holds no ceilings of the machine",
    "perf.floor_wrong": "the standard arm is faster than its floor",
    "perf.baseline_mismatch": "outputs of the current best or of its control are wrong",
    "perf.rig_fault": "a process other than the candidate's died",
    "perf.incomplete_record": "the raw lines do not hold all blocks of the plan",
    "perf.malformed": "a block is not one that the protocol allows: order, seed, number and length of slices, cells",
    "perf.plan": "the plan could not control its error, or the header is malformed",
    "perf.kit": "a GPU machine has to evaluate this: build a kit, run it there, import its results",
    "perf.device": "this machine cannot run the target's kernels",
    "perf.no_artifacts": "there are no built artifacts to run",
    "perf.environment": "the machine could not run the gate",
    "perf.internal_error": "the gate itself failed",
}
"""Code -> meaning."""
