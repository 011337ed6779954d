"""Loops over voxels that numba compiles. But for `agreed` imported only where a loop runs: numba costs
a quarter of a second."""
