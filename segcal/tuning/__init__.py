"""Choosing hyper-parameters on the validation cases."""
