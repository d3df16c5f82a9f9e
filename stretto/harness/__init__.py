"""What other harnesses drive: providers, sandboxes and environments of theirs over what is ours, and suites that they ask."""
