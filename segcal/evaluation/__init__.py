"""Measuring pipelines on labelled cases: one read of each case, per-case tables, intervals, files."""
