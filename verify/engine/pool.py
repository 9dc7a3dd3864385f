"""Who owns which cache page and which state slot. Id 0 of both is null and never handed out."""

from __future__ import annotations

__all__ = ["Pool"]


class Pool:
    """Ids 1 .. size-1, each owned by at most one request.

    Freed ids are reused last-in first-out, so that a new request soon meets what an old one left behind: content of a
    slot or page must not matter to its next owner, and this makes mistakes show.
    """

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, 0, -1))

    def __len__(self) -> int:
        """Free ids."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """That many ids, or None (and nothing taken) if there are too few."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, ids: list[int]) -> None:
        """Return ids.

        Raises:
            ValueError: an id is null or was free already.
        """
        for one in ids:
            if one <= 0 or one in self._free:
                raise ValueError(f"id {one} returned twice or never taken; expected an id of a running request")
            self._free.append(one)
