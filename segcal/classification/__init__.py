"""The generic backend: calibration of classifiers on (n, C) arrays, and losses that train for it."""
