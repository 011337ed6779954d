"""Numbers that a compiled loop and the code around it have to agree on.

They stand here because machine code is kept as long as the files of this folder do not change (`build`): a number that
came from elsewhere could change and leave old code in use. Nothing here needs numba, so anybody may import it.
"""

UNITS_PER_ONE = 2**34
"""Of `segcal.metrics.fixed_point`."""

SETTLED = 1.0 - 2.0**-10
"""Of `segcal.metrics.fine_cells`, like the next."""

DROPPED_BITS = 15

SMALLEST_NORMAL = 2.0**-126
"""Of float32; `segcal.metrics.voxel_sums` calls it the floor of probabilities."""

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64 (`segcal.fitting.hashing`)."""

KERNEL, DILATION = 5, 2
"""Of local temperature scaling (`segcal.calibrators.local_temperature`)."""

N_MAPS = 7

TAU_MIN, TAU_MAX = 0.01, 100.0
