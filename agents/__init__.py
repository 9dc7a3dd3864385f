"""The optimisation loop: proposers make candidates as commits, the gatekeeper judges them, the best one is kept."""
