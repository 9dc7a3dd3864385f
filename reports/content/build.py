"""Puts the report together: the first screen, then a section per gate and per question."""

from __future__ import annotations

from collections.abc import Sequence

from harness.records import GATES, Outcome, VerdictWord
from reports.content.gates import gate_section, why_not_run
from reports.content.glossary import glossary_section
from reports.content.model import evals_blocks, features_blocks
from reports.content.numerics import kernels_blocks
from reports.content.path import path_blocks
from reports.content.peers import peers_section
from reports.content.perf import interval, perf_blocks, ratio
from reports.content.perf_cells import PerfView, perf_view
from reports.content.provenance import (
    change_section,
    disclosure_section,
    environment_section,
    limits_section,
    others_section,
    reproduce_section,
)
from reports.content.words import VERDICT_TONES, outcome_word
from reports.document import Code, Content, Document, Section, Strong, Word
from reports.load import Loaded
from reports.patch import Patch, read_patch
from reports.text import count, duration

__all__ = ["build_document"]

_FILES_SHOWN = 4


def build_document(loaded: Loaded) -> Document:
    """Build the report of an intact bundle."""
    bundle = loaded.bundle
    patch = read_patch(loaded.files["candidate.patch"])
    view = perf_view(loaded)
    word = bundle.verdict.word
    return Document(
        title=f"Candidate {bundle.name} of run {bundle.run} on target {bundle.target.name}",
        verdict=Word(word.value, VERDICT_TONES[word]),
        sentence=_sentence(loaded),
        summary=_summary(loaded, patch, view),
        gates=_gates(loaded),
        sections=_sections(loaded, patch, view),
        footer=_footer(loaded),
    )


def _sentence(loaded: Loaded) -> str:
    verdict = loaded.bundle.verdict
    target, tier = loaded.bundle.target.name, loaded.bundle.tier.name
    if verdict.word is VerdictWord.ACCEPT:
        return f"All {count(len(verdict.required), 'gate')} that target {target} requires passed, at tier {tier}."
    if verdict.word is VerdictWord.REJECT:
        first = loaded.results[verdict.failed[0]].reasons[0]
        return f"Gate {verdict.failed[0]} failed at {first.where}: {first.message}."
    passed = {gate for gate, result in loaded.results.items() if result.outcome is Outcome.PASSED}
    missing = [gate for gate in GATES if gate in verdict.required and gate not in passed]
    needs = f"accept also needs {', '.join(missing)}" if missing else "accept needs other evidence"
    return f"No gate failed, but {needs}: {verdict.unmet[0].message}."


def _summary(loaded: Loaded, patch: Patch, view: PerfView | None) -> list[tuple[str, Sequence[Content]]]:
    bundle = loaded.bundle
    return [
        ("What changes", _changes(loaded, patch)),
        ("Where it applies", _applies(loaded)),
        ("What it cannot touch", _isolation(loaded)),
        ("How fast, at worst", _headline(loaded, view)),
        ("What is not shown", [*_not_shown(loaded), bundle.limits[0]]),
        ("Who proposed it", [(Code(bundle.candidate.origin), ": ", bundle.disclosure.statement)]),
    ]


def _changes(loaded: Loaded, patch: Patch) -> list[Content]:
    allowed = loaded.bundle.allowed
    lines: list[Content] = []
    if allowed:
        lines.append(Strong(f"{count(len(allowed), 'protected path')} allowed by a person: {', '.join(allowed)}"))
    ops = ", ".join(patch.ops) or "no op"
    size = f"+{patch.added:,} −{patch.removed:,} lines ({patch.band} complexity)"
    lines.append(f"{count(len(patch.files), 'file')}, {size}; ops: {ops}")
    lines += [Code(file.path) for file in patch.files[:_FILES_SHOWN]]
    if len(patch.files) > _FILES_SHOWN:
        lines.append(f"and {count(len(patch.files) - _FILES_SHOWN, 'more file')}")
    return lines


def _applies(loaded: Loaded) -> list[Content]:
    bundle = loaded.bundle
    target = bundle.target
    batches = sorted({cell.batch for cell in bundle.cells})
    contexts = sorted({cell.context for cell in bundle.cells if cell.context is not None})
    return [
        f"{target.name}: geometry {target.geometry}, {', '.join(target.archs)}",
        f"tier {bundle.tier.name} plans {count(len(bundle.cells), 'cell')}: "
        f"batch {_values(batches)}; context {_values(contexts)}",
    ]


def _values(values: Sequence[int]) -> str:
    if not values:
        return "any"
    return ", ".join(f"{value:,}" for value in values)


def _isolation(loaded: Loaded) -> list[Content]:
    scope = loaded.results.get("scope")
    state: Content = "the scope gate did not run" if scope is None else outcome_word(scope.outcome)
    lines: list[Content] = [("Everything outside ", *_joined(loaded.bundle.scope.editable), ".")]
    lines.append(("Scope gate: ", state) if isinstance(state, Word) else str(state))
    lines.append(("Judged by protected code of base ", Code(loaded.bundle.commits.base[:12]), ", never by its own."))
    return lines


def _joined(globs: Sequence[str]) -> list[Code | str]:
    out: list[Code | str] = []
    for index, glob in enumerate(globs):
        out += [", "] if index else []
        out.append(Code(glob))
    return out


def _headline(loaded: Loaded, view: PerfView | None) -> list[Content]:
    if view is None or not view.arms:
        result = loaded.results.get("perf")
        why = why_not_run(loaded) if result is None else result.reasons[0].message if result.reasons else "no cell"
        return [f"Not measured: {why}."]
    lines: list[Content] = []
    for arm in view.arms:
        worst, best = view.worst(arm), view.best(arm)
        if worst is None or best is None:
            lines.append(f"against {view.arm_names[arm]}: no cell could be compared")
            continue
        low, high = worst.against[arm], best.against[arm]
        text = f" [{interval(low)}] against {view.arm_names[arm]}, in its worst cell "
        rest = f"; best {ratio(high.ratio or 0.0)}"
        lines.append((Strong(ratio(low.ratio or 0.0)), text, Code(worst.cell.key), rest))
    return lines


def _not_shown(loaded: Loaded) -> list[Content]:
    lines: list[Content] = []
    for gate in loaded.bundle.target.required:
        result = loaded.results.get(gate)
        if result is None:
            lines.append((Code(gate), " did not run"))
        elif result.outcome in (Outcome.NOT_EVALUATED, Outcome.INCONCLUSIVE):
            lines.append((Code(gate), " ", outcome_word(result.outcome), f" {result.reasons[0].message}"))
    return lines or ["Every required gate was evaluated."]


def _gates(loaded: Loaded) -> list[tuple[str, Word, str, bool]]:
    rows: list[tuple[str, Word, str, bool]] = []
    for gate in GATES:
        result = loaded.results.get(gate)
        required = gate in loaded.bundle.target.required
        if result is None:
            rows.append((gate, Word("not run", "none"), why_not_run(loaded), required))
            continue
        if result.reasons:
            more = f" (and {len(result.reasons) - 1} more)" if len(result.reasons) > 1 else ""
            line = f"{result.reasons[0].message}{more}"
        else:
            kind = "" if result.evidence_class is None else f"{result.evidence_class.value} evidence, "
            line = f"{kind}{len(loaded.raw.get(gate, ())):,} raw lines, {duration(result.seconds)}"
        rows.append((gate, outcome_word(result.outcome), line, required))
    return rows


def _sections(loaded: Loaded, patch: Patch, view: PerfView | None) -> list[Section]:
    extra = {
        "perf": perf_blocks(view) if view is not None else [],
        "kernels": kernels_blocks(loaded),
        "path": path_blocks(loaded),
        "features": features_blocks(loaded),
        "evals": evals_blocks(loaded),
    }
    gates = {gate: gate_section(gate, loaded, extra.get(gate, ())) for gate in GATES}
    return [
        change_section(loaded, patch),
        gates.pop("perf"),
        *peers_section(loaded),
        *(gates[gate] for gate in ("kernels", "path", "features", "evals", "audit", "scope", "build")),
        disclosure_section(loaded),
        others_section(loaded),
        environment_section(loaded),
        reproduce_section(loaded),
        limits_section(loaded),
        glossary_section(),
    ]


def _footer(loaded: Loaded) -> list[Content]:
    bundle = loaded.bundle
    return [
        f"Finished {bundle.finished} after {duration(bundle.seconds)}. "
        f"Bundle schema {bundle.schema_version}, report {bundle.render_version}.",
        (
            "Check this bundle: ",
            Code("fasttrack bundle verify FOLDER"),
            ". It hashes every file, decides every gate again and renders this report again.",
        ),
    ]
