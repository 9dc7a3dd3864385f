"""The decode step: plan (guards and refusals), capture and replay, ledger, fallback to the standard path."""
