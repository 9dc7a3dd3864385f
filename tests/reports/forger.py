"""An attacker who edits a bundle and makes everything around the edit consistent again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import canonical
from harness.records import GateResult
from reports import derive
from reports.load import Loaded
from reports.render import render_all
from reports.schema import Bundle, Environment


class Forger:
    """The files of a bundle, editable; `publish` re-hashes references, evidence, manifest and folder name."""

    def __init__(self, bundle: Path) -> None:
        self.source = bundle
        self.files = {str(p.relative_to(bundle)): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}

    def json(self, path: str) -> Any:
        return json.loads(self.files[path])

    def put(self, path: str, value: Any) -> None:
        self.files[path] = canonical.document(value)

    def lines(self, gate: str) -> list[dict[str, Any]]:
        return canonical.parse_lines(self.files[f"raw/{gate}.jsonl"])

    def put_lines(self, gate: str, lines: list[dict[str, Any]]) -> None:
        self.files[f"raw/{gate}.jsonl"] = b"".join(canonical.line(line) + b"\n" for line in lines)
        self.files[f"derived/{gate}.parquet"] = derive.parquet_bytes(lines)

    def edit(self, path: str, change: Callable[[Any], None]) -> None:
        value = self.json(path)
        change(value)
        self.put(path, value)

    def publish(self, out: Path, *, render: bool = True, refresh: bool = True) -> Path:
        """Write the forgery, its digests, line counts and reports made consistent unless told otherwise."""
        if refresh:
            self._refresh()
        if render:
            self._render()
        manifest = {
            p: {"sha256": self._sha(p), "size": len(d)} for p, d in self.files.items() if not p.startswith("manifest.")
        }
        self.put("manifest.json", {"schema_version": 3, "files": manifest})
        digest = self._sha("manifest.json")
        self.files["manifest.sha256"] = f"{digest}  manifest.json\n".encode()
        folder = out / f"{self.source.name.rpartition('-')[0]}-{digest[:12]}"
        for path, data in self.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return folder

    def _refresh(self) -> None:
        for path in [p for p in self.files if p.startswith("gates/")]:
            self.edit(path, self._refresh_evidence)
        bundle = self.json("bundle.json")
        for ref in self._references(bundle):
            ref["sha256"] = self._sha(ref["path"])
            if "lines" in ref:
                ref["lines"] = self.files[ref["path"]].count(b"\n")
        for entry in bundle["gates"]:
            result = self.json(entry["result"]["path"])
            entry.update(outcome=result["outcome"], protocol_id=result["protocol_id"])
        self.put("bundle.json", bundle)

    def _refresh_evidence(self, result: dict[str, Any]) -> None:
        for ref in result["evidence"]:
            if ref["path"] in self.files:
                ref["sha256"] = self._sha(ref["path"])

    def _render(self) -> None:
        results = {p[6:-5]: GateResult.model_validate_json(d) for p, d in self.files.items() if p.startswith("gates/")}
        raw = {g: self.lines(g) for g in results if f"raw/{g}.jsonl" in self.files}
        loaded = Loaded(
            "", "", self.files, Bundle.model_validate_json(self.files["bundle.json"]),
            Environment.model_validate_json(self.files["environment.json"]), results, raw,
            self.lines("bench") if "raw/bench.jsonl" in self.files else [],
        )  # fmt: skip
        self.files |= {f"report.{form}": text.encode() for form, text in render_all(loaded).items()}

    def _references(self, bundle: dict[str, Any]) -> list[dict[str, Any]]:
        refs = [bundle["patch"], bundle["environment"], *(a["manifest"] for a in bundle["artifacts"])]
        refs += [] if bundle["peers"] is None else [bundle["peers"]["raw"]]
        for entry in bundle["gates"]:
            refs += [entry[key] for key in ("result", "raw", "derived", "error") if entry[key] is not None]
        return [ref for ref in refs if ref["path"] in self.files]

    def _sha(self, path: str) -> str:
        return hashlib.sha256(self.files[path]).hexdigest()


def copy_of(bundle: Path, out: Path) -> Path:
    """A copy under the same folder name, to spoil."""
    return Path(shutil.copytree(bundle, out / bundle.name))
