"""Terms of the report, for readers who are new to the project."""

from __future__ import annotations

from reports.document import Facts, Section

__all__ = ["glossary_section"]

_TERMS = (
    ("arm", "One of the implementations compared: standard path, current best, candidate."),
    ("best", "The specialised kernels before this candidate: those of the base commit, or the run's best so far."),
    ("block", "One pass over all cells in which the arms are measured in alternation, close together in time."),
    ("cell", "One point of the matrix: batch size, cached tokens per request (context), query tokens, workload."),
    ("context", "Tokens already in the KV cache per request."),
    ("evidence class", "hardware: measured on the target's kind of device. static: read off code or artifacts."),
    ("FAST", "The interval lies wholly above 1: faster."),
    ("SAME", "No slower than the declared band allows, and not shown to be faster."),
    ("SLOW", "The interval lies wholly below what is allowed."),
    ("AMBG", "Too little separation to say."),
    ("????", "No valid input for a comparison."),
    ("gate", "A check that says passed, failed, inconclusive or not_evaluated. not_evaluated is not failed."),
    ("interval", "Confidence interval of the number before it, at the level that the protocol states."),
    ("ledger", "Counters in the step runner that say, per layer and op, which implementation ran."),
    ("protocol id", "Name and version of a gate's method. Results of different protocols are never compared."),
    ("raw lines", "What a gate recorded while measuring. Every outcome is a function of them."),
    (
        "ratio",
        "Time of the other arm divided by time of the candidate: at 1.25× the other arm takes 1.25 times as long.",
    ),
    ("standard path", "What stock serving runs, op by op in torch."),
    ("tier", "How much of the matrix is measured, and how often: smoke, pr or full."),
    ("verdict", "accept: every required gate passed. reject: a gate failed. incomplete: neither."),
    ("watermark", "A build with deliberately wrong numbers. If nothing notices it, the tests did not run the kernels."),
    ("worst cell", "The cell with the lowest ratio. No average is shown without it."),
)


def glossary_section() -> Section:
    """The glossary."""
    return Section("glossary", "Terms", (Facts(_TERMS),))
