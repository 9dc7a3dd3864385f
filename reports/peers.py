"""The peer table of a bundle: what its raw lines must say, so that the table is of this candidate and this run.

The table is decided by `verify.protocol.peers` from the lines alone, like a gate, but no verdict rests on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import canonical
from harness.errors import FasttrackError
from harness.records import Outcome, Reason
from reports.folder import refusal
from reports.load import Loaded
from reports.protocols import UnknownProtocolError
from verify.protocol import chain, peers

__all__ = ["RAW", "SECTION", "conclude", "parse", "peer_findings", "require_protocol"]

SECTION = "bench"
RAW = f"raw/{SECTION}.jsonl"


def require_protocol(protocol_id: str) -> None:
    """Whether this checkout reads such lines.

    Raises:
        UnknownProtocolError: they were written under another protocol.
    """
    if protocol_id != peers.PROTOCOL_ID:
        raise UnknownProtocolError(f"decided by protocol {protocol_id}; this checkout implements {peers.PROTOCOL_ID}")


def parse(data: bytes, path: Path) -> list[dict[str, Any]]:
    """The raw lines of a peer table's file.

    Raises:
        FasttrackError: no canonical JSON lines.
    """
    try:
        return canonical.parse_lines(data)
    except canonical.NotCanonicalError as error:
        raise FasttrackError(
            f"the peer table is damaged: {str(error).splitlines()[0]}", where=str(path),
            expected="raw lines as a kit writes them", next="import the kit's results again",
        ) from error  # fmt: skip


def conclude(lines: Sequence[Mapping[str, Any]]) -> tuple[Outcome, str]:
    """Outcome by this checkout, and the protocol that the lines name."""
    return Outcome(peers.decide(lines).outcome), str(lines[0].get("protocol"))


def peer_findings(loaded: Loaded) -> Iterator[Reason]:
    """What is wrong with the peer table of a bundle that has one.

    Raises:
        UnknownProtocolError: lines of another protocol.
    """
    entry, lines = loaded.bundle.peers, loaded.peers
    assert entry is not None
    require_protocol(entry.protocol_id)
    header = lines[0]
    for key, value in _stated(loaded).items():
        if header.get(key) != value:
            yield refusal("peers", f"its header names another {key}", f"{RAW}:1", f"{key} {value}")
    artifacts = header.get("artifacts")
    if not isinstance(artifacts, dict) or not artifacts.items() <= loaded.bundle.candidate.artifacts.items():
        message = "its header names artifacts that are not the candidate's"
        yield refusal("peers", message, f"{RAW}:1", "digests of candidate.artifacts")
    number = chain.broken(chain.start(str(header.get("kit")), str(header.get("nonce")), SECTION), lines)
    if number is not None:
        message = "does not follow from the lines before it"
        yield refusal("peers", message, f"{RAW}:{number}", "the lines as they were written")
    decision = peers.decide(lines)
    if decision.outcome != entry.outcome.value:
        message = f"claims {entry.outcome.value}"
        yield refusal("peers", message, "bundle.json: peers", f"{decision.outcome}, as its raw lines decide")
    yield from (
        refusal("peers", finding.message, RAW, finding.expected)
        for finding in decision.findings
        if finding.code == "bench.malformed"
    )


def _stated(loaded: Loaded) -> Mapping[str, object]:
    """What the header has to say: the bundle's candidate and target, and the kit's run that the gates are of."""
    bundle = loaded.bundle
    stated: dict[str, object] = {
        "kind": "header", "gate": SECTION, "protocol": peers.PROTOCOL_ID, "base": bundle.commits.base,
        "head": bundle.commits.head, "target": bundle.target.name, "tier": bundle.tier.name,
    }  # fmt: skip
    for lines in loaded.raw.values():
        first = lines[0]
        if "kit" in first and "nonce" in first:
            stated |= {"kit": first["kit"], "nonce": first["nonce"]}
    return stated
