"""The GPU half of `fasttrack bench`: the peer table from a kit's results, or what to do to get them."""

from __future__ import annotations

from pathlib import Path

from fasttrack.console import EXIT_FALLS_SHORT, EXIT_FINE, EXIT_INCOMPLETE, Output
from fasttrack.workspace import Workspace
from harness.durable import disk_errors
from harness.errors import FasttrackError
from verify.kit.importing import require_ours
from verify.kit.receive import Received, read_results

__all__ = ["needs_kit", "show_peers"]

SECTION = "bench"


def needs_kit(target: str) -> FasttrackError:
    """What a machine says that cannot run the table itself."""
    return FasttrackError(
        f"target {target} is measured on its own kind of GPU, through a kit", where="--target",
        expected="--from R, with results of a kit that was built with --bench",
        next=f"fasttrack kit build --target {target} --gates kernels --bench --out K; "
        f"there: python3 K/kit.py run --gates bench --peers DIR --out R; "
        f"here: fasttrack bench --target {target} --peers --from R",
    )  # fmt: skip


def show_peers(
    out: Output,
    results: Path,
    *,
    target: str | None,
    op: str | None,
    mutants: Path | None,
    markdown: Path | None,
    shortened: bool = False,
) -> int:
    """Check a kit's results, decide every row from the raw lines, print; the exit code.

    Args:
        out: where to print.
        results: folder that `kit.py` wrote.
        target: what they are expected to be about; anything if null.
        op: only the rows of this op.
        mutants: the folder that the kit's mutants were built from.
        markdown: file to write the table to.
        shortened: write a few rows of every op only.

    Raises:
        FasttrackError: results that are not whole, of another kit than this checkout builds, or without a table.
    """
    from reports import peer_table
    from reports.peer_table import as_json, label, summary
    from verify.protocol.peer_rows import OURS
    from verify.protocol.peers import decide, read_table

    workspace = Workspace.here()
    received = read_results(results)
    lines = _section(received, results, target)
    require_ours(received, workspace.repo, workspace.settings, workspace.cache, mutants)
    decision = decide(lines)
    if any(finding.code == "bench.malformed" for finding in decision.findings):
        finding = decision.findings[0]
        raise FasttrackError(
            finding.message, where=finding.where, expected=finding.expected, next="run the kit again in a new folder"
        )
    table = read_table(lines)
    rows = [row for row in table.rows if op is None or row.cell["op"] == op]
    if not rows:
        raise FasttrackError(
            f"no row of op {op}" if op else "no cell was measured", where=str(results),
            expected=f"some of {', '.join(sorted({str(row.cell['op']) for row in table.rows})) or 'the cells'}",
            next="python3 kit.py run --gates bench --out R --resume",
        )  # fmt: skip
    shown = []
    for row in rows:
        ours = row.arms.get(OURS)
        peers = "; ".join(
            f"{name} {row.arms[name].median:.2f} ({ratio.value:.2f}; {ratio.low:.2f}-{ratio.high:.2f})"
            for name, ratio in row.ratios.items()
        )
        states = [judged.state for judged in row.judged]
        shown.append((
            f"{row.cell['op']} {label(row.cell)}", "-" if row.floor_us is None else f"{row.floor_us:.2f}",
            row.failure or row.missing.get(OURS, "-") if ours is None else f"{ours.median:.2f}",
            "-" if row.share is None else f"{row.share:.0%}", peers,
            ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) or "-",
        ))  # fmt: skip
    out.table(
        "our kernels beside peers", ("call", "floor us", "ours us", "share", "peers us (ratio)", "figures"), shown
    )
    out.table("figures", *summary(table))
    for finding in decision.findings:
        out.say(f"{finding.code}: {finding.message}; where: {finding.where}; next: {finding.next}")
    if markdown is not None:
        with disk_errors(markdown):
            page = peer_table.short if shortened else peer_table.markdown
            markdown.write_text(page(table), encoding="utf-8")
        out.say(f"table  {markdown}")
    out.document({
        "target": received.manifest.target, "commit": received.manifest.head, "measured": lines[0]["begun"],
        "machine": dict(received.machine),
        "kit": received.manifest.digest, "outcome": decision.outcome, **as_json(table),
    })  # fmt: skip
    return {"passed": EXIT_FINE, "failed": EXIT_FALLS_SHORT}.get(decision.outcome, EXIT_INCOMPLETE)


def _section(received: Received, results: Path, target: str | None) -> list[dict[str, object]]:
    found = received.manifest.target
    if target is not None and found != target:
        raise FasttrackError(
            f"is about target {found}", where=str(results), expected=f"results for {target}",
            next=f"fasttrack bench --target {found} --peers --from {results}",
        )  # fmt: skip
    if SECTION not in received.lines:
        raise FasttrackError(
            "holds no peer table", where=str(results), expected="results of a kit that was built with --bench",
            next=str(needs_kit(found).next),
        )  # fmt: skip
    return received.lines[SECTION]
