"""Statistics and decisions: pure functions from raw lines to outcomes; numpy and scipy only."""
