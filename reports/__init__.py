"""Evidence bundles: what a verification leaves behind for people who were not there.

`write_bundle` writes one, `verify_bundle` checks one as a stranger would, `show`, `diff` and `render` read them. The
layout, the compatibility rule and what each file is: docs/bundle.md. How to read the report: docs/reading-a-report.md.
"""

from reports import environment
from reports.claims import BundleCheck, CheckWord, Claim, ClaimStatus
from reports.load import BundleRefusedError, Loaded, load_bundle
from reports.render import FORMATS, render
from reports.schema import (
    BUNDLE_VERSION,
    RENDER_VERSION,
    Bundle,
    BundleInput,
    Command,
    Commits,
    Disclosure,
    Environment,
    OtherCandidate,
)
from reports.show import BundleDiff, BundleView, diff, show
from reports.verify import verify_bundle
from reports.write import write_bundle

__all__ = [
    "BUNDLE_VERSION",
    "FORMATS",
    "RENDER_VERSION",
    "Bundle",
    "BundleCheck",
    "BundleDiff",
    "BundleInput",
    "BundleRefusedError",
    "BundleView",
    "CheckWord",
    "Claim",
    "ClaimStatus",
    "Command",
    "Commits",
    "Disclosure",
    "Environment",
    "Loaded",
    "OtherCandidate",
    "diff",
    "environment",
    "load_bundle",
    "render",
    "show",
    "verify_bundle",
    "write_bundle",
]
