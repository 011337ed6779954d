"""Loops over voxels that numba compiles. Imported only where a loop runs: numba costs a quarter of a second."""
