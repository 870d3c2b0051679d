"""The kernel's part for fitted estimators: how far weights are from the optimum of the stored data (docs/kernel.md).

objective.py    what an estimator minimises, as gradients and Hessians in balls, in the coordinates of a fit
enclosure.py    where a gradient vanishes: Krawczyk's test, and its form for soft thresholds
prove.py        the distances of a file's weights, coefficients and intercepts
"""

from __future__ import annotations
