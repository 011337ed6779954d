"""Calibration of plain classifiers: (n, C) scores, labels, and features for the methods that use them."""
