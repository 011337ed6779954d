"""Pictures and pages. Nothing in the core imports this package; matplotlib and jinja2 are loaded here only."""
