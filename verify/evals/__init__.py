"""Evaluations that compare whole arms on texts: what is asked, and nothing of what decides."""
