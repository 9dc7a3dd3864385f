"""Measuring speed: what runs between plan and decision of the perf gate, on whatever machine the arms run.

`campaign` runs blocks in the order of a plan, `sampler` says what it needs of a machine, `compare` holds what arms left
behind against each other. Free of the application's packages: a kit carries it.
"""
