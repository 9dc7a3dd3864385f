"""Sections about where the evidence comes from: change, disclosure, environment, commands, other candidates, limits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.records import Missing
from reports.claims import ASSUMED
from reports.content.words import measured
from reports.document import (
    Block,
    Code,
    Commands,
    Content,
    Details,
    Facts,
    Items,
    Paragraph,
    Section,
    Strong,
    Table,
    Tone,
    Word,
)
from reports.load import Loaded
from reports.patch import Patch
from reports.text import count, size

__all__ = [
    "change_section",
    "disclosure_section",
    "environment_section",
    "limits_section",
    "others_section",
    "reproduce_section",
]

_BANDS = {"low": "below 50 added lines", "medium": "50 to 250 added lines", "high": "more than 250 added lines"}


def change_section(loaded: Loaded, patch: Patch) -> Section:
    """Files of the patch, complexity, isolation and artifacts."""
    bundle = loaded.bundle
    blocks: list[Block] = []
    if bundle.allowed:
        text = "A person allowed changes to protected paths for this verification. Read these first:"
        blocks += [Paragraph(Strong(text)), Items([Code(path) for path in bundle.allowed])]
    rows: list[tuple[Content, ...]] = [
        (
            Code(file.path),
            file.status,
            file.op or "–",
            "binary" if file.binary else f"+{file.added:,}",
            "–" if file.binary else f"−{file.removed:,}",
            _access(loaded, file.path),
        )
        for file in patch.files
    ]
    headings = ("file", "status", "op", "added", "removed", "access")
    blocks.append(Table("Files that the candidate changes", headings, rows, numeric=frozenset({3, 4})))
    commits = bundle.commits
    blocks.append(
        Facts(
            (
                ("complexity", f"{patch.band}: {count(patch.added, 'added line')} ({_BANDS[patch.band]})"),
                ("base commit", Code(commits.base)),
                ("candidate commit", Code(commits.head)),
                ("candidate tree", Code(bundle.candidate.tree)),
                ("patch", (Code("candidate.patch"), " sha256 ", Code(bundle.candidate.patch_sha256))),
                (
                    "evaluator",
                    (Code(commits.evaluator), " with uncommitted changes" if commits.evaluator_dirty else ", clean"),
                ),
            )
        )
    )
    artifacts = [(Code(a.name), Code(a.digest), "yes" if a.included else "no, digests only") for a in bundle.artifacts]
    if artifacts:
        columns = ("artifact", "digest", "object in this bundle")
        blocks.append(Details(f"{count(len(artifacts), 'artifact')} judged", (Table("Artifacts", columns, artifacts),)))
    return Section("change", "The change", tuple(blocks))


def disclosure_section(loaded: Loaded) -> Section:
    """Who proposed it."""
    disclosure = loaded.bundle.disclosure
    kinds = {
        "person": "a person",
        "search": "a search over declared tunables; no language model",
        "model": "a language model",
        "replay": "a recorded list of patches",
    }
    facts: list[tuple[str, Content]] = [
        ("proposed by", kinds[disclosure.proposer]),
        ("origin", Code(loaded.bundle.candidate.origin)),
        ("statement", disclosure.statement),
        ("language model", "none took part" if disclosure.model is None else Code(disclosure.model)),
        ("answers for it", disclosure.submitter or "nobody is named yet; a named person has to review every line"),
        ("model reviews", "; ".join(disclosure.reviews) or "none"),
    ]
    if disclosure.cost_usd is not None:
        facts.append(("paid model use", f"{disclosure.cost_usd:.2f} USD"))
    return Section("disclosure", "Who proposed it", (Facts(facts),))


def environment_section(loaded: Loaded) -> Section:
    """The measuring machine."""
    env = loaded.environment
    facts: list[tuple[str, Content]] = [
        ("processor", _known(env.cpu_model)),
        ("features", ", ".join(env.cpu_features) or "none of those that choose a level"),
        ("flags digest", _known(env.cpu_flags_sha256)),
        ("cores", str(env.cores)),
        ("memory", env.memory_bytes.missing if isinstance(env.memory_bytes, Missing) else size(env.memory_bytes)),
        ("kernel", env.kernel),
        ("compiler", _known(env.compiler)),
        ("python", env.python),
        ("container", "; ".join(env.container) or "no sign of one"),
        ("load average", ", ".join(f"{load:.2f}" for load in env.load_average) + " (1, 5, 15 min)"),
    ]
    packages = Table(
        "Packages that take part", ("package", "version"), [(Code(n), v) for n, v in sorted(env.packages.items())]
    )
    blocks = (Facts(facts), Details(count(len(env.packages), "package"), (packages,)))
    return Section("environment", "Environment", blocks)


def reproduce_section(loaded: Loaded) -> Section:
    """Commands, and what each file is."""
    commands = [(command.purpose, shlex.join(command.argv)) for command in loaded.bundle.commands]
    files: list[tuple[Content, ...]] = [
        (Code("bundle.json"), "whose candidate, which target, verdict, and what everything else is"),
        (Code("gates/"), "one result per gate"),
        (Code("raw/"), "canonical raw lines: every outcome is a function of them"),
        (Code("derived/"), "the raw lines as Parquet, for queries"),
        (Code("candidate.patch"), "the change"),
        (Code("artifacts/"), "manifests of the judged objects, and the objects while they are small"),
        (Code("environment.json"), "the machine"),
        (Code("manifest.json"), "size and sha256 of every other file; its own digest ends the folder's name"),
    ]
    return Section(
        "reproduce",
        "Check it again",
        (Commands(commands), Table("Files of this bundle", ("file", "what it is"), files)),
    )


def others_section(loaded: Loaded) -> Section:
    """Every other candidate of the run."""
    bundle = loaded.bundle
    if not bundle.others:
        text = f"No other candidate in this run; its error budget is spent over {bundle.candidates_planned}."
        return Section("others", "Other candidates of the run", (Paragraph(text),))
    tones: dict[str, Tone] = {"accepted": "good", "rejected": "bad"}
    rows: list[tuple[Content, ...]] = [
        (
            Code(other.name),
            Word(other.outcome, tones.get(other.outcome, "none")),
            other.reason or "–",
            measured(other.ratio),
            other.note or "–",
            Code(other.origin),
        )
        for other in bundle.others
    ]
    columns = ("candidate", "outcome", "reason", "worst cell ratio", "what it tried", "origin")
    lead = (
        f"{count(len(rows) + 1, 'candidate')} in run {bundle.run}; the error budget is spent over "
        f"{bundle.candidates_planned}. None is left out."
    )
    return Section("others", "Other candidates of the run", (Paragraph(lead), Table("Other candidates", columns, rows)))


def limits_section(loaded: Loaded) -> Section:
    """What this evidence does not show."""
    limits: Sequence[Content] = loaded.bundle.limits
    return Section(
        "limits",
        "What this does not show",
        (
            Items(limits),
            Paragraph("No file can prove about itself, so these stay to be trusted or measured again:"),
            Items(ASSUMED),
        ),
    )


def _access(loaded: Loaded, path: str) -> Content:
    if loaded.bundle.scope.is_editable(path):
        return "editable"
    return Word("protected", "bad")


def _known(value: str | Missing) -> Content:
    return f"missing: {value.missing}" if isinstance(value, Missing) else value
