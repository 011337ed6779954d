"""Many machines: the `CaseMap` that runs cases on a Dask cluster, with the same bytes as one process.

Needs the extra `dask`. The cluster must be trusted: Dask sends pickles over its wire (docs/adr/0007).
"""

from segcal.scale.cluster import open_cluster
from segcal.scale.dask_cases import DaskCases

__all__ = ["DaskCases", "open_cluster"]
