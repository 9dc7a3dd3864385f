"""Specialised decode path for Kimi K3, isolated from the serving engine: ops, ahead-of-time artifacts, step planner."""
