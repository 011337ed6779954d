"""What is durable: jobs, cases, calibrators, tokens, outputs that were seen."""
