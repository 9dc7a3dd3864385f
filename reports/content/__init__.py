"""What a report says: from a loaded bundle to a `Document`. Sections in the order in which a reviewer asks."""

from reports.content.build import build_document

__all__ = ["build_document"]
