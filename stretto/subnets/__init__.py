"""Selection of Subnets: rankings, latency tables, the search, and the check before extraction."""
