"""What one job does, as a function of its request and the files; no database, no network."""
