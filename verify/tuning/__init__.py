"""Schedules for GPU kernels from measurements: points are built here, timed on the GPU machine, chosen here.

`space` says which points, `build` makes the archive, `run` and `measure` work on the GPU machine, `receive` reads what
comes back, `choose` decides. Times from here steer schedules; they are no gate's evidence.
"""
