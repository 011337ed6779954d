"""A synthetic ensemble with a known truth, and the whole flow on top of it (`segcal demo`)."""
