"""Proposers: where candidates come from. Each is judged alike; none can influence how."""
