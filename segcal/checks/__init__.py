"""What `segcal manifest check` looks at: one module per group of checks, all giving `Finding`s."""
