"""Metrics of plain classifiers."""
