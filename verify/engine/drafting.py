"""N-gram drafter: guesses that a repeated context continues as it did before. It needs no model and is never trusted:
every draft token is verified by the target model.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["draft"]

LONGEST_MATCH = 4


def draft(tokens: Sequence[int], count: int) -> list[int]:
    """Exactly `count` draft tokens.

    The longest suffix of up to `LONGEST_MATCH` tokens that occurred before is looked up at its latest earlier place and
    its continuation copied; what is missing is filled with the last token. Always drafting `count` tokens keeps verify
    batches uniform.
    """
    guess: list[int] = []
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == suffix:
                guess = list(tokens[start + length : start + length + count])
                break
        if guess:
            break
    return guess + [tokens[-1]] * (count - len(guess))
