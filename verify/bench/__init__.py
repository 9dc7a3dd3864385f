"""Timing for people and the physics behind it: `fasttrack bench`, traffic of ops, ceilings of this machine.

Nothing here decides about a candidate; the perf gate uses only traffic and ceilings, for its floors. Entry points:
`verify.bench.run.bench` and `verify.bench.ceilings.measure_ceilings`.
"""
