"""REST under /v1 and who may do what."""
